/* SPDX-License-Identifier: Apache-2.0
 *
 * The state alone: equation (2) of docs/wkv6.md token by token, without outputs, and the sum of each channel's log
 * decays.
 *
 * Nothing is summed over the state's rows, so a block has any 32 rows and 64 columns of one head of one sequence; a
 * thread has 4 rows and 4 columns in registers. Tiles of tokens come as in recurrent_forward.cuh: bytes (fetched while
 * the tile before is computed) -> barrier -> k, v and decay as real numbers -> barrier -> the recurrence. Every shared
 * array is written by the thread that has the channel: 32 threads one of w each, 32 one of k, 64 one of v.
 */
#ifndef WKV6_RECURRENT_STATE_CUH
#define WKV6_RECURRENT_STATE_CUH

#include "tokens.cuh"

constexpr int state_rows = 32, state_columns = 64, state_threads = 2 * state_rows + state_columns, state_tile = 16;

struct state_arguments {
  wkv6_problem p;
  int row_slices, column_slices; /* blocks a head */
  raw_rows raw_k, raw_w, raw_v;
};

template <typename real> struct state_shared {
  real k[state_tile][state_rows], d[state_tile][state_rows], v[state_tile][state_columns];
};

/* Sets the places of the rows as bytes; returns the shared memory that a block needs. */
template <typename real> int state_layout(state_arguments &a) {
  const wkv6_problem &p = a.p;
  int at = sizeof(state_shared<real>);
  at = raw_layout(a.raw_k, p.k, p.K, state_rows, state_tile, at);
  at = raw_layout(a.raw_w, p.w, p.K, state_rows, state_tile, at);
  return raw_layout(a.raw_v, p.v, p.V, state_columns, state_tile, at);
}

/* A sum to its last digits: `due` keeps what rounding added too much. Equal weak decays would otherwise all be rounded
 * the same way. A sum that is infinite has no digits to keep. */
template <typename real> struct exact_sum {
  real sum = 0, due = 0;
  WKV6_DEVICE void add(real x) {
    const real y = x - due, total = sum + y, excess = (total - sum) - y;
    due = total * 0 == 0 ? excess : real(0);
    sum = total;
  }
};

template <typename real> struct state_block {
  const state_arguments &a;
  const wkv6_problem &p;
  const sequence s;
  const int64_t row, column; /* the slice's first */
  const int height, width;   /* rows and columns of the slice that exist */
  state_shared<real> &shared;

  WKV6_DEVICE void fetch(int64_t t, int count) const {
    fetch_rows(p.k, a.raw_k, s, t, count, row, height);
    fetch_rows(p.w, a.raw_w, s, t, count, row, height);
    fetch_rows(p.v, a.raw_v, s, t, count, column, width);
    copy_async_commit();
  }

  /* This thread's channel of the tile. `rest` and `w_sum` are those of its channel of w, if it has one. */
  WKV6_DEVICE void convert(int count, real &rest, exact_sum<real> &w_sum) const {
    const int i = thread_index(), of_k = i - state_rows, of_v = of_k - state_rows;
    if (of_k < 0) {
      convert_channel<real>(p.w, a.raw_w, i, height, count, false, [&](int t, real w) {
        const real log = log_decay(w, p);
        shared.d[t][i] = decay_factor(log, rest);
        w_sum.add(log);
      });
    } else if (of_v < 0) {
      const real scale = static_cast<real>(p.scale);
      convert_channel<real>(
          p.k, a.raw_k, of_k, height, count, false, [&](int t, real x) { shared.k[t][of_k] = scale * x; });
    } else {
      convert_channel<real>(p.v, a.raw_v, of_v, width, count, false, [&](int t, real x) { shared.v[t][of_v] = x; });
    }
  }
};

template <typename real>
__global__ void __launch_bounds__(state_threads) wkv6_state_recurrent(const __grid_constant__ state_arguments a) {
  const unsigned slices = a.row_slices * a.column_slices, slice = block_index() % slices, head = block_index() / slices,
                 i = thread_index();
  const int64_t row = static_cast<int64_t>(slice % a.row_slices) * state_rows,
                column = static_cast<int64_t>(slice / a.row_slices) * state_columns;
  const state_block<real> b = {a,
                               a.p,
                               sequence_of(a.p, head / a.p.H, head % a.p.H),
                               row,
                               column,
                               static_cast<int>(a.p.K - row < state_rows ? a.p.K - row : state_rows),
                               static_cast<int>(a.p.V - column < state_columns ? a.p.V - column : state_columns),
                               *reinterpret_cast<state_shared<real> *>(shared_memory())};
  const int64_t length = b.s.length;
  const auto tokens_at = [&](int64_t t) { return static_cast<int>(length - t < state_tile ? length - t : state_tile); };
  if (length > 0) b.fetch(0, tokens_at(0));

  const int first_row = 4 * (i % (state_rows / 4)), first_column = 4 * (i / (state_rows / 4)); /* of the slice */
  real state[4][4] = {};
  const auto each = [&](auto use) {
#pragma unroll
    for (int x = 0; x < 4; x++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (first_row + x < b.height && first_column + c < b.width)
          use(state[x][c], row + first_row + x, column + first_column + c);
  };
  const wkv6_tensor &from = a.p.initial_state, &to = a.p.final_state;
  if (from.dtype != WKV6_ABSENT)
    each([&](real &x, int64_t r, int64_t c) { x = load_element<real>(from, state_offset(from, b.s, r, c)); });

  real rest = 0;
  exact_sum<real> w_sum;
  for (int64_t t = 0; t < length; t += state_tile) {
    const int count = tokens_at(t);
    copy_async_wait();
    block_barrier(); /* this tile's bytes are here, the numbers of the one before are no longer needed */
    b.convert(count, rest, w_sum);
    block_barrier(); /* this tile's numbers are here, its bytes are no longer needed */
    if (t + state_tile < length) b.fetch(t + state_tile, tokens_at(t + state_tile));
    for (int q = 0; q < count; q++) {
      real k[4], d[4], v[4];
      load_shared<4>(b.shared.k[q] + first_row, k);
      load_shared<4>(b.shared.d[q] + first_row, d);
      load_shared<4>(b.shared.v[q] + first_column, v);
#pragma unroll
      for (int x = 0; x < 4; x++)
#pragma unroll
        for (int c = 0; c < 4; c++) state[x][c] = fma(d[x], state[x][c], k[x] * v[c]);
    }
  }
  each([&](real x, int64_t r, int64_t c) { store_element(to, state_offset(to, b.s, r, c), x); });
  if (column == 0 && static_cast<int>(i) < b.height)
    store_element(a.p.w_sum, state_offset(a.p.w_sum, b.s, row + i, 0), w_sum.sum);
}

#endif
