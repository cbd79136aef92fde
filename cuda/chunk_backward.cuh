/* SPDX-License-Identifier: Apache-2.0
 *
 * Equations (3) to (8) of docs/wkv6.md on tensor cores, in the chunk form (11): dr, dk, dw and the parts of du, and
 * with VALUES dv and dS_0 as well. (Otherwise these come from the forward kernel run from the end.)
 *
 * A block has KEYS key channels of one head of one sequence, or of a part of it, with all value columns; a warp 16 of
 * the channels. A warp's rows of G, and of S while it is brought forward, stay in registers as d fragments, [16 x
 * COLUMNS]. Chunks of 16 tokens go by from the last to the first. S is only to be had from the front: the forward pass
 * left a checkpoint every segment; from there the states before each chunk of a span are made again and kept in shared
 * memory as a fragments, each thread its own words. Nothing is divided by a decay, and no exponent is positive (I1).
 *
 * A chunk: decays and operands from r, k, w (each warp its channels) -> barrier -> scores (a level of the tree a warp),
 * products with S and G, dr, dk, dw to memory, dv so far = K^ G, G over the chunk -> barrier -> the scores' part of dv,
 * while the stage is filled again. Without VALUES nothing crosses warps and the first barrier is not needed.
 *
 * The pairs of tokens of a chunk are cut up by a tree (chunk_common.cuh): a pair (s, t) belongs to the level h = 8, 4,
 * 2 or 1 of the block of 2h tokens in whose left half s and in whose right half t lies, m the first token of the right
 * half. Z_h holds k P(s+1..m-1) in left rows and r P(m..t-1) in right ones, so A_h = Z_h Z_h^T, and a level's dr and dk
 * are products of Z_h with a masked v . do.
 *
 * KEYS: 32 or 64. COLUMNS: V, 32 or 64. P: operands that are not exact, bf16 or split. Q: v and do, and r and k
 * where they are operands themselves: bf16 if they are bfloat16 tensors, or if P is, else split.
 */
#ifndef WKV6_CHUNK_BACKWARD_CUH
#define WKV6_CHUNK_BACKWARD_CUH

#include "chunk_backward_state.cuh"

/* d += a b over eight tokens, without the product of two small parts. */
template <operand A, operand B>
WKV6_DEVICE void multiply_8(float (&d)[4], const fragment<A, 2> &a, const fragment<B, 1> &b) {
  multiply_bf16_8(d, a.part[0], b.part[0][0]);
  if constexpr (B == operand::split) multiply_bf16_8(d, a.part[0], b.part[1][0]);
  if constexpr (A == operand::split) multiply_bf16_8(d, a.part[1], b.part[0][0]);
}

template <int KEYS, int COLUMNS, operand P, operand Q, bool VALUES>
struct chunk_backward_thread : chunk_backward_state<KEYS, COLUMNS, P, Q, VALUES> {
  using state = chunk_backward_state<KEYS, COLUMNS, P, Q, VALUES>;
  using state::a, state::p, state::s, state::at, state::shared, state::channel, state::part, state::scale,
      state::adjoint, state::u, state::grad_u, state::grad_u_low, state::rest;
  using state::operand_place, state::word_place, state::row_place, state::state;
  using state::warps, state::threads, state::steps, state::tile, state::pitch, state::parts, state::input_parts,
      state::levels_here, state::value_tile;
  using typename state::matrix, typename state::tokens;
  static constexpr int value_tiles = VALUES && COLUMNS > KEYS ? COLUMNS / KEYS : 1; /* of 16 columns of dv, a warp */
  using values = float[value_tiles][2][4];

  /* What r and k of a token are multiplied by: in Z_2, Z_4 and Z_8 of its own role, in the chunk's products with S and
   * G
   * (`query`, with the scale, and `key`). */
  struct factors {
    tokens two, four, eight, query, key;
  };
  /* Z_8, Z_4, Z_2, Z_1 in the T layout. Of two terms they would take too many registers, and are read back. */
  struct level_words {
    uint32_t word[P == operand::split ? 1 : 4][4];
  };

  WKV6_DEVICE int word_at(int i) const { return (i / 2 ? word_place ^ 8 : word_place) + i % 2 * 8 * chunk_tokens; }

