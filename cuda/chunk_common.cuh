/* SPDX-License-Identifier: Apache-2.0
 *
 * What chunk_forward.cuh and chunk_backward.cuh share. A chunk is 16 tokens, a block of channels is 16 of them.
 *
 * The T layout is that of everything done element by element: of a 16 x 16 tile of channels and tokens, lane 4 g + p
 * has channels g and g + 8 and of each the tokens 2p, 2p + 1 and 2p + 8, 2p + 9, as x[half * 2 + c][j] for channel
 * g + 8 c and token 8 half + 2p + j. It is what a transposed ldmatrix makes of rows of tokens, it is the fragment of a
 * [channel x token] left operand, and that of a [channel x token] product.
 *
 * Dyadic levels h = 8, 4, 2, 1: for a block of 2 h tokens with its middle m, token t of the right half has the factor
 * P(m..t-1), token s of the left half P(s+1..m-1). Their product is the P(s+1..t-1) of equation (9), each factor is at
 * most 1, and one operand a level holds r times the one in right tokens and k times the other in left tokens (I1).
 */
#ifndef WKV6_CHUNK_COMMON_CUH
#define WKV6_CHUNK_COMMON_CUH

#include "matrix.cuh"
#include "tokens.cuh"

constexpr int chunk_tokens = 16, channels_of_block = 16;
constexpr float log2_of_e = 1.4426950408889634f;

/* What an operand of a product is made of.
 * bf16: 8 significant bits, precision="fast". tf32: 11 bits, two products of half the depth; what "default" is for
 * inputs of 16 bits, which it holds exactly. split: a bfloat16 and the bfloat16 of what it leaves out, 16 bits, three
 * products; "exact". */
enum class operand { bf16, tf32, split };

template <operand P> constexpr int parts_of = P == operand::bf16 ? 1 : 2;
/* Bytes of a 16 x 16 tile of an operand in shared memory. */
template <operand P> constexpr int tile_bytes = parts_of<P> * 512;

/* A fragment in registers, made of pairs of numbers that are neighbours along the dimension that the product sums over:
 * left: pair half * 2 + c: row g + 8 c, columns 8 half + 2p, + 1; right: pair half: rows 8 half + 2p, + 1, column g.
 * In tf32, part `half` is an operand of its own, 2p and 2p + 1 its columns p and p + 4 (the order does not matter to a
 * sum). */
template <operand P, int WORDS> struct fragment {
  uint32_t part[parts_of<P>][WORDS];
};
template <operand P> using left_fragment = fragment<P, 4>;
template <operand P> using right_fragment = fragment<P, 2>;

template <operand P, int WORDS> WKV6_DEVICE void put_pair(fragment<P, WORDS> &x, int pair, float low, float high) {
  if constexpr (P == operand::tf32) {
    const int half = WORDS == 4 ? pair / 2 : pair, c = WORDS == 4 ? pair % 2 : 0;
    x.part[half][c] = tf32_of(low);
    x.part[half][c + WORDS / 2] = tf32_of(high);
  } else {
    const uint32_t word = pack_bf16(low, high);
    x.part[0][pair] = word;
    if constexpr (P == operand::split) x.part[1][pair] = pack_bf16(low - low_float(word), high - high_float(word));
  }
}

/* A left operand from a tile in the T layout. */
template <operand P> WKV6_DEVICE void put_tile(left_fragment<P> &x, const float (&tile)[4][2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) put_pair(x, i, tile[i][0], tile[i][1]);
}

/* Rows 8 c to 8 c + 7 of a left operand as the columns of a right one. */
template <operand P> WKV6_DEVICE right_fragment<P> columns_of(const left_fragment<P> &x, int c) {
  right_fragment<P> y;
#pragma unroll
  for (int part = 0; part < parts_of<P>; part++)
    y.part[part][0] = x.part[part][c], y.part[part][1] = x.part[part][c + 2];
  return y;
}

/* d += a b. Of split operands the product of the two small parts is left out. An operand that is bfloat16 as it is can
 * meet a split one. */
