/* SPDX-License-Identifier: Apache-2.0
 *
 * What the chunk forms of both passes share: a chunk of CHUNK tokens packed for equations (9) to (11) of docs/wkv6.md,
 * the decayed products of its pairs of tokens, and the matrix products.
 *
 * Every decay over several tokens is a running product of factors exp(w) <= 1 that starts or ends at the chunk's
 * border, or at the token it belongs to: nothing overflows, nothing cancels, and exp(w) is computed once an element.
 */
#define CHUNK 8 /* tokens: more make the pairs dearer, fewer the state's traffic between cache and registers */
#define PAIRS (CHUNK * (CHUNK + 1) / 2)

/* Rows of a product's tile of TILE x 2 vectors: as many as the registers hold. */
#if WKV6_VECTOR_BYTES == 64 || defined(__aarch64__)
#define TILE 8
#else
#define TILE 4
#endif

/* Vectors of channels that are packed together: enough to hide the latency of the running products. */
#define PACK 4

/* Where pair (s, t), s <= t, of a chunk's tokens stands in the triangle of all pairs. */
INLINE int64_t pair(int64_t s, int64_t t) { return s * (2 * CHUNK - 1 - s) / 2 + t; }

/* K and V, and both rounded up to whole vectors. The kernels are compiled twice, once for heads of 64 x 64: constant
 * strides leave the registers to the tiles. */
typedef struct {
  int64_t K, V, K_, V_;
} sizes;

INLINE sizes sizes_of(int64_t K, int64_t V) { return (sizes){K, V, round_up(K, LANES), round_up(V, LANES)}; }

/* The rows of a chunk's tokens, as reals. */
typedef struct {
  const real *at;
  int64_t stride;
} chunk_rows;

/* One chunk of one head. */
typedef struct {
  chunk_rows r, k;
  real *r_start;         /* [CHUNK][K_] scale * r_t P(1..t-1): r as the state at the chunk's start sees it */
  real *k_end;           /* [CHUNK][K_] k_t P(t+1..C): k as the state at its end sees it */
  real *d;               /* [CHUNK][K_] exp(w) */
  real *product, *m_sum; /* [K_] P(1..C), and P(1..C) - 1 without cancellation */
} chunk_block;

/* Tokens [t, t + count) of x, in place where they are whole vectors of reals, else copied to scratch [CHUNK][stride]
 * and filled up with zeros: tokens that leave the state as it is. */
static chunk_rows find_rows(const wkv6_tensor *x, const sequence *s, int64_t h, int64_t t, int64_t count, int64_t width,
                            real *scratch, int64_t stride) {
  if (count == CHUNK && width == stride && x->dtype == REAL_DTYPE && x->stride[3] == 1)
    return (chunk_rows){(const real *)row_address(x, s->batch, s->first + t * s->step, h), s->step * x->stride[1]};
  load_tokens(scratch, stride, x, s, h, t, count, width);
  memset(scratch + count * stride, 0, (size_t)((CHUNK - count) * stride) * sizeof(real));
  return (chunk_rows){scratch, stride};
}

/* The same for w, and the log decays where it holds raw x. */
static chunk_rows find_log_decays(const wkv6_problem *p, const sequence *s, int64_t h, int64_t t, int64_t count,
                                  real *scratch, int64_t K_) {
  const chunk_rows x = find_rows(&p->w, s, h, t, count, p->K, scratch, K_);
  if (!(p->flags & WKV6_RAW_DECAY)) return x;
  for (int64_t i = 0; i < count; i++)
    for (int64_t c = 0; c < K_; c += LANES) {
      lanes e, m;
      exp_lanes(load(x.at + i * x.stride + c), &e, &m);
      store(scratch + i * K_ + c, -e);
    }
  return (chunk_rows){scratch, K_};
}

