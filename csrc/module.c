/* SPDX-License-Identifier: Apache-2.0
 *
 * rwkv6_ops._native: the CPython entry points. Tensors are read into a wkv6_problem, everything that could make a
 * kernel misbehave is checked, the GIL is released and the kernels run. Python (rwkv6_ops/_ops.py) allocates all
 * outputs; nothing here owns memory, but for a moment the scratch that some problems need on CUDA. Limited API of
 * CPython 3.10: one binary for every later version.
 */
#include <Python.h>

#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/wkv6_cpu.h"
#include "cuda_library.h"
#include "tensor_view.h"
#include "wkv6_problem.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define NEEDS_TORCH "rwkv6_ops needs a torch whose tensors have the DLPack C exchange API: torch >= 2.10"

typedef struct {
  PyObject *types[2]; /* torch.Tensor and torch.nn.Parameter, whose exchange table is the same */
  const dl_exchange *exchange;
  PyObject *is_neg; /* torch.Tensor.is_neg */
} module_state;

/* ---- Tensors ---- */

static const dl_exchange *exchange_of(PyObject *type) {
  PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (!capsule) {
    PyErr_Clear();
    return NULL;
  }
  const dl_header *header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);
  PyErr_Clear();
  while (header && header->major != 1) header = header->previous;
  return (const dl_exchange *)header;
}

static int is_plain_type(const module_state *state, PyObject *type) {
  return type == state->types[0] || type == state->types[1];
}

/* The exchange table for this object's type, or NULL with TypeError. */
static const dl_exchange *find_exchange(const module_state *state, PyObject *object, const char *name) {
  PyObject *type = (PyObject *)Py_TYPE(object);
  if (is_plain_type(state, type)) return state->exchange;
  const dl_exchange *exchange = exchange_of(type);
  if (!exchange) PyErr_Format(PyExc_TypeError, "%s: %R, expected a torch.Tensor", name, type);
  return exchange;
}

static int32_t dtype_of(dl_dtype dtype) {
  if (dtype.lanes != 1) return WKV6_ABSENT;
  if (dtype.code == DL_BFLOAT && dtype.bits == 16) return WKV6_BF16;
  if (dtype.code != DL_FLOAT) return WKV6_ABSENT;
  return dtype.bits == 32 ? WKV6_F32 : dtype.bits == 16 ? WKV6_F16 : dtype.bits == 64 ? WKV6_F64 : WKV6_ABSENT;
}

/* ---- Arguments ---- */

/* A tensor argument: where it goes and what its dimensions are. A dimension's first mention gives its size, later ones
 * must agree; 'S' is the number of checkpoints, of which there may be more than are used. */
typedef struct {
  const char *name, *dimensions;
  size_t member; /* offset in wkv6_problem */
  enum { PLAIN = 0, OPTIONAL = 1, CONTIGUOUS = 2, WRITTEN = 4 } is;
} argument;

#define MEMBER(m) offsetof(wkv6_problem, m)

static const argument forward_arguments[] = {
    {"r", "BTHK", MEMBER(r), PLAIN},
    {"k", "BTHK", MEMBER(k), PLAIN},
    {"v", "BTHV", MEMBER(v), PLAIN},
    {"w", "BTHK", MEMBER(w), PLAIN},
    {"u", "HK", MEMBER(u), PLAIN},
    {"initial_state", "NHKV", MEMBER(initial_state), OPTIONAL},
    {"o", "BTHV", MEMBER(o), WRITTEN},
    {"final_state", "NHKV", MEMBER(final_state), OPTIONAL | WRITTEN},
    {"checkpoints", "SHKV", MEMBER(checkpoints), OPTIONAL | CONTIGUOUS | WRITTEN},
    {"span_decays", "SHK", MEMBER(span_decays), OPTIONAL | CONTIGUOUS | WRITTEN},
};

