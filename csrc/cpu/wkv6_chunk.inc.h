/* SPDX-License-Identifier: Apache-2.0
 *
 * What the chunk forms of both passes share: a chunk of CHUNK tokens packed for equations (9) to (11) of docs/wkv6.md,
 * the decayed products of its pairs of tokens, and the matrix products.
 *
 * Every decay over several tokens is a running product of factors exp(w) <= 1 that starts or ends at the chunk's border,
 * or at the token it belongs to: nothing overflows, nothing cancels, and exp(w) is computed once an element.
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

/* The rows of a chunk's tokens, as reals. */
typedef struct {
  const real *at;
  int64_t stride;
} chunk_rows;

/* One chunk of one head. K_ and V_ are K and V rounded up to whole vectors. */
typedef struct {
  int64_t K_, V_;
  real *r, *k;           /* [CHUNK][K_] scale * r, k */
  real *r_start, *k_end; /* [CHUNK][K_] r_t P(1..t-1) and k_t P(t+1..C): as the state at the chunk's start and end sees them */
  real *d;               /* [CHUNK][K_] exp(w) */
  real *decay;           /* [K_] P(1..C) */
} chunk_block;

/* Tokens [t, t + count) of x, in place where they are whole vectors of reals, else copied to scratch [CHUNK][stride] and filled up with
 * `filler`. */
static chunk_rows find_rows(const wkv6_tensor *x, const sequence *s, int64_t h, int64_t t, int64_t count, int64_t width, real filler,
                            real *scratch, int64_t stride) {
  if (count == CHUNK && width == stride && x->dtype == REAL_DTYPE && x->stride[3] == 1)
    return (chunk_rows){(const real *)row_address(x, s->batch, s->first + t * s->step, h), s->step * x->stride[1]};
  load_tokens(scratch, stride, x, s, h, t, count, width);
  for (int64_t i = count * stride; i < CHUNK * stride; i++) scratch[i] = filler;
  return (chunk_rows){scratch, stride};
}

/* What a token after the last one has for w, so that its decay is 1. */
INLINE real no_decay(const wkv6_problem *p) { return p->flags & WKV6_RAW_DECAY ? -(real)INFINITY : 0; }

/* Packs `vectors` vectors of channels from c on. The chunk's decay comes from exp(sum of w) - 1, summed without cancellation, so that a
 * long chain of chunks loses nothing (wkv6_decay.inc.h). */
INLINE void pack_channels(const int vectors, const int raw, lanes scale, const chunk_block *b, chunk_rows r, chunk_rows k, chunk_rows w,
                          int64_t c, real *rest) {
  lanes product[PACK], m_sum[PACK];
  UNROLL for (int x = 0; x < vectors; x++) {
    product[x] = broadcast(1);
    m_sum[x] = broadcast(0);
  }
  NO_UNROLL for (int64_t t = 0; t < CHUNK; t++) {
    UNROLL for (int x = 0; x < vectors; x++) {
      const int64_t from = c + x * LANES, to = t * b->K_ + from;
      lanes e, m, log_decay = load(w.at + t * w.stride + from);
      if (raw) {
        exp_lanes(log_decay, &e, &m);
        log_decay = -e;
      }
      exp_lanes(log_decay, &e, &m);
      const lanes scaled = scale * load(r.at + t * r.stride + from);
      store(b->r + to, scaled);
      store(b->r_start + to, scaled * product[x]);
      store(b->d + to, e);
      m_sum[x] = fma_lanes(m, product[x], m_sum[x]);
      product[x] *= e;
    }
  }
  UNROLL for (int x = 0; x < vectors; x++) {
    store(b->decay + c + x * LANES, decay_factor(product[x], m_sum[x], rest + c + x * LANES));
    product[x] = broadcast(1);
  }
  NO_UNROLL for (int64_t t = CHUNK; t-- > 0;) {
    UNROLL for (int x = 0; x < vectors; x++) {
      const int64_t from = c + x * LANES, to = t * b->K_ + from;
      const lanes key = load(k.at + t * k.stride + from);
      store(b->k + to, key);
      store(b->k_end + to, key * product[x]);
      product[x] *= load(b->d + to);
    }
  }
}

INLINE void pack_rows(const int raw, lanes scale, const chunk_block *b, chunk_rows r, chunk_rows k, chunk_rows w, real *rest) {
  int64_t c = 0;
  for (; c + PACK * LANES <= b->K_; c += PACK * LANES) pack_channels(PACK, raw, scale, b, r, k, w, c, rest);
  for (; c < b->K_; c += LANES) pack_channels(1, raw, scale, b, r, k, w, c, rest);
}

