/* SPDX-License-Identifier: Apache-2.0
 *
 * From a problem's tensors to tiles of tokens in shared memory, on the way into recurrent_forward.cuh and
 * recurrent_backward.cuh.
 *
 * A tile's rows come in two steps. fetch_rows brings them as the bytes they are, by cp.async where the layout allows,
 * while the tile before is computed on. convert_channel then reads one channel of them, as real numbers in the order of
 * time; one thread has a channel for a whole tile, so decay_factor can pass its rest along.
 */
#ifndef WKV6_TOKENS_CUH
#define WKV6_TOKENS_CUH

#include "elem.cuh"

/* The sequence and head of a block. Token t of the sequence, in the order in which it is read, is row origin + step * t
 * of batch row `batch`; `first` counts all tokens before the sequence, as wkv6_checkpoint() wants it. */
struct sequence {
  int64_t n, h, batch, origin, step, first, length;
};

WKV6_DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

WKV6_DEVICE sequence sequence_of(const wkv6_problem &p, int64_t n, int64_t h) {
  int64_t begin = 0, end = p.T;
  if (p.cu_seqlens) {
    begin = clamp(load_global(p.cu_seqlens + n), 0, p.T);
    end = clamp(load_global(p.cu_seqlens + n + 1), begin, p.T);
  }
  const bool reverse = p.flags & WKV6_REVERSE;
  return {n,
          h,
          p.cu_seqlens ? 0 : n,
          reverse ? end - 1 : begin,
          reverse ? -1 : 1,
          p.cu_seqlens ? begin : n * p.T,
          end - begin};
}

/* Offset of token t's row, and of a state's matrix. */
WKV6_DEVICE int64_t row_offset(const wkv6_tensor &x, const sequence &s, int64_t t) {
  return s.batch * x.stride[0] + (s.origin + s.step * t) * x.stride[1] + s.h * x.stride[2];
}
WKV6_DEVICE int64_t state_offset(const wkv6_tensor &x, const sequence &s, int64_t row, int64_t column) {
  return s.n * x.stride[0] + s.h * x.stride[1] + row * x.stride[2] + column * x.stride[3];
}

/* Start of checkpoint c >= 1 of the sequence, [K][V], its rows stride[2] apart. */
template <typename real> WKV6_DEVICE real *checkpoint(const wkv6_problem &p, const sequence &s, int64_t c) {
  const wkv6_tensor &x = p.checkpoints;
  return static_cast<real *>(x.data) + (s.first / p.segment + c - 1) * x.stride[0] + s.h * x.stride[1];
}

/* Where the rows of one tensor lie in shared memory, `pitch` bytes apart. `vector`: rows can be copied 16 bytes at a
 * time. */
struct raw_rows {
  int at, pitch;
  bool vector;
};

/* Whether a slice of `width` channels, of rows that have `all` and from a multiple of `width` on, can be copied 16
 * bytes at a time. */
