/* SPDX-License-Identifier: Apache-2.0
 *
 * Equations (3) to (8) of docs/wkv6.md: dr, dk, dw and du, in one sweep from the last token to the first; dv and dS_0
 * too where a block has all of a head, else they come from recurrent_forward.cuh run from the end.
 *
 * A block has one head of one sequence and a slice of the key channels (rows) with all value columns, so no sum leaves
 * the block and the number of blocks can be chosen freely. A warp has 2 * (32 / LANES) rows, a thread 2 rows and
 * COLUMNS columns of them, of the state S and of its adjoint G. A sum over columns is a fixed tree: a thread's columns,
 * LANES lanes, column warps.
 *
 * dw needs G_t and S_{t-1} together, and S can only be had from the front: the forward pass left a checkpoint every
 * `segment` tokens. From there S is brought to the start of a tile of PARTS * HISTORY tokens; then, for each part of
 * the tile from the last, S is brought to the part's start, its values before each of the part's HISTORY tokens are
 * kept in registers, and G walks back over them. Where a segment has several tiles, those before the tile are replayed.
 * Nothing is ever divided by a decay.
 *
 * dv sums over rows, which are spread over the block. So for it G is put into shared memory before each tile and taken
 * up by the threads in the layout of recurrence.cuh, 2 columns each, which walks it over the tile once more: the same
 * sums in the same order as those of recurrent_forward.cuh, without its reading the inputs again.
 *
 * A tile goes through: bytes (fetched while the tile before is computed) -> barrier -> real numbers, a channel a
 * thread, and G -> barrier -> S, G and sums, written to `sums` and `grad_v` by the lanes that end up with them ->
 * barrier -> gradients to memory, a channel of one gradient a thread.
 *
 * real: float or double. COLUMNS: of a thread, 4 or 8. LANES: that share a row. EXACT: V is COLUMNS * LANES; without it
 * there may be several column warps, and columns beyond V, kept at zero by selection. Rows beyond K need no care:
 * nothing sums over rows. WHOLE: 0, or the lanes that share a column in the walk for dv, and K is 8 * WHOLE, all of it
 * in the block.
 */
#ifndef WKV6_RECURRENT_BACKWARD_CUH
#define WKV6_RECURRENT_BACKWARD_CUH

#include "recurrence.cuh"

struct backward_arguments {
  wkv6_problem p;
  int row_warps, column_warps; /* warps of a block */
  int rows, columns;           /* of a block; columns is V rounded up */
  int slices;                  /* blocks a head */
  bool vector_checkpoints;
  raw_rows raw_r, raw_k, raw_w, raw_v, raw_grad_o;
  /* Places in shared memory, in reals. [tile][rows]: scale * r, k, decay, and what turns rowsum(G * S) into dw;
   * [tile][columns]: v, do. */
  int r, k, d, to_grad_w, v, grad_o;
  int sums;               /* [column_warps][tile][3 * rows + 1]: S do, G v, rowsum(G * S) and v . do */
  int u, rest;            /* [rows]: the bonus, and the rest of the decays */
  int grad_u, grad_u_low; /* [rows]: the sum so far, and what its additions lost */
  bool whole;             /* a block has all of a head, and gives dv and dS_0: */
  int adjoint, grad_v;    /* [rows][adjoint_pitch]: G after the tile; [tile][columns] */
};

/* So that few of the threads that read a column of G meet in a bank. */
constexpr __host__ __device__ int adjoint_pitch(int columns) { return columns + 4; }

