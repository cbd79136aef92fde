/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward pass, chunk form: equations (3) to (8) of docs/wkv6.md over chunks of tokens, dw by (11).
 *
 * Segments from the last to the first. Each is packed, walked forward from its checkpoint, which leaves the state before every chunk and
 * what it gives to dr, then walked backward with the adjoint G. State and adjoint are kept transposed, [V][K], lanes over K, so that four
 * of the five large products need no sum over lanes. dv does: there the tokens are in the lanes, and what comes out is transposed.
 * Inside a chunk the pairs of tokens are split in halves again and again, and every decay starts or ends at the middle of such a block:
 * dw is a sum of products, never a difference. No sum depends on the number of threads.
 */
#if LANES == 16
#define RUN 2 /* reals of one token side by side where tokens are in the lanes */
#else
#define RUN 1
#endif
#define RUN_TOKENS (LANES / RUN)              /* tokens in one vector */
#define TOKEN_VECTORS (CHUNK * RUN / LANES)   /* vectors that hold all tokens of a chunk */

/* A segment of one head; `chunk` describes its first chunk, with [tokens] where that says [CHUNK]. */
typedef struct {
  chunk_block chunk;
  real *rows[2];            /* [CHUNK][K_] each: r, k where they are not whole vectors of reals */
  real *w;                  /* [tokens][K_] */
  real *v, *grad_o;         /* [tokens][V_] */
  real *states;             /* [chunks][V_][K_] before each chunk */
  real *grad_r;             /* [tokens][K_] */
  real *grad_k, *grad_w;    /* [CHUNK][K_] */
  real *grad_v;             /* [CHUNK][V_] */
  real *k_tokens;           /* [K_ / RUN][CHUNK][RUN] k_end with the tokens in the lanes */
  real *inner;              /* [K_] rowsum(G * S) */
  real *u, *grad_u;         /* [K_] */
  real *partial, *A, *M;    /* [PAIR_ROWS][LANES]; [PAIR_ROWS] each, M_st = do_t . v_s */
  adjoint_block heads;
} chunk_backward_block;

static chunk_backward_block chunk_backward_layout(const wkv6_problem *p, int64_t heads, char **scratch) {
  const int64_t K_ = round_up(p->K, LANES), V_ = round_up(p->V, LANES);
  const int64_t L = round_up(p->T < p->segment ? p->T : p->segment, CHUNK);
  chunk_backward_block b = {.chunk = {.K_ = K_, .V_ = V_}};
  real **const of_tokens[] = {&b.chunk.r, &b.chunk.k, &b.chunk.r_start, &b.chunk.k_end, &b.chunk.d, &b.w, &b.grad_r};
  real **const of_chunk[] = {&b.rows[0], &b.rows[1], &b.grad_k, &b.grad_w, &b.k_tokens};
  for (size_t i = 0; i < sizeof of_tokens / sizeof *of_tokens; i++) *of_tokens[i] = take(scratch, L * K_);
  for (size_t i = 0; i < sizeof of_chunk / sizeof *of_chunk; i++) *of_chunk[i] = take(scratch, CHUNK * K_);
  b.chunk.decay = take(scratch, L / CHUNK * K_);
  b.v = take(scratch, L * V_);
  b.grad_o = take(scratch, L * V_);
  b.grad_v = take(scratch, CHUNK * V_);
  b.inner = take(scratch, K_);
  b.u = take(scratch, K_);
  b.grad_u = take(scratch, K_);
  b.partial = take(scratch, PAIR_ROWS * LANES);
  b.A = take(scratch, PAIR_ROWS);
  b.M = take(scratch, PAIR_ROWS);
  b.states = take(scratch, L / CHUNK * V_ * K_);
  b.heads = adjoint_layout(p, heads, scratch);
  return b;
}

static size_t chunk_backward_scratch(const wkv6_problem *p, int64_t heads) {
  char *end = NULL;
  chunk_backward_layout(p, heads, &end);
  return (size_t)(end - (char *)NULL);
}

/* The block of the segment's chunk c. */
INLINE chunk_block chunk_at(const chunk_block *segment, int64_t c) {
  chunk_block b = *segment;
  const int64_t at = c * CHUNK * b.K_;
  b.r += at, b.k += at, b.r_start += at, b.k_end += at, b.d += at;
  b.decay += c * b.K_;
  return b;
}

