/* SPDX-License-Identifier: Apache-2.0
 *
 * Equations (1) and (2) of docs/wkv6.md, token by token, with the state in registers (recurrence.cuh).
 *
 * A block has one head of one sequence and a slice of the value columns. A warp has all rows (key channels), or a part
 * of them where there are more than one warp's worth, and 4 * (32 / LANES) columns.
 *
 * A tile of tokens goes through: rows as bytes (fetched while the tile before is computed) -> barrier -> r, k, v and
 * decay as real numbers, results of the tile before to memory -> barrier -> the recurrence, which writes its results to
 * shared memory. Each array but `out` is written by all threads, a channel each; `out` by the lanes that end up with a
 * sum.
 *
 * The same recurrence run from the end gives dv and dS_0, equations (5) and (7): with r and k exchanged, do for v, and
 * the scale on what enters the state instead of what leaves it (`scale_enters`).
 *
 * real: float or double. ROWS: rows of a thread, a multiple of 4. LANES: lanes that share a column, 4, 8 or 16. EXACT:
 * K is ROWS * LANES; without it there may be several row warps, and rows beyond K, which are kept at zero by selection,
 * since 0 * inf is not 0.
 */
#ifndef WKV6_RECURRENT_FORWARD_CUH
#define WKV6_RECURRENT_FORWARD_CUH

#include "recurrence.cuh"

struct forward_arguments {
  wkv6_problem p;
  int row_warps, column_warps; /* warps of a block */
  int slices;                  /* blocks a head */
  bool scale_enters, vector_checkpoints;
  raw_rows raw_r, raw_k, raw_w, raw_v;
  tile_numbers at; /* rows is K rounded up */
  int rest;        /* [rows], in reals: the rest of the decays */
};

/* Sets the places of a block's shared arrays; returns the bytes it needs. */
inline int forward_layout(forward_arguments &a, int real_bytes) {
  const wkv6_problem &p = a.p;
  tile_numbers &at = a.at;
  at.r = 0;
  at.k = at.r + at.tile * at.rows;
  at.d = at.k + at.tile * at.rows;
  at.v = at.d + at.tile * at.rows;
  at.out = at.v + at.tile * at.columns;
  a.rest = at.out + a.row_warps * at.tile * at.columns;
  int end = (a.rest + at.rows) * real_bytes;
  end = raw_layout(a.raw_r, p.r, p.K, static_cast<int>(p.K), at.tile, (end + 15) / 16 * 16);
  end = raw_layout(a.raw_k, p.k, p.K, static_cast<int>(p.K), at.tile, end);
  end = raw_layout(a.raw_w, p.w, p.K, static_cast<int>(p.K), at.tile, end);
  return raw_layout(a.raw_v, p.v, p.V, at.columns, at.tile, end);
}

template <typename real> struct forward_block {
  const forward_arguments &a;
  const wkv6_problem &p;
  const sequence s;
  const int64_t column; /* the slice's first */
  const int width;      /* columns of the slice that exist */
  real *const shared;

  WKV6_DEVICE void fetch(int64_t t, int count) const {
    fetch_rows(p.r, a.raw_r, s, t, count, 0, static_cast<int>(p.K));
    fetch_rows(p.k, a.raw_k, s, t, count, 0, static_cast<int>(p.K));
    fetch_rows(p.w, a.raw_w, s, t, count, 0, static_cast<int>(p.K));
    fetch_rows(p.v, a.raw_v, s, t, count, column, width);
    copy_async_commit();
  }

  /* A channel of w, r, k or v a thread, the dearest ones first. */
  WKV6_DEVICE void convert(int count) const {
    const int rows = a.at.rows, columns = a.at.columns, K = static_cast<int>(p.K);
    const real scale = static_cast<real>(p.scale), of_r = a.scale_enters ? 1 : scale, of_k = a.scale_enters ? scale : 1;
    for (int i = thread_index(); i < 3 * rows + columns; i += block_threads()) {
      if (i < rows) {
        real rest = shared[a.rest + i];
        real *const d = shared + a.at.d + i;
        convert_channel<real>(p.w, a.raw_w, i, K, count, false, [&](int t, real w) {
          d[t * rows] = decay_factor(log_decay(w, p), rest);
        });
        shared[a.rest + i] = rest;
      } else if (i < 2 * rows) {
        real *const r = shared + a.at.r + i - rows;
        convert_channel<real>(p.r, a.raw_r, i - rows, K, count, false, [&](int t, real x) { r[t * rows] = of_r * x; });
      } else if (i < 3 * rows) {
        real *const k = shared + a.at.k + i - 2 * rows;
        convert_channel<real>(
            p.k, a.raw_k, i - 2 * rows, K, count, false, [&](int t, real x) { k[t * rows] = of_k * x; });
      } else {
        real *const v = shared + a.at.v + i - 3 * rows;
        convert_channel<real>(
            p.v, a.raw_v, i - 3 * rows, width, count, false, [&](int t, real x) { v[t * columns] = x; });
      }
    }
  }

  /* Results of the tile at token t. */
  WKV6_DEVICE void store(int64_t t, int count) const {
    store_rows<real>(p.o, s, t, count, column, a.at.columns, width, [&](int i, int c) {
      real sum = shared[a.at.out + i * a.at.columns + c];
      for (int warp = 1; warp < a.row_warps; warp++)
        sum += shared[a.at.out + (warp * a.at.tile + i) * a.at.columns + c];
      return sum;
    });
  }
};