template <operand A, operand B>
WKV6_DEVICE void multiply(float (&d)[4], const left_fragment<A> &a, const right_fragment<B> &b) {
  static_assert(A == B || (A != operand::tf32 && B != operand::tf32), "tf32 goes with tf32");
  if constexpr (A == operand::tf32) {
    multiply_tf32(d, a.part[0], b.part[0]);
    multiply_tf32(d, a.part[1], b.part[1]);
  } else {
    multiply_matrices(d, a.part[0], b.part[0]);
    if constexpr (B == operand::split) multiply_matrices(d, a.part[0], b.part[1]);
    if constexpr (A == operand::split) multiply_matrices(d, a.part[1], b.part[0]);
  }
}

/* A thread's place. */
struct chunk_lane {
  const int lane = static_cast<int>(thread_index() % warp_size), warp = warp_index();
  const int g = lane / 4, p = lane % 4;
  const bool odd = p & 1, high = p >> 1; /* of the four pairs of a half, which is this lane's */
};

/* ---- Tiles of operands in shared memory ----
 *
 * A warp writes a tile in the T layout; later all warps read it as an operand, without bank conflicts either way. bf16
 * and each part of split: rows of channels, 16 tokens each, the halves exchanged in some rows. tf32: a lane's numbers
 * lie next to each other, in different order for the two ways of reading: there are store_rows and store_columns.
 *
 * Reading goes over the channels of a block in the order 0, 8, 1, 9, 2, 10, ... : columns 2p and 2p + 1 of group n of
 * eight are channels 4 n + p and 4 n + p + 8. */
WKV6_DEVICE int channel_row_at(int channel, int half) {
  return channel * 32 + (half ^ ((channel >> 2 ^ channel >> 3) & 1)) * 16;
}
WKV6_DEVICE constexpr int permuted_channel(int column) { return column / 8 * 4 + column % 8 / 2 + column % 2 * 8; }

struct tile_places {
  int words, rows, units[2], lines[2]; /* words, units of tf32 rows: to write; rows, lines: to read */
  int column_units[2], column_lines[2];
  WKV6_DEVICE explicit tile_places(const chunk_lane &at) {
    const auto unit = [](int x, int t) { return (x * 8 + (t ^ ((x & 1) | (x & 3) << 1))) * 16; };
    const auto column_unit = [](int x, int c, int p) { return ((x * 2 + (c ^ (x & 1))) * 4 + p) * 16; };
    words = keep(channel_row_at(at.g, 0) + at.p * 4);
    rows = keep(channel_row_at(permuted_channel(at.lane / 16 * 8 + at.lane % 8), at.lane / 8 % 2));
    for (int j = 0; j < 2; j++) {
      units[j] = keep(unit(at.g, 2 * at.p + j));
      lines[j] = keep(unit(4 * j + at.p, at.g));
      column_units[j] = keep(column_unit(at.g, j, at.p));
      column_lines[j] = keep(column_unit(4 * j + at.g / 2, at.g % 2, at.p));
    }
  }
};

/* Rows of channels in bfloat16: channel + 8 exchanges the halves. */
template <operand P>
WKV6_DEVICE void store_channel_rows(char *tile, const tile_places &places, const left_fragment<P> &x) {
#pragma unroll
  for (int part = 0; part < parts_of<P>; part++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      store_words<1>(tile + part * 512 + (places.words ^ (i / 2 ^ i % 2) * 16) + i % 2 * 256, &x.part[part][i]);
}

/* To be read as [token x channel] left operands. */
template <operand P> WKV6_DEVICE void store_rows(char *tile, const tile_places &places, const left_fragment<P> &x) {
  if constexpr (P == operand::tf32) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint32_t unit[4] = {x.part[0][2 * j], x.part[1][2 * j], x.part[0][2 * j + 1], x.part[1][2 * j + 1]};
      store_words<4>(tile + places.units[j], unit);
    }
  } else {
    store_channel_rows(tile, places, x);
  }
}
template <operand P> WKV6_DEVICE void load_rows(left_fragment<P> &x, const char *tile, const tile_places &places) {
#pragma unroll
  for (int part = 0; part < parts_of<P>; part++)
    if constexpr (P == operand::tf32)
      load_words<4>(tile + places.lines[part], x.part[part]);
    else
      load_matrices_transposed(x.part[part], tile + part * 512 + places.rows);
}

