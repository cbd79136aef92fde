/* SPDX-License-Identifier: Apache-2.0
 *
 * The C API of wkv6_cuda.h: chooses a kernel instance and a grid for each problem and launches it.
 */
#include "wkv6_cuda.h"

#include "launch_chunk.cuh"
#include "recurrent_backward.cuh"
#include "recurrent_forward.cuh"
#include "recurrent_parts.cuh"
#include "recurrent_state.cuh"
#include "recurrent_step.cuh"
#include "runtime.cuh"

#include <initializer_list>
#include <type_traits>

namespace {

using runtime::ceil_div;
using runtime::least;
using runtime::place;

bool states_by_16(const wkv6_problem &p) {
  return p.V % 4 == 0 && p.checkpoints.stride[2] % 4 == 0 && reinterpret_cast<uintptr_t>(p.checkpoints.data) % 16 == 0;
}

/* How many warps of a block share out `size`, `of_warp` each: up to `most`, but fewer where `heads` heads would else
 * give the multiprocessors less than two blocks each. */
int64_t warps_for(int64_t most, int64_t size, int64_t of_warp, int64_t heads, const place &where) {
  int64_t warps = least(most, ceil_div(size, of_warp));
  while (warps > 1 && heads * ceil_div(size, warps * of_warp) < 2 * where.multiprocessors) warps = (warps + 1) / 2;
  return warps;
}

template <auto kernel> using kernel_constant = std::integral_constant<decltype(kernel), kernel>;

template <typename real, int ROWS, int LANES, bool EXACT>
bool launch_forward_instance(const wkv6_problem &p, bool scale_enters, const place &where) {
  constexpr int of_warp = 4 * warp_size / LANES, most_warps = forward_most_threads / warp_size;
  forward_arguments a = {};
  a.p = p;
  a.scale_enters = scale_enters;
  a.vector_checkpoints = states_by_16(p);
  a.row_warps = static_cast<int>(ceil_div(p.K, ROWS * LANES));
  a.column_warps =
      static_cast<int>(warps_for(least(most_warps / a.row_warps, 64 / of_warp), p.V, of_warp, p.N * p.H, where));
  a.at.rows = a.row_warps * ROWS * LANES;
  a.at.columns = a.column_warps * of_warp;
  a.slices = static_cast<int>(ceil_div(p.V, a.at.columns));
  a.at.tile = 16;
  int bytes = forward_layout(a, sizeof(real));
  while (bytes > where.shared_bytes && a.at.tile > 1) {
    a.at.tile /= 2;
    bytes = forward_layout(a, sizeof(real));
  }
  return runtime::launch<&wkv6_forward_recurrent<real, ROWS, LANES, EXACT>, forward_most_threads>(
      "wkv6_forward_recurrent",
      static_cast<uint64_t>(p.N) * p.H * a.slices,
      a.row_warps * a.column_warps * warp_size,
      bytes,
      where.stream,
      a);
}

bool launch_recurrence_of_part(const wkv6_problem &p, bool scale_enters, const place &where) {
  if (wkv6_is_double(&p)) return launch_forward_instance<double, 4, 16, false>(p, scale_enters, where);
  if (p.K == 32) return launch_forward_instance<float, 8, 4, true>(p, scale_enters, where);
  if (p.K == 64) return launch_forward_instance<float, 8, 8, true>(p, scale_enters, where);
  if (p.K == 128) return launch_forward_instance<float, 8, 16, true>(p, scale_enters, where);
  return launch_forward_instance<float, 8, 8, false>(p, scale_enters, where);
}

/* The kernel's instance for heads that one block has whole is another than for those that blocks share. `whole` asks
 * for it, and comes back false where it is not to be had. */
template <typename real, int COLUMNS, int LANES, int HISTORY, int PARTS, bool EXACT, int WHOLE>
bool launch_backward_instance(const wkv6_problem &p, bool &whole, const place &where) {
  constexpr int of_warp = 2 * warp_size / LANES, usual_warps = 8;
  backward_arguments a = {};
  a.p = p;
  a.vector_checkpoints = states_by_16(p);
  a.column_warps = static_cast<int>(ceil_div(p.V, COLUMNS * LANES));
  a.columns = a.column_warps * COLUMNS * LANES;
  a.row_warps = static_cast<int>(
      warps_for(usual_warps > a.column_warps ? usual_warps / a.column_warps : 1, p.K, of_warp, p.N * p.H, where));
  int bytes;
  const auto fits = [&](bool with_values) {
    a.whole = with_values;
    a.rows = a.row_warps * of_warp;
    a.slices = static_cast<int>(ceil_div(p.K, a.rows));
    bytes = backward_layout(a, HISTORY * PARTS, sizeof(real));
    return bytes <= where.shared_bytes;
  };
  const auto launch = [&](auto kernel) {
    return runtime::launch<kernel.value, backward_most_threads<EXACT>>("wkv6_backward_recurrent",
                                                                       static_cast<uint64_t>(p.N) * p.H * a.slices,
                                                                       a.row_warps * a.column_warps * warp_size,
                                                                       bytes,
                                                                       where.stream,
                                                                       a);
  };
  whole = whole && WHOLE > 0 && p.K == 8 * WHOLE && p.K == a.row_warps * of_warp && fits(true);
  if (whole)
    return launch(kernel_constant<&wkv6_backward_recurrent<real, COLUMNS, LANES, HISTORY, PARTS, EXACT, WHOLE>>());
  while (!fits(false) && a.row_warps > 1) a.row_warps = (a.row_warps + 1) / 2;
  return launch(kernel_constant<&wkv6_backward_recurrent<real, COLUMNS, LANES, HISTORY, PARTS, EXACT, 0>>());
}

bool launch_backward_of_part(const wkv6_problem &p, bool &whole, const place &where) {
  if (p.N * p.H * p.K == 0) return true;
  if (wkv6_is_double(&p)) return launch_backward_instance<double, 4, 16, 2, 2, false, 0>(p, whole, where);
  if (p.V == 32) return launch_backward_instance<float, 8, 4, 8, 2, true, 4>(p, whole, where);
  if (p.V == 64) return launch_backward_instance<float, 8, 8, 8, 2, true, 8>(p, whole, where);
  if (p.V == 128) return launch_backward_instance<float, 8, 16, 8, 2, true, 0>(p, whole, where);
  return launch_backward_instance<float, 8, 8, 2, 2, false, 0>(p, whole, where);
}

bool launch_grad_u(const wkv6_problem &p, const place &where) {
  const uint64_t blocks = static_cast<uint64_t>(p.H) * ceil_div(p.K, warp_size);
  constexpr int threads = grad_u_warps * warp_size, bytes = threads * sizeof(double);
  if (blocks == 0) return true;
  if (wkv6_is_double(&p))
    return runtime::launch<&wkv6_grad_u<double>, threads>("wkv6_grad_u", blocks, threads, bytes, where.stream, p);
  return runtime::launch<&wkv6_grad_u<float>, threads>("wkv6_grad_u", blocks, threads, bytes, where.stream, p);
}

bool launch_step(const wkv6_problem &p, const wkv6_tensor &from, const place &where) {
  const uint64_t blocks = static_cast<uint64_t>(p.B) * p.H * ceil_div(p.V, warp_size);
  const step_arguments a = {p, from};
  if (blocks == 0) return true;
  if (wkv6_is_double(&p))
    return runtime::launch<&wkv6_step_recurrent<double>, step_threads>(
        "wkv6_step_recurrent", blocks, step_threads, sizeof(step_shared<double>), where.stream, a);
  return runtime::launch<&wkv6_step_recurrent<float>, step_threads>(
      "wkv6_step_recurrent", blocks, step_threads, sizeof(step_shared<float>), where.stream, a);
}

template <typename real> bool launch_state(const wkv6_problem &p, const place &where) {
  state_arguments a = {};
  a.p = p;
  a.row_slices = static_cast<int>(ceil_div(p.K, state_rows));
  a.column_slices = static_cast<int>(ceil_div(p.V, state_columns));
  const int bytes = state_layout<real>(a);
  const uint64_t blocks = static_cast<uint64_t>(p.N) * p.H * a.row_slices * a.column_slices;
  return blocks == 0 || runtime::launch<&wkv6_state_recurrent<real>, state_threads>(
                            "wkv6_state_recurrent", blocks, state_threads, bytes, where.stream, a);
}

/* ---- Heads with more channels than the warps of a block hold: in parts ----
 *
 * The rows of S do not meet but in the sums o and dv, its columns not but in dr, dk, dw and du. So a part of either
 * is a problem of its own, on the same tensors but for those sums: these go to scratch, a part after the other, and
 * are added in that order. */

/* `count` parts of `size` channels, the last one of fewer. */
struct parts {
  int64_t all, count, size;
  parts(int64_t channels, int64_t most)
      : all(channels), count(ceil_div(channels, most)), size(ceil_div(ceil_div(channels, count), 16) * 16) {}
  int64_t first(int64_t i) const { return i * size; }
  int64_t channels(int64_t i) const { return least(size, all - first(i)); }
};

parts parts_of_keys(const wkv6_problem &p) { return {p.K, 512}; }
parts parts_of_values(const wkv6_problem &p) { return {p.V, wkv6_is_double(&p) ? 384 : 768}; }

bool present(const wkv6_tensor &x) { return x.dtype != WKV6_ABSENT; }

/* The tensor from place `first` of dimension d on. */
void cut(wkv6_tensor &x, int d, int64_t first) {
  if (present(x)) x.data = static_cast<char *>(x.data) + first * x.stride[d] * element_bytes(x.dtype);
}

int64_t real_bytes(const wkv6_problem &p) { return wkv6_is_double(&p) ? 8 : 4; }
int64_t elements(const wkv6_problem &p, int64_t channels) { return p.B * p.T * p.H * channels; }

/* Takes [B, T, H, channels] reals of scratch for a part of x, if x is wanted. */
void put_into_scratch(wkv6_tensor &x, const wkv6_problem &p, int64_t channels, char *&scratch) {
  if (!present(x)) return;
  x = {scratch, {p.T * p.H * channels, p.H * channels, channels, 1}, wkv6_is_double(&p) ? WKV6_F64 : WKV6_F32};
  scratch += elements(p, channels) * real_bytes(p);
}

/* x = the sum of `count` parts. */
bool sum_parts(const wkv6_tensor &x, const wkv6_problem &p, int64_t channels, int64_t count, const char *from,
               const place &where) {
  if (!present(x) || elements(p, channels) == 0) return true;
  const sum_arguments a = {x, elements(p, channels), p.T, p.H, channels, from, static_cast<int>(count)};
  const uint64_t blocks = static_cast<uint64_t>(ceil_div(a.elements, sum_threads));
  if (wkv6_is_double(&p))
    return runtime::launch<&wkv6_sum_parts<double>, sum_threads>(
        "wkv6_sum_parts", blocks, sum_threads, 0, where.stream, a);
  return runtime::launch<&wkv6_sum_parts<float>, sum_threads>(
      "wkv6_sum_parts", blocks, sum_threads, 0, where.stream, a);
}

/* (1) and (2). */
bool launch_recurrence(const wkv6_problem &p, bool scale_enters, const place &where) {
  if (p.N * p.H * p.V == 0) return true;
  const parts keys = parts_of_keys(p);
  if (keys.count == 1) return launch_recurrence_of_part(p, scale_enters, where);
  char *const sums = static_cast<char *>(p.scratch), *scratch = sums;
  for (int64_t i = 0; i < keys.count; i++) {
    wkv6_problem q = p;
    q.K = keys.channels(i);
    for (wkv6_tensor *x : {&q.r, &q.k, &q.w}) cut(*x, 3, keys.first(i));
    for (wkv6_tensor *x : {&q.initial_state, &q.final_state, &q.checkpoints}) cut(*x, 2, keys.first(i));
    cut(q.u, 1, keys.first(i));
    put_into_scratch(q.o, p, p.V, scratch);
    if (!launch_recurrence_of_part(q, scale_enters, where)) return false;
  }
  return sum_parts(p.o, p, p.V, keys.count, sums, where);
}

/* Part i of dr, dk, dw and du: into scratch, dr of all parts first, then dk, dw, and du. */
wkv6_problem part_of_values(const wkv6_problem &p, const parts &values, int64_t i) {
  wkv6_problem q = p;
  char *scratch = static_cast<char *>(p.scratch);
  q.V = values.channels(i);
  for (wkv6_tensor *x : {&q.v, &q.grad_o, &q.initial_state, &q.grad_final_state, &q.checkpoints})
    cut(*x, 3, values.first(i));
  const int64_t bytes = elements(p, p.K) * real_bytes(p);
  for (wkv6_tensor *x : {&q.grad_r, &q.grad_k, &q.grad_w})
    if (present(*x)) {
      char *at = scratch + i * bytes;
      put_into_scratch(*x, p, p.K, at);
      scratch += values.count * bytes;
    }
  if (present(q.grad_u)) q.grad_u_parts.data = scratch + i * p.N * p.H * p.K * real_bytes(p);
  return q;
}

/* (3), (4), (6), (8). `whole` as in launch_backward_instance: dv and dS_0 as well. */
bool launch_backward(const wkv6_problem &p, bool &whole, const place &where) {
  const parts values = parts_of_values(p);
  if (values.count == 1)
    return launch_backward_of_part(p, whole, where) && (!present(p.grad_u) || launch_grad_u(p, where));
  whole = false;
  for (int64_t i = 0; i < values.count; i++)
    if (!launch_backward_of_part(part_of_values(p, values, i), whole, where)) return false;
  const wkv6_problem first = part_of_values(p, values, 0);
  const wkv6_tensor *const sums[][2] = {
      {&p.grad_r, &first.grad_r}, {&p.grad_k, &first.grad_k}, {&p.grad_w, &first.grad_w}};
  for (const auto &[to, from] : sums)
    if (!sum_parts(*to, p, p.K, values.count, static_cast<const char *>(from->data), where)) return false;
  if (!present(p.grad_u)) return true;
  wkv6_problem q = p; /* to (8) the parts are more sequences */
  q.N = p.N * values.count;
  q.grad_u_parts = first.grad_u_parts;
  return launch_grad_u(q, where);
}

/* The forward pass, which then is a step, takes any head whole. */
bool one_token(const wkv6_problem &p) { return p.T == 1 && !p.cu_seqlens; }

int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* What the two functions above take of scratch. One call may follow the other: they can have the same. */
int64_t scratch_bytes(const wkv6_problem &p) {
  const int64_t keys = parts_of_keys(p).count, values = parts_of_values(p).count;
  const int64_t of_keys = present(p.grad_r) + present(p.grad_k) + present(p.grad_w);
  const bool sums = (present(p.o) && !one_token(p)) || present(p.grad_v);
  const int64_t for_sums = keys > 1 && sums ? keys * elements(p, p.V) : 0;
  const int64_t for_gradients =
      values > 1 ? values * (of_keys * elements(p, p.K) + (present(p.grad_u) ? p.N * p.H * p.K : 0)) : 0;
  return most(for_sums, for_gradients) * real_bytes(p);
}

/* dv and dS_0: the recurrence of G, from the last token to the first. */
wkv6_problem adjoint_of(const wkv6_problem &p) {
  wkv6_problem q = p;
  q.flags ^= WKV6_REVERSE;
  q.r = p.k;
  q.k = p.r;
  q.v = p.grad_o;
  q.o = p.grad_v;
  q.initial_state = p.grad_final_state;
  q.final_state = p.grad_initial_state;
  q.checkpoints = {};
  return q;
}

/* All gradients but du, whose parts they leave. dv and dS_0 are a recurrence of their own where kernels share a head by
 * key channels. */
bool launch_backward_by_chunks(const wkv6_problem &p, const place &where) {
  const bool of_values = present(p.grad_v) || present(p.grad_initial_state);
  return chunks::launch_backward(p, where) &&
         (chunks::backward_has_values(p) || !of_values || launch_recurrence(adjoint_of(p), true, where));
}

template <typename function> wkv6_status run(int device, void *stream, function launches) {
  const runtime::device_guard guard(device);
  place where = {0, 0, stream};
  return guard.ok && runtime::limits(device, where.multiprocessors, where.shared_bytes) && launches(where)
             ? WKV6_OK
             : WKV6_E_DEVICE;
}

} // namespace

