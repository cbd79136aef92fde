/* SPDX-License-Identifier: Apache-2.0
 *
 * The CPU kernels without Python: every tensor, and the scratch memory, lies against a page that may not be touched,
 * once at its end and once at its start, so reading or writing one element too far ends the program. Results are
 * compared with a plain double loop, for every instruction set of this machine. Gaps between the elements of strided
 * tensors are NaN before, and must be after.
 *
 * It brings its own parallel.h: pieces of work run one after the other as if on three threads, and scratch is guarded
 * and NaN-filled too.
 */
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/wkv6_cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { AT_END, AT_START };
enum { CONTIGUOUS, GAPS, TRANSPOSED, BACKWARDS, REPEATED };

/* ---- Guarded memory ---- */

typedef struct {
  char *pages, *data;
  size_t mapped, bytes;
} block;

static block guarded(size_t bytes, size_t alignment, int where) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (bytes + page - 1) / page * page + (bytes == 0) * page;
  block b = {.mapped = inner + 2 * page, .bytes = bytes};
  b.pages = mmap(NULL, b.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (b.pages == MAP_FAILED || mprotect(b.pages, page, PROT_NONE) ||
      mprotect(b.pages + page + inner, page, PROT_NONE)) {
    perror("guard pages");
    exit(2);
  }
  b.data = b.pages + page + (where == AT_END ? (inner - bytes) / alignment * alignment : 0);
  memset(b.pages + page, 0xff, inner); /* NaN in every dtype */
  return b;
}

static void release(block *b) { munmap(b->pages, b->mapped); }

static block scratch_block;
static int scratch_where;

void *wkv6_scratch(size_t bytes) {
  scratch_block = guarded(bytes, 64, scratch_where);
  return scratch_block.data;
}
void wkv6_scratch_done(void) { release(&scratch_block); }
int64_t wkv6_parallel_threads(void) { return 3; }
void wkv6_parallel_for(int64_t count, void (*range)(int64_t, int64_t, void *), void *context) {
  for (int64_t i = 0; i < 3; i++)
    if (count * i / 3 < count * (i + 1) / 3) range(count * i / 3, count * (i + 1) / 3, context);
}

/* ---- Tensors: values in double, and the guarded memory that the kernels see ---- */

typedef struct {
  int64_t shape[4], elements;
  double *values; /* contiguous; NULL for an absent tensor */
  block memory;
  char *lowest; /* first byte of the memory that the strides reach */
  wkv6_tensor view;
} tensor;

static size_t size_of(int32_t dtype) { return dtype == WKV6_F64 ? 8 : dtype == WKV6_F32 ? 4 : 2; }

static double decode(const char *at, int32_t dtype) {
  if (dtype == WKV6_F64) return *(const double *)at;
  if (dtype == WKV6_F32) return *(const float *)at;
  const uint16_t bits = *(const uint16_t *)at;
  if (dtype == WKV6_BF16) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                     : ldexp(fraction, -24);
  return bits & 0x8000 ? -size : size;
}

/* Only for values that the dtype holds exactly, in its normal range. */
static void encode(char *at, int32_t dtype, double value) {
  const float single = (float)value;
  uint32_t bits;
  memcpy(&bits, &single, sizeof bits);
  const uint16_t bf16 = (uint16_t)(bits >> 16);
  const uint16_t f16 =
      (uint16_t)(bf16 & 0x8000) | (uint16_t)(value == 0 ? 0 : ((bits & 0x7fffffff) - (112u << 23)) >> 13);
  if (dtype == WKV6_F64)
    memcpy(at, &value, 8);
  else if (dtype == WKV6_F32)
    memcpy(at, &single, 4);
  else
    memcpy(at, dtype == WKV6_BF16 ? &bf16 : &f16, 2);
}

static int64_t offset_of(const tensor *x, int64_t element) {
  int64_t offset = 0;
  for (int d = 3; d >= 0; d--) {
    offset += element % x->shape[d] * x->view.stride[d];
    element /= x->shape[d];
  }
  return offset;
}

