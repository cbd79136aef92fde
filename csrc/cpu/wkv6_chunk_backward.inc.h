/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward pass, chunk form: equations (3) to (8) of docs/wkv6.md over chunks of tokens, dw by (11).
 *
 * Segments from the last to the first. Each is packed, walked forward from its checkpoint, which leaves the state
 * before every chunk and what it gives to dr, then walked backward with the adjoint G. State and adjoint are kept
 * transposed, [V][K], lanes over K, so that four of the five large products need no sum over lanes. dv does: there the
 * tokens are in the lanes, and what comes out is transposed. Inside a chunk the pairs of tokens are split in halves
 * again and again, and every decay starts or ends at the middle of such a block: dw is a sum of products, never a
 * difference. No sum depends on the number of threads.
 */
#if LANES == 16
#define RUN 2 /* reals of one token side by side where tokens are in the lanes */
#else
#define RUN 1
#endif
#define RUN_TOKENS (LANES / RUN)            /* tokens in one vector */
#define TOKEN_VECTORS (CHUNK * RUN / LANES) /* vectors that hold all tokens of a chunk */

/* A segment of one head; `chunk` describes its first chunk, with [tokens] where that says [CHUNK]. */
typedef struct {
  chunk_block chunk;
  real *r, *k;           /* [tokens][K_] */
  real *w;               /* [tokens][K_] log decays, where w is raw or not whole vectors of reals */
  real *v, *grad_o;      /* [tokens][V_] */
  real *states;          /* [chunks][V_][K_] before each chunk */
  real *grad_r;          /* [tokens][K_] */
  real *grad_k, *grad_w; /* [CHUNK][K_] */
  real *grad_v;          /* [CHUNK][V_] */
  real *k_tokens;        /* [K_ / RUN][CHUNK][RUN] k_end with the tokens in the lanes */
  real *inner;           /* [K_] rowsum(G * S) of G after a chunk and S before it */
  real *decay;           /* [K_] of a chunk */
  real *state_rest;      /* [K_] as `rest` is for the adjoint */
  real *u, *grad_u;      /* [K_] */
  real *partial;         /* [PAIR_ROWS][LANES] */
  real *A, *M;           /* [chunks][PAIR_ROWS], scale * A and M_st = scale * do_t . v_s */
  adjoint_block heads;
} chunk_backward_block;

static chunk_backward_block chunk_backward_layout(const wkv6_problem *p, int64_t heads, arena *scratch) {
  const int64_t K_ = round_up(p->K, LANES), V_ = round_up(p->V, LANES);
  const int64_t L = round_up(p->T < p->segment ? p->T : p->segment, CHUNK);
  chunk_backward_block b;
  real **const of_tokens[] = {&b.r, &b.k, &b.chunk.r_start, &b.chunk.k_end, &b.chunk.d, &b.w, &b.grad_r};
  real **const of_chunk[] = {&b.grad_k, &b.grad_w, &b.k_tokens};
  for (size_t i = 0; i < sizeof of_tokens / sizeof *of_tokens; i++) *of_tokens[i] = take(scratch, L * K_);
  for (size_t i = 0; i < sizeof of_chunk / sizeof *of_chunk; i++) *of_chunk[i] = take(scratch, CHUNK * K_);
  b.chunk.product = take(scratch, L / CHUNK * K_);
  b.chunk.m_sum = take(scratch, L / CHUNK * K_);
  b.v = take(scratch, L * V_);
  b.grad_o = take(scratch, L * V_);
  b.grad_v = take(scratch, CHUNK * V_);
  b.inner = take(scratch, K_);
  b.decay = take(scratch, K_);
  b.state_rest = take(scratch, K_);
  b.u = take(scratch, K_);
  b.grad_u = take(scratch, K_);
  b.partial = take(scratch, PAIR_ROWS * LANES);
  b.A = take(scratch, L / CHUNK * PAIR_ROWS);
  b.M = take(scratch, L / CHUNK * PAIR_ROWS);
  b.states = take(scratch, L / CHUNK * V_ * K_);
  b.heads = adjoint_layout(p, heads, scratch);
  return b;
}

static size_t chunk_backward_scratch(const wkv6_problem *p, int64_t heads) {
  arena sizes_only = {NULL, 0};
  chunk_backward_layout(p, heads, &sizes_only);
  return sizes_only.used;
}

