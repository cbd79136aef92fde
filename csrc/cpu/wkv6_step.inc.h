/* SPDX-License-Identifier: Apache-2.0
 *
 * One token, state in place: the decoding step. One pass over the rows of the state, each loaded and stored once, while
 * the accumulators of up to STEP_COLUMNS vectors of o stay in registers. The state is p->final_state, read and written;
 * p->initial_state is absent. Tensors whose rows are whole vectors of reals are read and written where they are.
 */
#define STEP_COLUMNS 4
#define STEP_AHEAD 16 /* rows of the state, or of the next head's, fetched before their turn */

/* The token of one head. */
typedef struct {
  int64_t K_, V_;
  real *r, *k, *d; /* [K_] scale * r, k, exp(w) */
  real *w, *u;     /* [K_] for rows that vectors cannot be loaded from */
  real *v, *o;     /* [V_] likewise */
  real *state;     /* [K][V_] likewise */
} step_block;

static step_block step_layout(const wkv6_problem *p, arena *scratch) {
  step_block b = {.K_ = round_up(p->K, LANES), .V_ = round_up(p->V, LANES)};
  real **const of_K[] = {&b.r, &b.k, &b.d, &b.w, &b.u};
  for (size_t i = 0; i < sizeof of_K / sizeof *of_K; i++) *of_K[i] = take(scratch, b.K_);
  b.v = take(scratch, b.V_);
  b.o = take(scratch, b.V_);
  b.state = take(scratch, p->K * b.V_);
  return b;
}

static size_t step_scratch(const wkv6_problem *p) {
  arena sizes_only = {NULL, 0};
  step_layout(p, &sizes_only);
  return sizes_only.used;
}

INLINE int is_vectors(int32_t dtype, int64_t stride, int64_t width) {
  return dtype == REAL_DTYPE && stride == 1 && width % LANES == 0;
}

/* Row h of the token: in place, or copied to scratch. */
INLINE const real *find_row(const wkv6_tensor *x, const sequence *s, int64_t h, int64_t width, real *scratch) {
  if (is_vectors(x->dtype, x->stride[3], width)) return (const real *)row_address(x, s->batch, s->first, h);
  load_tokens(scratch, width, x, s, h, 0, 1, width);
  return scratch;
}

INLINE const real *find_u(const wkv6_problem *p, int64_t h, real *scratch) {
  if (is_vectors(p->u.dtype, p->u.stride[1], p->K)) return (const real *)row_address(&p->u, h, 0, 0);
  load_u(scratch, p, h);
  return scratch;
}

/* Fills r, k and d with the token of head h; returns its bonus, scale * r . (u * k). */
static real step_load(const wkv6_problem *p, const step_block *b, const sequence *s, int64_t h) {
  const real *r = find_row(&p->r, s, h, p->K, b->r), *k = find_row(&p->k, s, h, p->K, b->k),
             *w = find_row(&p->w, s, h, p->K, b->w), *u = find_u(p, h, b->u);
  const lanes scale = broadcast((real)p->scale);
  lanes sum = broadcast(0);
  for (int64_t i = 0; i < b->K_; i += LANES) {
    lanes x = load(w + i), e, m;
    if (p->flags & WKV6_RAW_DECAY) {
      exp_lanes(x, &e, &m);
      x = -e;
    }
    exp_lanes(x, &e, &m);
    const lanes scaled = scale * load(r + i), key = load(k + i);
    sum = fma_lanes(scaled * key, load(u + i), sum);
    store(b->r + i, scaled);
    store(b->k + i, key);
    store(b->d + i, e);
  }
  return sum_of_lanes(sum);
}

/* `columns` vectors of V; v, o and the state, whose rows are stride_row reals apart, at the first of them. */
INLINE void step_columns(const int ahead, const int columns, int64_t K, const step_block *b, real bonus, const real *v,
                         real *o, real *state, int64_t stride_row) {
  lanes sum[STEP_COLUMNS], value[STEP_COLUMNS];
  UNROLL for (int c = 0; c < columns; c++) {
    value[c] = load(v + c * LANES);
    sum[c] = broadcast(bonus) * value[c];
  }
  for (int64_t i = 0; i < K; i++, state += stride_row) {
    const lanes r = broadcast(b->r[i]), k = broadcast(b->k[i]), d = broadcast(b->d[i]);
    UNROLL for (int c = 0; c < columns; c++) {
      if (ahead) __builtin_prefetch(state + STEP_AHEAD * stride_row + c * LANES, 1, 3);
      const lanes s = load(state + c * LANES);
      sum[c] = fma_lanes(r, s, sum[c]);
      store(state + c * LANES, fma_lanes(d, s, k * value[c]));
    }
  }
  UNROLL for (int c = 0; c < columns; c++)
    store(o + c * LANES, sum[c]);
}

INLINE void step_head(const int ahead, int64_t K, const step_block *b, real bonus, const real *v, real *o, real *state,
                      int64_t stride_row) {
  int64_t j = 0;
  for (; j + STEP_COLUMNS * LANES <= b->V_; j += STEP_COLUMNS * LANES)
    step_columns(ahead, STEP_COLUMNS, K, b, bonus, v + j, o + j, state + j, stride_row);
  for (; j < b->V_; j += LANES) step_columns(ahead, 1, K, b, bonus, v + j, o + j, state + j, stride_row);
}

static void step(const wkv6_problem *p, const wkv6_work *work, void *scratch) {
  const uint64_t mode = flush_subnormals();
  arena memory = {scratch, 0};
  const step_block b = step_layout(p, &memory);
  const sequence s = sequence_of(p, work->n);
  const wkv6_tensor *tensor = &p->final_state;
  const int ahead = wkv6_cpu_wants_prefetches(), o_in_place = is_vectors(p->o.dtype, p->o.stride[3], p->V),
            state_in_place = is_vectors(tensor->dtype, tensor->stride[3], p->V);
  memset(scratch, 0, (size_t)((char *)b.state - (char *)scratch)); /* the padding */
  for (int64_t h = work->head; h < work->head_end; h++) {
    const real bonus = step_load(p, &b, &s, h), *v = find_row(&p->v, &s, h, p->V, b.v);
    real *o = o_in_place ? (real *)row_address(&p->o, s.batch, s.first, h) : b.o;
    real *state = state_in_place ? (real *)row_address(tensor, work->n, h, 0) : b.state;
    const int64_t stride_row = state_in_place ? tensor->stride[2] : b.V_;
    if (!state_in_place) load_state(b.state, b.V_, tensor, work->n, h, p->K, p->V);
    if (ahead)
      step_head(1, p->K, &b, bonus, v, o, state, stride_row);
    else
      step_head(0, p->K, &b, bonus, v, o, state, stride_row);
    if (!state_in_place) store_state(tensor, work->n, h, p->K, p->V, b.state, b.V_);
    if (!o_in_place) store_tokens(&p->o, &s, h, 0, 1, p->V, b.o, b.V_);
  }
  restore_subnormals(mode);
}

#undef STEP_COLUMNS
#undef STEP_AHEAD
#undef TILE_ROWS