static const argument backward_arguments[] = {
    {"r", "BTHK", MEMBER(r), PLAIN},
    {"k", "BTHK", MEMBER(k), PLAIN},
    {"v", "BTHV", MEMBER(v), PLAIN},
    {"w", "BTHK", MEMBER(w), PLAIN},
    {"u", "HK", MEMBER(u), PLAIN},
    {"initial_state", "NHKV", MEMBER(initial_state), OPTIONAL},
    {"checkpoints", "SHKV", MEMBER(checkpoints), CONTIGUOUS},
    {"grad_o", "BTHV", MEMBER(grad_o), OPTIONAL},
    {"grad_final_state", "NHKV", MEMBER(grad_final_state), OPTIONAL},
    {"grad_r", "BTHK", MEMBER(grad_r), OPTIONAL | WRITTEN},
    {"grad_k", "BTHK", MEMBER(grad_k), OPTIONAL | WRITTEN},
    {"grad_v", "BTHV", MEMBER(grad_v), OPTIONAL | WRITTEN},
    {"grad_w", "BTHK", MEMBER(grad_w), OPTIONAL | WRITTEN},
    {"grad_u", "HK", MEMBER(grad_u), OPTIONAL | WRITTEN},
    {"grad_initial_state", "NHKV", MEMBER(grad_initial_state), OPTIONAL | WRITTEN},
    {"grad_u_parts", "NHK", MEMBER(grad_u_parts), OPTIONAL | CONTIGUOUS | WRITTEN},
    {"span_decays", "SHK", MEMBER(span_decays), OPTIONAL | CONTIGUOUS | WRITTEN},
    {"span_adjoints", "SHKV", MEMBER(span_adjoints), OPTIONAL | CONTIGUOUS | WRITTEN},
};

static const argument step_arguments[] = {
    {"r", "BTHK", MEMBER(r), PLAIN},
    {"k", "BTHK", MEMBER(k), PLAIN},
    {"v", "BTHV", MEMBER(v), PLAIN},
    {"w", "BTHK", MEMBER(w), PLAIN},
    {"u", "HK", MEMBER(u), PLAIN},
    {"state", "NHKV", MEMBER(final_state), WRITTEN},
    {"out", "BTHV", MEMBER(o), WRITTEN},
};

static const argument state_arguments[] = {
    {"k", "BTHK", MEMBER(k), PLAIN},
    {"v", "BTHV", MEMBER(v), PLAIN},
    {"w", "BTHK", MEMBER(w), PLAIN},
    {"initial_state", "NHKV", MEMBER(initial_state), OPTIONAL},
    {"state", "NHKV", MEMBER(final_state), WRITTEN},
    {"w_sum", "NHK", MEMBER(w_sum), WRITTEN},
};

#define COUNT(table) ((Py_ssize_t)(sizeof(table) / sizeof *(table)))

/* What is known while the arguments of one call are read. */
typedef struct {
  module_state *state;
  wkv6_problem problem;
  int known[128];              /* by dimension letter: 1 once its size is in problem */
  int one_token, without_time; /* a step; one whose tokens come as [B, H, K] */
  const char *first;           /* the argument that the others are compared with */
  dl_device device;
} call;

static int64_t *size_of(wkv6_problem *p, char dimension) {
  switch (dimension) {
  case 'B': return &p->B;
  case 'T': return &p->T;
  case 'H': return &p->H;
  case 'K': return &p->K;
  case 'V': return &p->V;
  default: return &p->N;
  }
}

/* "(2, 8, 4, 64)", cut short if it does not fit. A one-element tuple is written as Python does. */
static void write_tuple(char *text, size_t room, const int64_t *shape, int dimensions) {
  size_t used = (size_t)PyOS_snprintf(text, room, "(");
  for (int d = 0; d < dimensions && used < room; d++)
    used += (size_t)PyOS_snprintf(text + used,
                                  room - used,
                                  d + 1 < dimensions ? "%lld, "
                                  : dimensions == 1  ? "%lld,"
                                                     : "%lld",
                                  (long long)shape[d]);
  if (used < room) PyOS_snprintf(text + used, room - used, ")");
}