  template <operand O> WKV6_DEVICE void store_operand(uint16_t *to, int i, const left_fragment<O> &x) const {
#pragma unroll
    for (int n = 0; n < parts_of<O>; n++) store_words<1>(to + n * tile + word_at(i), &x.part[n][i]);
  }

  /* Decays, factors and operands of the warp's channels; r . (u * k), a warp's part, by token. Returns whether a NaN or
   * an infinity is among them. */
  WKV6_DEVICE bool prepare(const char *from, int64_t t, factors &f, level_words &z, left_fragment<P> &query,
                           float (&carry)[2]) {
    half_factors d[4];
    tokens r, k;
    this->load_decays(from, t, rest, d, carry);
    this->load_tokens(a.r, from, r);
    this->load_tokens(a.k, from, k);
    float bonus[2][2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int half = i / 2, c = i % 2;
      const half_factors &x = d[i];
      const float other = d[i ^ 2].all;
      bonus[half][0] = fma(r[i][0], u[c] * k[i][0], bonus[half][0]);
      bonus[half][1] = fma(r[i][1], u[c] * k[i][1], bonus[half][1]);
      const float right[2] = {x.r8, x.r8 * x.of[0]}, left[2] = {x.k8 * x.of[1], x.k8};
      f.two[i][0] = at.odd ? 1.f : x.of[1], f.two[i][1] = at.odd ? x.of[0] : 1.f;
      f.four[i][0] = at.high ? x.r4 : x.of[1] * x.k4, f.four[i][1] = at.high ? x.of[0] * x.r4 : x.k4;
      float two[2], four[2], eight[2], key[2], asked[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        f.eight[i][j] = half ? right[j] : left[j];
        f.query[i][j] = (half ? right[j] * other : right[j]) * scale;
        f.key[i][j] = half ? left[j] : left[j] * other;
        two[j] = (at.odd ? r[i][j] : k[i][j]) * f.two[i][j];
        four[j] = (at.high ? r[i][j] : k[i][j]) * f.four[i][j];
        eight[j] = (half ? r[i][j] : k[i][j]) * f.eight[i][j];
        asked[j] = r[i][j] * f.query[i][j];
        key[j] = k[i][j] * f.key[i][j];
      }
      left_fragment<P> z8, z4, z2, keys;
      left_fragment<Q> z1;
      put_pair(z8, i, eight[0], eight[1]), put_pair(z4, i, four[0], four[1]), put_pair(z2, i, two[0], two[1]);
      put_pair(z1, i, k[i][0], r[i][1]);
      put_pair(query, i, asked[0], asked[1]);
      if constexpr (levels_here) {
        store_operand(shared.levels[0][0], i, z8);
        store_operand(shared.levels[1][0], i, z4);
        store_operand(shared.levels[2][0], i, z2);
        store_operand(shared.pairs[0], i, z1);
      }
      if constexpr (P == operand::bf16)
        z.word[0][i] = z8.part[0][i], z.word[1][i] = z4.part[0][i], z.word[2][i] = z2.part[0][i],
        z.word[3][i] = z1.part[0][i];
      if constexpr (VALUES) {
        put_pair(keys, i, key[0], key[1]);
        store_operand(shared.keys[0], i, keys);
      }
    }
    const float probe =
        bonus[0][0] + bonus[0][1] + (bonus[1][0] + bonus[1][1]) + 0 * (d[0].all + d[1].all + (d[2].all + d[3].all));
    if constexpr (VALUES) store_bonus(bonus);
    return any_lane(!(probe > -INFINITY && probe < INFINITY));
  }

  /* Sums over the eight lanes that have a pair of tokens; two steps hand half of the values over. */
  WKV6_DEVICE void store_bonus(const float (&x)[2][2]) const {
    float y[4] = {x[0][0], x[1][0], x[0][1], x[1][1]};
    const bool first = at.g & 1, second = at.g & 2;
    float y0 = (first ? y[1] : y[0]) + shuffle_xor(first ? y[0] : y[1], 4),
          y1 = (first ? y[3] : y[2]) + shuffle_xor(first ? y[2] : y[3], 4);
    float sum = (second ? y1 : y0) + shuffle_xor(second ? y0 : y1, 8);
    sum += shuffle_xor(sum, 16);
    if (at.g < 4) shared.bonus[at.warp][(at.g & 1) * 8 + at.p * 2 + (at.g >> 1)] = sum;
  }