/* The block of the segment's chunk c. */
INLINE chunk_block chunk_at(const sizes z, const chunk_backward_block *segment, int64_t c) {
  chunk_block b = segment->chunk;
  const int64_t at = c * CHUNK * z.K_;
  b.r = (chunk_rows){segment->r + at, z.K_};
  b.k = (chunk_rows){segment->k + at, z.K_};
  b.r_start += at, b.k_end += at, b.d += at;
  b.product += c * z.K_, b.m_sum += c * z.K_;
  return b;
}

/* Tokens [t, t + count) of x to [CHUNK][stride], filled up with zeros. */
INLINE void copy_rows(real *to, const wkv6_tensor *x, const sequence *s, int64_t h, int64_t t, int64_t count,
                      int64_t width, const int64_t stride) {
  load_tokens(to, stride, x, s, h, t, count, width);
  if (count < CHUNK) memset(to + count * stride, 0, (size_t)((CHUNK - count) * stride) * sizeof(real));
}

/* to[CHUNK][K_] = left[CHUNK][V_] times a transposed state [V_][K_], `columns` vectors of it. */
INLINE void multiply_state_columns(const int columns, const sizes z, const real *left, const real *state, real *to) {
  NO_UNROLL for (int64_t t = 0; t < CHUNK; t += TILE) {
    lanes sum[TILE][2];
    UNROLL for (int x = 0; x < TILE; x++) UNROLL
      for (int c = 0; c < columns; c++) sum[x][c] = broadcast(0);
    multiply_rows(columns, z.V, left + t * z.V_, z.V_, state, z.K_, sum);
    store_tile(TILE, columns, sum, to + t * z.K_, z.K_);
  }
}

INLINE void multiply_state(const sizes z, const real *left, const real *state, real *to) {
  int64_t i = 0;
  NO_UNROLL for (; i + 2 * LANES <= z.K_; i += 2 * LANES)
    multiply_state_columns(2, z, left, state + i, to + i);
  if (i < z.K_) multiply_state_columns(1, z, left, state + i, to + i);
}

/* What turns a transposed state `from` into `to`: to = decay * from + the sum over the chunk's tokens of left_t
 * right_t^T, left [CHUNK][V_], right [CHUNK][K_]. With `other`, another state, inner = rowsum(from * other) on the way.
 */
typedef struct {
  const real *left, *right, *decay, *from, *other;
  real *to, *inner;
} state_step;

/* Rows j .. j + rows - 1 and `columns` vectors from i on. */
INLINE void state_step_tile(const int with_inner, const int rows, const int columns, const sizes z, const state_step *x,
                            int64_t i, int64_t j, lanes inner[2]) {
  lanes tile[TILE][2];
  UNROLL for (int y = 0; y < rows; y++) UNROLL
    for (int c = 0; c < columns; c++) {
      const int64_t at = (j + y) * z.K_ + i + c * LANES;
      const lanes before = load(x->from + at);
      if (with_inner) inner[c] = fma_lanes(before, load(x->other + at), inner[c]);
      tile[y][c] = load(x->decay + i + c * LANES) * before;
    }
  multiply_tokens(rows, columns, x->left + j, z.V_, x->right + i, z.K_, tile);
  store_tile(rows, columns, tile, x->to + j * z.K_ + i, z.K_);
}

INLINE void state_step_columns(const int with_inner, const int columns, const sizes z, const state_step *x, int64_t i,
                               prefetcher *ahead) {
  lanes inner[2] = {broadcast(0), broadcast(0)};
  int64_t j = 0;
  NO_UNROLL for (; j + TILE <= z.V; j += TILE) {
    prefetch_some(ahead);
    state_step_tile(with_inner, TILE, columns, z, x, i, j, inner);
  }
  NO_UNROLL for (; j < z.V; j++)
    state_step_tile(with_inner, 1, columns, z, x, i, j, inner);
  if (with_inner) UNROLL
    for (int c = 0; c < columns; c++) store(x->inner + i + c * LANES, inner[c]);
}

INLINE int64_t state_step_tiles(const sizes z) { return z.V / TILE * ((z.K_ + LANES) / (2 * LANES)); }