/* A view of `object`; -1 with an exception where it is no tensor on the call's device. */
static int view_tensor(call *c, const char *name, PyObject *object, dl_tensor *view) {
  const dl_exchange *exchange = find_exchange(c->state, object, name);
  if (!exchange || exchange->view(object, view)) return -1;
  int64_t elements = 1;
  for (int d = 0; d < view->ndim; d++) elements *= view->shape[d];
  if (!view->data && elements) { /* the view of a fake or functional tensor */
    PyErr_Format(PyExc_RuntimeError, "%s: a tensor without data reached the kernel", name);
    return -1;
  }
  if (c->device.type == 0) c->device = view->device;
  if (view->device.type != c->device.type || view->device.id != c->device.id) {
    PyErr_Format(PyExc_ValueError, "%s: on another device than %s", name, c->first);
    return -1;
  }
  return 0;
}

static void insert_time_axis(dl_tensor *view, int64_t shape[4], int64_t strides[4]) {
  for (int d = 0; d < 4; d++) {
    shape[d] = d == 1 ? 1 : view->shape[d - (d > 1)];
    strides[d] = d == 1 ? 0 : view->strides[d - (d > 1)];
  }
  view->shape = shape;
  view->strides = strides;
  view->ndim = 4;
}

static int read_tensor(call *c, const argument *a, PyObject *object) {
  wkv6_problem *p = &c->problem;
  wkv6_tensor *tensor = (wkv6_tensor *)((char *)p + a->member);
  if (object == Py_None && (a->is & OPTIONAL)) return 0; /* dtype stays WKV6_ABSENT */
  dl_tensor view;
  if (view_tensor(c, a->name, object, &view)) return -1;

  const int dimensions = (int)strlen(a->dimensions);
  int64_t expected[4] = {0}, stride = 1;
  /* A step's tokens may come without their time axis. */
  int64_t shape_with_time[4], strides_with_time[4];
  if (c->one_token && a->dimensions[1] == 'T') {
    if (tensor == &p->r) c->without_time = view.ndim == 3; /* and then all come so */
    if (c->without_time && view.ndim == 3)
      insert_time_axis(&view, shape_with_time, strides_with_time);
    else if (c->without_time)
      view.ndim = 0; /* refused below */
  }
  int agrees = view.ndim == dimensions, contiguous = 1, repeated = 0;
  for (int d = dimensions - 1; d >= 0; d--) {
    const char letter = a->dimensions[d];
    const int64_t shape = agrees ? view.shape[d] : -1;
    if (letter == 'S') {
      expected[d] = p->B * p->T / p->segment;
    } else {
      if (!c->known[(int)letter]) *size_of(p, letter) = shape, c->known[(int)letter] = view.ndim == dimensions;
      expected[d] = *size_of(p, letter);
    }
    agrees = agrees && (letter == 'S' ? shape >= expected[d] : shape == expected[d]);
    if (agrees) {
      tensor->stride[d] = view.strides[d];
      contiguous = contiguous && (view.strides[d] == stride || shape <= 1);
      repeated = repeated || (view.strides[d] == 0 && shape > 1);
      stride *= shape;
    }
  }
  if (!agrees) {
    char got[160], wanted[160];
    write_tuple(got, sizeof got, view.shape, view.ndim);
    write_tuple(wanted, sizeof wanted, expected, dimensions);
    PyErr_Format(PyExc_ValueError, "%s: shape %s, expected %s", a->name, got, wanted);
    return -1;
  }
  if ((a->is & CONTIGUOUS) && !contiguous && stride) {
    PyErr_Format(PyExc_ValueError, "%s: expected a contiguous tensor", a->name);
    return -1;
  }
  if ((a->is & WRITTEN) && repeated && stride) {
    PyErr_Format(PyExc_ValueError, "%s: an expanded tensor, expected one with memory for each element", a->name);
    return -1;
  }
  tensor->dtype = dtype_of(view.dtype);
  if (tensor->dtype == WKV6_ABSENT) {
    PyErr_Format(PyExc_TypeError, "%s: expected float32, bfloat16, float16 or float64", a->name);
    return -1;
  }
  tensor->data = (char *)view.data + view.byte_offset;
  return 0;
}