static void pack_chunk(const wkv6_problem *p, const chunk_block *b, chunk_rows r, chunk_rows k, chunk_rows w, real *rest) {
  const lanes scale = broadcast((real)p->scale);
  if (p->flags & WKV6_RAW_DECAY)
    pack_rows(1, scale, b, r, k, w, rest);
  else
    pack_rows(0, scale, b, r, k, w, rest);
}

/* Adds to partial[pair][LANES] the part of A that `vectors` vectors of channels from c on contribute, lane by lane:
 * A_ts = sum_i r_t[i] k_s[i] P(s+1..t-1)[i], and on the diagonal r_t . (u * k_t). */
INLINE void pair_products(const int vectors, const int first, const chunk_block *b, const real *u, int64_t c, real *partial) {
  NO_UNROLL for (int64_t s = 0; s < CHUNK; s++) {
    const real *r = b->r + s * b->K_ + c, *d = b->d + s * b->K_ + c;
    lanes key[PACK], sum = broadcast(0);
    UNROLL for (int x = 0; x < vectors; x++) {
      key[x] = load(b->k + s * b->K_ + c + x * LANES);
      sum = fma_lanes(load(r + x * LANES) * key[x], load(u + c + x * LANES), sum);
    }
    real *to = partial + pair(s, s) * LANES;
    store(to, first ? sum : sum + load(to));
    NO_UNROLL for (int64_t t = s + 1; t < CHUNK; t++) {
      r += b->K_;
      to += LANES;
      sum = broadcast(0);
      UNROLL for (int x = 0; x < vectors; x++) {
        if (t > s + 1) key[x] *= load(d + x * LANES);
        sum = fma_lanes(load(r + x * LANES), key[x], sum);
      }
      store(to, first ? sum : sum + load(to));
      d += b->K_;
    }
  }
}

#define PAIR_ROWS ((PAIRS + LANES - 1) / LANES * LANES) /* whole vectors of them */

/* A of the chunk: A[pair(s, t)], s <= t, u on the diagonal. */
static void chunk_pairs(const chunk_block *b, const real *u, real *partial, real *A) {
  int64_t c = 0;
  if (c + PACK * LANES <= b->K_)
    pair_products(PACK, 1, b, u, c, partial), c += PACK * LANES;
  else
    pair_products(1, 1, b, u, c, partial), c += LANES;
  for (; c + PACK * LANES <= b->K_; c += PACK * LANES) pair_products(PACK, 0, b, u, c, partial);
  for (; c < b->K_; c += LANES) pair_products(1, 0, b, u, c, partial);
  NO_UNROLL for (int64_t m = 0; m < PAIR_ROWS; m += LANES) store(A + m, row_sums(partial + m * LANES));
}

/* The rows that the next chunk will read and write, fetched into the nearest cache a few at a time between the tiles of the present one:
 * rows lie far apart in memory, which no hardware prefetcher follows. */
#define PREFETCHED 5 /* tensors */
typedef struct {
  const char *row[PREFETCHED];
  int64_t next[PREFETCHED], bytes[PREFETCHED]; /* from row to row, of a row */
  int64_t tensor, token, tokens, rows_a_tile;
} prefetcher;

static prefetcher prefetch_tokens(const wkv6_problem *p, const sequence *s, int64_t h, int64_t t, int64_t rows_a_tile) {
  const wkv6_tensor *const tensors[PREFETCHED] = {&p->w, &p->r, &p->k, &p->v, &p->o};
  prefetcher a = {.tensor = PREFETCHED, .rows_a_tile = rows_a_tile};
  if (h >= p->H || t >= s->length) return a;
  a.tensor = 0;
  a.tokens = s->length - t < CHUNK ? s->length - t : CHUNK;
  for (int64_t x = 0; x < PREFETCHED; x++) {
    const int64_t size = element_size(tensors[x]->dtype);
    a.row[x] = row_address(tensors[x], s->batch, s->first + t * s->step, h);
    a.next[x] = s->step * tensors[x]->stride[1] * size;
    a.bytes[x] = (x < 3 ? p->K : p->V) * size;
  }
  return a;
}

INLINE void prefetch_some(prefetcher *a) {
  for (int64_t n = 0; n < a->rows_a_tile && a->tensor < PREFETCHED; n++) {
    const char *row = a->row[a->tensor] + a->token * a->next[a->tensor];
    for (int64_t byte = 0; byte < a->bytes[a->tensor]; byte += 64) __builtin_prefetch(row + byte, 0, 3);
    if (++a->token == a->tokens) {
      a->token = 0;
      a->tensor++;
    }
  }
}
