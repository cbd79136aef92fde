/* SPDX-License-Identifier: Apache-2.0
 *
 * Forward pass, recurrent form: equations (1) and (2) of docs/wkv6.md, token by token, three operations an element of the state.
 *
 * The state never moves: a tile of TILE_ROWS x 2 vectors of it stays in registers for a whole block of tokens, so what is loaded a
 * token is a few numbers of r, k, v, d and the partial o. Lanes run over V and the rows i are summed in order, so o does not depend on
 * the vector length, the tiling or the number of threads, except for the one sum r.(u k).
 * Loops: blocks of tokens, then the heads, then tiles. The tokens' rows lie H * K apart in memory: all heads of a few tokens touch fewer pages
 * than all tokens of one head.
 */
#define TILE_ROWS 4

/* Tokens that a tile is walked through at a time: what one column of tiles reads then fits the first-level cache. */
#define FORWARD_BLOCK 32

/* A block of tokens of one head as contiguous reals; K_ and V_ are K and V rounded up to whole vectors. */
typedef struct {
  int64_t K_, V_;
  real *r, *k, *d; /* [tokens][K_] scale * r, k and the decay factors; r's and k's padding is 0 */
  real *w, *u;     /* [tokens][K_], [K_] */
  real *v, *o;     /* [tokens][V_] */
  real *rest;      /* [heads][K_] see wkv6_decay.inc.h */
  real *state;     /* [heads][K][V_] */
} forward_block;

INLINE int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* Hands out `count` reals of scratch, keeping every array 64-byte aligned. */
static real *take(char **scratch, int64_t count) {
  real *taken = (real *)*scratch;
  *scratch += round_up(count * (int64_t)sizeof(real), 64);
  return taken;
}

static forward_block forward_layout(const wkv6_problem *p, int64_t heads, char **scratch) {
  forward_block b = {.K_ = round_up(p->K, LANES), .V_ = round_up(p->V, LANES)};
  const int64_t L = smaller(p->T, FORWARD_BLOCK);
  b.r = take(scratch, L * b.K_);
  b.k = take(scratch, L * b.K_);
  b.d = take(scratch, L * b.K_);
  b.w = take(scratch, L * b.K_);
  b.v = take(scratch, L * b.V_);
  b.o = take(scratch, L * b.V_);
  b.u = take(scratch, b.K_);
  b.rest = take(scratch, heads * b.K_);
  b.state = take(scratch, heads * p->K * b.V_);
  return b;
}

static size_t forward_scratch(const wkv6_problem *p, int64_t heads) {
  char *end = NULL;
  forward_layout(p, heads, &end);
  return (size_t)(uintptr_t)end;
}

/* Fills r, k, v, d with tokens [t, t + count) of head h, and o with the bonus (r . (u * k)) v of each token. */
static void forward_load(const wkv6_problem *p, const forward_block *b, const sequence *s, int64_t h, int64_t t, int64_t count,
                         real *rest) {
  load_tokens(b->r, b->K_, &p->r, s, h, t, count, p->K);
  load_tokens(b->k, b->K_, &p->k, s, h, t, count, p->K);
  load_tokens(b->w, b->K_, &p->w, s, h, t, count, p->K);
  load_tokens(b->v, b->V_, &p->v, s, h, t, count, p->V);
  load_row(b->u, p->K, row_address(&p->u, h, 0, 0), p->u.stride[1], p->u.dtype);
  const lanes scale = broadcast((real)p->scale);
  for (int64_t i = 0; i < count; i++) {
    real *r = b->r + i * b->K_;
    const real *k = b->k + i * b->K_;
    decay_row(b->w + i * b->K_, b->d + i * b->K_, rest, b->K_, p->flags & WKV6_RAW_DECAY);
    lanes sum = broadcast(0);
    for (int64_t c = 0; c < b->K_; c += LANES) {
      const lanes scaled = scale * load(r + c);
      store(r + c, scaled);
      sum = fma_lanes(scaled * load(k + c), load(b->u + c), sum);
    }
    const lanes bonus = broadcast(sum_of_lanes(sum));
    for (int64_t c = 0; c < b->V_; c += LANES) store(b->o + i * b->V_ + c, bonus * load(b->v + i * b->V_ + c));
  }
}

/* A tile of `rows` x `columns` vectors, to and from memory whose rows are `stride` apart. */
INLINE void load_tile(const int rows, const int columns, lanes tile[TILE_ROWS][2], const real *from, int64_t stride) {
  UNROLL for (int i = 0; i < rows; i++) {
    UNROLL for (int c = 0; c < columns; c++) tile[i][c] = load(from + i * stride + c * LANES);
  }
}

INLINE void store_tile(const int rows, const int columns, lanes tile[TILE_ROWS][2], real *to, int64_t stride) {
  UNROLL for (int i = 0; i < rows; i++) {
    UNROLL for (int c = 0; c < columns; c++) store(to + i * stride + c * LANES, tile[i][c]);
  }
}