/* cu_seqlens fixes N, without it N = B. */
static int read_cu_seqlens(call *c, PyObject *object) {
  wkv6_problem *p = &c->problem;
  c->known['N'] = 1;
  p->N = p->B;
  if (object == Py_None) return 0;
  dl_tensor view;
  if (view_tensor(c, "cu_seqlens", object, &view)) return -1;
  if (view.ndim != 1 || view.shape[0] < 1 || view.dtype.code != DL_INT || view.dtype.bits != 64 ||
      (view.strides[0] != 1 && view.shape[0] > 1)) {
    PyErr_SetString(PyExc_ValueError, "cu_seqlens: expected a contiguous int64 vector");
    return -1;
  }
  p->cu_seqlens = (const int64_t *)((char *)view.data + view.byte_offset);
  p->N = view.shape[0] - 1;
  return 0;
}

static void refuse_cu_seqlens(const wkv6_problem *p) {
  char got[160];
  const int shown = p->N < 7 ? (int)p->N + 1 : 8;
  write_tuple(got, sizeof got, p->cu_seqlens, shown);
  PyErr_Format(PyExc_ValueError,
               "cu_seqlens: %s%s, expected to start at 0, never decrease and end at T = %lld",
               got,
               shown <= p->N ? " and so on" : "",
               (long long)p->T);
}

/* Sets the exception for what wkv6_check() or wkv6_check_step() found. */
static void refuse(const wkv6_problem *p, wkv6_status status, const char *culprit) {
  char sizes[160];
  switch (status) {
  case WKV6_E_DTYPE:
    PyErr_Format(
        PyExc_TypeError, "%s: dtype does not go with the others': all tensors are float64, or none is", culprit);
    return;
  case WKV6_E_ALIGNMENT:
    PyErr_Format(PyExc_ValueError,
                 "%s: at an address that its elements cannot have, expected an aligned one (clone it)",
                 culprit);
    return;
  case WKV6_E_OVERLAP:
    PyErr_Format(PyExc_ValueError,
                 "%s: in the memory of state, expected memory of its own: the step overwrites the state",
                 culprit);
    return;
  case WKV6_E_SIZE:
    write_tuple(sizes, sizeof sizes, (const int64_t[]){p->B, p->T, p->H, p->K, p->V}, 5);
    PyErr_Format(PyExc_ValueError, "%s: sizes B, T, H, K, V = %s, expected a product below 2^62", culprit, sizes);
    return;
  default: refuse_cu_seqlens(p);
  }
}