INLINE void step_state(const int with_inner, const sizes z, const state_step *x, prefetcher *ahead) {
  int64_t i = 0;
  NO_UNROLL for (; i + 2 * LANES <= z.K_; i += 2 * LANES)
    state_step_columns(with_inner, 2, z, x, i, ahead);
  if (i < z.K_) state_step_columns(with_inner, 1, z, x, i, ahead);
}

/* grad_v[CHUNK][V_] = k_end times G: tokens in the lanes, LANES rows of the transposed G at a time. */
INLINE void multiply_adjoint(const sizes z, const chunk_block *b, const real *G, real *k_tokens, real *grad_v) {
  const int64_t K_ = z.K_, V_ = z.V_, runs = (z.K + RUN - 1) / RUN;
  lanes x[LANES];
  for (int v = 0; v < TOKEN_VECTORS; v++)
    for (int64_t i = 0; i < K_; i += LANES) {
      UNROLL for (int m = 0; m < RUN_TOKENS; m++)
        x[m] = load(b->k_end + (v * RUN_TOKENS + m) * K_ + i);
      transpose_lanes(RUN, x);
      UNROLL for (int m = 0; m < RUN_TOKENS; m++)
        store(k_tokens + (i / RUN + m) * CHUNK * RUN + v * LANES, x[m]);
    }
  for (int64_t j = 0; j < V_; j += LANES) {
    lanes sum[LANES][TOKEN_VECTORS];
    UNROLL for (int l = 0; l < LANES; l++) UNROLL
      for (int v = 0; v < TOKEN_VECTORS; v++) sum[l][v] = broadcast(0);
    const real *g = G + j * K_;
    NO_UNROLL for (int64_t i = 0; i < runs; i++, g += RUN) {
      UNROLL for (int l = 0; l < LANES; l++) {
#if RUN == 2
        const lanes factor = broadcast_pair(g + l * K_);
#else
        const lanes factor = broadcast(g[l * K_]);
#endif
        UNROLL for (int v = 0; v < TOKEN_VECTORS; v++)
          sum[l][v] = fma_lanes(factor, load(k_tokens + i * CHUNK * RUN + v * LANES), sum[l][v]);
      }
    }
    UNROLL for (int v = 0; v < TOKEN_VECTORS; v++) {
      UNROLL for (int m = 0; m < RUN_TOKENS; m++)
        x[m] = RUN == 2 ? add_neighbours(sum[m * RUN][v], sum[(m * RUN + 1) % LANES][v]) : sum[m][v];
      transpose_lanes(RUN, x);
      UNROLL for (int m = 0; m < RUN_TOKENS; m++)
        store(grad_v + (v * RUN_TOKENS + m) * V_ + j, x[m]);
    }
  }
}

/* grad_v_t += sum over q >= t of A_qt do_q, as a true triangle: an infinite do times a zero would spoil later tokens.
 */
INLINE void add_later_outputs(const int64_t V_, const real *A, const real *grad_o, real *grad_v) {
  NO_UNROLL for (int64_t j = 0; j < V_; j += LANES) {
    lanes sum[CHUNK];
    UNROLL for (int t = 0; t < CHUNK; t++)
      sum[t] = load(grad_v + t * V_ + j);
    UNROLL for (int q = 0; q < CHUNK; q++) {
      const lanes row = load(grad_o + q * V_ + j);
      UNROLL for (int t = 0; t <= q; t++)
        sum[t] = fma_lanes(broadcast(A[pair(t, q)]), row, sum[t]);
    }
    UNROLL for (int t = 0; t < CHUNK; t++)
      store(grad_v + t * V_ + j, sum[t]);
  }
}

/* One vector of channels of a chunk: r, k, d are columns of [CHUNK][K_] matrices. */
typedef struct {
  const real *r, *k, *d, *M;
  int64_t stride;
  lanes grad_r[CHUNK], grad_k[CHUNK], grad_w[CHUNK];
} channel_block;

#define ROW(x, t) load((x) + (t) * b->stride)

