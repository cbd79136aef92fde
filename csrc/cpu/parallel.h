/* SPDX-License-Identifier: Apache-2.0
 *
 * Work on several threads, and each thread's scratch memory.
 */
#ifndef WKV6_PARALLEL_H
#define WKV6_PARALLEL_H

#include <stddef.h>
#include <stdint.h>

/* Looks for torch's thread pool among the libraries already loaded. Called once, before the first wkv6_parallel_for.
 * Without one all work is done by the calling thread. Returns whether it was found. */
int wkv6_parallel_init(void);

/* How many threads wkv6_parallel_for may use: torch.get_num_threads(), or 1. */
int64_t wkv6_parallel_threads(void);

/* Calls range(begin, end, context) for pieces that make up [0, count), on several threads, and returns when all are
 * done. */
void wkv6_parallel_for(int64_t count, void (*range)(int64_t begin, int64_t end, void *context), void *context);

/* At least `bytes` of memory that belong to the calling thread until it asks again; 64-byte aligned. NULL: out of
 * memory. A thread keeps up to WKV6_SCRATCH_KEPT bytes from call to call and frees them when it ends; a larger block is
 * freed by wkv6_scratch_done(). */
#define WKV6_SCRATCH_KEPT ((size_t)2 << 20)
void *wkv6_scratch(size_t bytes);
void wkv6_scratch_done(void);

#endif
