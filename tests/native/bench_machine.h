/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_MACHINE_H
#define BENCH_MACHINE_H

#include <stdint.h>

double seconds(void);  /* of this thread: what others take from it does not count */
double fma_peak(void); /* flop a second of one thread, on vectors of vector_bytes */
extern const double vector_bytes;
/* Bytes a second of a[i] = b[i] + 3 c[i], three streams counted, in `count` floats of memory. */
double triad_bandwidth(float *memory, int64_t count);
void ggml_form(int64_t T, int64_t H, int64_t D, const float *r, const float *k, const float *v, const float *d,
               const float *u, float *state, float *o);

#endif