/* What goes through the states at the chunk's ends; `inner` is rowsum(G * S). */
INLINE void gradients_through_states(channel_block *b, lanes scale, lanes inner) {
  lanes product = scale, sum = broadcast(0);
  UNROLL for (int t = 0; t < CHUNK; t++) {
    b->grad_r[t] *= product;
    if (t < CHUNK - 1) product *= ROW(b->d, t);
  }
  UNROLL for (int t = CHUNK - 1; t >= 0; t--) {
    b->grad_w[t] = sum;
    sum = fma_lanes(ROW(b->r, t), b->grad_r[t], sum);
  }
  product = broadcast(1);
  UNROLL for (int t = CHUNK - 1; t >= 0; t--) {
    b->grad_k[t] *= product;
    product *= ROW(b->d, t);
  }
  sum = product * inner;
  UNROLL for (int t = 0; t < CHUNK; t++) {
    b->grad_w[t] += sum;
    if (t < CHUNK - 1) sum = fma_lanes(ROW(b->k, t), b->grad_k[t], sum);
  }
}

/* The pairs of a token s in [first, middle) and a token q in [middle, middle + half), middle = first + half. Seen from
 * the middle, this is a chunk's border: z_sq = M_sq r_q P(middle..q-1) k_s P(s+1..middle-1). */
INLINE void gradients_between(channel_block *b, const int first, const int half) {
  const int middle = first + half, end = middle + half;
  lanes product[CHUNK], r[CHUNK], k[CHUNK];
  UNROLL for (int q = middle; q < end; q++) {
    if (q > middle) product[q] = q == middle + 1 ? ROW(b->d, middle) : product[q - 1] * ROW(b->d, q - 1);
    r[q] = q > middle ? ROW(b->r, q) * product[q] : ROW(b->r, q);
  }
  UNROLL for (int s = middle - 1; s >= first; s--) {
    if (s < middle - 1) product[s] = s == middle - 2 ? ROW(b->d, middle - 1) : product[s + 1] * ROW(b->d, s + 1);
    k[s] = s < middle - 1 ? ROW(b->k, s) * product[s] : ROW(b->k, s);
  }
  lanes later = broadcast(0), earlier = broadcast(0);
  UNROLL for (int q = end - 1; q >= middle; q--) {
    lanes sum = broadcast(b->M[pair(first, q)]) * k[first];
    UNROLL for (int s = first + 1; s < middle; s++)
      sum = fma_lanes(broadcast(b->M[pair(s, q)]), k[s], sum);
    b->grad_r[q] = q > middle ? fma_lanes(sum, product[q], b->grad_r[q]) : b->grad_r[q] + sum;
    if (q < end - 1) b->grad_w[q] += later;
    if (q > middle) later = fma_lanes(r[q], sum, later);
  }
  UNROLL for (int s = first; s < middle; s++) {
    lanes sum = broadcast(b->M[pair(s, middle)]) * r[middle];
    UNROLL for (int q = middle + 1; q < end; q++)
      sum = fma_lanes(broadcast(b->M[pair(s, q)]), r[q], sum);
    b->grad_k[s] = s < middle - 1 ? fma_lanes(sum, product[s], b->grad_k[s]) : b->grad_k[s] + sum;
    if (s > first) b->grad_w[s] += earlier;
    if (s < middle - 1) earlier = fma_lanes(k[s], sum, earlier);
  }
}

/* The bonus: (3), (4) and (8). */
INLINE lanes gradients_of_bonus(channel_block *b, lanes u, lanes grad_u) {
  UNROLL for (int t = 0; t < CHUNK; t++) {
    const lanes a = broadcast(b->M[pair(t, t)]), r = ROW(b->r, t), k = ROW(b->k, t), ua = u * a;
    b->grad_r[t] = fma_lanes(ua, k, b->grad_r[t]);
    b->grad_k[t] = fma_lanes(ua, r, b->grad_k[t]);
    grad_u = fma_lanes(r * k, a, grad_u);
  }
  return grad_u;
}
#undef ROW

/* Finishes dr, dk, dw and du of a chunk; grad_r and grad_k come in as do S and v G, without any decay. `w` is NULL
 * unless w is raw. */