  /* Puts G where all warps find it. */
  WKV6_DEVICE void publish() const {
#pragma unroll
    for (int step = 0; step < steps; step++) {
      left_fragment<P> x;
      this->as_operand(x, adjoint, step);
#pragma unroll
      for (int n = 0; n < parts; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          store_words<1>(
              &shared.adjoint[n][row_at<COLUMNS>(at.warp * 16 + at.g + i % 2 * 8, step * 16 + i / 2 * 8) + at.p * 2],
              &x.part[n][i]);
    }
  }

  /* The warp's levels of scale A^T, only the pairs that belong to them; with level 1 the diagonal, r . (u * k). */
  WKV6_DEVICE void score() const {
#pragma unroll
    for (int turn = 0; turn < 4 / warps; turn++) {
      const int level = turn * warps + at.warp;
      const uint16_t *const levels = level < 3 ? shared.levels[level][0] : shared.pairs[0];
      float d[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
      for (int step = 0; step < KEYS / 16; step++) {
        left_fragment<P> z;
#pragma unroll
        for (int n = 0; n < parts; n++) {
          z.part[n][0] = z.part[n][1] = z.part[n][2] = z.part[n][3] = 0;
          if (n < input_parts || level < 3)
            load_matrices_transposed(z.part[n], levels + n * tile + operand_place + step * 16 * chunk_tokens);
        }
        multiply(d[0], z, columns_of(z, 0));
        multiply(d[1], z, columns_of(z, 1));
      }
      const int g = at.g, pair = at.p;
      bool mine = true; /* does the lane hold pairs of this level? Those of level 8 are in one quarter of the matrix */
      if (level == 0) d[0][0] = d[1][0], d[0][1] = d[1][1];
      if (level == 1) mine = g / 4 == 0 && at.high;
      if (level == 2) mine = g / 4 == pair / 2 && !(g & 2) && at.odd;
      if (level == 3) {
        mine = g / 2 == pair;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float sum = 0;
#pragma unroll
          for (int warp = 0; warp < warps; warp++) sum += shared.bonus[warp][half * 8 + g];
          d[half][half * 2] = g & 1 ? 0.f : sum;
          d[half][half * 2 + 1] = g & 1 ? sum : d[half][half * 2 + 1];
        }
      }
      fragment<P, 2> x; /* the words in the upper left, and in the lower right of the matrix */
      put_pair(x, 0, d[0][0] * scale, d[0][1] * scale), put_pair(x, 1, d[1][2] * scale, d[1][3] * scale);
      const int place = g * pitch + pair * 2 + (level ? 0 : 8);
#pragma unroll
      for (int n = 0; n < parts; n++) {
        store_words<1>(&shared.scores[n][place], &x.part[n][0], mine);
        store_words<1>(&shared.scores[n][place + 8 * pitch + 8], &x.part[n][1], mine && level > 0);
      }
    }
  }

  /* S do, G v and the diagonal of G S^T of the warp's channels, and do v^T, all by token. */
  struct products {
    float dr[2][4] = {}, dk[2][4] = {}, rows[2][4] = {}, dA[2][4] = {};
  };
  WKV6_DEVICE void multiply_states(const char *from, const chunk_walk &now, products &x) const {
#pragma unroll
    for (int step = 0; step < steps; step++) {
      left_fragment<P> before, after;
      left_fragment<Q> grad_o, v;
#pragma unroll
      for (int n = 0; n < parts; n++) load_words<4>(this->kept_state(now, now.chunk, n, step), before.part[n]);
      if constexpr (VALUES) {
#pragma unroll
        for (int n = 0; n < parts; n++)
          load_matrices(after.part[n], &shared.adjoint[n][(row_place ^ step * 16) + at.warp * 16 * COLUMNS]);
      } else {
        this->as_operand(after, adjoint, step);
      }
#pragma unroll
      for (int n = 0; n < input_parts; n++) {
        const int place = ((row_place ^ step * 16) + n * value_tile) * 2;
        load_matrices(grad_o.part[n], from + a.grad_o.at + place);
        load_matrices(v.part[n], from + a.v.at + place);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const right_fragment<Q> of_v = columns_of(v, half);
        multiply(x.dA[half], grad_o, of_v);
        multiply(x.dr[half], before, columns_of(grad_o, half));
        multiply(x.dk[half], after, of_v);
        multiply(x.rows[half], after, columns_of(before, half));
      }
    }
  }

  /* What the pairs of each level add to dr of their right and dk of their left token, before the token's own factor. */
  struct level_gradients {
    float eight[2][4] = {}, four[2][4] = {}, two[2][4] = {}, one[2][4] = {};
  };

  /* Z of one level and one half of the chunk. `clean`: without what is not finite, which zeros would not hold back. */
  template <operand O>
  WKV6_DEVICE void level_operand(const level_words &words, int level, int half, bool clean, fragment<O, 2> &z) const {
    constexpr int N = parts_of<O>;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        if constexpr (P == operand::bf16)
          z.part[n][c] = words.word[level][half * 2 + c];
        else
          load_words<1>((level < 3 ? shared.levels[level][n] : shared.pairs[n]) + word_at(half * 2 + c), &z.part[n][c]);
      }
    if (!clean) return;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        if ((z.part[n][c] & 0x7f80) == 0x7f80) z.part[n][c] &= 0xffff0000;
        if ((z.part[n][c] & 0x7f800000) == 0x7f800000) z.part[n][c] &= 0xffff;
      }
  }

  /* dA: scale do v^T, rows of do. The blocks that a level masks out are never touched by its products: what is not
   * finite in Z is taken out here and put where the recurrence has it by spoil(). */
  WKV6_DEVICE void multiply_levels(const products &x, const level_words &words, bool spoilt, level_gradients &y) const {
    {
      fragment<P, 2> left, right;
      fragment<P, 1> across, turned;
      put_pair(across, 0, x.dA[0][2], x.dA[0][3]);
#pragma unroll
      for (int n = 0; n < parts; n++) turned.part[n][0] = transpose_matrix(across.part[n][0]);
      level_operand(words, 0, 0, false, left), level_operand(words, 0, 1, false, right);
      multiply_8(y.eight[0], right, turned);
      multiply_8(y.eight[1], left, across);
    }
    const int g4 = at.g >> 2, g2 = at.g >> 1 & 1;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      fragment<P, 1> block, b4, b2, b1;
      fragment<P, 2> z;
      fragment<Q, 2> z1;
      put_pair(block, 0, x.dA[half][half * 2], x.dA[half][half * 2 + 1]);
#pragma unroll
      for (int n = 0; n < parts; n++) {
        const uint32_t word = block.part[n][0], turned = transpose_matrix(word);
        b4.part[n][0] = g4 == at.high ? 0 : g4 ? word : turned;
        b2.part[n][0] = g4 != at.high || g2 == at.odd ? 0 : g2 ? word : turned;
        b1.part[n][0] = at.g >> 1 != at.p ? 0 : at.g & 1 ? word & 0xffff : turned & 0xffff0000;
      }
      level_operand(words, 1, half, spoilt, z), multiply_8(y.four[half], z, b4);
      level_operand(words, 2, half, spoilt, z), multiply_8(y.two[half], z, b2);
      level_operand(words, 3, half, spoilt, z1), multiply_8(y.one[half], z1, b1);
    }
  }

  /* The rule that multiply_levels() leaves out: within a half a k or w that is not finite reaches dr of all later
   * tokens, an r or w that is not finite dk of all earlier ones. */
  WKV6_DEVICE void spoil(const char *from, int64_t t, const tokens &r, const tokens &k, tokens &dr, tokens &dk) const {
    tokens w;
    this->load_log_decays(from, t, w);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      unsigned not_r = 0, not_k = 0;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const unsigned token = 1u << (at.p * 2 + j);
        const bool not_w = w[i][j] != w[i][j];
        if (not_w || !(r[i][j] > -INFINITY && r[i][j] < INFINITY)) not_r |= token;
        if (not_w || !(k[i][j] > -INFINITY && k[i][j] < INFINITY)) not_k |= token;
      }
      not_r |= shuffle_xor(not_r, 1), not_k |= shuffle_xor(not_k, 1);
      not_r |= shuffle_xor(not_r, 2), not_k |= shuffle_xor(not_k, 2);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int token = at.p * 2 + j;
        if (not_k & ((1u << token) - 1)) dr[i][j] = NAN;
        if (not_r >> (token + 1)) dk[i][j] = NAN;
      }
    }
  }

  /* dv = K^ G of the warp's value columns, and do of these columns as b operands: the stage is filled again before the
   * scores are there. */
  WKV6_DEVICE bool has_values(int i) const { return i * warps + at.warp < steps; }
  WKV6_DEVICE void multiply_keys(const char *from, values &dv, left_fragment<Q> (&grad_o)[value_tiles]) const {
#pragma unroll
    for (int i = 0; i < value_tiles; i++) {
      if (!has_values(i)) continue;
      const int place = row_place ^ (i * warps + at.warp) * 16;
#pragma unroll
      for (int n = 0; n < input_parts; n++)
        load_matrices_transposed(grad_o[i].part[n], from + a.grad_o.at + (place + n * value_tile) * 2);
#pragma unroll
      for (int step = 0; step < KEYS / 16; step++) {
        left_fragment<P> key, g;
#pragma unroll
        for (int n = 0; n < parts; n++) {
          load_matrices_transposed(key.part[n], &shared.keys[n][operand_place + step * 16 * chunk_tokens]);
          load_matrices_transposed(g.part[n], &shared.adjoint[n][place + step * 16 * COLUMNS]);
        }
        multiply(dv[i][0], key, halves_of(g, 0)), multiply(dv[i][1], key, halves_of(g, 1));
      }
    }
  }
  WKV6_DEVICE void multiply_scores(int64_t t, values &dv, const left_fragment<Q> (&grad_o)[value_tiles]) const {
    left_fragment<P> scores;
#pragma unroll
    for (int n = 0; n < parts; n++)
      load_matrices(scores.part[n], &shared.scores[n][at.lane % 16 * pitch + at.lane / 16 * 8]);
#pragma unroll
    for (int i = 0; i < value_tiles; i++) {
      if (!has_values(i)) continue;
      if (any_lane(not_finite(grad_o[i]))) { /* or a NaN would reach later tokens through 0 * NaN */
        multiply_one_by_one(dv[i][0], scores, halves_of(grad_o[i], 0));
        multiply_one_by_one(dv[i][1], scores, halves_of(grad_o[i], 1));
      } else {
        multiply(dv[i][0], scores, halves_of(grad_o[i], 0)), multiply(dv[i][1], scores, halves_of(grad_o[i], 1));
      }
      const int column = (i * warps + at.warp) * 16;
#pragma unroll
      for (int half = 0; half < 2; half++)
        this->store_columns(p.grad_v,
                            a.vector_v,
                            t + half * 8 + at.g,
                            column,
                            dv[i][0][half * 2],
                            dv[i][0][half * 2 + 1],
                            dv[i][1][half * 2],
                            dv[i][1][half * 2 + 1]);
    }
  }
  /* d += scores b, a token of b at a time and only in rows up to it. */
  WKV6_DEVICE void multiply_one_by_one(float (&d)[4], const left_fragment<P> &scores,
                                       const right_fragment<Q> &b) const {
#pragma unroll 1
    for (int token = 0; token < chunk_tokens; token++) {
      const uint32_t half = token & 1 ? 0xffff0000 : 0xffff, low = token / 2 == at.p ? half : 0,
                     high = token / 2 == at.p + 4 ? half : 0;
      right_fragment<Q> one;
#pragma unroll
      for (int n = 0; n < input_parts; n++) one.part[n][0] = b.part[n][0] & low, one.part[n][1] = b.part[n][1] & high;
      float x[4] = {0, 0, 0, 0};
      multiply(x, scores, one);
      if (token >= at.g) d[0] += x[0], d[1] += x[1];
      if (token >= at.g + 8) d[2] += x[2], d[3] += x[3];
    }
  }

  /* dr, dk, dw and du of the warp's channels, from all products. */
  WKV6_DEVICE void finish(const char *from, int64_t t, const factors &f, const products &x, const level_gradients &y,
                          const float (&carry)[2], bool spoilt) {
    tokens r, k, dr, dk, dw;
    float bonus[2][2], later[2], earlier[2], part_of_u[2] = {0, 0};
    this->load_tokens(a.r, from, r);
    this->load_tokens(a.k, from, k);
#pragma unroll
    for (int half = 0; half < 2; half++) /* v . do of the lane's tokens: the diagonal of dA */
#pragma unroll
      for (int j = 0; j < 2; j++) bonus[half][j] = shuffle_from(x.dA[half][half * 2 + j], (at.p * 2 + j) * 4 + at.p);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int half = i / 2, c = i % 2;
      /* k dk and r dr through S, G and the levels: over the whole chunk, over a half, over four tokens, over two. Each
       * dw gathers those of earlier tokens' k and of later tokens' r at every level of the tree: (11). */
      float before_half[2], after_half[2], before_four[2], after_four[2], before_two[2], after_two[2], before = 0,
                                                                                                       after = 0;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float r_inter = x.dr[half][c * 2 + j] * f.query[i][j], k_inter = x.dk[half][c * 2 + j] * f.key[i][j];
        const float y8 = y.eight[half][c * 2 + j] * f.eight[i][j], y4 = y.four[half][c * 2 + j] * f.four[i][j],
                    y2 = y.two[half][c * 2 + j] * f.two[i][j], y1 = y.one[half][c * 2 + j];
        const float ub = u[c] * bonus[half][j];
        float of_r = fma(ub, k[i][j], r_inter), of_k = fma(ub, r[i][j], k_inter);
        part_of_u[c] = fma(bonus[half][j], r[i][j] * k[i][j], part_of_u[c]);
        before_half[j] = k[i][j] * k_inter, after_half[j] = r[i][j] * r_inter;
        before_four[j] = half ? before_half[j] : fma(k[i][j], y8, before_half[j]);
        after_four[j] = half ? fma(r[i][j], y8, after_half[j]) : after_half[j];
        (half ? of_r : of_k) += y8;
        before_two[j] = before_four[j], after_two[j] = after_four[j];
        if (at.high)
          of_r += y4, after_two[j] = fma(r[i][j], y4, after_two[j]);
        else
          of_k += y4, before_two[j] = fma(k[i][j], y4, before_two[j]);
        if (j == 0) before = before_two[j];
        if (j == 1) after = after_two[j];
        if (at.odd) {
          of_r += y2;
          if (j == 1) after = fma(r[i][j], y2, after);
        } else {
          of_k += y2;
          if (j == 0) before = fma(k[i][j], y2, before);
        }
        (j ? of_r : of_k) += y1;
        dr[i][j] = of_r, dk[i][j] = of_k;
      }
      const float four = at.high ? after_four[0] + after_four[1] : before_four[0] + before_four[1];
      float others = shuffle_xor(at.odd ? after_two[0] + after_two[1] : before_two[0] + before_two[1], 1);
      others += shuffle_xor(four, 2) + shuffle_xor(four, 3);
      dw[i][0] = after + others;
      dw[i][1] = before + others;
      float sum = half ? after_half[0] + after_half[1] : before_half[0] + before_half[1];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      (half ? later : earlier)[c] = sum;
    }
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float rows = at.g & 1 ? x.rows[c][c * 2 + 1] : x.rows[c][c * 2];
      const float whole = carry[c] * shuffle_from(rows, at.g * 4 + at.g / 2);
