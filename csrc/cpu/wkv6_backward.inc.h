/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward pass, recurrent form: equations (3) to (8) of docs/wkv6.md, eight operations an element of the state and
 * token.
 *
 * Segments from the last to the first. In a segment each tile of the state is walked forward from the checkpoint,
 * leaving its value before each token in `history`, and its adjoint G backward, with both still in the nearest cache: 8
 * vectors x segment. State and adjoint are kept transposed, [V][K]: lanes over K turn the sums over V of dr, dk and dw
 * into plain additions, in the order of j; only dv is a sum over lanes, LANES of which are done together
 * (take_row_sums). No sum depends on the number of threads. dw comes from G and S at the same token, so nothing cancels
 * however strong the decay.
 */

/* Tokens that a tile is walked through at a time: all that one row of tiles touches then fits a first-level cache of 48
 * KB. */
#define BACKWARD_BLOCK 16

/* A segment of one head. K_ and V_ as in the forward pass. */
typedef struct {
  int64_t K_, V_;
  real *r, *k, *d, *w;            /* [tokens][K_] as in forward_block */
  real *v, *grad_o;               /* [tokens][V_] */
  real *grad_r, *grad_k, *grad_w; /* [tokens][K_] dr / scale, dk, dw / d */
  real *grad_v;                   /* [tokens][V_] */
  real *u, *grad_u;               /* [K_] */
  real *states;                   /* [blocks][V_][K_] before each block */
  real *history;                  /* [BACKWARD_BLOCK][TILE_ROWS][2 * LANES] one tile of the state before each token */
  real
      *products; /* [BACKWARD_BLOCK][rows][LANES] G k of one row of tiles, to be summed over lanes; zero between rows */
  real *sums;    /* [BACKWARD_BLOCK][rows] those sums */
  adjoint_block heads;
} backward_block;

static backward_block backward_layout(const wkv6_problem *p, int64_t heads, arena *scratch) {
  backward_block b = {.K_ = round_up(p->K, LANES), .V_ = round_up(p->V, LANES)};
  const int64_t L = smaller(p->T, p->segment), blocks = (L + BACKWARD_BLOCK - 1) / BACKWARD_BLOCK;
  real **const of_K[] = {&b.r, &b.k, &b.d, &b.w, &b.grad_r, &b.grad_k, &b.grad_w},
               **const of_V[] = {&b.v, &b.grad_o, &b.grad_v};
  for (size_t i = 0; i < sizeof of_K / sizeof *of_K; i++) *of_K[i] = take(scratch, L * b.K_);
  for (size_t i = 0; i < sizeof of_V / sizeof *of_V; i++) *of_V[i] = take(scratch, L * b.V_);
  b.u = take(scratch, b.K_);
  b.grad_u = take(scratch, b.K_);
  b.states = take(scratch, blocks * b.V_ * b.K_);
  b.history = take(scratch, BACKWARD_BLOCK * TILE_ROWS * 2 * LANES);
  b.products = take(scratch, BACKWARD_BLOCK * TILE_ROWS * LANES);
  b.sums = take(scratch, BACKWARD_BLOCK * TILE_ROWS);
  b.heads = adjoint_layout(p, heads, scratch);
  return b;
}

static size_t backward_scratch(const wkv6_problem *p, int64_t heads) {
  arena sizes_only = {NULL, 0};
  backward_layout(p, heads, &sizes_only);
  return sizes_only.used;
}