/* Sets the places of a block's shared arrays; returns the bytes it needs. */
inline int backward_layout(backward_arguments &a, int tile, int real_bytes) {
  const wkv6_problem &p = a.p;
  a.r = 0;
  a.k = a.r + tile * a.rows;
  a.d = a.k + tile * a.rows;
  a.to_grad_w = a.d + tile * a.rows;
  a.v = a.to_grad_w + tile * a.rows;
  a.grad_o = a.v + tile * a.columns;
  a.u = a.grad_o + tile * a.columns;
  a.rest = a.u + a.rows;
  a.grad_u = a.rest + a.rows;
  a.grad_u_low = a.grad_u + a.rows;
  a.sums = a.grad_u_low + a.rows;
  a.adjoint = (a.sums + a.column_warps * tile * (3 * a.rows + 1) + 3) / 4 * 4;
  a.grad_v = a.adjoint + (a.whole ? a.rows * adjoint_pitch(a.columns) : 0);
  int at = (a.grad_v + (a.whole ? tile * a.columns : 0)) * real_bytes;
  at = raw_layout(a.raw_r, p.r, p.K, a.rows, tile, (at + 15) / 16 * 16);
  at = raw_layout(a.raw_k, p.k, p.K, a.rows, tile, at);
  at = raw_layout(a.raw_w, p.w, p.K, a.rows, tile, at);
  at = raw_layout(a.raw_v, p.v, p.V, static_cast<int>(p.V), tile, at);
  return raw_layout(a.raw_grad_o, p.grad_o, p.V, static_cast<int>(p.V), tile, at);
}

/* One visit to a tile: tile `tile` of segment `segment`, on the way to tile `target` of it. When they are equal G walks
 * back over it. */
struct visit {
  int64_t segment, target, tile;
  WKV6_DEVICE bool replays() const { return tile < target; }
};

