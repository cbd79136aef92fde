/* SPDX-License-Identifier: Apache-2.0
 *
 * Chunks of tokens on their way between global memory and the T layout of chunk_common.cuh.
 *
 * A stage holds the 16 rows of one chunk of each input, as the bytes they are: by cp.async where a tensor's layout
 * allows 16 bytes at a time, element by element elsewhere. Dtypes are looked at here, so that any mix of them costs no
 * instance. Rows beyond the sequence are zeros (and so are their decays' logarithms): they change nothing.
 */
#ifndef WKV6_CHUNK_STAGE_CUH
#define WKV6_CHUNK_STAGE_CUH

#include "chunk_common.cuh"

/* One input in a stage. */
struct stage_rows {
  int at;           /* bytes from the start of a stage */
  int dtype;        /* as in memory and in shared memory */
  bool vector;      /* rows can be copied 16 bytes at a time */
  int64_t row_step; /* bytes from one token to the next in the order in which they are read */
};

inline int stage_layout(stage_rows &rows, const wkv6_tensor &x, bool reverse, int64_t all, int width, int at) {
  const int bytes = element_bytes(x.dtype);
  rows = {at, x.dtype, copies_by_16(x, all, width), x.stride[1] * bytes * (reverse ? -1 : 1)};
  return at + chunk_tokens * width * bytes;
}

/* Byte of a channel in a stage's rows of WIDTH channels, 16-byte pieces (of 16-bit numbers) or groups of eight channels
 * (of floats) exchanged so that neither ldmatrix nor the T layout's reads have bank conflicts. */
template <int WIDTH> WKV6_DEVICE int short_at(int t, int channel) {
  const int swizzle = WIDTH == 32 ? t >> 1 & 3 : t & 7;
  return (t * WIDTH + ((channel >> 3 ^ swizzle) << 3) + (channel & 7)) * 2;
}
template <int WIDTH> WKV6_DEVICE int float_at(int t, int channel) {
  return (t * WIDTH + ((channel >> 3 ^ (t >> 1 & 3)) << 3) + (channel & 7)) * 4;
}

/* Brings `width` of WIDTH channels of the chunk whose first token's row begins at `from`; the first `count` rows exist.
 * All threads, WIDTH / 8 of them a row. To be followed by copy_async_commit. */
template <int WIDTH, int THREADS>
WKV6_DEVICE void fetch_chunk(char *stage, const stage_rows &rows, const char *from, int64_t channel_step, int count,
                             int width) {
  char *const to = stage + rows.at;
  const bool wide = rows.dtype == WKV6_F32;
  if (rows.vector) {
    constexpr int pieces = WIDTH / 8, at_once = THREADS / pieces < chunk_tokens ? THREADS / pieces : chunk_tokens;
    const int piece = static_cast<int>(thread_index()) % pieces, first = static_cast<int>(thread_index()) / pieces;
#pragma unroll
    for (int i = 0; i < chunk_tokens; i += at_once) {
      const int t = first + i;
      if (at_once * pieces < THREADS && first >= at_once) break;
      const char *const row = from + t * rows.row_step;
      const bool exists = t < count;
      if (wide) {
        copy_async_16_or_zero(to + float_at<WIDTH>(t, piece * 4), row + piece * 16, exists && piece * 4 < width);
        copy_async_16_or_zero(to + float_at<WIDTH>(t, piece * 4 + WIDTH / 2),
                              row + piece * 16 + WIDTH * 2,
                              exists && piece * 4 + WIDTH / 2 < width);
      } else {
        copy_async_16_or_zero(to + short_at<WIDTH>(t, piece * 8), row + piece * 16, exists && piece * 8 < width);
      }
    }
    return;
  }
#pragma unroll 1
  for (int i = static_cast<int>(thread_index()); i < chunk_tokens * WIDTH; i += THREADS) {
    const int t = i / WIDTH, c = i % WIDTH;
    const char *const element = from + t * rows.row_step + c * channel_step;
    const bool exists = t < count && c < width;
    if (wide)
      *reinterpret_cast<float *>(to + float_at<WIDTH>(t, c)) =
          exists ? load_global(reinterpret_cast<const float *>(element)) : 0.f;
    else
      *reinterpret_cast<uint16_t *>(to + short_at<WIDTH>(t, c)) =
          exists ? load_global(reinterpret_cast<const uint16_t *>(element)) : uint16_t(0);
  }
}

