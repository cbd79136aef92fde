/* SPDX-License-Identifier: Apache-2.0
 *
 * Cuts a problem into pieces of work and hands them to the kernels on the pool's threads.
 */
#include "wkv6_cpu.h"

#include "dispatch.h"
#include "parallel.h"

#include <stdatomic.h>

/* Heads that one kernel call walks through together; their states should stay in the second-level cache. */
#define GROUP_BYTES ((size_t)384 << 10)

/* Below this many element-steps of the state, T * K * V * heads (some 20 us), waking other threads costs more than it
 * saves. */
#define SERIAL_STEPS ((int64_t)1 << 18)

typedef struct job job;
struct job {
  const wkv6_problem *problem;
  const wkv6_kernels *kernels;
  size_t (*scratch)(const job *, int64_t heads);
  void (*run)(const wkv6_kernels *, const wkv6_problem *, const wkv6_work *, void *scratch);
  int64_t column_blocks; /* pieces that V is cut into; 1 unless there are fewer heads than threads */
  atomic_int out_of_memory;
};

static const wkv6_kernels *kernels_for(const wkv6_problem *p) {
  const wkv6_isa *isa = wkv6_current_isa();
  return wkv6_is_double(p) ? isa->f64 : isa->f32;
}

/* Each sequence chooses for itself, so that its results do not depend on what else is in the batch. */
static int uses_chunks(const wkv6_problem *p, int64_t n) {
  if (p->flags & (WKV6_RECURRENT | WKV6_CHUNK)) return (p->flags & WKV6_CHUNK) != 0;
  return wkv6_sequence_length(p, n) >= WKV6_CHUNK_FROM_TOKENS;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static size_t scratch_forward(const job *j, int64_t heads) {
  return larger(j->kernels->forward_scratch(j->problem, heads), j->kernels->chunk_forward_scratch(j->problem, heads));
}
static size_t scratch_backward(const job *j, int64_t heads) {
  return larger(j->kernels->backward_scratch(j->problem, heads), j->kernels->chunk_backward_scratch(j->problem, heads));
}
static size_t scratch_step(const job *j, int64_t heads) {
  (void)heads; /* one at a time */
  return j->kernels->step_scratch(j->problem);
}
static size_t scratch_state(const job *j, int64_t heads) { return j->kernels->state_scratch(j->problem, heads); }
static void run_forward(const wkv6_kernels *k, const wkv6_problem *p, const wkv6_work *w, void *scratch) {
  (uses_chunks(p, w->n) ? k->chunk_forward : k->forward)(p, w, scratch);
}
static void run_backward(const wkv6_kernels *k, const wkv6_problem *p, const wkv6_work *w, void *scratch) {
  (uses_chunks(p, w->n) ? k->chunk_backward : k->backward)(p, w, scratch);
}
static void run_step(const wkv6_kernels *k, const wkv6_problem *p, const wkv6_work *w, void *scratch) {
  k->step(p, w, scratch);
}
static void run_state(const wkv6_kernels *k, const wkv6_problem *p, const wkv6_work *w, void *scratch) {
  k->state(p, w, scratch);
}

static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

/* As many heads as GROUP_BYTES hold, but at least one. */
static int64_t heads_in_group(const job *j) {
  const size_t one = j->scratch(j, 1), state = j->scratch(j, 2) - one;
  if (state == 0) return j->problem->H;
  return one + state > GROUP_BYTES ? 1 : 1 + (int64_t)((GROUP_BYTES - one) / state);
}

/* Units are (sequence, head, column block), the last fastest. */
static void run_units(int64_t begin, int64_t end, void *context) {
  job *j = context;
  const wkv6_problem *p = j->problem;
  const int64_t group = j->column_blocks > 1 ? 1 : min(heads_in_group(j), end - begin);
  void *scratch = wkv6_scratch(j->scratch(j, group));
  if (!scratch) {
    atomic_store(&j->out_of_memory, 1);
    return;
  }
  const int64_t step = 2 * j->kernels->lanes, vectors = (p->V + step - 1) / step;
  for (int64_t unit = begin; unit < end;) {
    const int64_t block = unit % j->column_blocks, n = unit / j->column_blocks / p->H,
                  head = unit / j->column_blocks % p->H;
    const int64_t heads = j->column_blocks > 1 ? 1 : min(min(group, end - unit), p->H - head);
    const wkv6_work work = {
        .n = n,
        .head = head,
        .head_end = head + heads,
        .column = min(vectors * block / j->column_blocks * step, p->V),
        .column_end = min(vectors * (block + 1) / j->column_blocks * step, p->V),
    };
    j->run(j->kernels, p, &work, scratch);
    unit += heads;
  }
  wkv6_scratch_done();
}

static wkv6_status run(job *j, int can_split_columns) {
  const wkv6_problem *p = j->problem;
  const int64_t heads = p->N * p->H, threads = wkv6_parallel_threads(), steps = p->B * p->T * p->H * p->K * p->V;
  if (heads == 0) return WKV6_OK;
  j->kernels = kernels_for(p);
  j->column_blocks = 1;
  if (steps < SERIAL_STEPS) {
    run_units(0, heads, j);
  } else {
    if (can_split_columns && heads < threads)
      j->column_blocks =
          min((threads + heads - 1) / heads, (p->V + 2 * j->kernels->lanes - 1) / (2 * j->kernels->lanes));
    wkv6_parallel_for(heads * j->column_blocks, run_units, j);
  }
  return atomic_load(&j->out_of_memory) ? WKV6_E_MEMORY : WKV6_OK;
}

wkv6_status wkv6_cpu_forward(const wkv6_problem *p) {
  job j = {.problem = p, .scratch = scratch_forward, .run = run_forward};
  return run(&j, 1);
}

wkv6_status wkv6_cpu_backward(const wkv6_problem *p) {
  job j = {.problem = p, .scratch = scratch_backward, .run = run_backward};
  const wkv6_status status = run(&j, 0);
  if (status == WKV6_OK) kernels_for(p)->reduce_grad_u(p);
  return status;
}

wkv6_status wkv6_cpu_step(const wkv6_problem *p) {
  job j = {.problem = p, .scratch = scratch_step, .run = run_step};
  return run(&j, 0);
}

wkv6_status wkv6_cpu_state(const wkv6_problem *p) {
  job j = {.problem = p, .scratch = scratch_state, .run = run_state};
  return run(&j, 1);
}
