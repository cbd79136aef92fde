/* SPDX-License-Identifier: Apache-2.0
 *
 * Forward pass, chunk form: equations (9) and (10) of docs/wkv6.md, two operations an element of the state and token
 * where the recurrent form has three. Both are matrix products over a chunk of tokens, done in tiles that stay in
 * registers. Lanes run over V, and each sum over K is one chain in the order of i, so that o does not depend on the
 * tiling or the number of threads.
 */
typedef struct {
  chunk_block chunk;
  real *rows[3];     /* [CHUNK][K_] each: r, k, w where they are not whole vectors of reals */
  real *v, *o;       /* [CHUNK][V_] */
  real *u, *decay;   /* [K_] */
  real *partial, *A; /* [PAIR_ROWS][LANES], [PAIR_ROWS] */
  state_block heads;
} chunk_forward_block;

static chunk_forward_block chunk_forward_layout(const wkv6_problem *p, int64_t heads, arena *scratch) {
  const int64_t K_ = round_up(p->K, LANES), V_ = round_up(p->V, LANES);
  chunk_forward_block b;
  chunk_block *c = &b.chunk;
  real **const of_K[] = {&c->r_start, &c->k_end, &c->d, &b.rows[0], &b.rows[1], &b.rows[2]};
  for (size_t i = 0; i < sizeof of_K / sizeof *of_K; i++) *of_K[i] = take(scratch, CHUNK * K_);
  b.v = take(scratch, CHUNK * V_);
  b.o = take(scratch, CHUNK * V_);
  c->product = take(scratch, K_);
  c->m_sum = take(scratch, K_);
  b.decay = take(scratch, K_);
  b.u = take(scratch, K_);
  b.partial = take(scratch, PAIR_ROWS * LANES);
  b.A = take(scratch, PAIR_ROWS);
  b.heads = state_layout(p, heads, scratch);
  return b;
}

static size_t chunk_forward_scratch(const wkv6_problem *p, int64_t heads) {
  arena sizes_only = {NULL, 0};
  chunk_forward_layout(p, heads, &sizes_only);
  return sizes_only.used;
}

/* (9) for tokens first .. first + TILE - 1 of the chunk and `columns` vectors of V; S, v and o at the first of them. */
INLINE void output_tile(const int columns, const sizes z, int64_t first, const chunk_forward_block *b, const real *S,
                        const real *v, real *o, int64_t stride_o) {
  lanes sum[TILE][2], row[2];
  UNROLL for (int t = 0; t < TILE; t++) UNROLL
    for (int c = 0; c < columns; c++) sum[t][c] = broadcast(0);
  multiply_rows(columns, z.K, b->chunk.r_start + first * z.K_, z.K_, S, z.V_, sum);
  NO_UNROLL for (int64_t s = 0; s < first; s++) {
    UNROLL for (int c = 0; c < columns; c++)
      row[c] = load(v + s * z.V_ + c * LANES);
    UNROLL for (int t = 0; t < TILE; t++) {
      const lanes x = broadcast(b->A[pair(s, first + t)]);
      UNROLL for (int c = 0; c < columns; c++)
        sum[t][c] = fma_lanes(x, row[c], sum[t][c]);
    }
  }
  /* The diagonal block as a true triangle: an infinite v times a zero of A would reach earlier tokens as NaN. */
  UNROLL for (int s = 0; s < TILE; s++) {
    UNROLL for (int c = 0; c < columns; c++)
      row[c] = load(v + (first + s) * z.V_ + c * LANES);
    UNROLL for (int t = s; t < TILE; t++) {
      const lanes x = broadcast(b->A[pair(first + s, first + t)]);
      UNROLL for (int c = 0; c < columns; c++)
        sum[t][c] = fma_lanes(x, row[c], sum[t][c]);
    }
  }
  store_tile(TILE, columns, sum, o + first * stride_o, stride_o);
}

/* (10) for `rows` rows of the state from i and `columns` vectors of V; S and v at the first of them. */
INLINE void state_tile(const int rows, const int columns, const sizes z, int64_t i, const chunk_forward_block *b,
                       const real *v, real *S) {
  lanes s[TILE][2];
  UNROLL for (int x = 0; x < rows; x++) {
    const lanes decay = broadcast(b->decay[i + x]);
    UNROLL for (int c = 0; c < columns; c++)
      s[x][c] = decay * load(S + x * z.V_ + c * LANES);
  }
  multiply_tokens(rows, columns, b->chunk.k_end + i, z.K_, v, z.V_, s);
  store_tile(rows, columns, s, S, z.V_);
}

/* Everything for `columns` vectors of V from j on. The state's columns come from the nearest cache for the second
 * product. */
INLINE void chunk_columns(const int columns, const sizes z, int64_t j, const chunk_forward_block *b, real *S, real *o,
                          int64_t stride_o, prefetcher *ahead) {
  NO_UNROLL for (int64_t t = 0; t < CHUNK; t += TILE)
    output_tile(columns, z, t, b, S + j, b->v + j, o + j, stride_o);
  int64_t i = 0;
  NO_UNROLL for (; i + TILE <= z.K; i += TILE) {
    prefetch_some(ahead);
    state_tile(TILE, columns, z, i, b, b->v + j, S + i * z.V_ + j);
  }
  NO_UNROLL for (; i < z.K; i++)
    state_tile(1, columns, z, i, b, b->v + j, S + i * z.V_ + j); /* no padded rows */
}

