/* SPDX-License-Identifier: Apache-2.0
 *
 * From what each span of a sequence makes of no state, and how much it forgets, to the state before each span: the
 * second of the three passes of few long sequences (wkv6_state_chunk, this, wkv6_forward_chunk). A thread has one
 * element of the state of one sequence and head. The states are scanned where they lie, in the checkpoints.
 */
#ifndef WKV6_CHUNK_SCAN_CUH
#define WKV6_CHUNK_SCAN_CUH

#include "tokens.cuh"

struct chunk_scan_arguments {
  wkv6_problem p;
  int64_t span; /* tokens */
};

constexpr int scan_threads = 256;

__global__ void __launch_bounds__(scan_threads) wkv6_scan_spans(const __grid_constant__ chunk_scan_arguments a) {
  const wkv6_problem &p = a.p;
  const unsigned parts = static_cast<unsigned>((p.K * p.V + scan_threads - 1) / scan_threads);
  const unsigned head = block_index() / parts;
  const int64_t element = static_cast<int64_t>(block_index() % parts) * scan_threads + thread_index();
  if (element >= p.K * p.V) return;
  const sequence s = sequence_of(p, head / p.H, head % p.H);
  const int64_t row = element / p.V, column = element % p.V, stride = a.span / p.segment;
  const float *const decays = static_cast<const float *>(p.span_decays.data);
  float state = 0, rest = 0;
  if (p.initial_state.dtype != WKV6_ABSENT)
    state = load_element<float>(p.initial_state, state_offset(p.initial_state, s, row, column));
  constexpr int batch = 4; /* loads on their way at once: none of them waits for the scan */
  const int64_t count = s.length > 0 ? (s.length - 1) / a.span : 0;
  for (int64_t first = 1; first <= count; first += batch) {
    float made[batch], sums[batch];
#pragma unroll
    for (int i = 0; i < batch; i++) {
      if (first + i > count) break;
      const int64_t c = (first + i) * stride;
      made[i] = load_global(checkpoint<float>(p, s, c) + element);
      sums[i] = load_global(decays + ((s.first / p.segment + c - 1) * p.H + s.h) * p.K + row);
    }
#pragma unroll
    for (int i = 0; i < batch; i++) {
      if (first + i > count) break;
      state = fma(decay_factor(sums[i], rest), state, made[i]);
      store_global(checkpoint<float>(p, s, (first + i) * stride) + element, state);
    }
  }
}

#endif