INLINE void finish_gradients(const sizes z, const chunk_block *chunk, const chunk_backward_block *b, const real *M,
                             lanes scale, real *grad_r, const real *w) {
  NO_UNROLL for (int64_t i = 0; i < z.K_; i += LANES) {
    channel_block x = {.r = chunk->r.at + i, .k = chunk->k.at + i, .d = chunk->d + i, .M = M, .stride = z.K_};
    UNROLL for (int t = 0; t < CHUNK; t++) {
      x.grad_r[t] = load(grad_r + t * z.K_ + i);
      x.grad_k[t] = load(b->grad_k + t * z.K_ + i);
    }
    gradients_through_states(&x, scale, load(b->inner + i));
    gradients_between(&x, 0, 4);
    gradients_between(&x, 0, 2);
    gradients_between(&x, 4, 2);
    UNROLL for (int first = 0; first < CHUNK; first += 2)
      gradients_between(&x, first, 1);
    store(b->grad_u + i, gradients_of_bonus(&x, load(b->u + i), load(b->grad_u + i)));
    UNROLL for (int t = 0; t < CHUNK; t++) {
      store(grad_r + t * z.K_ + i, x.grad_r[t]);
      store(b->grad_k + t * z.K_ + i, x.grad_k[t]);
      store(b->grad_w + t * z.K_ + i, w ? gradient_of_raw(x.grad_w[t], load(w + t * z.K_ + i)) : x.grad_w[t]);
    }
  }
}

/* Chunk c of the segment, `count` tokens of head h from t on. On the way forward: packs it, and leaves its part of dr
 * and the state after it, unless it is the `last` one. */
INLINE void walk_chunk(const sizes z, const wkv6_problem *p, const chunk_backward_block *b, const sequence *s,
                       int64_t h, int64_t t, int64_t c, int64_t count, int last) {
  const chunk_block chunk = chunk_at(z, b, c);
  const int64_t at_K = c * CHUNK * z.K_, at_V = c * CHUNK * z.V_;
  copy_rows(b->r + at_K, &p->r, s, h, t, count, z.K, z.K_);
  copy_rows(b->k + at_K, &p->k, s, h, t, count, z.K, z.K_);
  copy_rows(b->v + at_V, &p->v, s, h, t, count, z.V, z.V_);
  copy_rows(b->grad_o + at_V, &p->grad_o, s, h, t, count, z.V, z.V_);
  pack_chunk(z, p, &chunk, find_log_decays(p, s, h, t, count, b->w + at_K, z.K_));
  const row_pairs of_M = {.early = {b->v + at_V, z.V_}, .late = {b->grad_o + at_V, z.V_}};
  chunk_A(z, p, &chunk, b->u, b->partial, b->A + c * PAIR_ROWS);
  sum_pairs(0, z.V_, p, &of_M, b->partial, b->M + c * PAIR_ROWS);

  real *S = b->states + c * z.V_ * z.K_;
  multiply_state(z, b->grad_o + at_V, S, b->grad_r + at_K);
  if (last) return;
  chunk_decay(z, &chunk, b->state_rest, b->decay);
  const state_step step = {
      .left = b->v + at_V, .right = chunk.k_end, .decay = b->decay, .from = S, .to = S + z.V_ * z.K_};
  prefetcher ahead = prefetch_during(state_step_tiles(z), 5, smaller(s->length - t - CHUNK, CHUNK));
  prefetch_tokens(&ahead, &p->w, s, h, t + CHUNK, z.K);
  prefetch_tokens(&ahead, &p->r, s, h, t + CHUNK, z.K);
  prefetch_tokens(&ahead, &p->k, s, h, t + CHUNK, z.K);
  prefetch_tokens(&ahead, &p->v, s, h, t + CHUNK, z.V);
  prefetch_tokens(&ahead, &p->grad_o, s, h, t + CHUNK, z.V);
  step_state(0, z, &step, &ahead);
}