/* Packs `vectors` vectors of channels from c on. */
INLINE void pack_channels(const int vectors, const sizes z, lanes scale, const chunk_block *b, chunk_rows w,
                          int64_t c) {
  lanes product[PACK], r_product[PACK], m_sum[PACK];
  UNROLL for (int x = 0; x < vectors; x++) {
    product[x] = broadcast(1);
    r_product[x] = scale;
    m_sum[x] = broadcast(0);
  }
  NO_UNROLL for (int64_t t = 0; t < CHUNK; t++) {
    UNROLL for (int x = 0; x < vectors; x++) {
      const int64_t from = c + x * LANES, to = t * z.K_ + from;
      lanes e, m;
      exp_lanes(load(w.at + t * w.stride + from), &e, &m);
      store(b->r_start + to, load(b->r.at + t * b->r.stride + from) * r_product[x]);
      store(b->d + to, e);
      m_sum[x] = fma_lanes(m, product[x], m_sum[x]);
      product[x] *= e;
      r_product[x] *= e;
    }
  }
  UNROLL for (int x = 0; x < vectors; x++) {
    store(b->product + c + x * LANES, product[x]);
    store(b->m_sum + c + x * LANES, m_sum[x]);
    product[x] = broadcast(1);
  }
  NO_UNROLL for (int64_t t = CHUNK; t-- > 0;) {
    UNROLL for (int x = 0; x < vectors; x++) {
      const int64_t from = c + x * LANES, to = t * z.K_ + from;
      store(b->k_end + to, load(b->k.at + t * b->k.stride + from) * product[x]);
      product[x] *= load(b->d + to);
    }
  }
}

INLINE void pack_chunk(const sizes z, const wkv6_problem *p, const chunk_block *b, chunk_rows w) {
  const lanes scale = broadcast((real)p->scale);
  int64_t c = 0;
  for (; c + PACK * LANES <= z.K_; c += PACK * LANES) pack_channels(PACK, z, scale, b, w, c);
  for (; c < z.K_; c += LANES) pack_channels(1, z, scale, b, w, c);
}

/* decay[K_]: what states are multiplied by over the chunk. A long chain of chunks loses nothing: see wkv6_decay.inc.h
 * for `rest`. */
INLINE void chunk_decay(const sizes z, const chunk_block *b, real *rest, real *decay) {
  for (int64_t c = 0; c < z.K_; c += LANES)
    store(decay + c, decay_factor(load(b->product + c), load(b->m_sum + c), rest + c));
}

/* Rows that are multiplied in pairs, row s of `early` with row t >= s of `late`. Between them stand the decays d,
 * [CHUNK][width], of the tokens s+1 .. t-1, and u where s = t; without decays both are NULL. */
typedef struct {
  chunk_rows early, late;
  const real *d, *u;
} row_pairs;

/* The part of all pairs' products that `vectors` vectors from c on contribute, lane by lane; added to
 * partial[PAIRS][LANES] unless it is the `first`. */
INLINE void pair_products(const int vectors, const int first, const int decayed, const int64_t width,
                          const row_pairs *x, int64_t c, real *partial) {
  NO_UNROLL for (int64_t s = 0; s < CHUNK; s++) {
    const real *late = x->late.at + s * x->late.stride + c, *d = decayed ? x->d + s * width + c : NULL;
    lanes early[PACK], sum = broadcast(0);
    UNROLL for (int v = 0; v < vectors; v++) {
      early[v] = load(x->early.at + s * x->early.stride + c + v * LANES);
      const lanes left = decayed ? early[v] * load(x->u + c + v * LANES) : early[v];
      sum = fma_lanes(left, load(late + v * LANES), sum);
    }
    real *to = partial + pair(s, s) * LANES;
    store(to, first ? sum : sum + load(to));
    NO_UNROLL for (int64_t t = s + 1; t < CHUNK; t++) {
      late += x->late.stride;
      to += LANES;
      sum = broadcast(0);
      UNROLL for (int v = 0; v < vectors; v++) {
        if (decayed && t > s + 1) early[v] *= load(d + v * LANES);
        sum = fma_lanes(load(late + v * LANES), early[v], sum);
      }
      store(to, first ? sum : sum + load(to));
      if (decayed) d += width;
    }
  }
}

#define PAIR_ROWS ((PAIRS + LANES - 1) / LANES * LANES) /* whole vectors of them */

/* sums[pair(s, t)] = scale times the sum over `width` elements of early_s late_t and what stands between them.
 * `partial` is scratch, [PAIR_ROWS][LANES]. */
INLINE void sum_pairs(const int decayed, const int64_t width, const wkv6_problem *p, const row_pairs *x, real *partial,
                      real *sums) {
  int64_t c = 0;
  if (width >= PACK * LANES)
    pair_products(PACK, 1, decayed, width, x, c, partial), c += PACK * LANES;
  else
    pair_products(1, 1, decayed, width, x, c, partial), c += LANES;
  for (; c + PACK * LANES <= width; c += PACK * LANES) pair_products(PACK, 0, decayed, width, x, c, partial);
  for (; c < width; c += LANES) pair_products(1, 0, decayed, width, x, c, partial);
  const lanes scale = broadcast((real)p->scale);
  NO_UNROLL for (int64_t m = 0; m < PAIR_ROWS; m += LANES)
    store(sums + m, scale * row_sums(partial + m * LANES));
}