/* Loads and packs tokens [t, t + count) of head h, the last chunk first: the rests of the decays pass from a segment to the one before it. */
static void chunk_backward_load(const wkv6_problem *p, const chunk_backward_block *b, const sequence *s, int64_t h, int64_t t,
                                int64_t count, real *rest) {
  const int64_t K_ = b->chunk.K_, V_ = b->chunk.V_, tokens = round_up(count, CHUNK);
  load_u(b->u, p, h);
  load_tokens(b->v, V_, &p->v, s, h, t, count, p->V);
  load_tokens(b->grad_o, V_, &p->grad_o, s, h, t, count, p->V);
  memset(b->v + count * V_, 0, (size_t)((tokens - count) * V_) * sizeof(real));
  memset(b->grad_o + count * V_, 0, (size_t)((tokens - count) * V_) * sizeof(real));
  for (int64_t c = tokens / CHUNK; c-- > 0;) {
    const int64_t at = c * CHUNK, here = smaller(count - at, CHUNK);
    const chunk_block chunk = chunk_at(&b->chunk, c);
    const chunk_rows r = find_rows(&p->r, s, h, t + at, here, p->K, b->rows[0], K_);
    const chunk_rows k = find_rows(&p->k, s, h, t + at, here, p->K, b->rows[1], K_);
    const chunk_rows w = find_log_decays(p, s, h, t + at, here, b->w + at * K_, K_);
    pack_chunk(p, &chunk, r, k, w, rest);
  }
}

/* to[CHUNK][K_] = left[CHUNK][V_] times a transposed state [V_][K_]. */
static void multiply_state(int64_t V, int64_t K_, int64_t V_, const real *left, const real *state, real *to) {
  for (int64_t i = 0; i < K_; i += 2 * LANES)
    for (int64_t t = 0; t < CHUNK; t += TILE) {
      lanes sum[TILE][2];
      UNROLL for (int x = 0; x < TILE; x++) UNROLL for (int c = 0; c < 2; c++) sum[x][c] = broadcast(0);
      if (i + LANES < K_) {
        multiply_rows(2, V, left + t * V_, V_, state + i, K_, sum);
        store_tile(TILE, 2, sum, to + t * K_ + i, K_);
      } else {
        multiply_rows(1, V, left + t * V_, V_, state + i, K_, sum);
        store_tile(TILE, 1, sum, to + t * K_ + i, K_);
      }
    }
}

/* to = decay * from + the sum over tokens of left_t right_t^T, on `rows` rows and `columns` vectors; all pointers at the tile. With `other`,
 * inner[c] gains the lanes' products of `from` and `other`. */
INLINE void transposed_tile(const int rows, const int columns, const int64_t K_, const int64_t V_, const real *left, const real *right,
                            const real *decay, const real *from, real *to, const real *other, lanes inner[2]) {
  lanes tile[TILE][2];
  UNROLL for (int x = 0; x < rows; x++)
    UNROLL for (int c = 0; c < columns; c++) {
      const lanes before = load(from + x * K_ + c * LANES);
      if (other) inner[c] = fma_lanes(before, load(other + x * K_ + c * LANES), inner[c]);
      tile[x][c] = load(decay + c * LANES) * before;
    }
  multiply_tokens(rows, columns, left, V_, right, K_, tile);
  store_tile(rows, columns, tile, to, K_);
}

/* The same for `columns` vectors of K and all of V. */
INLINE void transposed_columns(const int columns, int64_t V, int64_t K_, int64_t V_, const real *left, const real *right,
                               const real *decay, const real *from, real *to, const real *other, real *inner) {
  lanes sum[2] = {broadcast(0), broadcast(0)};
  int64_t j = 0;
  NO_UNROLL for (; j + TILE <= V; j += TILE)
    transposed_tile(TILE, columns, K_, V_, left + j, right, decay, from + j * K_, to + j * K_, other ? other + j * K_ : NULL, sum);
  NO_UNROLL for (; j < V; j++)
    transposed_tile(1, columns, K_, V_, left + j, right, decay, from + j * K_, to + j * K_, other ? other + j * K_ : NULL, sum);
  if (other) UNROLL for (int c = 0; c < columns; c++) store(inner + c * LANES, sum[c]);
}

/* (10): the state after a chunk from the one before it. */
static void advance_state(int64_t V, const chunk_block *b, const real *v, const real *from, real *to) {
  const int64_t K_ = b->K_, V_ = b->V_;
  int64_t i = 0;
  for (; i + 2 * LANES <= K_; i += 2 * LANES)
    transposed_columns(2, V, K_, V_, v, b->k_end + i, b->decay + i, from + i, to + i, NULL, NULL);
  if (i < K_) transposed_columns(1, V, K_, V_, v, b->k_end + i, b->decay + i, from + i, to + i, NULL, NULL);
}

/* (7) over a chunk, and inner = rowsum(G * S) of G before that and the state S before the chunk. */
static void retreat_adjoint(int64_t V, const chunk_block *b, const real *grad_o, real *G, const real *S, real *inner) {
  const int64_t K_ = b->K_, V_ = b->V_;
  int64_t i = 0;
  for (; i + 2 * LANES <= K_; i += 2 * LANES)
    transposed_columns(2, V, K_, V_, grad_o, b->r_start + i, b->decay + i, G + i, G + i, S + i, inner + i);
  if (i < K_) transposed_columns(1, V, K_, V_, grad_o, b->r_start + i, b->decay + i, G + i, G + i, S + i, inner + i);
}