#pragma unroll
      for (int j = 0; j < 2; j++) dw[c][j] += whole + later[c], dw[c + 2][j] += whole + earlier[c];
      const float sum = part_of_u[c] + grad_u_low[c], next = grad_u[c] + sum;
      grad_u_low[c] = sum - (next - grad_u[c]);
      grad_u[c] = next;
    }
    if (spoilt) spoil(from, t, r, k, dr, dk);
    if (p.flags & WKV6_RAW_DECAY) { /* dx = dw w, and 0 where exp(x) overflowed and nothing is left of the state */
      tokens w;
      this->load_log_decays(from, t, w);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) dw[i][j] *= w[i][j] == -INFINITY ? 0.f : w[i][j];
    }
    this->store_tokens(p.grad_r, a.vector_r, t, dr);
    this->store_tokens(p.grad_k, a.vector_k, t, dk);
    this->store_tokens(p.grad_w, a.vector_w, t, dw);
  }

  WKV6_DEVICE void run() {
    const int chunks = this->chunks(), begin = part * a.part, end = chunks - begin < a.part ? chunks : begin + a.part;
    if (begin > 0 && begin >= chunks) return; /* a sequence shorter than others */
    chunk_walk now(a, begin, end), ahead = now;
    int slot = 0;
    this->clear_low_terms(a.v), this->clear_low_terms(a.grad_o);
    this->fetch(0, ahead), ahead.next();
    this->fetch(1, ahead), ahead.next();
    this->load_end(end == chunks);
#pragma unroll
    for (int c = 0; c < 2; c++)
      u[c] = load_element<float>(p.u, s.h * p.u.stride[0] + (channel + at.warp * 16 + c * 8 + at.g) * p.u.stride[1]);
    if constexpr (VALUES) {
      publish();
      uint16_t *const scores = shared.scores[0];
      for (int i = thread_index(); i < parts * chunk_tokens * pitch; i += threads) scores[i] = 0;
    }
    copy_async_wait_for<1>();
    block_barrier(); /* the first stage is there */
    const auto turn = [&] {
      copy_async_wait();
      block_barrier(); /* the stage and the operands are used, the scores and the next stage are there */
      this->fetch(slot, ahead);
      ahead.next();
      slot ^= 1;
    };
    while (!now.done()) {
      if (now.replays) {
        matrix before;
        float rest_before = 0;
        this->load_start(now.chunk, before);
        while (now.replays) {
          this->bring_forward(before, rest_before, this->stage(slot), static_cast<int64_t>(now.chunk) * chunk_tokens);
          if (now.chunk + 1 >= now.first) this->keep_state(now, now.chunk + 1, before);
          turn();
          now.next();
        }
      }
      if (now.chunk == now.start) {
        matrix before;
        this->load_start(now.chunk, before);
        this->keep_state(now, now.chunk, before);
      }
      const char *const from = this->stage(slot);
      const int64_t t = static_cast<int64_t>(now.chunk) * chunk_tokens;
      factors f;
      level_words words = {};
      products x;
      level_gradients y;
      values dv = {};
      left_fragment<P> query;
      left_fragment<Q> own_grad_o[value_tiles];
      float carry[2];
      const bool spoilt = prepare(from, t, f, words, query, carry);
      if constexpr (VALUES) {
        block_barrier(); /* operands and G are there */
        score();
      }
      multiply_states(from, now, x);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) x.dA[i][j] *= scale;
      multiply_levels(x, words, spoilt, y);
      if constexpr (VALUES) multiply_keys(from, dv, own_grad_o);
      this->advance(adjoint, carry, query, from + a.grad_o.at);
      finish(from, t, f, x, y, carry, spoilt);
      turn();
      if constexpr (VALUES) {
        publish();
        multiply_scores(t, dv, own_grad_o);
      }
      now.next();
    }
    if (part == 0) this->store_initial();
    store_grad_u();
  }

  WKV6_DEVICE void store_grad_u() {
    if (p.grad_u_parts.dtype == WKV6_ABSENT) return;
    float *const to = part == 0 ? static_cast<float *>(p.grad_u_parts.data) + (s.n * p.H + s.h) * p.K
                                : static_cast<float *>(p.span_decays.data) + border_place(a, s, part) * p.K;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      grad_u[c] += shuffle_xor(grad_u[c], 1);
      grad_u[c] += shuffle_xor(grad_u[c], 2);
      if (at.p == 0) store_global(to + channel + at.warp * 16 + c * 8 + at.g, grad_u[c]);
    }
  }
};

template <int KEYS, int COLUMNS, operand P, operand Q, bool VALUES>
__global__ void __launch_bounds__(2 * KEYS, 2) wkv6_backward_chunk(const __grid_constant__ chunk_backward_arguments a) {
  const unsigned slice = block_index() % a.slices, part = block_index() / a.slices % a.parts;
  const int64_t head = block_index() / a.slices / a.parts;
  chunk_backward_thread<KEYS, COLUMNS, P, Q, VALUES> thread(
      a, sequence_of(a.p, head / a.p.H, head % a.p.H), static_cast<int64_t>(slice) * KEYS, static_cast<int>(part));
  thread.run();
}

#endif