/* Loads tokens [t, t + count) of head h and sets the gradients to their terms in the bonus u. */
static void backward_load(const wkv6_problem *p, const backward_block *b, const sequence *s, int64_t h, int64_t t,
                          int64_t count, real *rest) {
  load_tokens(b->r, b->K_, &p->r, s, h, t, count, p->K);
  load_tokens(b->k, b->K_, &p->k, s, h, t, count, p->K);
  load_tokens(b->w, b->K_, &p->w, s, h, t, count, p->K);
  load_tokens(b->v, b->V_, &p->v, s, h, t, count, p->V);
  load_tokens(b->grad_o, b->V_, &p->grad_o, s, h, t, count, p->V);
  load_u(b->u, p, h);
  memset(b->grad_u, 0, (size_t)b->K_ * sizeof(real));
  memset(b->grad_w, 0, (size_t)(count * b->K_) * sizeof(real));
  const lanes scale = broadcast((real)p->scale);
  /* The last token first: the rests of the decays pass from one segment to the one before it. */
  for (int64_t i = count; i-- > 0;) {
    real *r = b->r + i * b->K_, *grad_r = b->grad_r + i * b->K_, *grad_k = b->grad_k + i * b->K_;
    const real *k = b->k + i * b->K_, *v = b->v + i * b->V_, *grad_o = b->grad_o + i * b->V_;
    decay_row(b->w + i * b->K_, b->d + i * b->K_, rest, b->K_, p->flags & WKV6_RAW_DECAY);
    lanes sum = broadcast(0);
    for (int64_t c = 0; c < b->V_; c += LANES) sum = fma_lanes(load(v + c), load(grad_o + c), sum);
    const lanes a = broadcast(sum_of_lanes(sum)); /* a_t of the equations */
    sum = broadcast(0);
    for (int64_t c = 0; c < b->K_; c += LANES) {
      const lanes scaled = scale * load(r + c), u = load(b->u + c), rk = scaled * load(k + c);
      store(r + c, scaled);
      store(grad_r + c, a * (u * load(k + c)));
      store(grad_k + c, a * (u * scaled));
      store(b->grad_u + c, fma_lanes(a, rk, load(b->grad_u + c)));
      sum = fma_lanes(rk, u, sum);
    }
    const lanes bonus = broadcast(sum_of_lanes(sum));
    for (int64_t c = 0; c < b->V_; c += LANES) store(b->grad_v + i * b->V_ + c, bonus * load(grad_o + c));
  }
}

/* (2) on a tile of the transposed state through a whole block: `after` = the state behind it. */
INLINE void advance_tile(const int rows, const int columns, const backward_block *b, int64_t i, int64_t j,
                         const real *before, real *after) {
  lanes s[TILE_ROWS][2];
  load_tile(rows, columns, s, before + j * b->K_ + i, b->K_);
  NO_UNROLL for (int64_t t = 0; t < BACKWARD_BLOCK; t++) {
    const real *d = b->d + t * b->K_ + i, *k = b->k + t * b->K_ + i, *v = b->v + t * b->V_ + j;
    UNROLL for (int x = 0; x < rows; x++) {
      const lanes value = broadcast(v[x]);
      UNROLL for (int c = 0; c < columns; c++)
        s[x][c] = fma_lanes(load(d + c * LANES), s[x][c], load(k + c * LANES) * value);
    }
  }
  store_tile(rows, columns, s, after + j * b->K_ + i, b->K_);
}

static void advance(const wkv6_problem *p, const backward_block *b, const real *before, real *after) {
  for (int64_t i = 0; i < b->K_;) {
    int64_t j = 0;
    if (i + 2 * LANES <= b->K_) {
      for (; j + TILE_ROWS <= p->V; j += TILE_ROWS) advance_tile(TILE_ROWS, 2, b, i, j, before, after);
      for (; j < p->V; j++) advance_tile(1, 2, b, i, j, before, after);
      i += 2 * LANES;
    } else {
      for (; j < p->V; j++) advance_tile(1, 1, b, i, j, before, after);
      i += LANES;
    }
  }
}

/* The equations on the tile of `rows` rows from j and `columns` vectors from i, through a block. `last_lanes` selects
 * the lanes of the tile's last vector that belong to the state, if `padded`: in the padding zeros meet infinities. */
