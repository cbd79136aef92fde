/* SPDX-License-Identifier: Apache-2.0
 *
 * One token of equations (1) and (2) on a thread's part of the state, in registers: what recurrent_forward.cuh is made
 * of, and with r and k exchanged and do for v, equations (5) and (7), what recurrent_backward.cuh takes dv from.
 *
 * A warp has ROWS * LANES rows (key channels) and COLUMNS * (32 / LANES) value columns, a thread ROWS rows and COLUMNS
 * columns. The sum over rows is a fixed tree, whatever COLUMNS is: a thread's rows, LANES lanes, then row warps.
 *
 * real: float or double. ROWS: a multiple of 4. COLUMNS: 2 or 4. LANES: lanes that share a column, 4, 8 or 16. EXACT: a
 * warp has all rows; without it rows beyond K are kept at zero by selection, since 0 * inf is not 0.
 */
#ifndef WKV6_RECURRENCE_CUH
#define WKV6_RECURRENCE_CUH

#include "tokens.cuh"

/* Where the numbers of a tile of tokens lie in shared memory, in reals. [tile][rows]: r, k, decay; [tile][columns]: v;
 * [row warps][tile][columns]: the sums that leave. */
struct tile_numbers {
  int tile, rows, columns;
  int r, k, d, v, out;
};

template <typename real, int ROWS, int COLUMNS, int LANES, bool EXACT> struct recurrence {
  real *const shared;
  const int K;
  const unsigned lane = thread_index() % warp_size;
  const int row_lane = lane % LANES, column_lane = lane / LANES;
  const int row_warp, column_warp;
  const int first_row = row_warp * ROWS * LANES + 4 * row_lane; /* then groups of 4 rows, 4 * LANES apart */
  const int first_column = column_warp * (COLUMNS * warp_size / LANES) + COLUMNS * column_lane;
  real s[ROWS][COLUMNS], u[ROWS];

  WKV6_DEVICE recurrence(real *shared_numbers, int64_t rows, int row_warps)
      : shared(shared_numbers), K(static_cast<int>(rows)), row_warp(EXACT ? 0 : thread_index() / warp_size % row_warps),
        column_warp(thread_index() / warp_size / (EXACT ? 1 : row_warps)) {}

  WKV6_DEVICE int row(int i) const { return first_row + i / 4 * 4 * LANES + i % 4; }
  WKV6_DEVICE bool has(int i) const { return EXACT || row(i) < K; }

  /* Token t of the tile. */
  WKV6_DEVICE void step(const tile_numbers &at, int t) {
    real v[COLUMNS], sum[COLUMNS], bonus = 0;
    load_shared<COLUMNS>(shared + at.v + t * at.columns + first_column, v);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) sum[c] = 0;
#pragma unroll
    for (int group = 0; group < ROWS; group += 4) {
      real r[4], k[4], d[4];
      const int of_token = t * at.rows + row(group);
      load_shared<4>(shared + at.r + of_token, r);
      load_shared<4>(shared + at.k + of_token, k);
      load_shared<4>(shared + at.d + of_token, d);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        bonus = fma(r[i] * u[group + i], k[i], bonus);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          real &state = s[group + i][c];
          sum[c] = fma(r[i], state, sum[c]);
          const real next = fma(d[i], state, k[i] * v[c]);
          state = has(group + i) ? next : real(0);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) sum[c] = has(0) ? fma(bonus, v[c], sum[c]) : real(0); /* without rows: 0 * inf */
    scatter_sum<COLUMNS, LANES>(sum, row_lane);
    if (row_lane < COLUMNS)
      shared[at.out + (row_warp * at.tile + t) * at.columns + first_column + scattered<COLUMNS, LANES>(row_lane)] =
          sum[0];
  }
};

#endif