/* scale * A_ts at A[pair(s, t)], A_ts = sum_i r_t[i] k_s[i] P(s+1..t-1)[i]; r_t . (u * k_t) on the diagonal. */
INLINE void chunk_A(const sizes z, const wkv6_problem *p, const chunk_block *b, const real *u, real *partial, real *A) {
  const row_pairs x = {b->k, b->r, b->d, u};
  sum_pairs(1, z.K_, p, &x, partial, A);
}

/* sum[t] += sum over i < count of left[t][i] right[i]: a tile of TILE rows and `columns` vectors of a matrix product.
 * One chain of additions an element, in the order of i. */
INLINE void multiply_rows(const int columns, int64_t count, const real *left, int64_t stride_left, const real *right,
                          int64_t stride_right, lanes sum[TILE][2]) {
  _Pragma("GCC unroll 2") for (int64_t i = 0; i < count; i++, right += stride_right) {
    lanes row[2];
    UNROLL for (int c = 0; c < columns; c++)
      row[c] = load(right + c * LANES);
    UNROLL for (int t = 0; t < TILE; t++) {
      const lanes x = broadcast(left[t * stride_left + i]);
      UNROLL for (int c = 0; c < columns; c++)
        sum[t][c] = fma_lanes(x, row[c], sum[t][c]);
    }
  }
}

/* sum[x] += sum over the chunk's tokens t of left[t][x] right[t]: `rows` rows and `columns` vectors of a state's
 * update. */
INLINE void multiply_tokens(const int rows, const int columns, const real *left, int64_t stride_left, const real *right,
                            int64_t stride_right, lanes sum[TILE][2]) {
  _Pragma("GCC unroll 2") for (int64_t t = 0; t < CHUNK; t++, left += stride_left, right += stride_right) {
    lanes row[2];
    UNROLL for (int c = 0; c < columns; c++)
      row[c] = load(right + c * LANES);
    UNROLL for (int x = 0; x < rows; x++) {
      const lanes factor = broadcast(left[x]);
      UNROLL for (int c = 0; c < columns; c++)
        sum[x][c] = fma_lanes(factor, row[c], sum[x][c]);
    }
  }
}

/* Rows that will be wanted soon, fetched into the second-level cache a few at a time between the tiles of matrix
 * products. Tokens lie far apart in memory, which no hardware prefetcher follows. */
#define PREFETCHED 5 /* tensors at most */
typedef struct {
  const char *row[PREFETCHED];
  int64_t next[PREFETCHED], bytes[PREFETCHED]; /* from row to row, of a row */
  int64_t tensors, tensor, token, tokens;
  int64_t rows_a_tile;
} prefetcher;

/* Rows of `tokens` tokens from t on, if the sequence has them. */
INLINE void prefetch_tokens(prefetcher *a, const wkv6_tensor *x, const sequence *s, int64_t h, int64_t t,
                            int64_t width) {
  if (x->dtype == WKV6_ABSENT) return;
  a->row[a->tensors] = row_address(x, s->batch, s->first + t * s->step, h);
  a->next[a->tensors] = s->step * x->stride[1] * element_size(x->dtype);
  a->bytes[a->tensors++] = width * element_size(x->dtype);
}

/* To be called in each of `tiles` tiles; the rows are spread evenly over them. */
INLINE prefetcher prefetch_during(int64_t tiles, int64_t tensors, int64_t tokens) {
  return (prefetcher){.tokens = tokens, .rows_a_tile = tiles > 0 ? (tensors * tokens + tiles - 1) / tiles : 0};
}

INLINE void prefetch_some(prefetcher *a) {
  for (int64_t n = 0; n < a->rows_a_tile && a->tensor < a->tensors; n++) {
    const char *row = a->row[a->tensor] + a->token * a->next[a->tensor];
    for (int64_t byte = 0; byte < a->bytes[a->tensor]; byte += 64) __builtin_prefetch(row + byte, 0, 2);
    if (++a->token == a->tokens) {
      a->token = 0;
      a->tensor++;
    }
  }
}