/* On the way back: takes G over the chunk and writes the gradients. */
INLINE void unwalk_chunk(const sizes z, const wkv6_problem *p, const chunk_backward_block *b, const sequence *s,
                         int64_t h, int64_t t, int64_t c, int64_t count, real *rest, real *G) {
  const chunk_block chunk = chunk_at(z, b, c);
  const real *v = b->v + c * CHUNK * z.V_, *grad_o = b->grad_o + c * CHUNK * z.V_, *w = b->w + c * CHUNK * z.K_;
  real *grad_r = b->grad_r + c * CHUNK * z.K_;
  multiply_state(z, v, G, b->grad_k);
  multiply_adjoint(z, &chunk, G, b->k_tokens, b->grad_v);
  add_later_outputs(z.V_, b->A + c * PAIR_ROWS, grad_o, b->grad_v);
  chunk_decay(z, &chunk, rest, b->decay);
  const state_step step = {.left = grad_o,
                           .right = chunk.r_start,
                           .decay = b->decay,
                           .from = G,
                           .other = b->states + c * z.V_ * z.K_,
                           .to = G,
                           .inner = b->inner};
  prefetcher ahead = prefetch_during(state_step_tiles(z), 4, count);
  prefetch_tokens(&ahead, &p->grad_r, s, h, t, z.K);
  prefetch_tokens(&ahead, &p->grad_k, s, h, t, z.K);
  prefetch_tokens(&ahead, &p->grad_w, s, h, t, z.K);
  prefetch_tokens(&ahead, &p->grad_v, s, h, t, z.V);
  step_state(1, z, &step, &ahead);
  for (int64_t j = 0; z.K % RUN && j < z.V; j++)
    G[j * z.K_ + z.K] = 0; /* multiply_adjoint() reads it: zeros met infinities */
  finish_gradients(
      z, &chunk, b, b->M + c * PAIR_ROWS, broadcast((real)p->scale), grad_r, p->flags & WKV6_RAW_DECAY ? w : NULL);
  store_tokens(&p->grad_r, s, h, t, count, z.K, grad_r, z.K_);
  store_tokens(&p->grad_k, s, h, t, count, z.K, b->grad_k, z.K_);
  store_tokens(&p->grad_w, s, h, t, count, z.K, b->grad_w, z.K_);
  store_tokens(&p->grad_v, s, h, t, count, z.V, b->grad_v, z.V_);
}

INLINE void backward_chunks(const sizes z, const wkv6_problem *p, const chunk_backward_block *b, const sequence *s,
                            int64_t h, int64_t t, int64_t count, real *rest, real *G) {
  const int64_t chunks = (count + CHUNK - 1) / CHUNK;
  memset(b->state_rest, 0, (size_t)z.K_ * sizeof(real));
  NO_UNROLL for (int64_t c = 0; c < chunks; c++)
    walk_chunk(z, p, b, s, h, t + c * CHUNK, c, smaller(count - c * CHUNK, CHUNK), c + 1 == chunks);
  NO_UNROLL for (int64_t c = chunks; c-- > 0;)
    unwalk_chunk(z, p, b, s, h, t + c * CHUNK, c, smaller(count - c * CHUNK, CHUNK), rest, G);
}

NOINLINE void backward_chunks_64(const wkv6_problem *p, const chunk_backward_block *b, const sequence *s, int64_t h,
                                 int64_t t, int64_t count, real *rest, real *G) {
  backward_chunks(sizes_of(64, 64), p, b, s, h, t, count, rest, G);
}

NOINLINE void backward_chunks_any(const wkv6_problem *p, const chunk_backward_block *b, const sequence *s, int64_t h,
                                  int64_t t, int64_t count, real *rest, real *G) {
  backward_chunks(sizes_of(p->K, p->V), p, b, s, h, t, count, rest, G);
}

/* Tokens [t, t + count) of head h. */
static void chunk_backward_tokens(const wkv6_problem *p, const void *block, const sequence *s, int64_t n, int64_t h,
                                  int64_t t, int64_t count, real *rest, real *G) {
  const chunk_backward_block *b = block;
  load_u(b->u, p, h);
  memset(b->grad_u, 0, (size_t)p->K * sizeof(real));
  if (p->K == 64 && p->V == 64)
    backward_chunks_64(p, b, s, h, t, count, rest, G);
  else
    backward_chunks_any(p, b, s, h, t, count, rest, G);
  if (p->grad_u_parts.dtype == WKV6_ABSENT) return;
  real *part = (real *)p->grad_u_parts.data + (n * p->H + h) * p->K;
  for (int64_t i = 0; i < p->K; i++) part[i] += b->grad_u[i];
}

static void chunk_backward(const wkv6_problem *p, const wkv6_work *work, void *scratch) {
  arena memory = {scratch, 0};
  const chunk_backward_block b = chunk_backward_layout(p, work->head_end - work->head, &memory);
  memset(scratch, 0, memory.used); /* padding and rests */
  backward_pass(p, work, &b.heads, b.states, chunk_backward_tokens, &b);
}