/* Where a lane reads tiles: by ldmatrix, and as floats. */
template <int WIDTH> struct stage_places {
  int shorts, floats;
  WKV6_DEVICE explicit stage_places(const chunk_lane &at) {
    shorts = keep(short_at<WIDTH>(at.lane % 8 + at.lane / 16 * 8, at.lane / 8 % 2 * 8));
    floats = keep(float_at<WIDTH>(at.p * 2, at.g));
  }
};

/* The pairs of a tile of 16-bit numbers in the T layout: channels 16 block .. 16 block + 15. */
template <int WIDTH>
WKV6_DEVICE void load_pairs(uint32_t (&pairs)[4], const char *stage, const stage_rows &rows,
                            const stage_places<WIDTH> &places, int block) {
  load_matrices_transposed(pairs, stage + rows.at + (places.shorts ^ block * 32));
}

template <int WIDTH>
WKV6_DEVICE void load_tile(float (&x)[4][2], const char *stage, const stage_rows &rows,
                           const stage_places<WIDTH> &places, int block) {
  if (rows.dtype == WKV6_F32) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint32_t bits;
        load_words<1>(stage + rows.at + (places.floats ^ (block * 2 + i % 2) * 32) + (i / 2 * 8 + j) * WIDTH * 4,
                      &bits);
        x[i][j] = float_of_bits(bits);
      }
    return;
  }
  uint32_t pairs[4];
  load_pairs<WIDTH>(pairs, stage, rows, places, block);
  const bool half = rows.dtype == WKV6_F16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[i][0] = half ? low_half(pairs[i]) : low_float(pairs[i]);
    x[i][1] = half ? high_half(pairs[i]) : high_float(pairs[i]);
  }
}

/* A tile as a [channel x token] left operand. */
template <operand P, int WIDTH>
WKV6_DEVICE void load_operand(left_fragment<P> &x, const char *stage, const stage_rows &rows,
                              const stage_places<WIDTH> &places, int block) {
  if (P == operand::bf16 && rows.dtype == WKV6_BF16) {
    load_pairs<WIDTH>(x.part[0], stage, rows, places, block);
  } else {
    float tile[4][2];
    load_tile<WIDTH>(tile, stage, rows, places, block);
    put_tile(x, tile);
  }
}

/* ---- Results ---- */

/* Rows of a result: `vector` where its channels are neighbours and pieces of 8 bytes are aligned. */
struct result_rows {
  int dtype;
  bool vector;
  int64_t row_step, channel_step; /* bytes; row_step in the order in which tokens are read */
};

inline result_rows result_layout(const wkv6_tensor &x, bool reverse) {
  const int bytes = element_bytes(x.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(x.data) % 8 == 0 && x.stride[3] == 1;
  for (int d = 0; d < 3; d++) aligned = aligned && x.stride[d] * bytes % 8 == 0;
  return {x.dtype, aligned, x.stride[1] * bytes * (reverse ? -1 : 1), x.stride[3] * bytes};
}

/* Stores one row of 16 columns, of which the lane has 2p, 2p + 1 and 8 + 2p, 9 + 2p: x[0..3]. Of 16-bit results lane
 * pairs exchange words, so that each has four columns side by side: whole sectors of 32 bytes are written. `row` is
 * that of the lane; all lanes of the warp come here. */
WKV6_DEVICE void store_row(char *row, const result_rows &to, bool exists, const float (&x)[4], const chunk_lane &at) {
  if (!to.vector) {
    if (!exists) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      char *const element = row + (i / 2 * 8 + at.p * 2 + i % 2) * to.channel_step;
      with_element<float>(to.dtype, [&](auto type) {
        round_element(x[i], type);
        store_global(reinterpret_cast<decltype(type) *>(element), type);
      });
    }
    return;
  }
  if (to.dtype == WKV6_F32) {
    if (!exists) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t words[2] = {bits_of(x[2 * i]), bits_of(x[2 * i + 1])};
      store_global_words<2>(row + (i * 8 + at.p * 2) * 4, words);
    }
    return;
  }
  const bool half = to.dtype == WKV6_F16;
  const uint32_t low = half ? pack_f16(x[0], x[1]) : pack_bf16(x[0], x[1]);
  const uint32_t high = half ? pack_f16(x[2], x[3]) : pack_bf16(x[2], x[3]);
  const uint32_t other = shuffle_xor(at.odd ? low : high, 1);
  const uint32_t words[2] = {at.odd ? other : low, at.odd ? high : other};
  if (exists) store_global_words<2>(row + (at.odd * 8 + at.high * 4) * 2, words);
}

#endif
