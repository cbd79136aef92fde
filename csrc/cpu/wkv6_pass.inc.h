/* SPDX-License-Identifier: Apache-2.0
 *
 * What all passes share: scratch memory, and the walk of the forward pass through segments and heads.
 */
INLINE int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* Hands out `count` reals of scratch, keeping every array 64-byte aligned. */
static real *take(char **scratch, int64_t count) {
  real *taken = (real *)*scratch;
  *scratch += round_up(count * (int64_t)sizeof(real), 64);
  return taken;
}

/* What the forward pass carries from segment to segment; V_ is V rounded up to whole vectors, K_ is K likewise. */
typedef struct {
  real *rest;  /* [heads][K_] see wkv6_decay.inc.h */
  real *state; /* [heads][K][V_] */
} state_block;

static state_block state_layout(const wkv6_problem *p, int64_t heads, char **scratch) {
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

/* Tokens of one head that the forward pass takes together: what one column of tiles reads then fits the first-level cache. */
#define FORWARD_BLOCK 32

/* Advances `state` [K][V_] and `rest` [K_] of head h over tokens [t, t + count), at most FORWARD_BLOCK of one segment, and writes their
 * o. `block` is the algorithm's scratch. */
typedef void forward_block_fn(const wkv6_problem *p, const void *block, const sequence *s, int64_t h, int64_t t, int64_t count,
                                real *rest, real *state);

/* Blocks of tokens, then the heads: the tokens' rows lie H * K apart in memory, and all heads of a few tokens touch fewer pages than all tokens
 * of one head. */
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