/* Strides of `layout` in elements, and the guarded memory for them; inputs get their values, outputs stay NaN. */
static void place(tensor *x, int32_t dtype, int layout, int where, int is_input) {
  x->view.dtype = x->values ? dtype : WKV6_ABSENT;
  if (!x->values) return;
  const int order[2][4] = {{3, 2, 1, 0}, {2, 1, 3, 0}}; /* innermost first */
  int64_t stride = layout == GAPS ? 3 : 1, low = 0, high = 0;
  for (int i = 0; i < 4; i++) {
    const int d = order[layout == TRANSPOSED][i];
    x->view.stride[d] = layout == BACKWARDS && d != 2 ? -stride : layout == REPEATED && d == 0 ? 0 : stride;
    stride *= x->shape[d];
  }
  for (int d = 0; d < 4; d++) {
    const int64_t reach = (x->shape[d] - 1) * x->view.stride[d];
    *(reach < 0 ? &low : &high) += reach;
  }
  const size_t size = size_of(dtype), bytes = x->elements ? (size_t)(high - low + 1) * size : 0;
  x->memory = guarded(bytes, size, where);
  x->lowest = x->memory.data;
  x->view.data = x->memory.data - low * (int64_t)size;
  for (int64_t e = 0; is_input && e < x->elements; e++)
    encode((char *)x->view.data + offset_of(x, e) * (int64_t)size, dtype, x->values[e]);
}

static uint64_t seed;
static double sixteenths(int count) { /* a multiple of 1/16 in [-count, count] / 16: exact in every dtype */
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (double)((int64_t)(seed >> 33) % (2 * count + 1) - count) / 16;
}

static tensor tensor_of(int present, int64_t a, int64_t b, int64_t c, int64_t d, int count) {
  tensor x = {.shape = {a, b, c, d}, .elements = a * b * c * d};
  if (!present) return x;
  x.values = calloc((size_t)x.elements + 1, sizeof(double));
  for (int64_t e = 0; count && e < x.elements; e++) x.values[e] = sixteenths(count);
  return x;
}

/* ---- The plain loop: equations (1) to (8) of docs/wkv6.md ---- */

typedef struct {
  tensor r, k, v, w, u, s0, go, gs;      /* inputs */
  tensor o, sT, dr, dk, dv, dw, du, ds0; /* outputs */
  tensor w_sum;                          /* [1, N, H, K] */
} tensors;

