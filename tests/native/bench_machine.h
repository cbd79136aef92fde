/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_MACHINE_H
#define BENCH_MACHINE_H

#include <stdint.h>

double seconds(void);          /* of this thread: what others take from it does not count */
extern const int vector_bytes; /* of the machine's widest vectors */
double fma_peak(int bytes);    /* flop a second of one thread, on vectors of 16, 32 or 64 bytes, at most vector_bytes */
/* Bytes a second of a[i] = b[i] + 3 c[i], three streams counted, in `count` floats of memory. */
double triad_bandwidth(float *memory, int64_t count);
void ggml_form(int64_t T, int64_t H, int64_t D, const float *r, const float *k, const float *v, const float *d,
               const float *u, float *state, float *o);

#endif
