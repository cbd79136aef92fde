/* SPDX-License-Identifier: Apache-2.0
 *
 * The state alone: what a run of tokens does to any state before it, equations (10) and (12) of docs/wkv6.md. Chunk by
 * chunk, one operation an element of the state and token; neither r, u nor o.
 */
typedef struct {
  real *k, *w, *v;     /* [CHUNK][K_], [CHUNK][V_] tokens that are not whole vectors of reals */
  real *k_end;         /* [CHUNK][K_] scale * k_t P(t+1..C) */
  real *decay;         /* [K_] what the chunk multiplies the state by */
  real *w_sum, *w_due; /* [heads][K_] sum of the log decays so far, and what its rounding took too much */
  int64_t head;        /* the first one's number */
  state_block heads;
} summary_block;

static summary_block summary_layout(const wkv6_problem *p, int64_t heads, arena *scratch) {
  const int64_t K_ = round_up(p->K, LANES), V_ = round_up(p->V, LANES);
  summary_block b = {.head = 0};
  b.k = take(scratch, CHUNK * K_);
  b.w = take(scratch, CHUNK * K_);
  b.v = take(scratch, CHUNK * V_);
  b.k_end = take(scratch, CHUNK * K_);
  b.decay = take(scratch, K_);
  b.w_sum = take(scratch, heads * K_);
  b.w_due = take(scratch, heads * K_);
  b.heads = state_layout(p, heads, scratch);
  return b;
}

static size_t state_scratch(const wkv6_problem *p, int64_t heads) {
  arena sizes_only = {NULL, 0};
  summary_layout(p, heads, &sizes_only);
  return sizes_only.used;
}

/* sum + x, both to the last digits: `due` keeps what the rounding added too much. Equal weak decays would otherwise all
 * be rounded the same way. A sum that is infinite has no digits to keep. */
INLINE lanes add_log_decays(lanes sum, lanes x, real *due) {
  const lanes y = x - load(due), total = sum + y, excess = (total - sum) - y;
  store(due, choose(total * broadcast(0) == broadcast(0), excess, broadcast(0)));
  return total;
}

/* k_end, decay and the sums for `vectors` vectors of channels from c on. */
INLINE void summary_channels(const int vectors, const sizes z, lanes scale, const summary_block *b, chunk_rows k,
                             chunk_rows w, int64_t c, real *rest, real *w_sum, real *w_due) {
  lanes product[PACK], m_sum[PACK], sum[PACK];
  UNROLL for (int x = 0; x < vectors; x++) {
    product[x] = broadcast(1);
    m_sum[x] = sum[x] = broadcast(0);
  }
  NO_UNROLL for (int64_t t = CHUNK; t-- > 0;) {
    UNROLL for (int x = 0; x < vectors; x++) {
      const int64_t from = c + x * LANES;
      const lanes log_decay = load(w.at + t * w.stride + from);
      lanes e, m;
      exp_lanes(log_decay, &e, &m);
      store(b->k_end + t * z.K_ + from, scale * load(k.at + t * k.stride + from) * product[x]);
      m_sum[x] = fma_lanes(m, product[x], m_sum[x]); /* P(t..C) - 1, without cancellation */
      product[x] *= e;
      sum[x] += log_decay;
    }
  }
  UNROLL for (int x = 0; x < vectors; x++) {
    const int64_t from = c + x * LANES;
    store(b->decay + from, decay_factor(product[x], m_sum[x], rest + from));
    store(w_sum + from, add_log_decays(load(w_sum + from), sum[x], w_due + from));
  }
}

/* (10) for `rows` rows of the state and `columns` vectors of V; S, v, k_end and decay at the first of them. */
INLINE void summary_tile(const int rows, const int columns, const sizes z, const real *k_end, const real *decay,
                         const real *v, int64_t stride_v, real *S) {
  lanes s[TILE][2];
  UNROLL for (int x = 0; x < rows; x++) {
    const lanes factor = broadcast(decay[x]);
    UNROLL for (int c = 0; c < columns; c++)
      s[x][c] = factor * load(S + x * z.V_ + c * LANES);
  }
  multiply_tokens(rows, columns, k_end, z.K_, v, stride_v, s);
  store_tile(rows, columns, s, S, z.V_);
}