/* To be read as [token x channel] right operands, eight channels each. */
template <operand P> WKV6_DEVICE void store_columns(char *tile, const tile_places &places, const left_fragment<P> &x) {
  if constexpr (P == operand::tf32) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint32_t unit[4] = {x.part[0][c], x.part[0][c + 2], x.part[1][c], x.part[1][c + 2]};
      store_words<4>(tile + places.column_units[c], unit);
    }
  } else {
    store_channel_rows(tile, places, x);
  }
}
template <operand P>
WKV6_DEVICE void load_columns(right_fragment<P> (&x)[2], const char *tile, const tile_places &places) {
#pragma unroll
  for (int i = 0; i < parts_of<P>; i++) {
    uint32_t y[4];
    if constexpr (P == operand::tf32) {
      load_words<4>(tile + places.column_lines[i], y);
      x[i].part[0][0] = y[0], x[i].part[0][1] = y[1], x[i].part[1][0] = y[2], x[i].part[1][1] = y[3];
    } else {
      load_matrices(y, tile + i * 512 + places.rows);
      x[0].part[i][0] = y[0], x[0].part[i][1] = y[1], x[1].part[i][0] = y[2], x[1].part[i][1] = y[3];
    }
  }
}

/* ---- Values that are not finite ---- */

/* True where some of a fragment's numbers are not. */
template <operand P, int WORDS> WKV6_DEVICE bool not_finite(const fragment<P, WORDS> &x) {
  if constexpr (P == operand::tf32) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) sum = fma(float_of_bits(x.part[i / WORDS][i % WORDS]), 0.f, sum);
    return sum != 0;
  } else {
    uint32_t bad = 0; /* bits 15 and 31: an exponent of ones has carried into them */
#pragma unroll
    for (int i = 0; i < WORDS; i++) bad |= (x.part[0][i] & 0x7f807f80) + 0x00800080;
    return bad & 0x80008000;
  }
}

/* d[c] += a b[c] over the tokens up to a row's own, or with FROM_ROW from it on, one token at a time: what lies on the
 * other side of the diagonal is selected away, because 0 * NaN is not 0 (I4). */
template <bool FROM_ROW, operand P>
WKV6_DEVICE void multiply_selected(float (&d)[2][4], const left_fragment<P> &a, const right_fragment<P> (&b)[2],
                                   const chunk_lane &at) {
#pragma unroll 1
  for (int t = 0; t < chunk_tokens; t++) {
    /* What to keep of a fragment's first and second word; in tf32 of the first and second part. */
    const uint32_t half = P == operand::tf32 ? ~0u : t % 2 ? 0xffff0000 : 0xffff, mine = t % 8 / 2 == at.p ? half : 0;
    const uint32_t kept[2] = {t < 8 ? mine : 0, t < 8 ? 0 : mine};
#pragma unroll
    for (int c = 0; c < 2; c++) {
      right_fragment<P> one = b[c];
#pragma unroll
      for (int part = 0; part < parts_of<P>; part++)
#pragma unroll
        for (int i = 0; i < 2; i++) one.part[part][i] &= P == operand::tf32 ? (t % 2 == i ? kept[part] : 0) : kept[i];
      float x[4] = {0, 0, 0, 0};
      multiply(x, a, one);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = at.g + i / 2 * 8;
        if (FROM_ROW ? t >= row : t <= row) d[c][i] += x[i];
      }
    }
  }
}

/* ---- Decays ---- */

/* Of one channel and one half of the chunk: what the dyadic tree makes of exp(w) of a pair of tokens. */
struct half_factors {
  float of[2];  /* exp(w) of the pair */
  float r4, k4; /* what the other pair of its group of four adds to a right or a left role of level 4 */
  float r8, k8; /* the same for level 8 */
  float all;    /* P over the half */