/* Reads (tensors in the table's order, cu_seqlens, scale, flags, segment) into c->problem and checks it all. */
static int read_call(call *c, const argument *table, Py_ssize_t tensors, PyObject *const *args, Py_ssize_t count) {
  if (count != tensors + 4) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", tensors + 4, count);
    return -1;
  }
  wkv6_problem *p = &c->problem;
  c->first = table[0].name;
  PyObject *scale = args[tensors + 1];
  if (!PyFloat_Check(scale) && !PyLong_Check(scale)) { /* a tensor would convert, and lose its gradient */
    PyErr_Format(PyExc_TypeError, "scale: %R, expected a number", (PyObject *)Py_TYPE(scale));
    return -1;
  }
  p->scale = PyFloat_AsDouble(scale);
  p->flags = (uint32_t)PyLong_AsLong(args[tensors + 2]);
  p->segment = PyLong_AsLongLong(args[tensors + 3]);
  if (PyErr_Occurred()) return -1;
  if (p->segment < 1 || p->segment > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "segment: %lld, expected 1 to %d", (long long)p->segment, INT32_MAX);
    return -1;
  }
  for (Py_ssize_t i = 0; i < tensors; i++) {
    if (i == 1 && read_cu_seqlens(c, args[tensors])) return -1; /* the first has told B */
    if (read_tensor(c, &table[i], args[i])) return -1;
  }
  if (p->K < 1 || p->V < 1) {
    PyErr_Format(PyExc_ValueError, "%s: expected at least one channel", p->K < 1 ? c->first : "v");
    return -1;
  }
  const char *culprit = "";
  wkv6_status status = wkv6_check(p, c->device.type == DL_CPU, &culprit);
  if (status == WKV6_OK && c->one_token) status = wkv6_check_step(p, &culprit);
  if (status == WKV6_OK) return 0;
  refuse(p, status, culprit);
  return -1;
}

/* ---- Entry points ---- */

static void keep_error(void *context, const char *kind, const char *message) {
  (void)kind;
  PyErr_Format(PyExc_MemoryError, "rwkv6_ops on CUDA: %zu bytes of scratch: %.400s", *(const size_t *)context, message);
}

/* Scratch as the library wants it: a tensor of torch's allocator, in the order of the current stream, so it may be
 * given back once the kernels are on that stream. NULL if none is wanted; -1 with an exception. */
static int take_scratch(call *c, const wkv6_cuda_library *cuda, dl_managed **scratch) {
  size_t bytes = cuda->scratch_bytes(&c->problem);
  *scratch = NULL;
  if (!bytes) return 0;
  int64_t floats = (int64_t)((bytes + 3) / 4);
  dl_tensor prototype = {
      .device = c->device, .ndim = 1, .dtype = {.code = DL_FLOAT, .bits = 32, .lanes = 1}, .shape = &floats};
  if (c->state->exchange->allocate(&prototype, scratch, &bytes, keep_error)) return -1;
  c->problem.scratch = (char *)(*scratch)->tensor.data + (*scratch)->tensor.byte_offset;
  return 0;
}

/* Puts the problem on the CPU's kernels, or on those of CUDA. */
static PyObject *launch(call *c, wkv6_status (*cpu)(const wkv6_problem *), size_t cuda_member) {
  const wkv6_cuda_library *cuda = wkv6_cuda_emulated();
  void *stream = NULL;
  if (c->device.type == DL_CUDA) {
    const char *why;
    cuda = wkv6_cuda_library_open(&why);
    if (!cuda) {
      PyErr_Format(
          PyExc_RuntimeError, "%s: on CUDA, but this build of rwkv6_ops has no CUDA kernels: %s", c->first, why);
      return NULL;
    }
    if (c->state->exchange->current_stream(DL_CUDA, c->device.id, &stream)) return NULL;
  } else if (c->device.type != DL_CPU) {
    PyErr_Format(
        PyExc_NotImplementedError, "%s: neither on a CPU nor on CUDA: rwkv6_ops has no kernels there", c->first);
    return NULL;
  }
  dl_managed *scratch = NULL;
  if (cuda && take_scratch(c, cuda, &scratch)) return NULL;
  wkv6_cuda_function *const kernel = cuda ? *(wkv6_cuda_function *const *)((const char *)cuda + cuda_member) : NULL;
  wkv6_status status;
  Py_BEGIN_ALLOW_THREADS
  status = kernel ? kernel(&c->problem, c->device.id, stream) : cpu(&c->problem);
  Py_END_ALLOW_THREADS
  if (scratch && scratch->deleter) scratch->deleter(scratch);
  if (status == WKV6_OK) Py_RETURN_NONE;
  if (status == WKV6_E_MEMORY || !cuda) return PyErr_NoMemory(); /* the CPU's kernels have no other */
  return PyErr_Format(PyExc_RuntimeError, "rwkv6_ops on CUDA: %s", cuda->error());
}