INLINE void backward_tile(const int rows, const int columns, const int padded, lanes_integer last_lanes, int64_t count,
                          const backward_block *b, int64_t i, int64_t j, const real *state, real *adjoint) {
  lanes s[TILE_ROWS][2];
  load_tile(rows, columns, s, state + j * b->K_ + i, b->K_);
  NO_UNROLL for (int64_t t = 0; t < count; t++) { /* (2), and the state's part of (3) */
    const real *d = b->d + t * b->K_ + i, *k = b->k + t * b->K_ + i, *v = b->v + t * b->V_ + j,
               *grad_o = b->grad_o + t * b->V_ + j;
    real *grad_r = b->grad_r + t * b->K_ + i, *history = b->history + t * TILE_ROWS * 2 * LANES;
    lanes sum[2];
    UNROLL for (int c = 0; c < columns; c++)
      sum[c] = load(grad_r + c * LANES);
    UNROLL for (int x = 0; x < rows; x++) {
      const lanes go = broadcast(grad_o[x]), value = broadcast(v[x]);
      UNROLL for (int c = 0; c < columns; c++) {
        store(history + (x * 2 + c) * LANES, s[x][c]);
        sum[c] = fma_lanes(go, s[x][c], sum[c]);
        s[x][c] = fma_lanes(load(d + c * LANES), s[x][c], load(k + c * LANES) * value);
      }
    }
    UNROLL for (int c = 0; c < columns; c++)
      store(grad_r + c * LANES, sum[c]);
  }

  lanes g[TILE_ROWS][2];
  load_tile(rows, columns, g, adjoint + j * b->K_ + i, b->K_);
  NO_UNROLL for (int64_t t = count; t-- > 0;) { /* (4) to (7) */
    const real *d = b->d + t * b->K_ + i, *k = b->k + t * b->K_ + i, *r = b->r + t * b->K_ + i;
    const real *v = b->v + t * b->V_ + j, *grad_o = b->grad_o + t * b->V_ + j,
               *history = b->history + t * TILE_ROWS * 2 * LANES;
    real *grad_k = b->grad_k + t * b->K_ + i, *grad_w = b->grad_w + t * b->K_ + i,
         *products = b->products + t * rows * LANES;
    lanes sum_k[2], sum_w[2];
    UNROLL for (int c = 0; c < columns; c++) {
      sum_k[c] = load(grad_k + c * LANES);
      sum_w[c] = load(grad_w + c * LANES);
    }
    UNROLL for (int x = 0; x < rows; x++) {
      const lanes go = broadcast(grad_o[x]), value = broadcast(v[x]);
      lanes product = load(products + x * LANES);
      UNROLL for (int c = 0; c < columns; c++) {
        sum_k[c] = fma_lanes(g[x][c], value, sum_k[c]);
        sum_w[c] = fma_lanes(g[x][c], load(history + (x * 2 + c) * LANES), sum_w[c]);
        const lanes inside = padded && c == columns - 1 ? choose(last_lanes, g[x][c], broadcast(0)) : g[x][c];
        product = fma_lanes(inside, load(k + c * LANES), product);
        g[x][c] = fma_lanes(load(d + c * LANES), g[x][c], load(r + c * LANES) * go);
      }
      store(products + x * LANES, product);
    }
    UNROLL for (int c = 0; c < columns; c++) {
      store(grad_k + c * LANES, sum_k[c]);
      store(grad_w + c * LANES, sum_w[c]);
    }
  }
  store_tile(rows, columns, g, adjoint + j * b->K_ + i, b->K_);
}

/* All tiles of rows j .. j + rows - 1, and dv of those value channels. */
INLINE void backward_rows(const int rows, int64_t count, int64_t K, const backward_block *b, int64_t j,
                          const real *state, real *adjoint) {
  lanes_integer last_lanes = {0};
  for (int l = 0; l < LANES; l++) last_lanes[l] = l < K - (b->K_ - LANES) ? -1 : 0;
  int64_t i = 0;
  for (; i + 2 * LANES <= K; i += 2 * LANES) backward_tile(rows, 2, 0, last_lanes, count, b, i, j, state, adjoint);
  if (i + LANES < K)
    backward_tile(rows, 2, 1, last_lanes, count, b, i, j, state, adjoint);
  else if (i + LANES == K)
    backward_tile(rows, 1, 0, last_lanes, count, b, i, j, state, adjoint);
  else if (i < K)
    backward_tile(rows, 1, 1, last_lanes, count, b, i, j, state, adjoint);
  for (int64_t m = 0; m < count * rows; m += LANES) store(b->sums + m, take_row_sums(b->products + m * LANES));
  for (int64_t t = 0; t < count; t++)
    for (int x = 0; x < rows; x++) b->grad_v[t * b->V_ + j + x] += b->sums[t * rows + x];
}

/* The part of a segment from token t on. */
static backward_block from_token(const backward_block *b, int64_t t) {
  backward_block part = *b;
  real **const of_K[] = {&part.r, &part.k, &part.d, &part.grad_r, &part.grad_k, &part.grad_w};
  real **const of_V[] = {&part.v, &part.grad_o, &part.grad_v};
  for (size_t i = 0; i < sizeof of_K / sizeof *of_K; i++) *of_K[i] += t * b->K_;
  for (size_t i = 0; i < sizeof of_V / sizeof *of_V; i++) *of_V[i] += t * b->V_;
  return part;
}