wkv6_status wkv6_cuda_forward(const wkv6_problem *p, int device, void *stream) {
  if (!p->scratch && scratch_bytes(*p)) return WKV6_E_MEMORY;
  return run(device, stream, [&](const place &where) {
    return one_token(*p)      ? launch_step(*p, p->initial_state, where)
           : chunks::take(*p) ? chunks::launch_forward(*p, where)
                              : launch_recurrence(*p, false, where);
  });
}

wkv6_status wkv6_cuda_backward(const wkv6_problem *p, int device, void *stream) {
  if (!p->scratch && scratch_bytes(*p)) return WKV6_E_MEMORY;
  const bool of_keys = present(p->grad_r) || present(p->grad_k) || present(p->grad_w) || present(p->grad_u);
  const bool of_values = present(p->grad_v) || present(p->grad_initial_state);
  const bool by_chunks = (p->T > 1 || p->cu_seqlens) && of_keys && chunks::take_backward(*p);
  return run(device, stream, [&](const place &where) {
    if (by_chunks) return launch_backward_by_chunks(*p, where) && (!present(p->grad_u) || launch_grad_u(*p, where));
    bool whole = of_keys && of_values;
    return (!of_keys || launch_backward(*p, whole, where)) &&
           (!of_values || whole || launch_recurrence(adjoint_of(*p), true, where));
  });
}

wkv6_status wkv6_cuda_step(const wkv6_problem *p, int device, void *stream) {
  return run(device, stream, [&](const place &where) { return launch_step(*p, p->final_state, where); });
}

wkv6_status wkv6_cuda_state(const wkv6_problem *p, int device, void *stream) {
  return run(device, stream, [&](const place &where) {
    return wkv6_is_double(p) ? launch_state<double>(*p, where) : launch_state<float>(*p, where);
  });
}

size_t wkv6_cuda_scratch_bytes(const wkv6_problem *p) { return static_cast<size_t>(scratch_bytes(*p)); }

const char *wkv6_cuda_error(void) { return runtime::error; }

const char *wkv6_cuda_archs(void) { return runtime::architectures; }

wkv6_status wkv6_cuda_versions(int *runtime_version, int *driver_version) {
  return runtime::versions(*runtime_version, *driver_version) ? WKV6_OK : WKV6_E_DEVICE;
}

size_t wkv6_cuda_problem_bytes(void) { return sizeof(wkv6_problem); }
