/* SPDX-License-Identifier: Apache-2.0
 *
 * Forward pass, recurrent form: equations (1) and (2) of docs/wkv6.md, token by token, three operations an element of
 * the state.
 *
 * The state never moves: a tile of TILE_ROWS x 2 vectors of it stays in registers for a whole block of tokens, so what
 * is loaded a token is a few numbers of r, k, v, d and the partial o. Lanes run over V and the rows i are summed in
 * order, so o does not depend on the vector length, the tiling or the number of threads, except for the one sum r.(u
 * k).
 */
#define TILE_ROWS 4

/* A block of tokens of one head as contiguous reals; K_ and V_ are K and V rounded up to whole vectors. */
typedef struct {
  int64_t K_, V_;
  real *r, *k, *d; /* [tokens][K_] scale * r, k and the decay factors; r's and k's padding is 0 */
  real *w, *u;     /* [tokens][K_], [K_] */
  real *v, *o;     /* [tokens][V_] */
  state_block heads;
} forward_block;

static forward_block forward_layout(const wkv6_problem *p, int64_t heads, arena *scratch) {
  forward_block b = {.K_ = round_up(p->K, LANES), .V_ = round_up(p->V, LANES)};
  const int64_t L = smaller(p->T, FORWARD_BLOCK);
  b.r = take(scratch, L * b.K_);
  b.k = take(scratch, L * b.K_);
  b.d = take(scratch, L * b.K_);
  b.w = take(scratch, L * b.K_);
  b.v = take(scratch, L * b.V_);
  b.o = take(scratch, L * b.V_);
  b.u = take(scratch, b.K_);
  b.heads = state_layout(p, heads, scratch);
  return b;
}

static size_t forward_scratch(const wkv6_problem *p, int64_t heads) {
  arena sizes_only = {NULL, 0};
  forward_layout(p, heads, &sizes_only);
  return sizes_only.used;
}

/* Fills r, k, v, d with tokens [t, t + count) of head h, and o with the bonus (r . (u * k)) v of each token. */
static void forward_load(const wkv6_problem *p, const forward_block *b, const sequence *s, int64_t h, int64_t t,
                         int64_t count, real *rest) {
  load_tokens(b->r, b->K_, &p->r, s, h, t, count, p->K);
  load_tokens(b->k, b->K_, &p->k, s, h, t, count, p->K);
  load_tokens(b->w, b->K_, &p->w, s, h, t, count, p->K);
  load_tokens(b->v, b->V_, &p->v, s, h, t, count, p->V);
  load_u(b->u, p, h);
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
    UNROLL for (int c = 0; c < columns; c++)
      tile[i][c] = load(from + i * stride + c * LANES);
  }
}

INLINE void store_tile(const int rows, const int columns, lanes tile[TILE_ROWS][2], real *to, int64_t stride) {
  UNROLL for (int i = 0; i < rows; i++) {
    UNROLL for (int c = 0; c < columns; c++)
      store(to + i * stride + c * LANES, tile[i][c]);
  }
}

/* Equations (1) and (2) on `rows` x `columns` vectors of the state, for `count` tokens; all pointers at the tile. */
INLINE void forward_tile(const int rows, const int columns, int64_t count, const forward_block *b, const real *r,
                         const real *k, const real *d, const real *v, real *o, real *state) {
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
    UNROLL for (int c = 0; c < columns; c++)
      store(o + c * LANES, sum[c]);
  }
  store_tile(rows, columns, s, state, b->V_);
}

/* All rows of one column of tiles. */
INLINE void forward_columns(const int columns, int64_t count, int64_t K, const forward_block *b, real *state,
                            int64_t j) {
  int64_t i = 0;
  for (; i + TILE_ROWS <= K; i += TILE_ROWS)
    forward_tile(TILE_ROWS, columns, count, b, b->r + i, b->k + i, b->d + i, b->v + j, b->o + j, state + i * b->V_ + j);
  for (; i < K; i++) /* no padded rows: zeros would meet the infinities of v */
    forward_tile(1, columns, count, b, b->r + i, b->k + i, b->d + i, b->v + j, b->o + j, state + i * b->V_ + j);
}

/* Tokens [t, t + count) of head h. */
static void forward_tokens(const wkv6_problem *p, const void *block, const sequence *s, int64_t h, int64_t t,
                           int64_t count, real *rest, real *state) {
  const forward_block *b = block;
  forward_load(p, b, s, h, t, count, rest);
  int64_t j = 0;
  for (; j + 2 * LANES <= b->V_; j += 2 * LANES) forward_columns(2, count, p->K, b, state, j);
  if (j < b->V_) forward_columns(1, count, p->K, b, state, j);
  store_tokens(&p->o, s, h, t, count, p->V, b->o, b->V_);
}

static void forward(const wkv6_problem *p, const wkv6_work *work, void *scratch) {
  const wkv6_problem part = of_columns(p, work);
  arena memory = {scratch, 0};
  const forward_block b = forward_layout(&part, work->head_end - work->head, &memory);
  memset(scratch, 0, (size_t)((char *)b.heads.rest - (char *)scratch)); /* the padding */
  forward_pass(&part, work, &b.heads, forward_tokens, &b);
}
