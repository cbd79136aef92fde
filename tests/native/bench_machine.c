/* SPDX-License-Identifier: Apache-2.0
 *
 * What bench_kernels.c compares with, compiled for the very machine it runs on (-O3 -march=native): the machine's
 * limits, and the recurrence in the form of ggml's WKV6 operator, the fastest public one on a CPU.
 */
#include "bench_machine.h"

#include <time.h>

#if defined(__AVX512F__)
typedef float vector __attribute__((vector_size(64)));
#define CHAINS 24
#elif defined(__AVX__)
typedef float vector __attribute__((vector_size(32)));
#define CHAINS 12
#else
typedef float vector __attribute__((vector_size(16)));
#define CHAINS 12
#endif

const double vector_bytes = sizeof(vector);

double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double fma_peak(void) {
  enum { STEPS = 20000 };
  const vector factor = (vector){0} + 0.999f, term = (vector){0} + 0.001f;
  vector x[CHAINS];
  for (int i = 0; i < CHAINS; i++) x[i] = term * (float)i;
  const double start = seconds();
  for (int n = 0; n < STEPS; n++) {
    _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; i++) x[i] = x[i] * factor + term; /* contracted to one FMA */
    __asm__ volatile("");
  }
  const double elapsed = seconds() - start;
  for (int i = 1; i < CHAINS; i++) x[0] += x[i];
  volatile float sink = x[0][0];
  (void)sink;
  return 2.0 * STEPS * CHAINS * (double)(sizeof(vector) / sizeof(float)) / elapsed;
}

double triad_bandwidth(float *memory, int64_t count) {
  float *a = memory, *b = memory + count / 3, *c = memory + count / 3 * 2;
  const double start = seconds();
  for (int64_t i = 0; i < count / 3; i++) a[i] = b[i] + 3.0f * c[i];
  __asm__ volatile("" ::"r"(a) : "memory");
  return (double)(count / 3 * 3) * sizeof(float) / (seconds() - start);
}

/* [T, H, D] rows, multiplicative decays d, one [D, D] state a head, changed in place. */
void ggml_form(int64_t T, int64_t H, int64_t D, const float *r, const float *k, const float *v, const float *d,
               const float *u, float *state, float *o) {
  for (int64_t t = 0; t < T; t++)
    for (int64_t h = 0; h < H; h++) {
      const int64_t row = (t * H + h) * D;
      float *restrict out = o + row;
      const float *restrict value = v + row;
      for (int64_t j = 0; j < D; j++) out[j] = 0;
      for (int64_t i = 0; i < D; i++) {
        float *restrict S = state + (h * D + i) * D;
        const float ri = r[row + i], ki = k[row + i], di = d[row + i], ui = u[h * D + i];
        for (int64_t j = 0; j < D; j++) {
          const float kv = ki * value[j], s = S[j];
          out[j] += ri * (ui * kv + s);
          S[j] = di * s + kv;
        }
      }
    }
}