static void plain_loop(const wkv6_problem *p, const tensors *x) {
  const int64_t H = p->H, K = p->K, V = p->V, states = K * V;
  int64_t longest = p->T + 1;
  double *all = malloc((size_t)(longest * states + states) * sizeof(double)), *G = all + longest * states;
  for (int64_t n = 0; n < p->N; n++) {
    for (int64_t h = 0; h < H; h++) {
      const int64_t first = wkv6_first_token(p, n), L = wkv6_sequence_length(p, n),
                    step = p->flags & WKV6_REVERSE ? -1 : 1;
      const int64_t start = step > 0 ? first : first + L - 1;
      const double *u = x->u.values + h * K;
      for (int64_t e = 0; e < states; e++) all[e] = x->s0.values ? x->s0.values[(n * H + h) * states + e] : 0;
      for (int64_t t = 0; t < L; t++) {
        const int64_t row = (start + step * t) * H + h;
        const double *r = x->r.values + row * K, *k = x->k.values + row * K, *v = x->v.values + row * V,
                     *w = x->w.values + row * K;
        const double *S = all + t * states;
        for (int64_t i = 0; i < K; i++) {
          const double log_decay = p->flags & WKV6_RAW_DECAY ? -exp(w[i]) : w[i], decay = exp(log_decay);
          x->w_sum.values[(n * H + h) * K + i] += log_decay;
          for (int64_t j = 0; j < V; j++) {
            x->o.values[row * V + j] += p->scale * r[i] * (S[i * V + j] + u[i] * k[i] * v[j]);
            all[(t + 1) * states + i * V + j] = decay * S[i * V + j] + k[i] * v[j];
          }
        }
      }
      for (int64_t e = 0; e < states; e++) {
        if (x->sT.values) x->sT.values[(n * H + h) * states + e] = all[L * states + e];
        G[e] = x->gs.values ? x->gs.values[(n * H + h) * states + e] : 0;
      }
      for (int64_t t = L - 1; t >= 0; t--) {
        const int64_t row = (start + step * t) * H + h;
        const double *r = x->r.values + row * K, *k = x->k.values + row * K, *v = x->v.values + row * V,
                     *w = x->w.values + row * K;
        const double *S = all + t * states;
        double a = 0;
        for (int64_t j = 0; x->go.values && j < V; j++) a += v[j] * x->go.values[row * V + j];
        for (int64_t i = 0; i < K; i++) {
          const double log_decay = p->flags & WKV6_RAW_DECAY ? -exp(w[i]) : w[i];
          double Sdo = 0, Gv = 0, GS = 0;
          for (int64_t j = 0; j < V; j++) {
            const double go = x->go.values ? x->go.values[row * V + j] : 0;
            Sdo += S[i * V + j] * go;
            Gv += G[i * V + j] * v[j];
            GS += G[i * V + j] * S[i * V + j];
            x->dv.values[row * V + j] += G[i * V + j] * k[i] + p->scale * r[i] * u[i] * k[i] * go;
            G[i * V + j] = exp(log_decay) * G[i * V + j] + p->scale * r[i] * go;
          }
          x->dr.values[row * K + i] = p->scale * (Sdo + a * u[i] * k[i]);
          x->dk.values[row * K + i] = Gv + p->scale * a * u[i] * r[i];
          x->dw.values[row * K + i] = exp(log_decay) * GS * (p->flags & WKV6_RAW_DECAY ? log_decay : 1);
          x->du.values[h * K + i] += p->scale * a * r[i] * k[i];
        }
      }
      for (int64_t e = 0; x->ds0.values && e < states; e++) x->ds0.values[(n * H + h) * states + e] = G[e];
    }
  }
  free(all);
}

/* ---- Cases ---- */

typedef struct {
  const char *name;
  int64_t B, T, H, K, V, segment;
  const char *dtypes; /* of r, k, v, w, u and the state: d double, f float, b bfloat16, h half */
  int layout, raw, reverse, with_states;
  double scale;
  int64_t N, cu_seqlens[6]; /* N = 0: none */
} test_case;