/* grad_v[CHUNK][V_] = k_end times G: tokens in the lanes, LANES rows of the transposed G at a time. */
static void multiply_adjoint(int64_t K, const chunk_block *b, const real *G, real *k_tokens, real *grad_v) {
  const int64_t K_ = b->K_, V_ = b->V_, runs = (K + RUN - 1) / RUN;
  lanes x[LANES];
  for (int v = 0; v < TOKEN_VECTORS; v++)
    for (int64_t i = 0; i < K_; i += LANES) {
      UNROLL for (int m = 0; m < RUN_TOKENS; m++) x[m] = load(b->k_end + (v * RUN_TOKENS + m) * K_ + i);
      transpose_lanes(RUN, x);
      UNROLL for (int m = 0; m < RUN_TOKENS; m++) store(k_tokens + (i / RUN + m) * CHUNK * RUN + v * LANES, x[m]);
    }
  for (int64_t j = 0; j < V_; j += LANES) {
    lanes sum[LANES][TOKEN_VECTORS];
    UNROLL for (int l = 0; l < LANES; l++) UNROLL for (int v = 0; v < TOKEN_VECTORS; v++) sum[l][v] = broadcast(0);
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
      UNROLL for (int m = 0; m < RUN_TOKENS; m++) x[m] = RUN == 2 ? add_neighbours(sum[m * RUN][v], sum[(m * RUN + 1) % LANES][v]) : sum[m][v];
      transpose_lanes(RUN, x);
      UNROLL for (int m = 0; m < RUN_TOKENS; m++) store(grad_v + (v * RUN_TOKENS + m) * V_ + j, x[m]);
    }
  }
}

/* grad_v_t += sum over q >= t of A_qt do_q, as a true triangle: an infinite do times a zero would spoil later tokens. */
static void add_later_outputs(const real *A, int64_t V_, const real *grad_o, real *grad_v) {
  for (int64_t j = 0; j < V_; j += LANES) {
    lanes sum[CHUNK];
    UNROLL for (int t = 0; t < CHUNK; t++) sum[t] = load(grad_v + t * V_ + j);
    UNROLL for (int q = 0; q < CHUNK; q++) {
      const lanes row = load(grad_o + q * V_ + j);
      UNROLL for (int t = 0; t <= q; t++) sum[t] = fma_lanes(broadcast(A[pair(t, q)]), row, sum[t]);
    }
    UNROLL for (int t = 0; t < CHUNK; t++) store(grad_v + t * V_ + j, sum[t]);
  }
}

/* One vector of channels of a chunk: r, k, d are columns of [CHUNK][K_] matrices. */
typedef struct {
  const real *r, *k, *d, *M;
  int64_t K_;
  lanes grad_r[CHUNK], grad_k[CHUNK], grad_w[CHUNK];
} channel_block;

#define ROW(x, t) load((x) + (t) * b->K_)