template <typename real, int TILE> struct backward_block {
  const backward_arguments &a;
  const wkv6_problem &p;
  const sequence s;
  const int64_t channel; /* the slice's first */
  const int width;       /* rows of the slice that exist */
  real *const shared;

  WKV6_DEVICE int64_t segment_tokens(int64_t c) const {
    const int64_t left = s.length - c * p.segment;
    return left < p.segment ? left : p.segment;
  }
  WKV6_DEVICE visit first_visit(int64_t c) const { return {c, c < 0 ? 0 : (segment_tokens(c) - 1) / TILE, 0}; }
  WKV6_DEVICE visit after(const visit &now) const {
    if (now.replays()) return {now.segment, now.target, now.tile + 1};
    return now.target > 0 ? visit{now.segment, now.target - 1, 0} : first_visit(now.segment - 1);
  }
  WKV6_DEVICE int64_t token(const visit &now) const { return now.segment * p.segment + now.tile * TILE; }
  WKV6_DEVICE int tokens(const visit &now) const {
    const int64_t left = segment_tokens(now.segment) - now.tile * TILE;
    return static_cast<int>(left < TILE ? left : TILE);
  }

  WKV6_DEVICE void fetch(const visit &now) const {
    const int64_t t = token(now);
    const int count = tokens(now), V = static_cast<int>(p.V);
    fetch_rows(p.k, a.raw_k, s, t, count, channel, width);
    fetch_rows(p.w, a.raw_w, s, t, count, channel, width);
    fetch_rows(p.v, a.raw_v, s, t, count, 0, V);
    if (!now.replays()) {
      fetch_rows(p.r, a.raw_r, s, t, count, channel, width);
      fetch_rows(p.grad_o, a.raw_grad_o, s, t, count, 0, V);
    }
    copy_async_commit();
  }

  /* A channel of w, k, v, r or do a thread, the dearest ones first. Rests pass from a tile to the one before it, along
   * with G; a replay is short enough to start without. */
  WKV6_DEVICE void convert(const visit &now) const {
    const int rows = a.rows, columns = a.columns, V = static_cast<int>(p.V), count = tokens(now);
    const real scale = static_cast<real>(p.scale);
    const int channels = now.replays() ? 2 * rows + columns : 3 * rows + 2 * columns;
    for (int i = thread_index(); i < channels; i += block_threads()) {
      if (i < rows) {
        real rest = now.replays() ? 0 : shared[a.rest + i];
        real *const d = shared + a.d + i, *const to_grad_w = shared + a.to_grad_w + i;
        convert_channel<real>(p.w, a.raw_w, i, width, count, !now.replays(), [&](int t, real x) {
          const real w = log_decay(x, p), decay = decay_factor(w, rest);
          d[t * rows] = decay;
          /* raw: dx = dw * w; where exp(x) overflowed that would be inf * 0, and -inf says so */
          const bool raw = p.flags & WKV6_RAW_DECAY, overflowed = w == static_cast<real>(-INFINITY);
          to_grad_w[t * rows] = !raw ? decay : overflowed ? w : decay * w;
        });
        if (!now.replays()) shared[a.rest + i] = rest;
      } else if (i < 2 * rows) {
        real *const k = shared + a.k + i - rows;
        convert_channel<real>(p.k, a.raw_k, i - rows, width, count, false, [&](int t, real x) { k[t * rows] = x; });
      } else if (i < 2 * rows + columns) {
        const int c = i - 2 * rows;
        real *const v = shared + a.v + c;
        convert_channel<real>(p.v, a.raw_v, c, V, count, false, [&](int t, real x) { v[t * columns] = x; });
      } else if (i < 3 * rows + columns) {
        const int c = i - 2 * rows - columns;
        real *const r = shared + a.r + c;
        convert_channel<real>(p.r, a.raw_r, c, width, count, false, [&](int t, real x) { r[t * rows] = scale * x; });
      } else {
        const int c = i - 3 * rows - columns;
        real *const grad_o = shared + a.grad_o + c;
        convert_channel<real>(
            p.grad_o, a.raw_grad_o, c, V, count, false, [&](int t, real x) { grad_o[t * columns] = x; });
      }
    }
  }

  /* Sum `which` (of one row, or 3 * rows for v . do) of token t over the column warps. */
  WKV6_DEVICE real sum_of(int t, int which) const {
    real sum = 0;
    for (int warp = 0; warp < a.column_warps; warp++)
      sum += shared[a.sums + (warp * TILE + t) * (3 * a.rows + 1) + which];
    return sum;
  }

  template <typename function>
  WKV6_DEVICE void store_channel(const wkv6_tensor &to, int64_t t, int count, int row, function value) const {
    if (to.dtype == WKV6_ABSENT) return;
    const int64_t at = row_offset(to, s, t) + (channel + row) * to.stride[3], step = s.step * to.stride[1];
    with_element<real>(to.dtype, [&](auto type) {
      for (int i = 0; i < count; i++) {
        round_element(value(i), type);
        store_global(static_cast<decltype(type) *>(to.data) + at + i * step, type);
      }
    });
  }

  /* Adds the terms in the bonus u, and puts a tile's gradients into memory: dr, dk, dw or du of a row a thread. */
  WKV6_DEVICE void store(const visit &now) const {
    const int rows = a.rows, count = tokens(now);
    const int64_t t = token(now);
    const real scale = static_cast<real>(p.scale);
    for (int i = thread_index(); i < 4 * rows; i += block_threads()) {
      const int row = i % rows, kind = i / rows;
      if (row >= width) continue;
      const real *const r = shared + a.r + row, *const k = shared + a.k + row,
                        *const to_grad_w = shared + a.to_grad_w + row;
      const real u = shared[a.u + row];
      if (kind == 0)
        store_channel(p.grad_r, t, count, row, [&](int j) {
          return scale * fma(sum_of(j, 3 * rows), u * k[j * rows], sum_of(j, row));
        });
      else if (kind == 1)
        store_channel(p.grad_k, t, count, row, [&](int j) {
          return fma(sum_of(j, 3 * rows), u * r[j * rows], sum_of(j, rows + row));
        });
      else if (kind == 2)
        /* Where exp(x) overflowed nothing is left of the state and the gradient is 0, whatever stands beside it. */
        store_channel(p.grad_w, t, count, row, [&](int j) {
          const real factor = to_grad_w[j * rows];
          return factor == static_cast<real>(-INFINITY) ? real(0) : factor * sum_of(j, 2 * rows + row);
        });
      else
        add_grad_u(row, count, r, k);
    }
    if (a.whole)
      store_rows<real>(p.grad_v, s, t, count, 0, a.columns, static_cast<int>(p.V), [&](int j, int c) {
        return shared[a.grad_v + j * a.columns + c];
      });
  }

  /* Compensated: one long sequence sums as exactly as many short ones. */
  WKV6_DEVICE void add_grad_u(int row, int count, const real *r, const real *k) const {
    real sum = shared[a.grad_u + row], low = shared[a.grad_u_low + row];
    for (int t = count - 1; t >= 0; t--) {
      const real x = sum_of(t, 3 * a.rows) * (r[t * a.rows] * k[t * a.rows]) + low, next = sum + x;
      low = x - (next - sum);
      sum = next;
    }
    shared[a.grad_u + row] = sum;
    shared[a.grad_u_low + row] = low;
  }
};