INLINE void summary_columns(const int columns, const sizes z, const summary_block *b, chunk_rows v, int64_t j, real *S,
                            prefetcher *ahead) {
  int64_t i = 0;
  NO_UNROLL for (; i + TILE <= z.K; i += TILE) {
    prefetch_some(ahead);
    summary_tile(TILE, columns, z, b->k_end + i, b->decay + i, v.at + j, v.stride, S + i * z.V_ + j);
  }
  NO_UNROLL for (; i < z.K; i++) /* no padded rows */
    summary_tile(1, columns, z, b->k_end + i, b->decay + i, v.at + j, v.stride, S + i * z.V_ + j);
}

/* Tokens [t, t + count) of head h, at most a chunk. */
INLINE void summary_chunk(const sizes z, const wkv6_problem *p, const summary_block *b, const sequence *s, int64_t h,
                          int64_t t, int64_t count, real *rest, real *S) {
  const chunk_rows k = find_rows(&p->k, s, h, t, count, z.K, b->k, z.K_);
  const chunk_rows w = find_log_decays(p, s, h, t, count, b->w, z.K_);
  const chunk_rows v = find_rows(&p->v, s, h, t, count, z.V, b->v, z.V_);
  const int64_t next = t + CHUNK, tiles = z.K / TILE * ((z.V_ + LANES) / (2 * LANES));
  prefetcher ahead = prefetch_during(tiles, 3, next < s->length ? smaller(s->length - next, CHUNK) : 0);
  if (ahead.tokens > 0) {
    prefetch_tokens(&ahead, &p->w, s, h, next, z.K);
    prefetch_tokens(&ahead, &p->k, s, h, next, z.K);
    prefetch_tokens(&ahead, &p->v, s, h, next, z.V);
  }
  const lanes scale = broadcast((real)p->scale);
  real *const w_sum = b->w_sum + (h - b->head) * z.K_, *const w_due = b->w_due + (h - b->head) * z.K_;
  int64_t c = 0;
  for (; c + PACK * LANES <= z.K_; c += PACK * LANES) summary_channels(PACK, z, scale, b, k, w, c, rest, w_sum, w_due);
  for (; c < z.K_; c += LANES) summary_channels(1, z, scale, b, k, w, c, rest, w_sum, w_due);
  int64_t j = 0;
  NO_UNROLL for (; j + 2 * LANES <= z.V_; j += 2 * LANES)
    summary_columns(2, z, b, v, j, S, &ahead);
  if (j < z.V_) summary_columns(1, z, b, v, j, S, &ahead);
}

INLINE void summary_chunks(const sizes z, const wkv6_problem *p, const summary_block *b, const sequence *s, int64_t h,
                           int64_t t, int64_t count, real *rest, real *S) {
  NO_UNROLL for (int64_t c = 0; c < count; c += CHUNK)
    summary_chunk(z, p, b, s, h, t + c, smaller(count - c, CHUNK), rest, S);
}

NOINLINE void summary_chunks_64(const wkv6_problem *p, const summary_block *b, const sequence *s, int64_t h, int64_t t,
                                int64_t count, real *rest, real *S) {
  summary_chunks(sizes_of(64, 64), p, b, s, h, t, count, rest, S);
}

NOINLINE void summary_chunks_any(const wkv6_problem *p, const summary_block *b, const sequence *s, int64_t h, int64_t t,
                                 int64_t count, real *rest, real *S) {
  summary_chunks(sizes_of(p->K, p->V), p, b, s, h, t, count, rest, S);
}

/* Tokens [t, t + count) of head h. */
static void summary_tokens(const wkv6_problem *p, const void *block, const sequence *s, int64_t h, int64_t t,
                           int64_t count, real *rest, real *S) {
  if (p->K == 64 && p->V == 64)
    summary_chunks_64(p, block, s, h, t, count, rest, S);
  else
    summary_chunks_any(p, block, s, h, t, count, rest, S);
}

static void state(const wkv6_problem *p, const wkv6_work *work, void *scratch) {
  const wkv6_problem part = of_columns(p, work);
  const int64_t heads = work->head_end - work->head, K_ = round_up(p->K, LANES);
  arena memory = {scratch, 0};
  summary_block b = summary_layout(&part, heads, &memory);
  b.head = work->head;
  memset(scratch, 0, (size_t)((char *)b.heads.rest - (char *)scratch)); /* the padding, and the sums */
  forward_pass(&part, work, &b.heads, summary_tokens, &b);
  for (int64_t h = 0; work->column == 0 && h < heads; h++) /* every piece of the columns has the same sums */
    store_rows(row_address(&p->w_sum, work->n, work->head + h, 0),
               0,
               p->w_sum.stride[2],
               p->w_sum.dtype,
               1,
               p->K,
               b.w_sum + h * K_,
               K_);
}