/* A loaded segment of `count` tokens: forward from block to block, then each block's equations from the last to the
 * first. */
static void backward_segment(const wkv6_problem *p, const backward_block *b, int64_t count, real *adjoint) {
  const int64_t state_size = b->V_ * b->K_, blocks = (count + BACKWARD_BLOCK - 1) / BACKWARD_BLOCK;
  for (int64_t c = 0; c + 1 < blocks; c++) {
    const backward_block block = from_token(b, c * BACKWARD_BLOCK);
    advance(p, &block, b->states + c * state_size, b->states + (c + 1) * state_size);
  }
  for (int64_t c = blocks; c-- > 0;) {
    const backward_block block = from_token(b, c * BACKWARD_BLOCK);
    const int64_t tokens = c + 1 < blocks ? BACKWARD_BLOCK : count - c * BACKWARD_BLOCK;
    const real *state = b->states + c * state_size;
    int64_t j = 0;
    for (; j + TILE_ROWS <= p->V; j += TILE_ROWS) backward_rows(TILE_ROWS, tokens, p->K, &block, j, state, adjoint);
    for (; j < p->V; j++) backward_rows(1, tokens, p->K, &block, j, state, adjoint);
  }
}

/* What is still to be multiplied into dr and dw, and out with everything. */
static void backward_store(const wkv6_problem *p, const backward_block *b, const sequence *s, int64_t n, int64_t h,
                           int64_t t, int64_t count) {
  const lanes scale = broadcast((real)p->scale);
  for (int64_t c = 0; c < count * b->K_; c += LANES) {
    store(b->grad_r + c, scale * load(b->grad_r + c));
    const lanes grad_w = load(b->d + c) * load(b->grad_w + c), w = load(b->w + c);
    store(b->grad_w + c, p->flags & WKV6_RAW_DECAY ? gradient_of_raw(grad_w, w) : grad_w);
  }
  store_tokens(&p->grad_r, s, h, t, count, p->K, b->grad_r, b->K_);
  store_tokens(&p->grad_k, s, h, t, count, p->K, b->grad_k, b->K_);
  store_tokens(&p->grad_w, s, h, t, count, p->K, b->grad_w, b->K_);
  store_tokens(&p->grad_v, s, h, t, count, p->V, b->grad_v, b->V_);
  if (p->grad_u_parts.dtype == WKV6_ABSENT) return;
  real *part = (real *)p->grad_u_parts.data + (n * p->H + h) * p->K;
  for (int64_t i = 0; i < p->K; i++) part[i] += b->grad_u[i];
}

/* Tokens [t, t + count) of head h. */
static void backward_tokens(const wkv6_problem *p, const void *block, const sequence *s, int64_t n, int64_t h,
                            int64_t t, int64_t count, real *rest, real *adjoint) {
  const backward_block *b = block;
  backward_load(p, b, s, h, t, count, rest);
  backward_segment(p, b, count, adjoint);
  backward_store(p, b, s, n, h, t, count);
}

static void backward(const wkv6_problem *p, const wkv6_work *work, void *scratch) {
  arena memory = {scratch, 0};
  const backward_block b = backward_layout(p, work->head_end - work->head, &memory);
  memset(scratch, 0, memory.used); /* padding and rests */
  backward_pass(p, work, &b.heads, b.states, backward_tokens, &b);
}

/* (8): the sum over sequences, in their order, in double: as exact for one long sequence as for many short ones. */
static void reduce_grad_u(const wkv6_problem *p) {
  if (p->grad_u.dtype == WKV6_ABSENT) return;
  const real *parts = p->grad_u_parts.data;
  for (int64_t h = 0; h < p->H; h++)
    for (int64_t i = 0; i < p->K; i++) {
      double sum = 0;
      for (int64_t n = 0; n < p->N; n++) sum += (double)parts[(n * p->H + h) * p->K + i];
      const real rounded = (real)sum;
      store_rows(row_address(&p->grad_u, h, i, 0), 0, 1, p->grad_u.dtype, 1, 1, &rounded, 0);
    }
}
