/* SPDX-License-Identifier: Apache-2.0
 *
 * The operator on the CPU. Problems have passed wkv6_check(). The calling thread needs no GIL.
 */
#ifndef WKV6_CPU_H
#define WKV6_CPU_H

#include "../wkv6_problem.h"

/* Shorter sequences go token by token unless asked otherwise: a chunk is packed whole, however few its tokens.
 * Measured: docs/performance.md. */
#define WKV6_CHUNK_FROM_TOKENS 8

/* o and, where present, final_state and checkpoints. */
wkv6_status wkv6_cpu_forward(const wkv6_problem *p);

/* Every grad_* that is present. */
wkv6_status wkv6_cpu_backward(const wkv6_problem *p);

/* One token (T = 1): o, and final_state read and then overwritten. */
wkv6_status wkv6_cpu_step(const wkv6_problem *p);

/* final_state and w_sum; `scale` is a factor on k. */
wkv6_status wkv6_cpu_state(const wkv6_problem *p);

#endif
