/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of CPU kernels that each instance (ISA x type) fills and dispatch.c chooses from. A kernel does a rectangle
 * of the work on one thread: the heads [head, head_end) of sequence n and, forward pass and state only, the value
 * columns [column, column_end). What it computes does not depend on how the work was cut. Kernels cannot fail and
 * allocate nothing; scratch is 64-byte aligned.
 */
#ifndef WKV6_KERNELS_H
#define WKV6_KERNELS_H

#include "../wkv6_problem.h"

#include <stddef.h>
#include <stdint.h>

typedef struct wkv6_work {
  int64_t n, head, head_end, column, column_end;
} wkv6_work;

typedef struct wkv6_kernels {
  int64_t lanes; /* value columns are cut at multiples of 2 * lanes */
  /* Bytes that the kernel needs for `heads` heads at once. */
  size_t (*forward_scratch)(const wkv6_problem *p, int64_t heads);
  void (*forward)(const wkv6_problem *p, const wkv6_work *work, void *scratch);
  size_t (*chunk_forward_scratch)(const wkv6_problem *p, int64_t heads);
  void (*chunk_forward)(const wkv6_problem *p, const wkv6_work *work, void *scratch);
  size_t (*backward_scratch)(const wkv6_problem *p, int64_t heads);
  void (*backward)(const wkv6_problem *p, const wkv6_work *work, void *scratch);
  size_t (*chunk_backward_scratch)(const wkv6_problem *p, int64_t heads);
  void (*chunk_backward)(const wkv6_problem *p, const wkv6_work *work, void *scratch);
  void (*reduce_grad_u)(const wkv6_problem *p); /* after all backward work: sums grad_u_parts over the sequences */
  size_t (*step_scratch)(const wkv6_problem *p);
  void (*step)(const wkv6_problem *p, const wkv6_work *work, void *scratch);
  size_t (*state_scratch)(const wkv6_problem *p, int64_t heads);
  void (*state)(const wkv6_problem *p, const wkv6_work *work, void *scratch);
} wkv6_kernels;

extern const wkv6_kernels wkv6_generic_f32, wkv6_generic_f64;
extern const wkv6_kernels wkv6_avx2_f32, wkv6_avx2_f64;     /* x86-64 only */
extern const wkv6_kernels wkv6_avx512_f32, wkv6_avx512_f64; /* x86-64 only */

#endif
