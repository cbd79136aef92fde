/* SPDX-License-Identifier: Apache-2.0
 *
 * The C API of wkv6_cuda.h: chooses a kernel instance and a grid for each problem and launches it.
 */
#include "wkv6_cuda.h"

#include "launch_chunk.cuh"
#include "recurrent_backward.cuh"
#include "recurrent_forward.cuh"
#include "recurrent_state.cuh"
#include "recurrent_step.cuh"
#include "runtime.cuh"

namespace {

using runtime::ceil_div;
using runtime::least;
using runtime::place;

bool states_by_16(const wkv6_problem &p) {
  return p.V % 4 == 0 && reinterpret_cast<uintptr_t>(p.checkpoints.data) % 16 == 0;
}

/* How many warps of a block share out `size`, `of_warp` each: up to `most`, but fewer where `heads` heads would else
 * give the multiprocessors less than two blocks each. */
int64_t warps_for(int64_t most, int64_t size, int64_t of_warp, int64_t heads, const place &where) {
  int64_t warps = least(most, ceil_div(size, of_warp));
  while (warps > 1 && heads * ceil_div(size, warps * of_warp) < 2 * where.multiprocessors) warps = (warps + 1) / 2;
  return warps;
}

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
  a.rows = a.row_warps * ROWS * LANES;
  a.columns = a.column_warps * of_warp;
  a.slices = static_cast<int>(ceil_div(p.V, a.columns));
  a.tile = 16;
  int bytes = forward_layout(a, sizeof(real));
  while (bytes > where.shared_bytes && a.tile > 1) {
    a.tile /= 2;
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

bool launch_recurrence(const wkv6_problem &p, bool scale_enters, const place &where) {
  if (p.N * p.H * p.V == 0) return true;
  if (wkv6_is_double(&p)) return launch_forward_instance<double, 4, 16, false>(p, scale_enters, where);
  if (p.K == 32) return launch_forward_instance<float, 8, 4, true>(p, scale_enters, where);
  if (p.K == 64) return launch_forward_instance<float, 8, 8, true>(p, scale_enters, where);
  if (p.K == 128) return launch_forward_instance<float, 8, 16, true>(p, scale_enters, where);
  return launch_forward_instance<float, 8, 8, false>(p, scale_enters, where);
}

template <typename real, int COLUMNS, int LANES, int HISTORY, int PARTS, bool EXACT>
bool launch_backward_instance(backward_arguments a, const place &where) {
  constexpr int of_warp = 2 * warp_size / LANES, usual_warps = 8;
  const wkv6_problem &p = a.p;
  a.vector_checkpoints = states_by_16(p);
  a.column_warps = static_cast<int>(ceil_div(p.V, COLUMNS * LANES));
  a.columns = a.column_warps * COLUMNS * LANES;
  a.row_warps = static_cast<int>(
      warps_for(usual_warps > a.column_warps ? usual_warps / a.column_warps : 1, p.K, of_warp, p.N * p.H, where));
  int bytes;
  for (;; a.row_warps = (a.row_warps + 1) / 2) {
    a.rows = a.row_warps * of_warp;
    a.slices = static_cast<int>(ceil_div(p.K, a.rows));
    bytes = backward_layout(a, HISTORY * PARTS, sizeof(real));
    if (bytes <= where.shared_bytes || a.row_warps == 1) break;
  }
  return runtime::launch<&wkv6_backward_recurrent<real, COLUMNS, LANES, HISTORY, PARTS, EXACT>,
                         backward_most_threads<EXACT>>("wkv6_backward_recurrent",
                                                       static_cast<uint64_t>(p.N) * p.H * a.slices,
                                                       a.row_warps * a.column_warps * warp_size,
                                                       bytes,
                                                       where.stream,
                                                       a);
}

/* dr, dk, dw and the parts of du. */
bool launch_backward(const backward_arguments &a, const place &where) {
  if (a.p.N * a.p.H * a.p.K == 0) return true;
  if (wkv6_is_double(&a.p)) return launch_backward_instance<double, 4, 16, 2, 2, false>(a, where);
  if (a.p.V == 32) return launch_backward_instance<float, 8, 4, 8, 2, true>(a, where);
  if (a.p.V == 64) return launch_backward_instance<float, 8, 8, 8, 2, true>(a, where);
  if (a.p.V == 128) return launch_backward_instance<float, 8, 16, 8, 2, true>(a, where);
  return launch_backward_instance<float, 8, 8, 2, 2, false>(a, where);
}

bool launch_grad_u(const backward_arguments &a, const place &where) {
  const uint64_t blocks = static_cast<uint64_t>(a.p.H) * ceil_div(a.p.K, warp_size);
  constexpr int threads = grad_u_warps * warp_size, bytes = threads * sizeof(double);
  if (blocks == 0) return true;
  if (wkv6_is_double(&a.p))
    return runtime::launch<&wkv6_grad_u<double>, threads>("wkv6_grad_u", blocks, threads, bytes, where.stream, a);
  return runtime::launch<&wkv6_grad_u<float>, threads>("wkv6_grad_u", blocks, threads, bytes, where.stream, a);
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

bool present(const wkv6_tensor &x) { return x.dtype != WKV6_ABSENT; }

/* All gradients but du, whose parts they leave. dv and dS_0 are a recurrence of their own where kernels share a head by
 * key channels. */
bool launch_backward_by_chunks(const wkv6_problem &p, const place &where) {
  const bool of_values = present(p.grad_v) || present(p.grad_initial_state);
  return chunks::launch_backward(p, where) &&
         (chunks::backward_has_values(p) || !of_values || launch_recurrence(adjoint_of(p), true, where));
}

/* The largest K of a recurrence and the largest V of the gradients of the keys: what the warps of one block hold. */
template <typename real> constexpr int most_k = (sizeof(real) == 8 ? 4 * 16 : 8 * 8) * forward_most_threads / warp_size;
template <typename real>
constexpr int most_v = (sizeof(real) == 8 ? 4 * 16 : 8 * 8) * backward_most_threads<false> / warp_size;

wkv6_status check_size(const char *name, int64_t size, int most) {
  if (size <= most) return WKV6_OK;
  runtime::fail("%s: %lld, at most %d on CUDA", name, static_cast<long long>(size), most);
  return WKV6_E_SIZE;
}

wkv6_status check_k(const wkv6_problem &p) {
  return check_size("K", p.K, wkv6_is_double(&p) ? most_k<double> : most_k<float>);
}
wkv6_status check_v(const wkv6_problem &p) {
  return check_size("V", p.V, wkv6_is_double(&p) ? most_v<double> : most_v<float>);
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
  const bool one_token = p->T == 1 && !p->cu_seqlens, by_chunks = !one_token && chunks::take(*p);
  const wkv6_status fits = one_token || by_chunks ? WKV6_OK : check_k(*p);
  if (fits != WKV6_OK) return fits;
  return run(device, stream, [&](const place &where) {
    return one_token   ? launch_step(*p, p->initial_state, where)
           : by_chunks ? chunks::launch_forward(*p, where)
                       : launch_recurrence(*p, false, where);
  });
}

wkv6_status wkv6_cuda_backward(const wkv6_problem *p, int device, void *stream) {
  backward_arguments a = {};
  a.p = *p;
  const bool of_keys = present(p->grad_r) || present(p->grad_k) || present(p->grad_w) || present(p->grad_u);
  const bool of_values = present(p->grad_v) || present(p->grad_initial_state);
  const bool by_chunks = (p->T > 1 || p->cu_seqlens) && of_keys && chunks::take(*p);
  wkv6_status fits = of_values ? check_k(*p) : WKV6_OK;
  if (fits == WKV6_OK && of_keys) fits = check_v(*p);
  if (fits != WKV6_OK) return fits;
  return run(device, stream, [&](const place &where) {
    const bool done = by_chunks ? launch_backward_by_chunks(*p, where)
                                : (!of_keys || launch_backward(a, where)) &&
                                      (!of_values || launch_recurrence(adjoint_of(*p), true, where));
    return done && (!present(p->grad_u) || launch_grad_u(a, where));
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

const char *wkv6_cuda_error(void) { return runtime::error; }

size_t wkv6_cuda_problem_bytes(void) { return sizeof(wkv6_problem); }