static PyObject *native_forward(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  call c = {.state = PyModule_GetState(module)};
  if (read_call(&c, forward_arguments, COUNT(forward_arguments), args, count)) return NULL;
  return launch(&c, wkv6_cpu_forward, offsetof(wkv6_cuda_library, forward));
}

static PyObject *native_backward(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  call c = {.state = PyModule_GetState(module)};
  if (read_call(&c, backward_arguments, COUNT(backward_arguments), args, count)) return NULL;
  return launch(&c, wkv6_cpu_backward, offsetof(wkv6_cuda_library, backward));
}

static PyObject *native_step(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  call c = {.state = PyModule_GetState(module), .one_token = 1};
  if (read_call(&c, step_arguments, COUNT(step_arguments), args, count)) return NULL;
  if (c.problem.T != 1 || c.problem.cu_seqlens) {
    PyErr_SetString(PyExc_ValueError, "r: expected one token (T = 1), without cu_seqlens");
    return NULL;
  }
  if (c.problem.final_state.dtype != (wkv6_is_double(&c.problem) ? WKV6_F64 : WKV6_F32)) {
    PyErr_SetString(PyExc_TypeError, "state: expected float32 (float64 with float64 inputs): it is updated in place");
    return NULL;
  }
  if (c.problem.o.dtype != c.problem.v.dtype) {
    PyErr_SetString(PyExc_TypeError, "out: expected the dtype of v");
    return NULL;
  }
  return launch(&c, wkv6_cpu_step, offsetof(wkv6_cuda_library, step));
}

static PyObject *native_state(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  call c = {.state = PyModule_GetState(module)};
  if (read_call(&c, state_arguments, COUNT(state_arguments), args, count)) return NULL;
  return launch(&c, wkv6_cpu_state, offsetof(wkv6_cuda_library, state));
}

