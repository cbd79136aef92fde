/* SPDX-License-Identifier: Apache-2.0
 *
 * The ground that chunk_backward.cuh walks on: what a block has in shared memory, what a thread holds, how chunks and
 * states come in and go out, and S brought forward. Template parameters as there.
 */
#ifndef WKV6_CHUNK_BACKWARD_STATE_CUH
#define WKV6_CHUNK_BACKWARD_STATE_CUH

#include "chunk_backward_stage.cuh"

/* What the warps of a block hand each other, and what a thread puts aside for itself. Tiles of operands are
 * [channel][token], see operand_at(). */
template <int KEYS, int COLUMNS, operand P, operand Q, bool VALUES> struct chunk_backward_shared {
  static constexpr int tile = KEYS * chunk_tokens, pitch = chunk_tokens + 8; /* of scores: ldmatrix meets all banks */
  static constexpr bool levels_here = VALUES || P == operand::split;
  alignas(128)
      uint16_t levels[levels_here ? 3 : 1][levels_here ? parts_of<P> : 1][levels_here ? tile : 8]; /* Z_8, Z_4, Z_2 */
  alignas(128) uint16_t pairs[parts_of<Q>][levels_here ? tile : 8];                                /* Z_1 */
  alignas(128) uint16_t keys[parts_of<P>][VALUES ? tile : 8];                                      /* k P(s+1..C) */
  alignas(128) uint16_t adjoint[parts_of<P>][VALUES ? KEYS * COLUMNS : 8]; /* G after the chunk, [channel][column] */
  alignas(
      128) uint16_t scores[parts_of<P>][VALUES ? chunk_tokens * pitch : 8]; /* scale A^T with its diagonal, by row s */
  float bonus[KEYS / 16][chunk_tokens];                                     /* a warp's part of r . (u * k) */
};

