/* SPDX-License-Identifier: Apache-2.0
 *
 * Few long sequences, backwards: G at the borders between the parts that a sequence is cut into, so that a block of
 * chunk_backward.cuh can take each part by itself. Three kernels, one after another: wkv6_adjoint_chunk makes of each
 * part but the first what it adds to G, starting from nothing, and the sum of its w; wkv6_scan_adjoints turns these
 * into G itself, where they lie; wkv6_fold_grad_u adds up the parts' du when all is done. Everything in a fixed order.
 *
 * In wkv6_adjoint_chunk a block has KEYS key channels of a part with all value columns, a warp 16 of them, as in
 * chunk_backward.cuh. In the other two a thread has one element of G, or one channel of du.
 */
#ifndef WKV6_CHUNK_BACKWARD_SPANS_CUH
#define WKV6_CHUNK_BACKWARD_SPANS_CUH

#include "chunk_backward_state.cuh"

template <int KEYS, int COLUMNS, operand P>
struct chunk_adjoint_thread : chunk_backward_state<KEYS, COLUMNS, P, P, false> {
  using state = chunk_backward_state<KEYS, COLUMNS, P, P, false>;
  using state::a, state::p, state::s, state::at, state::channel, state::part, state::scale, state::adjoint, state::rest,
      state::threads, state::state;
  using typename state::tokens;

  WKV6_DEVICE void fetch_next(int slot, int chunk, int begin) const {
    if (chunk >= begin) {
      const int64_t t = static_cast<int64_t>(chunk) * chunk_tokens;
      fetch_chunk<KEYS, threads, operand::bf16>(p.r, a.r, this->stage(slot), s, t, channel);
      fetch_chunk<KEYS, threads, operand::bf16>(p.w, a.w, this->stage(slot), s, t, channel);
      fetch_chunk<COLUMNS, threads, P>(p.grad_o, a.grad_o, this->stage(slot), s, t, 0);
    }
    copy_async_commit();
  }

  WKV6_DEVICE void run() {
    const int chunks = this->chunks(), begin = part * a.part, end = chunks - begin < a.part ? chunks : begin + a.part;
    if (begin >= chunks) return;
    this->clear_low_terms(a.grad_o);
    fetch_next(0, end - 1, begin);
    fetch_next(1, end - 2, begin);
    this->for_pairs(adjoint, [](int, int, float &x0, float &x1) { x0 = x1 = 0; });
    float sum = 0;
    copy_async_wait_for<1>();
    block_barrier(); /* the first stage is there */
    for (int chunk = end - 1, slot = 0; chunk >= begin; chunk--, slot ^= 1) {
      const char *const from = this->stage(slot);
      half_factors d[4];
      float carry[2];
      tokens r;
      left_fragment<P> query;
      sum += this->load_decays(from, static_cast<int64_t>(chunk) * chunk_tokens, rest, d, carry);
      this->load_tokens(a.r, from, r);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float before = (i < 2 ? d[i].r8 : d[i].r8 * d[i - 2].all) * scale;
        put_pair(query, i, r[i][0] * before, r[i][1] * (before * d[i].of[0]));
      }
      this->advance(adjoint, carry, query, from + a.grad_o.at);
      copy_async_wait();
      block_barrier(); /* the stage is used, the next one is there */
      fetch_next(slot, chunk - 2, begin);
    }
    const int64_t border = border_place(a, s, part);
    float *const to = static_cast<float *>(p.span_adjoints.data) + (border * p.K + channel) * COLUMNS;
    this->for_pairs(adjoint, [&](int row, int column, float &x0, float &x1) {
      const uint32_t words[2] = {bits_of(x0), bits_of(x1)};
      store_global_words<2>(to + row * COLUMNS + column, words);
    });
    if (!at.high) /* lanes of odd p have the sum of channel g + 8 */
      store_global(static_cast<float *>(p.span_decays.data) + border * p.K + channel + at.warp * 16 + at.odd * 8 + at.g,
                   sum);
  }
};

/* The blocks leave it 128 registers a thread; by itself ptxas gives some instances 80, and spills. */
template <int KEYS, int COLUMNS, operand P>
__global__ void __launch_bounds__(2 * KEYS, 256 / KEYS)
    wkv6_adjoint_chunk(const __grid_constant__ chunk_backward_arguments a) {
  const unsigned others = a.parts - 1, slice = block_index() % a.slices, part = block_index() / a.slices % others + 1;
  const int64_t head = block_index() / a.slices / others;
  chunk_adjoint_thread<KEYS, COLUMNS, P> thread(
      a, sequence_of(a.p, head / a.p.H, head % a.p.H), static_cast<int64_t>(slice) * KEYS, static_cast<int>(part));
  thread.run();
}

constexpr int border_threads = 256;

/* Parts of a sequence that there are. */
WKV6_DEVICE int64_t parts_of_sequence(const chunk_backward_arguments &a, const sequence &s) {
  const int64_t tokens = static_cast<int64_t>(a.part) * chunk_tokens;
  return (s.length + tokens - 1) / tokens;
}

__global__ void __launch_bounds__(border_threads)
    wkv6_scan_adjoints(const __grid_constant__ chunk_backward_arguments a) {
  const wkv6_problem &p = a.p;
  const int64_t i = static_cast<int64_t>(block_index()) * border_threads + thread_index(), matrix = p.K * p.V,
                head = i / matrix, element = i % matrix, row = element / p.V;
  if (head >= p.N * p.H) return;
  const sequence s = sequence_of(p, head / p.H, head % p.H);
  float *const adjoints = static_cast<float *>(p.span_adjoints.data);
  float state = 0, rest = 0;
  if (p.grad_final_state.dtype != WKV6_ABSENT)
    state = load_element<float>(p.grad_final_state, state_offset(p.grad_final_state, s, row, element % p.V));
  for (int64_t part = parts_of_sequence(a, s) - 1; part > 0; part--) {
    const int64_t border = border_place(a, s, part);
    const float sum = load_global(static_cast<const float *>(p.span_decays.data) + border * p.K + row);
    state = fma(decay_factor(sum, rest), state, load_global(adjoints + border * matrix + element));
    store_global(adjoints + border * matrix + element, state);
  }
}

__global__ void __launch_bounds__(border_threads) wkv6_fold_grad_u(const __grid_constant__ chunk_backward_arguments a) {
  const wkv6_problem &p = a.p;
  const int64_t i = static_cast<int64_t>(block_index()) * border_threads + thread_index(), head = i / p.K;
  if (head >= p.N * p.H) return;
  const sequence s = sequence_of(p, head / p.H, head % p.H);
  float *const to = static_cast<float *>(p.grad_u_parts.data) + i;
  double sum = load_global(to);
  for (int64_t part = 1; part < parts_of_sequence(a, s); part++)
    sum += load_global(static_cast<const float *>(p.span_decays.data) + border_place(a, s, part) * p.K + i % p.K);
  store_global(to, static_cast<float>(sum));
}

#endif