template <typename real, int COLUMNS, int LANES, int HISTORY, int PARTS, bool EXACT, int WHOLE> struct backward_thread {
  using block = backward_block<real, HISTORY * PARTS>;
  using matrix = real[2][COLUMNS];
  const block &b;
  const unsigned lane = thread_index() % warp_size;
  const int column_lane = lane % LANES, row_lane = lane / LANES;
  const int column_warp = EXACT ? 0 : thread_index() / warp_size % b.a.column_warps;
  const int row_warp = thread_index() / warp_size / (EXACT ? 1 : b.a.column_warps);
  const int first_row = (row_warp * (warp_size / LANES) + row_lane) * 2; /* in the slice */
  const int first_column =
      column_warp * COLUMNS * LANES + 4 * column_lane; /* then groups of 4 columns, 4 * LANES apart */
  matrix start, adjoint;                               /* S at the start of the tile, and G */

  WKV6_DEVICE explicit backward_thread(const block &tiles) : b(tiles) {}

  WKV6_DEVICE int column(int c) const { return first_column + c / 4 * 4 * LANES + c % 4; }
  WKV6_DEVICE bool has(int c) const { return EXACT || column(c) < b.p.V; }

  /* Rows beyond K are zero. */
  WKV6_DEVICE void load_state(const wkv6_tensor &from, matrix &x) const {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) x[i][c] = 0;
    if (from.dtype == WKV6_ABSENT) return;
    const int64_t first = state_offset(from, b.s, b.channel + first_row, 0);
    with_element<real>(from.dtype, [&](auto type) {
      const auto *const data = static_cast<const decltype(type) *>(from.data) + first;
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
          if (first_row + i < b.width && has(c))
            read_element(load_global(data + i * from.stride[2] + column(c) * from.stride[3]), x[i][c]);
    });
  }

  WKV6_DEVICE void load_checkpoint(int64_t segment, matrix &x) const {
    const int64_t pitch = b.p.checkpoints.stride[2];
    const real *const from = checkpoint<real>(b.p, b.s, segment) + (b.channel + first_row) * pitch;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int group = 0; group < COLUMNS; group += 4) {
        real y[4] = {0, 0, 0, 0};
        const real *const at = from + i * pitch + column(group);
        if (first_row + i < b.width) {
          if (b.a.vector_checkpoints) {
            if (has(group)) load_global_4(at, y);
          } else {
#pragma unroll
            for (int c = 0; c < 4; c++)
              if (has(group + c)) y[c] = load_global(at + c);
          }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) x[i][group + c] = y[c];
      }
  }

  WKV6_DEVICE void load_start(int64_t segment) {
    if (segment > 0)
      load_checkpoint(segment, start);
    else
      load_state(b.p.initial_state, start);
  }

  template <int N> WKV6_DEVICE void of_rows(int array, int t, real (&x)[N]) const {
    load_shared<2>(b.shared + array + t * b.a.rows + first_row, x);
  }
  WKV6_DEVICE void of_columns(int array, int t, real (&x)[COLUMNS]) const {
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 4) load_shared<4>(b.shared + array + t * b.a.columns + column(c), x + c);
  }

  /* to = diag(decay) x + left right^T of token t: (2) with k and v, (7) with r and do. */
  WKV6_DEVICE void advance(matrix &to, const matrix &x, int t, const real (&left)[2],
                           const real (&right)[COLUMNS]) const {
    real d[2];
    of_rows(b.a.d, t, d);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const real next = fma(d[i], x[i][c], left[i] * right[c]);
        to[i][c] = has(c) ? next : real(0);
      }
  }

  WKV6_DEVICE void forward(matrix &to, const matrix &x, int t) const {
    real k[2], v[COLUMNS];
    of_rows(b.a.k, t, k);
    of_columns(b.a.v, t, v);
    advance(to, x, t, k, v);
  }

  /* G over token t, with the state before it: the sums of (3), (4), (6) and v . do, then (7). */
  WKV6_DEVICE void walk_back(const matrix &before, int t) {
    real v[COLUMNS], grad_o[COLUMNS], r[2], sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    of_columns(b.a.v, t, v);
    of_columns(b.a.grad_o, t, grad_o);
    of_rows(b.a.r, t, r);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        sum[i] = fma(before[i][c], grad_o[c], sum[i]);
        sum[2 + i] = fma(adjoint[i][c], v[c], sum[2 + i]);
        sum[4 + i] = fma(adjoint[i][c], before[i][c], sum[4 + i]);
      }
      sum[6] = fma(v[c], grad_o[c], sum[6]);
    }
    advance(adjoint, adjoint, t, r, grad_o);
    scatter_sum<8, LANES>(sum, column_lane);
    constexpr int mine = LANES < 8 ? 8 / LANES : 1;
    real *const to = b.shared + b.a.sums + (column_warp * HISTORY * PARTS + t) * (3 * b.a.rows + 1);