/* What goes through the states at the chunk's ends; `inner` is rowsum(G * S) times the chunk's decay. */
INLINE void gradients_through_states(channel_block *b, lanes inner) {
  lanes product = broadcast(1), sum = broadcast(0);
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

/* The pairs of a token s in [first, middle) and a token q in [middle, middle + half), middle = first + half. Seen from the middle, this is
 * a chunk's border: z_sq = M_sq r_q P(middle..q-1) k_s P(s+1..middle-1). */
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
    UNROLL for (int s = first + 1; s < middle; s++) sum = fma_lanes(broadcast(b->M[pair(s, q)]), k[s], sum);
    b->grad_r[q] = q > middle ? fma_lanes(sum, product[q], b->grad_r[q]) : b->grad_r[q] + sum;
    if (q < end - 1) b->grad_w[q] += later;
    if (q > middle) later = fma_lanes(r[q], sum, later);
  }
  UNROLL for (int s = first; s < middle; s++) {
    lanes sum = broadcast(b->M[pair(s, middle)]) * r[middle];
    UNROLL for (int q = middle + 1; q < end; q++) sum = fma_lanes(broadcast(b->M[pair(s, q)]), r[q], sum);
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

/* Finishes dr, dk, dw and du of a chunk; grad_r and grad_k come in as do S and v G, without any decay. `w` is NULL unless w is raw. */
static void finish_gradients(const chunk_block *chunk, const chunk_backward_block *b, lanes scale, real *grad_r, const real *w) {
  const int64_t K_ = chunk->K_;
  for (int64_t i = 0; i < K_; i += LANES) {
    channel_block x = {.r = chunk->r + i, .k = chunk->k + i, .d = chunk->d + i, .M = b->M, .K_ = K_};
    UNROLL for (int t = 0; t < CHUNK; t++) {
      x.grad_r[t] = load(grad_r + t * K_ + i);
      x.grad_k[t] = load(b->grad_k + t * K_ + i);
    }
    gradients_through_states(&x, load(b->inner + i));
    gradients_between(&x, 0, 4);
    gradients_between(&x, 0, 2);
    gradients_between(&x, 4, 2);
    UNROLL for (int first = 0; first < CHUNK; first += 2) gradients_between(&x, first, 1);
    store(b->grad_u + i, gradients_of_bonus(&x, load(b->u + i), load(b->grad_u + i)));
    UNROLL for (int t = 0; t < CHUNK; t++) {
      store(grad_r + t * K_ + i, scale * x.grad_r[t]);
      store(b->grad_k + t * K_ + i, x.grad_k[t]);
      store(b->grad_w + t * K_ + i, w ? x.grad_w[t] * load(w + t * K_ + i) : x.grad_w[t]);
    }
  }
}

/* Everything that chunk c of the segment, `count` tokens from t, adds on the way back. */
static void backward_chunk(const wkv6_problem *p, const chunk_backward_block *b, const sequence *s, int64_t h, int64_t t, int64_t c,
                           int64_t count, real *G) {
  const chunk_block chunk = chunk_at(&b->chunk, c);
  const int64_t K = p->K, V = p->V, K_ = chunk.K_, V_ = chunk.V_, at = c * CHUNK;
  const real *v = b->v + at * V_, *grad_o = b->grad_o + at * V_;
  real *grad_r = b->grad_r + at * K_;
  const row_pairs of_M = {.early = v, .late = grad_o, .stride = V_};
  chunk_A(&chunk, b->u, b->partial, b->A);
  sum_pairs(0, &of_M, b->partial, b->M);
  multiply_state(V, K_, V_, v, G, b->grad_k);
  multiply_adjoint(K, &chunk, G, b->k_tokens, b->grad_v);
  add_later_outputs(b->A, V_, grad_o, b->grad_v);
  retreat_adjoint(V, &chunk, grad_o, G, b->states + c * V_ * K_, b->inner);
  for (int64_t j = 0; K % RUN && j < V; j++) G[j * K_ + K] = 0; /* multiply_adjoint() reads it: zeros met infinities */
  finish_gradients(&chunk, b, broadcast((real)p->scale), grad_r, p->flags & WKV6_RAW_DECAY ? b->w + at * K_ : NULL);
  store_tokens(&p->grad_r, s, h, t, count, K, grad_r, K_);
  store_tokens(&p->grad_k, s, h, t, count, K, b->grad_k, K_);
  store_tokens(&p->grad_w, s, h, t, count, K, b->grad_w, K_);
  store_tokens(&p->grad_v, s, h, t, count, V, b->grad_v, V_);
}

/* Tokens [t, t + count) of head h. */
static void chunk_backward_tokens(const wkv6_problem *p, const void *block, const sequence *s, int64_t n, int64_t h, int64_t t,
                                  int64_t count, real *rest, real *G) {
  const chunk_backward_block *b = block;
  const int64_t K_ = b->chunk.K_, V_ = b->chunk.V_, chunks = (count + CHUNK - 1) / CHUNK;
  chunk_backward_load(p, b, s, h, t, count, rest);
  memset(b->grad_u, 0, (size_t)K_ * sizeof(real));
  for (int64_t c = 0; c < chunks; c++) {
    const chunk_block chunk = chunk_at(&b->chunk, c);
    real *state = b->states + c * V_ * K_;
    multiply_state(p->V, K_, V_, b->grad_o + c * CHUNK * V_, state, b->grad_r + c * CHUNK * K_);
    if (c + 1 < chunks) advance_state(p->V, &chunk, b->v + c * CHUNK * V_, state, state + V_ * K_);
  }
  for (int64_t c = chunks; c-- > 0;) backward_chunk(p, b, s, h, t + c * CHUNK, c, smaller(count - c * CHUNK, CHUNK), G);
  if (p->grad_u_parts.dtype == WKV6_ABSENT) return;
  real *part = (real *)p->grad_u_parts.data + (n * p->H + h) * p->K;
  for (int64_t i = 0; i < p->K; i++) part[i] += b->grad_u[i];
}

static void chunk_backward(const wkv6_problem *p, const wkv6_work *work, void *scratch) {
  char *end = scratch;
  const chunk_backward_block b = chunk_backward_layout(p, work->head_end - work->head, &end);
  memset(scratch, 0, (size_t)(end - (char *)scratch)); /* padding and rests */
  backward_pass(p, work, &b.heads, b.states, chunk_backward_tokens, &b);
}
