/* SPDX-License-Identifier: Apache-2.0
 *
 * One token (decoding): equations (1) and (2) for T = 1, in one pass over the state, for any K and V.
 *
 * A block has 32 value columns of one head, a lane one of them; warp w has the rows w, w + 8, .. First all threads read
 * r, k, u and decay of up to step_rows rows into shared memory, a row a thread; then each takes its elements of the
 * state. The state may be updated in place: each element is read and written by one thread. The sums over rows meet in
 * shared memory and are added in the order of the warps.
 */
#ifndef WKV6_RECURRENT_STEP_CUH
#define WKV6_RECURRENT_STEP_CUH

#include "tokens.cuh"

constexpr int step_warps = 8, step_threads = step_warps * warp_size, step_rows = step_threads;

struct step_arguments {
  wkv6_problem p;
  wkv6_tensor from; /* the state before the token, or absent: zeros. The one after goes to p.final_state, if present */
};

template <typename real> struct step_shared {
  real r[step_rows], k[step_rows], u[step_rows], d[step_rows], sums[step_threads], bonus[step_warps];
};

template <typename real>
__global__ void __launch_bounds__(step_threads) wkv6_step_recurrent(const __grid_constant__ step_arguments a) {
  const wkv6_problem &p = a.p;
  auto &shared = *reinterpret_cast<step_shared<real> *>(shared_memory());
  const unsigned slices = static_cast<unsigned>((p.V + warp_size - 1) / warp_size);
  const unsigned thread = thread_index(), lane = thread % warp_size, warp = thread / warp_size,
                 head = block_index() / slices;
  const sequence s = {head / p.H, head % p.H, head / p.H, 0, 1, head / p.H, 1};
  const int64_t column = static_cast<int64_t>(block_index() % slices) * warp_size + lane;
  real sum = 0, bonus = 0, v = 0;
  if (column < p.V) v = load_element<real>(p.v, row_offset(p.v, s, 0) + column * p.v.stride[3]);
  for (int64_t first = 0; first < p.K; first += step_rows) {
    const int64_t row = first + thread;
    if (first > 0) block_barrier(); /* the rows before are done with */
    if (row < p.K) {
      shared.r[thread] =
          static_cast<real>(p.scale) * load_element<real>(p.r, row_offset(p.r, s, 0) + row * p.r.stride[3]);
      shared.k[thread] = load_element<real>(p.k, row_offset(p.k, s, 0) + row * p.k.stride[3]);
      shared.u[thread] = load_element<real>(p.u, s.h * p.u.stride[0] + row * p.u.stride[1]);
      shared.d[thread] = exp(log_decay(load_element<real>(p.w, row_offset(p.w, s, 0) + row * p.w.stride[3]), p));
    }
    block_barrier();
    const int count = static_cast<int>(p.K - first < step_rows ? p.K - first : step_rows);
    if (column >= p.V) continue;
#pragma unroll 4
    for (int i = warp; i < count; i += step_warps) {
      const real r = shared.r[i], k = shared.k[i];
      real state = 0;
      if (a.from.dtype != WKV6_ABSENT) state = load_element<real>(a.from, state_offset(a.from, s, first + i, column));
      sum = fma(r, state, sum);
      bonus = fma(r * shared.u[i], k, bonus);
      if (p.final_state.dtype != WKV6_ABSENT)
        store_element<real>(
            p.final_state, state_offset(p.final_state, s, first + i, column), fma(shared.d[i], state, k * v));
    }
  }
  shared.sums[thread] = sum;
  if (lane == 0) shared.bonus[warp] = bonus;
  block_barrier();
  if (warp > 0 || column >= p.V) return;
  for (int other = 1; other < step_warps; other++) {
    sum += shared.sums[other * warp_size + lane];
    bonus += shared.bonus[other];
  }
  sum = fma(bonus, v, sum);
  store_element<real>(p.o, row_offset(p.o, s, 0) + column * p.o.stride[3], sum);
}

#endif