#pragma unroll
    for (int i = 0; i < mine; i++) {
      const int which = scattered<8, LANES>(column_lane) + i;
      if (column_lane >= 8) continue;
      if (which < 6) to[which / 2 * b.a.rows + first_row + which % 2] = sum[i];
      if (which == 6 && row_lane == 0 && row_warp == 0) to[3 * b.a.rows] = sum[i];
    }
  }

  /* G for the walk of dv; and at last for dS_0. */
  WKV6_DEVICE void share_adjoint() const {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        b.shared[b.a.adjoint + (first_row + i) * adjoint_pitch(b.a.columns) + column(c)] = adjoint[i][c];
  }

  WKV6_DEVICE void store_adjoint(const wkv6_tensor &to) const {
    if (to.dtype == WKV6_ABSENT) return;
    const int64_t first = state_offset(to, b.s, first_row, 0);
    with_element<real>(to.dtype, [&](auto type) {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          round_element(adjoint[i][c], type);
          store_global(static_cast<decltype(type) *>(to.data) + first + i * to.stride[2] + column(c) * to.stride[3],
                       type);
        }
    });
  }

  /* (5) of a tile: the recurrence with k for r, r for k and do for v. */
  WKV6_DEVICE void walk_back_values(int count) const {
    const backward_arguments &a = b.a;
    recurrence<real, 8, 2, WHOLE, true> g(b.shared, b.p.K, 1);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      g.u[i] = b.shared[a.u + g.row(i)];
#pragma unroll
      for (int c = 0; c < 2; c++)
        g.s[i][c] = b.shared[a.adjoint + g.row(i) * adjoint_pitch(a.columns) + g.first_column + c];
    }
    const tile_numbers at = {HISTORY * PARTS, a.rows, a.columns, a.k, a.r, a.d, a.grad_o, a.grad_v};
#pragma unroll 1
    for (int t = count - 1; t >= 0; t--) g.step(at, t);
  }

  WKV6_DEVICE void replay(int count) {
    for (int t = 0; t < count; t++) forward(start, start, t);
  }

  WKV6_DEVICE void walk_back_tile(int count) {
#pragma unroll 1
    for (int part = (count - 1) / HISTORY; part >= 0; part--) {
      const int first = part * HISTORY;
      matrix history[HISTORY];
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) history[0][i][c] = start[i][c];
      for (int t = 0; t < first; t++) forward(history[0], history[0], t);
#pragma unroll
      for (int t = 1; t < HISTORY; t++)
        if (first + t < count) forward(history[t], history[t - 1], first + t - 1);
#pragma unroll
      for (int t = HISTORY - 1; t >= 0; t--)
        if (first + t < count) walk_back(history[t], first + t);
    }
  }
};

template <bool EXACT>
constexpr int backward_most_threads = EXACT ? 256 : 384; /* so that the registers hold what a thread has */