/* Types first: a subclass's is_neg may be anything. */
static PyObject *native_is_plain(PyObject *module, PyObject *const *args, Py_ssize_t count) {
  const module_state *state = PyModule_GetState(module);
  for (Py_ssize_t i = 0; i < count; i++)
    if (args[i] != Py_None && !is_plain_type(state, (PyObject *)Py_TYPE(args[i]))) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (args[i] == Py_None) continue;
    PyObject *negated = PyObject_CallFunctionObjArgs(state->is_neg, args[i], NULL);
    if (!negated) return NULL;
    Py_DECREF(negated); /* True and False outlive this */
    if (negated != Py_False) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

static PyObject *isa_names(int runnable_only) {
  Py_ssize_t count = 0;
  for (const wkv6_isa *isa = wkv6_isas; isa->name; isa++) count += !runnable_only || isa->runs_here();
  PyObject *names = PyTuple_New(count);
  Py_ssize_t at = 0;
  for (const wkv6_isa *isa = wkv6_isas; names && isa->name; isa++) {
    if (runnable_only && !isa->runs_here()) continue;
    PyObject *name = PyUnicode_FromString(isa->name);
    if (!name || PyTuple_SetItem(names, at++, name)) Py_CLEAR(names);
  }
  return names;
}

static PyObject *native_isas(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return isa_names(1);
}

static PyObject *native_isas_built(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return isa_names(0);
}

static PyObject *native_isa(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyUnicode_FromString(wkv6_current_isa()->name);
}

static int use_isa(const char *name, PyObject *error) {
  if (wkv6_use_isa(name) == 0) return 0;
  PyObject *names = isa_names(1);
  if (names) PyErr_Format(error, "no instruction set %.40s here, expected one of %R", name, names);
  Py_XDECREF(names);
  return -1;
}

static PyObject *native_use_isa(PyObject *module, PyObject *name) {
  (void)module;
  const char *before = wkv6_current_isa()->name;
  PyObject *bytes = PyUnicode_AsUTF8String(name);
  if (!bytes) return NULL;
  const int failed = use_isa(PyBytes_AsString(bytes), PyExc_ValueError);
  Py_DECREF(bytes);
  return failed ? NULL : PyUnicode_FromString(before);
}

/* ---- Module ---- */

static PyObject *native_use_cuda_emulation(PyObject *module, PyObject *path) {
  (void)module;
  PyObject *bytes = NULL;
  const char *why;
  if (path != Py_None && !PyUnicode_FSConverter(path, &bytes)) return NULL;
  const int failed = wkv6_cuda_emulate(bytes ? PyBytes_AsString(bytes) : NULL, &why);
  Py_XDECREF(bytes);
  if (failed) return PyErr_Format(PyExc_OSError, "%s", why);
  Py_RETURN_NONE;
}

static PyObject *native_cuda_library(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  const char *why;
  int runtime = 0, driver = 0;
  const wkv6_cuda_library *const cuda = wkv6_cuda_library_open(&why);
  if (!cuda) return PyErr_Format(PyExc_RuntimeError, "no CUDA kernels: %s", why);
  if (cuda->versions(&runtime, &driver) != WKV6_OK) return PyErr_Format(PyExc_RuntimeError, "%s", cuda->error());
  return Py_BuildValue("(sii)", cuda->archs(), runtime, driver);
}

PyDoc_STRVAR(
    forward_doc,
    "forward(r, k, v, w, u, initial_state, o, final_state, checkpoints, span_decays, cu_seqlens, scale, flags,\n"
    "        segment)\n"
    "Fills o and, unless None, final_state and checkpoints.");
PyDoc_STRVAR(
    backward_doc,
    "backward(r, k, v, w, u, initial_state, checkpoints, grad_o, grad_final_state, grad_r, grad_k, grad_v, grad_w, grad_u,\n"
    "         grad_initial_state, grad_u_parts, span_decays, span_adjoints, cu_seqlens, scale, flags, segment)\n"
    "Fills the gradients that are not None.");
PyDoc_STRVAR(step_doc,
             "step(r, k, v, w, u, state, o, cu_seqlens, scale, flags, segment)\nOne token; fills o and updates state.");
PyDoc_STRVAR(state_doc, "state(k, v, w, initial_state, state, w_sum, cu_seqlens, scale, flags, segment)\n"
                        "Fills state, which has scale * k in k's place, and w_sum.");
PyDoc_STRVAR(
    is_plain_doc,
    "is_plain(*tensors): whether each is None, or a torch.Tensor or torch.nn.Parameter, no subclass, whose memory\n"
    "holds its values: without a lazy minus sign, which DLPack does not tell.");
PyDoc_STRVAR(isas_doc, "Names of the instruction sets whose kernels run on this machine, best first.");
PyDoc_STRVAR(isas_built_doc, "Names of the instruction sets that kernels were compiled for, best first.");
PyDoc_STRVAR(isa_doc, "Name of the instruction set in use.");
PyDoc_STRVAR(
    use_isa_doc,
    "use_isa(name): uses the kernels of that instruction set from now on; returns the name of the one before.");
PyDoc_STRVAR(
    cuda_library_doc,
    "(devices that the CUDA kernels were built for, as in \"800,900\"; version of the CUDA runtime; newest that the "
    "driver\nserves, 0 without a driver), versions as 1000 * major + 10 * minor.");
PyDoc_STRVAR(
    use_cuda_emulation_doc,
    "use_cuda_emulation(path): for tests: CPU tensors go to the CUDA kernels of the emulated library there; None undoes it.");

#define FASTCALL(function) (PyCFunction)(void (*)(void))(function)
static PyMethodDef methods[] = {
    {"forward", FASTCALL(native_forward), METH_FASTCALL, forward_doc},
    {"backward", FASTCALL(native_backward), METH_FASTCALL, backward_doc},
    {"step", FASTCALL(native_step), METH_FASTCALL, step_doc},
    {"state", FASTCALL(native_state), METH_FASTCALL, state_doc},
    {"is_plain", FASTCALL(native_is_plain), METH_FASTCALL, is_plain_doc},
    {"isas", native_isas, METH_NOARGS, isas_doc},
    {"isas_built", native_isas_built, METH_NOARGS, isas_built_doc},
    {"isa", native_isa, METH_NOARGS, isa_doc},
    {"use_isa", native_use_isa, METH_O, use_isa_doc},
    {"cuda_library", native_cuda_library, METH_NOARGS, cuda_library_doc},
    {"use_cuda_emulation", native_use_cuda_emulation, METH_O, use_cuda_emulation_doc},
    {NULL, NULL, 0, NULL},
};

static PyObject *attribute_of(const char *module, const char *name) {
  PyObject *found = PyImport_ImportModule(module);
  PyObject *attribute = found ? PyObject_GetAttrString(found, name) : NULL;
  Py_XDECREF(found);
  return attribute;
}

static int find_torch(module_state *state) {
  state->types[0] = attribute_of("torch", "Tensor");
  state->types[1] = state->types[0] ? attribute_of("torch.nn", "Parameter") : NULL;
  state->is_neg = state->types[1] ? PyObject_GetAttrString(state->types[0], "is_neg") : NULL;
  if (!state->is_neg) return -1;
  state->exchange = exchange_of(state->types[0]);
  if (!state->exchange) PyErr_SetString(PyExc_ImportError, NEEDS_TORCH);
  return state->exchange ? 0 : -1;
}

static int module_exec(PyObject *module) {
  const char *wanted = getenv("RWKV6_OPS_ISA");
  if (wanted && *wanted && use_isa(wanted, PyExc_ImportError)) return -1;
  if (find_torch(PyModule_GetState(module))) return -1;
  if (PyModule_AddIntConstant(module, "REVERSE", WKV6_REVERSE) ||
      PyModule_AddIntConstant(module, "RAW_DECAY", WKV6_RAW_DECAY) ||
      PyModule_AddIntConstant(module, "RECURRENT", WKV6_RECURRENT) ||
      PyModule_AddIntConstant(module, "CHUNK", WKV6_CHUNK) || PyModule_AddIntConstant(module, "FAST", WKV6_FAST) ||
      PyModule_AddIntConstant(module, "EXACT", WKV6_EXACT) || PyModule_AddIntConstant(module, "WHOLE", WKV6_WHOLE) ||
      PyModule_AddIntConstant(module, "SPANS", WKV6_SPANS) ||
      PyModule_AddIntConstant(module, "CHUNK_FROM_TOKENS", WKV6_CHUNK_FROM_TOKENS) ||
      PyModule_AddIntConstant(module, "CUDA_CHUNK_FROM_TOKENS", WKV6_CUDA_CHUNK_FROM_TOKENS))
    return -1;
  return PyModule_AddIntConstant(module, "uses_torch_threads", wkv6_parallel_init());
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  module_state *state = PyModule_GetState(module);
  Py_VISIT(state->types[0]);
  Py_VISIT(state->types[1]);
  Py_VISIT(state->is_neg);
  return 0;
}

static int module_clear(PyObject *module) {
  module_state *state = PyModule_GetState(module);
  Py_CLEAR(state->types[0]);
  Py_CLEAR(state->types[1]);
  Py_CLEAR(state->is_neg);
  return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

PyDoc_STRVAR(module_doc, "The C core of rwkv6_ops. Not a public interface: rwkv6_ops is.");

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rwkv6_ops._native",
    .m_doc = module_doc,
    .m_size = sizeof(module_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