  WKV6_DEVICE void scan(const chunk_lane &at) {
    const float pair = of[0] * of[1], sibling = shuffle_xor(pair, 1);
    const float group = pair * sibling, cousin = shuffle_xor(group, 2);
    all = group * cousin;
    r4 = at.odd ? sibling : 1.f;
    k4 = at.odd ? 1.f : sibling;
    r8 = at.high ? r4 * cousin : r4;
    k8 = at.high ? k4 : k4 * cousin;
  }
};

/* exp(w) - 1, for w <= 0 within some 2e-7 of it. */
WKV6_DEVICE float expm1_of_decay(float w) {
  const float far = exp2_approx(w * log2_of_e) - 1;
  float y = fma(w, 1.f / 720, 1.f / 120);
  y = fma(w, y, 1.f / 24);
  y = fma(w, y, 1.f / 6);
  y = fma(w, y, 0.5f);
  y = fma(w, y, 1.f);
  return w > -0.35f && w < 0.35f ? w * y : far;
}

/* The decay of a whole chunk, from the sum of its w, with what rounding loses carried on in `rest` as decay_factor()
 * does for one token (I2). */
WKV6_DEVICE float chunk_decay(float sum, float &rest) {
  const float m = expm1_of_decay(sum), y = fma(m, rest, m + rest), d = 1 + y;
  const bool weak = sum > -0.7f && sum < 0.35f;
  rest = weak ? (y - (d - 1)) * (1 - y) : 0.f; /* the difference is exact; 1 - y for 1 / d: the rest needs few digits */
  return weak ? d : exp2_approx(sum * log2_of_e);
}

/* Log decays from RWKV's raw x, of the first `left` tokens: what follows them, zeros, decays nothing. */
WKV6_DEVICE void log_of_raw(float (&w)[4][2], int left, const chunk_lane &at) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float y = -exp2_approx(w[i][j] * log2_of_e);
      w[i][j] = i / 2 * 8 + at.p * 2 + j < left ? y : 0.f;
    }
}

/* A tile's factors; returns, in lanes of even p for channel g and in those of odd p for channel g + 8, the sum of w
 * over the chunk. */
WKV6_DEVICE float factors_of(half_factors (&f)[4], const float (&w)[4][2], const chunk_lane &at) {
  float sums[2];
#pragma unroll
  for (int c = 0; c < 2; c++) sums[c] = (w[c][0] + w[c][1]) + (w[c + 2][0] + w[c + 2][1]);
  float sum = (at.odd ? sums[1] : sums[0]) + shuffle_xor(at.odd ? sums[0] : sums[1], 1);
  sum += shuffle_xor(sum, 2);
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int j = 0; j < 2; j++) f[i].of[j] = exp2_approx(w[i][j] * log2_of_e);
    f[i].scan(at);
  }
  return sum;
}

/* Sums over the channels of a tile: of bonus[half][j], for token 8 half + 2p + j, and of before[half], for the pair's
 * second token. Lane g = half + 2 j receives that of bonus[half][j], lanes g = 4 + half and 6 + half that of
 * before[half]. */
WKV6_DEVICE float sum_near(const float (&bonus)[2][2], const float (&before)[2], const chunk_lane &at) {
  const bool half = at.g & 1, second = at.g & 2, third = at.g & 4;
  float first = half ? bonus[1][0] : bonus[0][0], last = half ? bonus[1][1] : bonus[0][1];
  float other = half ? before[1] : before[0];
  first += shuffle_xor(half ? bonus[0][0] : bonus[1][0], 4);
  last += shuffle_xor(half ? bonus[0][1] : bonus[1][1], 4);
  other += shuffle_xor(half ? before[0] : before[1], 4);
  const float of_bonus = (second ? last : first) + shuffle_xor(second ? first : last, 8);
  other += shuffle_xor(other, 8);
  return (third ? other : of_bonus) + shuffle_xor(third ? of_bonus : other, 16);
}

#endif
