/* SPDX-License-Identifier: Apache-2.0
 *
 * What chunk_backward.cuh reads and in which order: the arguments of the kernel, the rows of a chunk on their way into
 * shared memory, and the walk over a sequence's chunks.
 */
#ifndef WKV6_CHUNK_BACKWARD_STAGE_CUH
#define WKV6_CHUNK_BACKWARD_STAGE_CUH

#include "chunk_common.cuh"

/* [row][column] of WIDTH bfloat16, in pieces of 8 that are exchanged within a row, so that ldmatrix of eight rows meets
 * all banks. A multiple of 16 columns on is an exclusive or away. */
template <int WIDTH> WKV6_DEVICE int row_at(int row, int column) {
  const int exchange = WIDTH == 32 ? row >> 1 & 3 : row & 7;
  return row * WIDTH + ((column >> 3 ^ exchange) << 3) + (column & 7);
}
/* The same of float, exchanged so that the T layout meets all banks. */
template <int WIDTH> WKV6_DEVICE int wide_row_at(int row, int column) {
  return row * WIDTH + ((column >> 3 ^ (row >> 1 & 3)) << 3) + (column & 7);
}
/* [channel][token] of bfloat16, the halves exchanged so that words of the T layout and ldmatrix meet all banks. */
WKV6_DEVICE int operand_at(int channel, int half) {
  return channel * chunk_tokens + ((half ^ (channel >> 2 & 1)) << 3);
}

/* Words 2 j, 2 j + 1 of a matrix that ldmatrix has transposed, as the right operand of its eight columns from 8 j on.
 */
template <operand P> WKV6_DEVICE right_fragment<P> halves_of(const left_fragment<P> &x, int j) {
  right_fragment<P> y;
#pragma unroll
  for (int n = 0; n < parts_of<P>; n++) y.part[n][0] = x.part[n][j * 2], y.part[n][1] = x.part[n][j * 2 + 1];
  return y;
}

/* How the rows of one tensor lie in a stage, and how they get there. */
struct chunk_rows {
  int at;    /* bytes from the stage's start: a tile of bfloat16, of two where an operand has two terms, or of float */
  bool wide; /* of float; r, k and w that are not bfloat16 */
  bool direct; /* by cp.async as they are; otherwise element by element, converted */
};

struct chunk_backward_arguments {
  wkv6_problem p;
  chunk_rows r, k, w, v, grad_o;
  int stage_bytes;
  int stages, states; /* in shared memory: two stages, then the states before a span's chunks */
  int segment;        /* chunks from one checkpoint to the next */
  int span;           /* chunks whose states are made again at a time */
  int first_state;    /* 1 if a span is a segment, whose first state is the checkpoint itself; else 0 */
  int slices;         /* blocks a head, sharing it by key channels */
  int parts, part;    /* blocks a sequence, and how many chunks each has: a multiple of `segment` */
  bool vector_r, vector_k, vector_w, vector_v; /* rows of the gradients can be written 8 bytes at a time */
  bool vector_states[3]; /* initial_state, grad_final_state, grad_initial_state: rows of neighbouring floats */
};

/* Where p.span_adjoints (times K V) and p.span_decays (times K) have what belongs to the border before part `part` >=
 * 1: the place of the checkpoint there. */
WKV6_DEVICE int64_t border_place(const chunk_backward_arguments &a, const sequence &s, int64_t part) {
  return (s.first / a.p.segment + part * (a.part / a.segment) - 1) * a.p.H + s.h;
}

/* The chunks of one part in the order in which they are met: spans from the last to the first. Of each, the chunks from
 * the segment's start to the span's last but one forwards, to make the states again (k, v and w are read), then the
 * span's own backwards. */
struct chunk_walk {
  int chunk, start, first, last; /* start: of the segment; first, last: of the span */
  bool replays;
  int segment, span, end;

  WKV6_DEVICE chunk_walk(const chunk_backward_arguments &a, int from, int to)
      : segment(a.segment), span(a.span), end(from) {
    enter(to - 1);
  }
  WKV6_DEVICE void enter(int last_chunk) {
    start = last_chunk / segment * segment;
    last = last_chunk;
    first = start + (last - start) / span * span;
    replays = start < last;
    chunk = replays ? start : last;
  }
  WKV6_DEVICE bool done() const { return chunk < end; }
  WKV6_DEVICE void next() {
    if (replays)
      replays = ++chunk < last;
    else if (--chunk < first && chunk >= end)
      enter(chunk);
  }
};

/* Channels [channel, channel + WIDTH) of a chunk's rows, tokens `t` on. Rows beyond the sequence's end, and of an
 * absent tensor, are zeros. */
template <int WIDTH, int THREADS, operand P>
WKV6_DEVICE void fetch_chunk(const wkv6_tensor &x, const chunk_rows &rows, char *stage, const sequence &s, int64_t t,
                             int64_t channel) {
  constexpr int pieces = WIDTH / 8;
#pragma unroll
  for (int i = thread_index(); i < chunk_tokens * pieces; i += THREADS) {
    const int row = i / pieces, column = i % pieces * 8;
    const bool valid = x.dtype != WKV6_ABSENT && t + row < s.length;
    const int64_t from = row_offset(x, s, t + row) + (channel + column) * x.stride[3];
    char *const narrow = stage + rows.at + row_at<WIDTH>(row, column) * 2, *const wide =
                                                                               stage + rows.at +
                                                                               wide_row_at<WIDTH>(row, column) * 4;
    if (rows.direct && !rows.wide) {
      copy_async_16_or_zero(narrow, static_cast<const bf16 *>(x.data) + from, valid);
    } else if (rows.direct) {
      copy_async_16_or_zero(wide, static_cast<const float *>(x.data) + from, valid);
      copy_async_16_or_zero(wide + 16, static_cast<const float *>(x.data) + from + 4, valid);
    } else {
      float y[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      if (valid)
#pragma unroll
        for (int j = 0; j < 8; j++) y[j] = load_element<float>(x, from + j * x.stride[3]);
      if (rows.wide) {
        uint32_t bits[8];
#pragma unroll
        for (int j = 0; j < 8; j++) bits[j] = bits_of(y[j]);
        store_words<4>(wide, bits);
        store_words<4>(wide + 16, bits + 4);
      } else {
        left_fragment<P> words;
#pragma unroll
        for (int j = 0; j < 4; j++) put_pair(words, j, y[2 * j], y[2 * j + 1]);
#pragma unroll
        for (int n = 0; n < parts_of<P>; n++) store_words<4>(narrow + n * chunk_tokens * WIDTH * 2, words.part[n]);
      }
    }
  }
}

#endif