inline bool copies_by_16(const wkv6_tensor &x, int64_t all, int width) {
  const int bytes = element_bytes(x.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[3] == 1;
  aligned = aligned && all * bytes % 16 == 0 && width * bytes % 16 == 0;
  for (int d = 0; d < 3; d++) aligned = aligned && x.stride[d] * bytes % 16 == 0;
  return aligned;
}

/* Room for `tile` rows of such a slice from `at` on; returns where the next may start. */
inline int raw_layout(raw_rows &raw, const wkv6_tensor &x, int64_t all, int width, int tile, int at) {
  raw.at = at;
  raw.pitch = x.dtype == WKV6_ABSENT ? 0 : (width * element_bytes(x.dtype) + 15) / 16 * 16;
  raw.vector = x.dtype != WKV6_ABSENT && copies_by_16(x, all, width);
  return at + tile * raw.pitch;
}

template <typename word>
WKV6_DEVICE void fetch_words(const wkv6_tensor &x, const raw_rows &raw, const sequence &s, int64_t t, int count,
                             int64_t channel, int width) {
  for (int i = thread_index(); i < count * width; i += block_threads()) {
    const int row = i / width, c = i % width;
    const int64_t from = row_offset(x, s, t + row) + (channel + c) * x.stride[3];
    reinterpret_cast<word *>(shared_memory() + raw.at + row * raw.pitch)[c] =
        load_global(static_cast<const word *>(x.data) + from);
  }
}

/* All threads: brings `width` channels from `channel` on of the tokens t .. t + count - 1. To be followed by
 * copy_async_commit, and used after copy_async_wait and a barrier. */
WKV6_DEVICE void fetch_rows(const wkv6_tensor &x, const raw_rows &raw, const sequence &s, int64_t t, int count,
                            int64_t channel, int width) {
  if (x.dtype == WKV6_ABSENT) return;
  const int bytes = element_bytes(x.dtype);
  if (raw.vector) {
    const int pieces = width * bytes / 16;
    for (int i = thread_index(); i < count * pieces; i += block_threads()) {
      const int row = i / pieces, piece = i % pieces;
      const char *from = static_cast<const char *>(x.data) + (row_offset(x, s, t + row) + channel) * bytes;
      copy_async_16(shared_memory() + raw.at + row * raw.pitch + piece * 16, from + piece * 16);
    }
  } else if (bytes == 2) {
    fetch_words<uint16_t>(x, raw, s, t, count, channel, width);
  } else if (bytes == 4) {
    fetch_words<uint32_t>(x, raw, s, t, count, channel, width);
  } else {
    fetch_words<uint64_t>(x, raw, s, t, count, channel, width);
  }
}

/* Calls use(t, x) with channel c of the tokens 0 .. count - 1, in descending order if `descending`; x is 0 where the
 * tensor is absent or has no such channel. */
template <typename real, typename function>
WKV6_DEVICE void convert_channel(const wkv6_tensor &x, const raw_rows &raw, int c, int width, int count,
                                 bool descending, function use) {
  if (x.dtype == WKV6_ABSENT || c >= width) {
    for (int t = 0; t < count; t++) use(t, real(0));
    return;
  }
  const char *const base = shared_memory() + raw.at;
  with_element<real>(x.dtype, [&](auto type) {
    for (int i = 0; i < count; i++) {
      const int t = descending ? count - 1 - i : i;
      use(t, real_of<decltype(type), real>(reinterpret_cast<const decltype(type) *>(base + t * raw.pitch)[c]));
    }
  });
}

/* All threads: puts value(i, c) into column `column + c` of token t + i, for i < count and c < width. A multiple of
 * `columns` threads, of which each has one column. */
template <typename real, typename function>
WKV6_DEVICE void store_rows(const wkv6_tensor &to, const sequence &s, int64_t t, int count, int64_t column, int columns,
                            int width, function value) {
  const int c = thread_index() % columns, together = block_threads() / columns;
  if (to.dtype == WKV6_ABSENT || c >= width) return;
  const int64_t step = s.step * to.stride[1], at = row_offset(to, s, t) + (column + c) * to.stride[3];
  with_element<real>(to.dtype, [&](auto type) {
    auto *const first = static_cast<decltype(type) *>(to.data) + at;
    for (int i = thread_index() / columns; i < count; i += together) {
      round_element(value(i, c), type);
      store_global(first + i * step, type);
    }
  });
}

/* exp(w) times (1 + rest), and in rest what rounding lost, for the channel's next token.
 *
 * The same rounding error of exp(w) at each token would be a systematic one: 5e-5 after 8192 tokens at w = -1e-4. With
 * the rest passed on, the product over any range of tokens is that of exp(w) within two roundings. expm1 has the digits
 * of exp(w) that a real has not. Strong decays forget before errors add up: they leave no rest. */
template <typename real> WKV6_DEVICE real decay_factor(real w, real &rest) {
  if (!(w > real(-0.7) && w < real(0.4))) {
    rest = 0;
    return exp(w);
  }
  const real m = expm1(w), y = fma(m, rest, m + rest), d = 1 + y;
  rest = (y - (d - 1)) * (1 - y); /* the difference is exact; 1 - y for 1 / d: the rest needs few digits */
  return d;
}

/* The log decay: w itself, or -exp(x) of RWKV's raw x. */
template <typename real> WKV6_DEVICE real log_decay(real w, const wkv6_problem &p) {
  return p.flags & WKV6_RAW_DECAY ? -exp(w) : w;
}

#endif