static const test_case cases[] = {
    {"one element", 1, 1, 1, 1, 1, 16, "ffffff", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"no tokens", 2, 0, 2, 3, 5, 16, "ffffff", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"odd sizes", 2, 19, 3, 3, 5, 16, "ffffff", CONTIGUOUS, 0, 0, 1, 0.5, 0, {0}},
    {"odd sizes, gaps", 2, 19, 3, 7, 9, 8, "ffffff", GAPS, 1, 1, 1, 0.5, 0, {0}},
    {"odd sizes, half", 2, 17, 2, 5, 19, 16, "bhbhbf", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"odd sizes, half, gaps", 2, 17, 2, 17, 3, 4, "hbhbhf", GAPS, 1, 0, 1, 1.0, 0, {0}},
    {"odd sizes, double", 2, 9, 2, 5, 7, 4, "dddddd", TRANSPOSED, 0, 0, 1, 1.0, 0, {0}},
    {"one key", 1, 5, 2, 1, 33, 2, "ffffff", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"one value", 1, 5, 2, 33, 1, 2, "fffbbf", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"64", 1, 65, 1, 64, 64, 32, "ffffff", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"64, bfloat16", 1, 66, 2, 64, 64, 32, "bbbbbf", CONTIGUOUS, 1, 0, 0, 1.0, 0, {0}},
    {"64, transposed", 2, 34, 3, 64, 64, 16, "ffffff", TRANSPOSED, 0, 1, 1, 1.0, 0, {0}},
    {"64, negative strides", 2, 18, 2, 64, 64, 16, "fhfbff", BACKWARDS, 0, 0, 1, 1.0, 0, {0}},
    {"64, zero stride", 3, 18, 2, 64, 64, 16, "ffffff", REPEATED, 0, 0, 1, 1.0, 0, {0}},
    {"64, double", 1, 33, 1, 64, 64, 16, "dddddd", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"columns cut among threads", 1, 33, 1, 40, 203, 16, "ffffff", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"columns cut, double, gaps", 1, 33, 2, 40, 203, 16, "dddddd", GAPS, 0, 0, 1, 1.0, 0, {0}},
    {"wide", 1, 9, 1, 100, 256, 4, "ffffff", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"very wide", 1, 5, 1, 288, 300, 4, "hhhhhf", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"sequences", 1, 37, 2, 16, 16, 8, "ffffff", CONTIGUOUS, 0, 0, 1, 1.0, 5, {0, 5, 5, 22, 22, 37}},
    {"sequences, reversed", 1, 37, 2, 6, 10, 4, "bfbfhf", GAPS, 1, 1, 1, 1.0, 4, {0, 0, 1, 36, 37}},
    {"one token", 3, 1, 2, 64, 64, 16, "ffffff", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
    {"one token, odd, half", 3, 1, 2, 7, 19, 16, "hbhbff", GAPS, 1, 0, 1, 0.5, 0, {0}},
    {"one token, double", 2, 1, 2, 9, 5, 16, "dddddd", TRANSPOSED, 0, 0, 1, 1.0, 0, {0}},
    {"one token, wide", 1, 1, 1, 300, 1000, 16, "ffffff", CONTIGUOUS, 0, 0, 1, 1.0, 0, {0}},
};

static int32_t dtype_of(char letter) {
  return letter == 'd' ? WKV6_F64 : letter == 'f' ? WKV6_F32 : letter == 'b' ? WKV6_BF16 : WKV6_F16;
}

static int failures;

static void report(const test_case *c, const char *isa, int where, const char *what, const char *why, double error) {
  printf(
      "%s, %s, guard page %s: %s: %s (%.2e)\n", c->name, isa, where == AT_END ? "behind" : "before", what, why, error);
  failures++;
}

/* The kernels' result in memory against the plain loop's in values; and nothing may be written between the elements. */
static void compare(const test_case *c, const char *isa, int where, const char *what, tensor *x) {
  if (!x->values) return;
  const size_t size = size_of(x->view.dtype);
  /* A few roundings of float or double; half a unit in the last place of bfloat16 and float16. */
  const double tolerance = x->view.dtype == WKV6_F64    ? 1e-13
                           : x->view.dtype == WKV6_F32  ? 2e-6
                           : x->view.dtype == WKV6_BF16 ? 1. / 256
                                                        : 1. / 2048;
  double difference = 0, norm = 0;
  for (int64_t e = 0; e < x->elements; e++) {
    char *at = (char *)x->view.data + offset_of(x, e) * (int64_t)size;
    difference += pow(decode(at, x->view.dtype) - x->values[e], 2);
    norm += pow(x->values[e], 2);
    memset(at, 0xff, size);
  }
  if (!(sqrt(difference) <= tolerance * sqrt(norm) + 1e-30))
    report(c, isa, where, what, "relative error", sqrt(difference / norm));
  for (size_t b = 0; b < x->memory.bytes; b++)
    if ((unsigned char)x->lowest[b] != 0xff) {
      report(c, isa, where, what, "written between its elements", (double)b);
      break;
    }
}

static void run_case(const test_case *c, const wkv6_isa *isa, uint32_t algorithm, int where) {
  seed = 1;
  scratch_where = where;
  int32_t d[6];
  for (int i = 0; i < 6; i++) d[i] = dtype_of(c->dtypes[i]);
  const int64_t B = c->B, T = c->T, H = c->H, K = c->K, V = c->V, N = c->N ? c->N : B;
  const int repeated = c->layout == REPEATED;
  wkv6_problem p = {.B = B, .T = T, .H = H, .K = K, .V = V, .N = N, .segment = c->segment, .scale = c->scale};
  p.cu_seqlens = c->N ? c->cu_seqlens : NULL;
  p.flags = algorithm | (c->raw ? WKV6_RAW_DECAY : 0) | (c->reverse ? WKV6_REVERSE : 0);

  tensors x = {
      .r = tensor_of(1, B, T, H, K, 16),
      .k = tensor_of(1, B, T, H, K, 16),
      .v = tensor_of(1, B, T, H, V, 16),
      .w = tensor_of(1, B, T, H, K, 16),
      .u = tensor_of(1, 1, 1, H, K, 16),
      .s0 = tensor_of(c->with_states, N, H, K, V, 16),
      .go = tensor_of(1, B, T, H, V, 16),
      .gs = tensor_of(c->with_states, N, H, K, V, 16),
      .o = tensor_of(1, B, T, H, V, 0),
      .sT = tensor_of(1, N, H, K, V, 0),
      .dr = tensor_of(1, B, T, H, K, 0),
      .dk = tensor_of(1, B, T, H, K, 0),
      .dv = tensor_of(1, B, T, H, V, 0),
      .dw = tensor_of(1, B, T, H, K, 0),
      .du = tensor_of(1, 1, 1, H, K, 0),
      .ds0 = tensor_of(c->with_states, N, H, K, V, 0),
      .w_sum = tensor_of(1, 1, N, H, K, 0),
  };
  for (int64_t e = 0; !c->raw && e < x.w.elements; e++)
    x.w.values[e] = e % 7 == 6 ? -22016 : e % 7 == 5 ? 0 : -fabs(x.w.values[e]);
  tensor *inputs[8] = {&x.r, &x.k, &x.v, &x.w, &x.u, &x.s0, &x.go, &x.gs},
         *outputs[8] = {&x.o, &x.sT, &x.dr, &x.dk, &x.dv, &x.dw, &x.du, &x.ds0};
  const int32_t input_dtypes[8] = {d[0], d[1], d[2], d[3], d[4], d[5], d[2], d[5]},
                output_dtypes[8] = {d[2], d[5], d[0], d[1], d[2], d[3], d[4], d[5]};
  for (int i = 0; i < 8; i++) { /* a repeated batch row: the same values in every row */
    const int64_t row = inputs[i]->elements / inputs[i]->shape[0];
    for (int64_t e = row; repeated && inputs[i]->values && e < inputs[i]->elements; e++)
      inputs[i]->values[e] = inputs[i]->values[e - row];
  }
  plain_loop(&p, &x);
  for (int i = 0; i < 8; i++) {
    place(inputs[i], input_dtypes[i], c->layout, where, 1);
    place(outputs[i], output_dtypes[i], repeated ? CONTIGUOUS : c->layout, where, 0);
  }

  const int32_t real = wkv6_is_double(&(wkv6_problem){.k = x.k.view}) ? WKV6_F64 : WKV6_F32;
  tensor checkpoints = tensor_of(1, B * T / c->segment, H, K, V, 0), parts = tensor_of(1, 1, N, H, K, 0);
  place(&checkpoints, real, CONTIGUOUS, where, 0);
  place(&parts, real, CONTIGUOUS, where, 0);
  place(&x.w_sum, real, repeated ? CONTIGUOUS : c->layout, where, 0);
  parts.view.stride[0] = parts.view.stride[1], parts.view.stride[1] = parts.view.stride[2], parts.view.stride[2] = 1;

  p.r = x.r.view, p.k = x.k.view, p.v = x.v.view, p.w = x.w.view, p.initial_state = x.s0.view;
  p.o = x.o.view, p.final_state = x.sT.view, p.checkpoints = checkpoints.view;
  p.u = x.u.view, p.u.stride[0] = x.u.view.stride[2], p.u.stride[1] = x.u.view.stride[3];
  const char *culprit = "";
  if (wkv6_check(&p, 1, &culprit) != WKV6_OK) report(c, isa->name, where, culprit, "refused", 0);
  if (wkv6_cpu_forward(&p) != WKV6_OK) report(c, isa->name, where, "forward", "failed", 0);
  compare(c, isa->name, where, "o", &x.o);
  compare(c, isa->name, where, "final_state", &x.sT);

  wkv6_problem s = p; /* the state alone: neither r nor u */
  s.scale = 1, s.r = s.u = s.o = s.checkpoints = (wkv6_tensor){0};
  s.w_sum = x.w_sum.view;
  for (int d = 0; d < 3; d++) s.w_sum.stride[d] = x.w_sum.view.stride[d + 1];
  if (wkv6_check(&s, 1, &culprit) != WKV6_OK) report(c, isa->name, where, culprit, "refused", 0);
  if (wkv6_cpu_state(&s) != WKV6_OK) report(c, isa->name, where, "state", "failed", 0);
  compare(c, isa->name, where, "state", &x.sT);
  compare(c, isa->name, where, "w_sum", &x.w_sum);

  wkv6_problem b = p;
  b.o = b.final_state = (wkv6_tensor){0};
  b.grad_o = x.go.view, b.grad_final_state = x.gs.view, b.grad_u_parts = parts.view;
  b.grad_r = x.dr.view, b.grad_k = x.dk.view, b.grad_v = x.dv.view, b.grad_w = x.dw.view,
  b.grad_initial_state = x.ds0.view;
  b.grad_u = x.du.view, b.grad_u.stride[0] = x.du.view.stride[2], b.grad_u.stride[1] = x.du.view.stride[3];
  if (wkv6_check(&b, 1, &culprit) != WKV6_OK) report(c, isa->name, where, culprit, "refused", 0);
  if (wkv6_cpu_backward(&b) != WKV6_OK) report(c, isa->name, where, "backward", "failed", 0);
  const char *names[8] = {"o", "final_state", "grad_r", "grad_k", "grad_v", "grad_w", "grad_u", "grad_initial_state"};
  for (int i = 2; i < 8; i++) compare(c, isa->name, where, names[i], outputs[i]);

  if (T == 1 && c->with_states && !c->reverse && !c->N) { /* the state starts as s0 and is updated in place */
    for (int64_t e = 0; e < x.sT.elements; e++)
      encode((char *)x.sT.view.data + offset_of(&x.sT, e) * (int64_t)size_of(d[5]), d[5], x.s0.values[e]);
    p.initial_state = p.checkpoints = (wkv6_tensor){0};
    if (wkv6_cpu_step(&p) != WKV6_OK) report(c, isa->name, where, "step", "failed", 0);
    compare(c, isa->name, where, "o of the step", &x.o);
    compare(c, isa->name, where, "state of the step", &x.sT);
  }

  for (int i = 0; i < 8; i++) {
    if (inputs[i]->values) release(&inputs[i]->memory);
    if (outputs[i]->values) release(&outputs[i]->memory);
    free(inputs[i]->values);
    free(outputs[i]->values);
  }
  release(&checkpoints.memory), release(&parts.memory), release(&x.w_sum.memory);
  free(checkpoints.values), free(parts.values), free(x.w_sum.values);
}

int main(void) {
  int runs = 0;
  for (const wkv6_isa *isa = wkv6_isas; isa->name; isa++) {
    if (!isa->runs_here()) continue;
    wkv6_use_isa(isa->name);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
      for (int where = AT_END; where <= AT_START; where++, runs += 2) {
        run_case(&cases[i], isa, WKV6_RECURRENT, where);
        run_case(&cases[i], isa, WKV6_CHUNK, where);
      }
  }
  printf("%d runs, %d failures\n", runs, failures);
  return failures != 0;
}