/* Equations (1) and (2) on `rows` x `columns` vectors of the state, for `count` tokens; all pointers at the tile. */
INLINE void forward_tile(const int rows, const int columns, int64_t count, const forward_block *b, const real *r, const real *k,
                         const real *d, const real *v, real *o, real *state) {
  lanes s[TILE_ROWS][2];
  load_tile(rows, columns, s, state, b->V_);
  NO_UNROLL for (int64_t t = 0; t < count; t++, r += b->K_, k += b->K_, d += b->K_, v += b->V_, o += b->V_) {
    lanes sum[2], value[2];
    UNROLL for (int c = 0; c < columns; c++) {
      sum[c] = load(o + c * LANES);
      value[c] = load(v + c * LANES);
    }
    UNROLL for (int i = 0; i < rows; i++) {
      const lanes ri = broadcast(r[i]), ki = broadcast(k[i]), di = broadcast(d[i]);
      UNROLL for (int c = 0; c < columns; c++) {
        sum[c] = fma_lanes(ri, s[i][c], sum[c]);
        s[i][c] = fma_lanes(di, s[i][c], ki * value[c]);
      }
    }
    UNROLL for (int c = 0; c < columns; c++) store(o + c * LANES, sum[c]);
  }
  store_tile(rows, columns, s, state, b->V_);
}

/* All rows of one column of tiles. */
INLINE void forward_columns(const int columns, int64_t count, int64_t K, const forward_block *b, real *state, int64_t j) {
  int64_t i = 0;
  for (; i + TILE_ROWS <= K; i += TILE_ROWS)
    forward_tile(TILE_ROWS, columns, count, b, b->r + i, b->k + i, b->d + i, b->v + j, b->o + j, state + i * b->V_ + j);
  for (; i < K; i++) /* no padded rows: zeros would meet the infinities of v */
    forward_tile(1, columns, count, b, b->r + i, b->k + i, b->d + i, b->v + j, b->o + j, state + i * b->V_ + j);
}

/* The part of a token's or state's tensor that starts at value column j. */
INLINE wkv6_tensor from_column(const wkv6_tensor *x, int64_t j) {
  wkv6_tensor part = *x;
  if (x->dtype != WKV6_ABSENT) part.data = (char *)x->data + element_size(x->dtype) * j * x->stride[3];
  return part;
}

static void forward(const wkv6_problem *p, const wkv6_work *work, void *scratch) {
  const uint64_t mode = flush_subnormals();
  const sequence s = sequence_of(p, work->n);
  const int64_t heads = work->head_end - work->head, first = wkv6_first_token(p, work->n), K = p->K;

  /* From here on the columns of this piece of work are columns 0 .. width - 1. */
  const int64_t width = work->column_end - work->column;
  wkv6_problem part = *p;
  part.V = width;
  part.v = from_column(&p->v, work->column);
  part.o = from_column(&p->o, work->column);
  part.initial_state = from_column(&p->initial_state, work->column);
  part.final_state = from_column(&p->final_state, work->column);
  part.checkpoints = from_column(&p->checkpoints, work->column);
  char *end = scratch;
  const forward_block b = forward_layout(&part, heads, &end);
  if (b.K_ > K || b.V_ > width) memset(scratch, 0, (size_t)(end - (char *)scratch)); /* the padding */
  memset(b.rest, 0, (size_t)(heads * b.K_) * sizeof(real));

  for (int64_t h = work->head; h < work->head_end; h++)
    load_state(b.state + (h - work->head) * K * b.V_, b.V_, &part.initial_state, work->n, h, K, width);
  for (int64_t t = 0, count; t < s.length; t += count) {
    const int64_t into_segment = t % p->segment;
    count = smaller(smaller(FORWARD_BLOCK, p->segment - into_segment), s.length - t);
    for (int64_t h = work->head; h < work->head_end; h++) {
      real *state = b.state + (h - work->head) * K * b.V_;
      if (t > 0 && into_segment == 0) store_state(&part.checkpoints, wkv6_checkpoint(p, first, t / p->segment), h, K, width, state, b.V_);
      forward_load(&part, &b, &s, h, t, count, b.rest + (h - work->head) * b.K_);
      int64_t j = 0;
      for (; j + 2 * LANES <= b.V_; j += 2 * LANES) forward_columns(2, count, K, &b, state, j);
      if (j < b.V_) forward_columns(1, count, K, &b, state, j);
      store_tokens(&part.o, &s, h, t, count, width, b.o, b.V_);
    }
  }
  for (int64_t h = work->head; h < work->head_end; h++)
    store_state(&part.final_state, work->n, h, K, width, b.state + (h - work->head) * K * b.V_, b.V_);
  restore_subnormals(mode);
}