template <int KEYS, int COLUMNS, operand P, operand Q, bool VALUES> struct chunk_backward_state {
  static constexpr int warps = KEYS / 16, threads = warps * warp_size, steps = COLUMNS / 16, tiles = COLUMNS / 8;
  using shared_arrays = chunk_backward_shared<KEYS, COLUMNS, P, Q, VALUES>;
  static constexpr int tile = shared_arrays::tile, pitch = shared_arrays::pitch, parts = parts_of<P>,
                       input_parts = parts_of<Q>;
  static constexpr bool levels_here = shared_arrays::levels_here;
  static constexpr int value_tile = chunk_tokens * COLUMNS; /* elements of one term of v or do in a stage */
  using matrix = float[tiles][4];                           /* a warp's 16 rows: d fragments of 8 columns each */
  using tokens = float[4][2];                               /* the T layout */

  const chunk_backward_arguments &a;
  const wkv6_problem &p;
  const sequence s;
  const int64_t channel; /* the block's first */
  const int part;
  char *const memory = shared_memory();
  shared_arrays &shared = *reinterpret_cast<shared_arrays *>(memory);
  const chunk_lane at;
  const float scale;
  /* Places in tiles, in elements. */
  const int keys_place = keep(row_at<KEYS>(at.lane % 8 + at.lane / 16 * 8, at.warp * 16 + at.lane / 8 % 2 * 8)),
            row_place = keep(row_at<COLUMNS>(at.lane % 16, at.lane / 16 * 8)),
            operand_place = keep(operand_at(at.lane % 8 + at.lane / 16 * 8, at.lane / 8 % 2)),
            word_place = keep(operand_at(at.warp * 16 + at.g, 0) + at.p * 2);

  matrix adjoint;                                         /* G */
  float rest = 0;                                         /* of the decays G has met, see carry_decays() */
  float u[2], grad_u[2] = {0, 0}, grad_u_low[2] = {0, 0}; /* du so far, and what its additions lost */

  WKV6_DEVICE chunk_backward_state(const chunk_backward_arguments &arguments, const sequence &sequence, int64_t first,
                                   int part_index)
      : a(arguments), p(a.p), s(sequence), channel(first), part(part_index), scale(static_cast<float>(p.scale)) {}

  WKV6_DEVICE int chunks() const { return static_cast<int>((s.length + chunk_tokens - 1) / chunk_tokens); }
  WKV6_DEVICE char *stage(int slot) const { return memory + a.stages + slot * a.stage_bytes; }

  WKV6_DEVICE void fetch(int slot, const chunk_walk &ahead) const {
    if (!ahead.done()) {
      char *const to = stage(slot);
      const int64_t t = static_cast<int64_t>(ahead.chunk) * chunk_tokens;
      fetch_chunk<KEYS, threads, operand::bf16>(p.k, a.k, to, s, t, channel);
      fetch_chunk<KEYS, threads, operand::bf16>(p.w, a.w, to, s, t, channel);
      fetch_chunk<COLUMNS, threads, Q>(p.v, a.v, to, s, t, 0);
      if (!ahead.replays) {
        fetch_chunk<KEYS, threads, operand::bf16>(p.r, a.r, to, s, t, channel);
        fetch_chunk<COLUMNS, threads, Q>(p.grad_o, a.grad_o, to, s, t, 0);
      }
    }
    copy_async_commit();
  }

  /* What bfloat16 rows copied as they are leave of an operand of two terms: zeros, for good. */
  WKV6_DEVICE void clear_low_terms(const chunk_rows &rows) const {
    if constexpr (Q == operand::split)
      for (int slot = 0; slot < 2 && rows.direct; slot++)
        for (int i = thread_index(); i < value_tile; i += threads)
          reinterpret_cast<uint16_t *>(stage(slot) + rows.at)[value_tile + i] = 0;
  }

  /* The warp's channels of r, k or w. */
  WKV6_DEVICE void load_tokens(const chunk_rows &rows, const char *from, tokens &x) const {
    from += rows.at;
    if (rows.wide) {
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint32_t bits;
          load_words<1>(from + wide_row_at<KEYS>(i / 2 * 8 + at.p * 2 + j, at.warp * 16 + i % 2 * 8 + at.g) * 4, &bits);
          x[i][j] = float_of_bits(bits);
        }
    } else {
      uint32_t words[4];
      load_matrices_transposed(words, from + keys_place * 2);
#pragma unroll
      for (int i = 0; i < 4; i++) x[i][0] = low_float(words[i]), x[i][1] = high_float(words[i]);
    }
  }
  /* Of the chunk at token t. Rows beyond the sequence, zeros, must not decay: as raw x they would. */
  WKV6_DEVICE void load_log_decays(const char *from, int64_t t, tokens &w) const {
    load_tokens(a.w, from, w);
    if (!(p.flags & WKV6_RAW_DECAY)) return;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        w[i][j] = t + i / 2 * 8 + at.p * 2 + j < s.length ? -exp2_approx(w[i][j] * log2_of_e) : 0.f;
  }

  /* The decays of the chunk, and in `carry` what its G or S is multiplied by: chunk_decay() of channels g and g + 8.
   * `carry_rest` is that of channel g in lanes of even p and of g + 8 in the others, and so is the sum of w returned.
   */
  WKV6_DEVICE float load_decays(const char *from, int64_t t, float &carry_rest, half_factors (&f)[4],
                                float (&carry)[2]) const {
    tokens w;
    load_log_decays(from, t, w);
    const float sum = factors_of(f, w, at), mine = chunk_decay(sum, carry_rest), other = shuffle_xor(mine, 1);
    carry[0] = at.odd ? other : mine;
    carry[1] = at.odd ? mine : other;
    return sum;
  }

  /* x = diag(carry) x + left rows, `rows` a [token][column] tile of v or do */
  WKV6_DEVICE void advance(matrix &x, const float (&carry)[2], const left_fragment<P> &left, const char *rows) const {
#pragma unroll
    for (int step = 0; step < steps; step++) {
      left_fragment<Q> y;
#pragma unroll
      for (int n = 0; n < input_parts; n++)
        load_matrices_transposed(y.part[n], rows + ((row_place ^ step * 16) + n * value_tile) * 2);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float (&z)[4] = x[step * 2 + j];
        z[0] *= carry[0], z[1] *= carry[0], z[2] *= carry[1], z[3] *= carry[1];
        multiply(z, left, halves_of(y, j));
      }
    }
  }

  /* 16 columns of a matrix of the warp as an a operand. */
  static WKV6_DEVICE void as_operand(left_fragment<P> &x, const matrix &from, int step) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      put_pair(x, i, from[step * 2 + i / 2][i % 2 * 2], from[step * 2 + i / 2][i % 2 * 2 + 1]);
  }

  /* ---- States in memory ---- */

  /* f(row, column, x) for the pairs of columns of the warp's rows. */
  template <typename function> WKV6_DEVICE void for_pairs(matrix &x, function f) const {
#pragma unroll
    for (int n = 0; n < tiles; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) f(at.warp * 16 + c * 8 + at.g, n * 8 + at.p * 2, x[n][c * 2], x[n][c * 2 + 1]);
  }
  WKV6_DEVICE void load_floats(const float *from, int64_t pitch, matrix &x) const {
    for_pairs(x, [&](int row, int column, float &x0, float &x1) {
      uint32_t y[2];
      load_global_words<2>(from + row * pitch + column, y);
      x0 = float_of_bits(y[0]), x1 = float_of_bits(y[1]);
    });
  }
  WKV6_DEVICE void load_state(const wkv6_tensor &from, bool vector, matrix &x) const {
    const int64_t first = state_offset(from, s, channel, 0);
    if (from.dtype == WKV6_ABSENT) {
      for_pairs(x, [](int, int, float &x0, float &x1) { x0 = x1 = 0; });
    } else if (vector) {
      load_floats(static_cast<const float *>(from.data) + first, from.stride[2], x);
    } else {
      for_pairs(x, [&](int row, int column, float &x0, float &x1) {
        const int64_t place = first + row * from.stride[2] + column * from.stride[3];
        x0 = load_element<float>(from, place), x1 = load_element<float>(from, place + from.stride[3]);
      });
    }
  }
  /* S before a segment's first chunk */
  WKV6_DEVICE void load_start(int chunk, matrix &x) const {
    if (chunk == 0)
      load_state(p.initial_state, a.vector_states[0], x);
    else
      load_floats(checkpoint<float>(p, s, chunk / a.segment) + channel * COLUMNS, COLUMNS, x);
  }
  /* G after the part, which is the sequence's last one or not */
  WKV6_DEVICE void load_end(bool is_last) {
    if (!is_last)
      load_floats(static_cast<const float *>(p.span_adjoints.data) +
                      (border_place(a, s, part + 1) * p.K + channel) * COLUMNS,
                  COLUMNS,
                  adjoint);
    else
      load_state(p.grad_final_state, a.vector_states[1], adjoint);
  }
  WKV6_DEVICE void store_initial() {
    const wkv6_tensor &to = p.grad_initial_state;
    if (to.dtype == WKV6_ABSENT) return;
    const int64_t first = state_offset(to, s, channel, 0);
    for_pairs(adjoint, [&](int row, int column, float &x0, float &x1) {
      const int64_t place = first + row * to.stride[2] + column * to.stride[3];
      if (a.vector_states[2]) {
        const uint32_t words[2] = {bits_of(x0), bits_of(x1)};
        store_global_words<2>(static_cast<float *>(to.data) + place, words);
      } else {
        store_element(to, place, x0), store_element(to, place + to.stride[3], x1);
      }
    });
  }

  /* Words of the state before chunk `chunk` of a span, the thread's own. */
  WKV6_DEVICE char *kept_state(const chunk_walk &now, int chunk, int term, int step) const {
    const int place = chunk - now.first - a.first_state, state = place > 0 ? place : 0;
    return memory + a.states +
           (((state * parts + term) * steps + step) * threads + static_cast<int>(thread_index())) * 16;
  }
  WKV6_DEVICE void keep_state(const chunk_walk &now, int chunk, const matrix &state) const {
#pragma unroll
    for (int step = 0; step < steps; step++) {
      left_fragment<P> x;
      as_operand(x, state, step);
#pragma unroll
      for (int n = 0; n < parts; n++) store_words<4>(kept_state(now, chunk, n, step), x.part[n]);
    }
  }

  /* ---- Gradients to memory ---- */

  /* Columns 2p, 2p + 1 (x) and 8 + 2p, 9 + 2p (y) of a 16-bit row from `place` on: lanes of a pair swap, so that each
   * has four columns next to each other. */
  WKV6_DEVICE void put_columns(const wkv6_tensor &to, bool vector, bool valid, int64_t place, uint32_t x,
                               uint32_t y) const {
    const uint32_t theirs = shuffle_xor(at.odd ? x : y, 1), words[2] = {at.odd ? theirs : x, at.odd ? y : theirs};
    const int column = (at.odd ? 8 : 0) + (at.high ? 4 : 0);
    if (!valid) return;
    uint16_t *const data = static_cast<uint16_t *>(to.data) + place + column * to.stride[3];
    if (vector) {
      store_global_words<2>(data, words);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++)
        store_global(data + i * to.stride[3], static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
    }
  }
  WKV6_DEVICE void put_floats(const wkv6_tensor &to, bool vector, bool valid, int64_t place, uint32_t x0,
                              uint32_t x1) const {
    if (!valid) return;
    float *const data = static_cast<float *>(to.data) + place;
    if (vector) {
      const uint32_t words[2] = {x0, x1};
      store_global_words<2>(data, words);
    } else {
      store_global(data, float_of_bits(x0)), store_global(data + to.stride[3], float_of_bits(x1));
    }
  }
  static WKV6_DEVICE uint32_t pack(int dtype, float low, float high) {
    return dtype == WKV6_BF16 ? pack_bf16(low, high) : pack_f16(low, high);
  }

  /* 16 columns of the row of token t: a warp's d fragments, 2p and 2p + 1 of each eight in a lane. */
  WKV6_DEVICE void store_columns(const wkv6_tensor &to, bool vector, int64_t t, int column, float x0, float x1,
                                 float y0, float y1) const {
    if (to.dtype == WKV6_ABSENT) return;
    const int64_t place = row_offset(to, s, t) + column * to.stride[3];
    const bool valid = t < s.length;
    if (to.dtype == WKV6_F32) {
      put_floats(to, vector, valid, place + at.p * 2 * to.stride[3], bits_of(x0), bits_of(x1));
      put_floats(to, vector, valid, place + (at.p * 2 + 8) * to.stride[3], bits_of(y0), bits_of(y1));
    } else {
      put_columns(to, vector, valid, place, pack(to.dtype, x0, x1), pack(to.dtype, y0, y1));
    }
  }

  /* The warp's channels of the tokens from t on, out of the T layout. */
  WKV6_DEVICE void store_tokens(const wkv6_tensor &to, bool vector, int64_t t, const tokens &x) const {
    if (to.dtype == WKV6_ABSENT) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int64_t token = t + half * 8 + at.g,
                    place = row_offset(to, s, token) + (channel + at.warp * 16) * to.stride[3];
      const bool valid = token < s.length;
      if (to.dtype == WKV6_F32) {
#pragma unroll
        for (int c = 0; c < 2; c++) { /* the halves of a float as two matrices of 16-bit numbers */
          const uint32_t first = bits_of(x[half * 2 + c][0]), second = bits_of(x[half * 2 + c][1]);
          const uint32_t low = transpose_matrix(permute_bytes(first, second, 0x5410)),
                         high = transpose_matrix(permute_bytes(first, second, 0x7632));
          put_floats(to,
                     vector,
                     valid,
                     place + (c * 8 + at.p * 2) * to.stride[3],
                     permute_bytes(low, high, 0x5410),
                     permute_bytes(low, high, 0x7632));
        }
      } else {
        const uint32_t y0 = transpose_matrix(pack(to.dtype, x[half * 2][0], x[half * 2][1])),
                       y1 = transpose_matrix(pack(to.dtype, x[half * 2 + 1][0], x[half * 2 + 1][1]));
        put_columns(to, vector, valid, place, y0, y1);
      }
    }
  }

  /* S over one chunk: (10). */
  WKV6_DEVICE void bring_forward(matrix &state, float &state_rest, const char *from, int64_t t) const {
    half_factors f[4];
    float carry[2];
    tokens k;
    load_decays(from, t, state_rest, f, carry);
    load_tokens(a.k, from, k);
    left_fragment<P> left;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float later = i < 2 ? f[i].k8 * f[i + 2].all : f[i].k8;
      put_pair(left, i, k[i][0] * (f[i].of[1] * later), k[i][1] * later);
    }
    advance(state, carry, left, from + a.v.at);
  }
};

#endif
