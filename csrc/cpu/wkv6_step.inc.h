/* SPDX-License-Identifier: Apache-2.0
 *
 * One token, state in place: the decoding step. One pass over the rows of the state, each loaded and stored once, while
 * the accumulators of up to STEP_COLUMNS vectors of o stay in registers. The state is p->final_state, read and written;
 * p->initial_state is absent.
 */
#define STEP_COLUMNS 4
#define STEP_AHEAD 16 /* rows of the state, or of the next head's, fetched before their turn */

typedef struct {
  int64_t K_, V_;
  real *r, *k, *w, *d, *u, *rest; /* [K_] */
  real *v, *o;                    /* [V_] */
  real *state;                    /* [K][V_], for states that vectors cannot be loaded from */
} step_block;

static step_block step_layout(const wkv6_problem *p, arena *scratch) {
  step_block b = {.K_ = round_up(p->K, LANES), .V_ = round_up(p->V, LANES)};
  real **const of_K[] = {&b.r, &b.k, &b.w, &b.d, &b.u, &b.rest};
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

/* Value columns [j, j + columns * LANES) of a state whose rows are stride_row reals apart. */
INLINE void step_columns(const int columns, int64_t K, const step_block *b, int64_t j, real *state,
                         int64_t stride_row) {
  lanes sum[STEP_COLUMNS], value[STEP_COLUMNS];
  UNROLL for (int c = 0; c < columns; c++) {
    sum[c] = load(b->o + j + c * LANES);
    value[c] = load(b->v + j + c * LANES);
  }
  state += j;
  for (int64_t i = 0; i < K; i++, state += stride_row) {
    const lanes r = broadcast(b->r[i]), k = broadcast(b->k[i]), d = broadcast(b->d[i]);
    UNROLL for (int c = 0; c < columns; c++) {
      __builtin_prefetch(state + STEP_AHEAD * stride_row + c * LANES, 1, 3);
      const lanes s = load(state + c * LANES);
      sum[c] = fma_lanes(r, s, sum[c]);
      store(state + c * LANES, fma_lanes(d, s, k * value[c]));
    }
  }
  UNROLL for (int c = 0; c < columns; c++)
    store(b->o + j + c * LANES, sum[c]);
}

static void step(const wkv6_problem *p, const wkv6_work *work, void *scratch) {
  const uint64_t mode = flush_subnormals();
  arena memory = {scratch, 0};
  const step_block b = step_layout(p, &memory);
  const sequence s = sequence_of(p, work->n);
  const wkv6_tensor *tensor = &p->final_state;
  /* In place where a row is a run of whole vectors of reals; else by way of scratch. */
  const int in_place =
      tensor->stride[3] == 1 && p->V % LANES == 0 && element_size(tensor->dtype) == (int64_t)sizeof(real);
  memset(scratch, 0, (size_t)((char *)b.state - (char *)scratch)); /* padding and rests */
  for (int64_t h = work->head; h < work->head_end; h++) {
    const forward_block token = {
        .K_ = b.K_, .V_ = b.V_, .r = b.r, .k = b.k, .d = b.d, .w = b.w, .u = b.u, .v = b.v, .o = b.o};
    memset(b.rest, 0, (size_t)b.K_ * sizeof(real));
    forward_load(p, &token, &s, h, 0, 1, b.rest);
    real *state = in_place ? (real *)row_address(tensor, work->n, h, 0) : b.state;
    const int64_t stride_row = in_place ? tensor->stride[2] : b.V_;
    if (!in_place) load_state(b.state, b.V_, tensor, work->n, h, p->K, p->V);
    int64_t j = 0;
    for (; j + STEP_COLUMNS * LANES <= b.V_; j += STEP_COLUMNS * LANES)
      step_columns(STEP_COLUMNS, p->K, &b, j, state, stride_row);
    for (; j < b.V_; j += LANES) step_columns(1, p->K, &b, j, state, stride_row);
    if (!in_place) store_state(tensor, work->n, h, p->K, p->V, b.state, b.V_);
    store_tokens(&p->o, &s, h, 0, 1, p->V, b.o, b.V_);
  }
  restore_subnormals(mode);
}

#undef STEP_COLUMNS
#undef STEP_AHEAD
#undef TILE_ROWS
