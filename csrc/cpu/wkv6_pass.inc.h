/* SPDX-License-Identifier: Apache-2.0
 *
 * What both algorithms share: scratch memory, and the walks of the two passes through tokens and heads.
 */
INLINE int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* Scratch memory that is handed out from its start on. Without a base it only counts: the size of a layout is what
 * laying it out in nothing has used. */
typedef struct {
  char *base;
  size_t used;
} arena;

/* `count` reals of it, 64-byte aligned. */
static real *take(arena *scratch, int64_t count) {
  real *taken = scratch->base ? (real *)(scratch->base + scratch->used) : NULL;
  scratch->used += (size_t)round_up(count * (int64_t)sizeof(real), 64);
  return taken;
}

/* What the forward pass carries from segment to segment; V_ is V rounded up to whole vectors, K_ is K likewise. */
typedef struct {
  real *rest;  /* [heads][K_] see wkv6_decay.inc.h */
  real *state; /* [heads][K][V_] */
} state_block;

static state_block state_layout(const wkv6_problem *p, int64_t heads, arena *scratch) {
  state_block b;
  b.rest = take(scratch, heads * round_up(p->K, LANES));
  b.state = take(scratch, heads * p->K * round_up(p->V, LANES));
  return b;
}

/* The part of a token's or state's tensor that starts at value column j. */
INLINE wkv6_tensor from_column(const wkv6_tensor *x, int64_t j) {
  wkv6_tensor part = *x;
  if (x->dtype != WKV6_ABSENT) part.data = (char *)x->data + element_size(x->dtype) * j * x->stride[3];
  return part;
}

/* The problem of which the work's value columns are all there are. */
static wkv6_problem of_columns(const wkv6_problem *p, const wkv6_work *work) {
  wkv6_problem part = *p;
  part.V = work->column_end - work->column;
  part.v = from_column(&p->v, work->column);
  part.o = from_column(&p->o, work->column);
  part.initial_state = from_column(&p->initial_state, work->column);
  part.final_state = from_column(&p->final_state, work->column);
  part.checkpoints = from_column(&p->checkpoints, work->column);
  return part;
}

/* Tokens of one head that the forward pass takes together: what one column of tiles reads then fits the first-level
 * cache. */
#define FORWARD_BLOCK 32

/* Advances `state` [K][V_] and `rest` [K_] of head h over tokens [t, t + count), at most FORWARD_BLOCK of one segment,
 * and writes their o. `block` is the algorithm's scratch. */
typedef void forward_block_fn(const wkv6_problem *p, const void *block, const sequence *s, int64_t h, int64_t t,
                              int64_t count, real *rest, real *state);

/* Blocks of tokens, then the heads: the tokens' rows lie H * K apart in memory, and all heads of a few tokens touch
 * fewer pages than all tokens of one head. */
static void forward_pass(const wkv6_problem *p, const wkv6_work *work, const state_block *b, forward_block_fn *advance,
                         const void *block) {
  const uint64_t mode = flush_subnormals();
  const sequence s = sequence_of(p, work->n);
  const int64_t first = wkv6_first_token(p, work->n), K_ = round_up(p->K, LANES), V_ = round_up(p->V, LANES);
  for (int64_t h = work->head; h < work->head_end; h++)
    load_state(b->state + (h - work->head) * p->K * V_, V_, &p->initial_state, work->n, h, p->K, p->V);
  memset(b->rest, 0, (size_t)((work->head_end - work->head) * K_) * sizeof(real));
  for (int64_t t = 0, count; t < s.length; t += count) {
    const int64_t into_segment = t % p->segment;
    count = smaller(smaller(FORWARD_BLOCK, p->segment - into_segment), s.length - t);
    for (int64_t h = work->head; h < work->head_end; h++) {
      real *state = b->state + (h - work->head) * p->K * V_;
      if (t > 0 && into_segment == 0)
        store_state(&p->checkpoints, wkv6_checkpoint(p, first, t / p->segment), h, p->K, p->V, state, V_);
      advance(p, block, &s, h, t, count, b->rest + (h - work->head) * K_, state);
    }
  }
  for (int64_t h = work->head; h < work->head_end; h++)
    store_state(&p->final_state, work->n, h, p->K, p->V, b->state + (h - work->head) * p->K * V_, V_);
  restore_subnormals(mode);
}