template <typename real, int COLUMNS, int LANES, int HISTORY, int PARTS, bool EXACT, int WHOLE>
__global__ void __launch_bounds__(backward_most_threads<EXACT>)
    wkv6_backward_recurrent(const __grid_constant__ backward_arguments a) {
  const unsigned slice = block_index() % a.slices, head = block_index() / a.slices;
  const int64_t channel = static_cast<int64_t>(slice) * a.rows, left = a.p.K - channel;
  const backward_block<real, HISTORY * PARTS> b = {a,
                                                   a.p,
                                                   sequence_of(a.p, head / a.p.H, head % a.p.H),
                                                   channel,
                                                   static_cast<int>(left < a.rows ? left : a.rows),
                                                   reinterpret_cast<real *>(shared_memory())};
  visit now = b.first_visit((b.s.length + a.p.segment - 1) / a.p.segment - 1);
  if (now.segment >= 0) b.fetch(now);
  for (int i = thread_index(); i < a.rows; i += block_threads()) {
    const wkv6_tensor &u = a.p.u;
    b.shared[a.u + i] =
        i < b.width ? load_element<real>(u, b.s.h * u.stride[0] + (channel + i) * u.stride[1]) : real(0);
    b.shared[a.rest + i] = b.shared[a.grad_u + i] = b.shared[a.grad_u_low + i] = 0;
  }
  backward_thread<real, COLUMNS, LANES, HISTORY, PARTS, EXACT, WHOLE> thread(b);
  thread.load_state(a.p.grad_final_state, thread.adjoint);
  while (now.segment >= 0) {
    copy_async_wait();
    block_barrier(); /* this tile's bytes are here, the gradients of the one before are stored */
    b.convert(now);
    const bool values = WHOLE && a.p.grad_v.dtype != WKV6_ABSENT && !now.replays();
    if (values) thread.share_adjoint();
    block_barrier(); /* this tile's numbers are here, its bytes are no longer needed */
    const visit next = b.after(now);
    if (next.segment >= 0) b.fetch(next);
    if (now.tile == 0) thread.load_start(now.segment);
    if (now.replays()) {
      thread.replay(b.tokens(now));
    } else {
      if constexpr (WHOLE > 0)
        if (values) thread.walk_back_values(b.tokens(now));
      thread.walk_back_tile(b.tokens(now));
      block_barrier(); /* the sums are complete */
      b.store(now);
    }
    now = next;
  }
  if (WHOLE) thread.store_adjoint(a.p.grad_initial_state);
  block_barrier();
  if (a.p.grad_u_parts.dtype != WKV6_ABSENT)
    for (int i = thread_index(); i < b.width; i += block_threads())
      store_global(static_cast<real *>(a.p.grad_u_parts.data) + (b.s.n * a.p.H + b.s.h) * a.p.K + channel + i,
                   b.shared[a.grad_u + i]);
}

constexpr int grad_u_warps = 8; /* of a block of the kernel below */

/* (8): the sum of grad_u_parts over the sequences, in double and in a fixed order. A block has 32 channels of a head, a
 * lane one of them; warp w takes the sequences w, w + 8, .. */
template <typename real>
__global__ void __launch_bounds__(grad_u_warps *warp_size) wkv6_grad_u(const __grid_constant__ wkv6_problem p) {
  const unsigned slices = static_cast<unsigned>((p.K + warp_size - 1) / warp_size), lane = thread_index() % warp_size,
                 warp = thread_index() / warp_size;
  const int64_t h = block_index() / slices, channel = static_cast<int64_t>(block_index() % slices) * warp_size + lane;
  double *const sums = reinterpret_cast<double *>(shared_memory()); /* [warps][32] */
  double sum = 0;
  if (channel < p.K)
    for (int64_t n = warp; n < p.N; n += grad_u_warps)
      sum += load_global(static_cast<const real *>(p.grad_u_parts.data) + (n * p.H + h) * p.K + channel);
  sums[thread_index()] = sum;
  block_barrier();
  if (warp > 0 || channel >= p.K) return;
  for (int other = 1; other < grad_u_warps; other++) sum += sums[other * warp_size + lane];
  store_element<real>(p.grad_u, h * p.grad_u.stride[0] + channel * p.grad_u.stride[1], static_cast<real>(sum));
}

#endif