/* Tokens [t, t + count) of head h, at most a chunk. */
INLINE void forward_chunk(const sizes z, const wkv6_problem *p, const chunk_forward_block *b, const sequence *s,
                          int64_t h, int64_t t, int64_t count, real *rest, real *S, prefetcher *ahead) {
  chunk_block chunk = b->chunk;
  chunk.r = find_rows(&p->r, s, h, t, count, z.K, b->rows[0], z.K_);
  chunk.k = find_rows(&p->k, s, h, t, count, z.K, b->rows[1], z.K_);
  pack_chunk(z, p, &chunk, find_log_decays(p, s, h, t, count, b->rows[2], z.K_));
  chunk_decay(z, &chunk, rest, b->decay);
  chunk_A(z, p, &chunk, b->u, b->partial, b->A);
  const chunk_rows v = find_rows(&p->v, s, h, t, count, z.V, b->v, z.V_);
  if (v.at != b->v)
    for (int64_t i = 0; i < CHUNK; i++)
      for (int64_t j = 0; j < z.V_; j += LANES) store(b->v + i * z.V_ + j, load(v.at + i * v.stride + j));

  const int in_place = count == CHUNK && z.V == z.V_ && p->o.dtype == REAL_DTYPE && p->o.stride[3] == 1;
  real *o = in_place ? (real *)row_address(&p->o, s->batch, s->first + t * s->step, h) : b->o;
  const int64_t stride_o = in_place ? s->step * p->o.stride[1] : z.V_;
  int64_t j = 0;
  NO_UNROLL for (; j + 2 * LANES <= z.V_; j += 2 * LANES)
    chunk_columns(2, z, j, b, S, o, stride_o, ahead);
  if (j < z.V_) chunk_columns(1, z, j, b, S, o, stride_o, ahead);
  if (!in_place) store_tokens(&p->o, s, h, t, count, z.V, b->o, z.V_);
}

/* What chunk (h, t) will read and write, while the one before it is worked on. */
INLINE prefetcher prefetch_chunk(const sizes z, const wkv6_problem *p, const sequence *s, int64_t h, int64_t t) {
  const int64_t tiles = z.K / TILE * ((z.V_ + LANES) / (2 * LANES));
  if (h >= p->H || t >= s->length) return prefetch_during(0, 0, 0);
  prefetcher a = prefetch_during(tiles, 5, smaller(s->length - t, CHUNK));
  prefetch_tokens(&a, &p->w, s, h, t, z.K);
  prefetch_tokens(&a, &p->r, s, h, t, z.K);
  prefetch_tokens(&a, &p->k, s, h, t, z.K);
  prefetch_tokens(&a, &p->v, s, h, t, z.V);
  prefetch_tokens(&a, &p->o, s, h, t, z.V);
  return a;
}

INLINE void forward_chunks(const sizes z, const wkv6_problem *p, const chunk_forward_block *b, const sequence *s,
                           int64_t h, int64_t t, int64_t count, real *rest, real *S) {
  NO_UNROLL for (int64_t c = 0; c < count; c += CHUNK) {
    /* The next chunk is the next head's first one after the block's last. */
    const int last = c + CHUNK >= count;
    prefetcher ahead = prefetch_chunk(z, p, s, last ? h + 1 : h, last ? t : t + c + CHUNK);
    forward_chunk(z, p, b, s, h, t + c, smaller(count - c, CHUNK), rest, S, &ahead);
  }
}

NOINLINE void forward_chunks_64(const wkv6_problem *p, const chunk_forward_block *b, const sequence *s, int64_t h,
                                int64_t t, int64_t count, real *rest, real *S) {
  forward_chunks(sizes_of(64, 64), p, b, s, h, t, count, rest, S);
}

NOINLINE void forward_chunks_any(const wkv6_problem *p, const chunk_forward_block *b, const sequence *s, int64_t h,
                                 int64_t t, int64_t count, real *rest, real *S) {
  forward_chunks(sizes_of(p->K, p->V), p, b, s, h, t, count, rest, S);
}

/* Tokens [t, t + count) of head h. */
static void chunk_forward_tokens(const wkv6_problem *p, const void *block, const sequence *s, int64_t h, int64_t t,
                                 int64_t count, real *rest, real *S) {
  const chunk_forward_block *b = block;
  load_u(b->u, p, h);
  if (p->K == 64 && p->V == 64)
    forward_chunks_64(p, b, s, h, t, count, rest, S);
  else
    forward_chunks_any(p, b, s, h, t, count, rest, S);
}

static void chunk_forward(const wkv6_problem *p, const wkv6_work *work, void *scratch) {
  const wkv6_problem part = of_columns(p, work);
  arena memory = {scratch, 0};
  const chunk_forward_block b = chunk_forward_layout(&part, work->head_end - work->head, &memory);
  memset(scratch, 0, (size_t)((char *)b.heads.rest - (char *)scratch)); /* the padding */
  forward_pass(&part, work, &b.heads, chunk_forward_tokens, &b);
}