/* What the backward pass carries from segment to segment, from the last to the first. */
typedef struct {
  real *natural; /* [K_][V_] a state on the way to or from a transposed one */
  real *rest;    /* [heads][K_] see wkv6_decay.inc.h */
  real *adjoint; /* [heads][V_][K_] G at the segment's end, then at its start */
} adjoint_block;

static adjoint_block adjoint_layout(const wkv6_problem *p, int64_t heads, arena *scratch) {
  const int64_t K_ = round_up(p->K, LANES), V_ = round_up(p->V, LANES);
  adjoint_block b;
  b.natural = take(scratch, K_ * V_);
  b.rest = take(scratch, heads * K_);
  b.adjoint = take(scratch, heads * V_ * K_);
  return b;
}

/* to[columns][stride_to] = the transpose of from[rows][stride_from]; rows and columns are multiples of LANES. */
static void transpose(const real *from, int64_t stride_from, int64_t rows, int64_t columns, real *to,
                      int64_t stride_to) {
  for (int64_t i = 0; i < rows; i += LANES)
    for (int64_t j = 0; j < columns; j += LANES)
      transpose_block(from + i * stride_from + j, stride_from, to + j * stride_to + i, stride_to);
}

/* Matrix (n, h) of a state tensor, transposed to [V_][K_]. */
static void load_state_transposed(const wkv6_problem *p, real *natural, const wkv6_tensor *x, int64_t n, int64_t h,
                                  real *to) {
  const int64_t K_ = round_up(p->K, LANES), V_ = round_up(p->V, LANES);
  load_state(natural, V_, x, n, h, p->K, p->V);
  transpose(natural, V_, K_, V_, to, K_);
}

/* Walks G and the `rest` of head h back over tokens [t, t + count), one segment, and writes their gradients; the sum
 * for u is added to its part. `block` is the algorithm's scratch. */
typedef void backward_segment_fn(const wkv6_problem *p, const void *block, const sequence *s, int64_t n, int64_t h,
                                 int64_t t, int64_t count, real *rest, real *G);

/* Segments, then the heads. `state` [V_][K_] receives the transposed state before each segment. */
static void backward_pass(const wkv6_problem *p, const wkv6_work *work, const adjoint_block *b, real *state,
                          backward_segment_fn *retreat, const void *block) {
  const uint64_t mode = flush_subnormals();
  const int64_t n = work->n, first = wkv6_first_token(p, n), K_ = round_up(p->K, LANES), V_ = round_up(p->V, LANES);
  const sequence s = sequence_of(p, n);
  for (int64_t h = work->head; h < work->head_end; h++) {
    load_state_transposed(p, b->natural, &p->grad_final_state, n, h, b->adjoint + (h - work->head) * V_ * K_);
    if (p->grad_u_parts.dtype != WKV6_ABSENT)
      memset((real *)p->grad_u_parts.data + (n * p->H + h) * p->K, 0, (size_t)p->K * sizeof(real));
  }
  for (int64_t c = (s.length + p->segment - 1) / p->segment; c-- > 0;) {
    const int64_t t = c * p->segment, count = smaller(s.length - t, p->segment);
    for (int64_t h = work->head; h < work->head_end; h++) {
      if (c > 0)
        load_state_transposed(p, b->natural, &p->checkpoints, wkv6_checkpoint(p, first, c), h, state);
      else
        load_state_transposed(p, b->natural, &p->initial_state, n, h, state);
      retreat(p, block, &s, n, h, t, count, b->rest + (h - work->head) * K_, b->adjoint + (h - work->head) * V_ * K_);
    }
  }
  for (int64_t h = work->head; h < work->head_end; h++) {
    transpose(b->adjoint + (h - work->head) * V_ * K_, K_, V_, K_, b->natural, V_);
    store_state(&p->grad_initial_state, n, h, p->K, p->V, b->natural, V_);
  }
  restore_subnormals(mode);
}