template <typename real, int ROWS, int LANES, bool EXACT>
struct forward_thread : recurrence<real, ROWS, 4, LANES, EXACT> {
  using part = recurrence<real, ROWS, 4, LANES, EXACT>;
  using part::first_column, part::has, part::row, part::s, part::u;
  const forward_block<real> &b;

  WKV6_DEVICE explicit forward_thread(const forward_block<real> &block)
      : part(block.shared, block.p.K, block.a.row_warps), b(block) {}

  /* Calls use(i, c, offset) for the elements that exist of this thread's part of a state tensor. */
  template <typename function> WKV6_DEVICE void each(const wkv6_tensor &x, function use) const {
    const int64_t first = state_offset(x, b.s, 0, b.column + first_column);
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (has(i) && first_column + c < b.width) use(i, c, first + row(i) * x.stride[2] + c * x.stride[3]);
  }

  WKV6_DEVICE void load() {
    const wkv6_problem &p = b.p;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) s[i][c] = 0;
    if (p.initial_state.dtype != WKV6_ABSENT)
      with_element<real>(p.initial_state.dtype, [&](auto type) {
        const auto *const from = static_cast<const decltype(type) *>(p.initial_state.data);
        each(p.initial_state, [&](int i, int c, int64_t at) { read_element(load_global(from + at), s[i][c]); });
      });
    with_element<real>(p.u.dtype, [&](auto type) {
      const auto *const from = static_cast<const decltype(type) *>(p.u.data) + b.s.h * p.u.stride[0];
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        u[i] = 0;
        if (has(i)) read_element(load_global(from + row(i) * p.u.stride[1]), u[i]);
      }
    });
  }

  WKV6_DEVICE void store_final() const {
    const wkv6_tensor &to = b.p.final_state;
    if (to.dtype == WKV6_ABSENT) return;
    with_element<real>(to.dtype, [&](auto type) {
      each(to, [&](int i, int c, int64_t at) {
        round_element(s[i][c], type);
        store_global(static_cast<decltype(type) *>(to.data) + at, type);
      });
    });
  }

  WKV6_DEVICE void store_checkpoint(int64_t c) const {
    real *const to = checkpoint<real>(b.p, b.s, c) + b.column + first_column;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      real *const to_row = to + row(i) * b.p.checkpoints.stride[2];
      if (!has(i)) continue;
      if (b.a.vector_checkpoints) {
        if (first_column < b.width) store_global_4(to_row, s[i]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (first_column + j < b.width) store_global(to_row + j, s[i][j]);
      }
    }
  }
};

constexpr int forward_most_threads = 256; /* so that the registers hold what a thread has */

template <typename real, int ROWS, int LANES, bool EXACT>
__global__ void __launch_bounds__(forward_most_threads)
    wkv6_forward_recurrent(const __grid_constant__ forward_arguments a) {
  const unsigned slice = block_index() % a.slices, head = block_index() / a.slices;
  const int64_t column = static_cast<int64_t>(slice) * a.at.columns, left = a.p.V - column;
  const forward_block<real> b = {a,
                                 a.p,
                                 sequence_of(a.p, head / a.p.H, head % a.p.H),
                                 column,
                                 static_cast<int>(left < a.at.columns ? left : a.at.columns),
                                 reinterpret_cast<real *>(shared_memory())};
  const int64_t length = b.s.length;
  const auto tokens_at = [&](int64_t t) { return static_cast<int>(length - t < a.at.tile ? length - t : a.at.tile); };
  if (length > 0) b.fetch(0, tokens_at(0));
  for (int i = thread_index(); i < a.at.rows; i += block_threads())
    b.shared[a.rest + i] = 0; /* read by the same thread */
  forward_thread<real, ROWS, LANES, EXACT> thread(b);
  thread.load();
  const bool checkpoints = a.p.checkpoints.dtype != WKV6_ABSENT;
  int64_t until_checkpoint = a.p.segment, next_checkpoint = 1;
  for (int64_t t = 0; t < length; t += a.at.tile) {
    const int count = tokens_at(t);
    copy_async_wait();
    block_barrier(); /* this tile's bytes are here, the results of the one before are complete */
    if (t > 0) b.store(t - a.at.tile, a.at.tile);
    b.convert(count);
    block_barrier(); /* this tile's numbers are here, its bytes are no longer needed */
    if (t + a.at.tile < length) b.fetch(t + a.at.tile, tokens_at(t + a.at.tile));
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      if (until_checkpoint-- == 0) {
        if (checkpoints) thread.store_checkpoint(next_checkpoint++);
        until_checkpoint = a.p.segment - 1;
      }
      thread.step(a.at, i);
    }
  }
  block_barrier();
  if (length > 0) {
    const int64_t t = (length - 1) / a.at.tile * a.at.tile;
    b.store(t, tokens_at(t));
  }
  thread.store_final();
}

#endif
