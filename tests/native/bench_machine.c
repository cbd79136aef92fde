/* SPDX-License-Identifier: Apache-2.0
 *
 * What bench_kernels.c compares with, compiled for the very machine it runs on (-O3 -march=native): the machine's
 * limits, and the recurrence in the form of ggml's WKV6 operator, the fastest public one on a CPU.
 */
#include "bench_machine.h"

#include <time.h>

#if defined(__AVX512F__)
typedef float vector __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef float vector __attribute__((vector_size(32)));
#else
typedef float vector __attribute__((vector_size(16)));
#endif

const int vector_bytes = sizeof(vector);

double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* 24 chains where there are 32 registers, 12 where there are 16: enough for two units of five cycles each. */
#if defined(__AVX512F__)
#define CHAINS 24
#else
#define CHAINS 12
#endif

#define DEFINE_FMA_PEAK(BYTES)                                                               \
  static double fma_peak_##BYTES(void) {                                                     \
    typedef float lanes __attribute__((vector_size(BYTES)));                                 \
    enum { STEPS = 20000 };                                                                  \
    const lanes factor = (lanes){0} + 0.999f, term = (lanes){0} + 0.001f;                    \
    lanes x[CHAINS];                                                                         \
    for (int i = 0; i < CHAINS; i++) x[i] = term * (float)i;                                 \
    const double start = seconds();                                                          \
    for (int n = 0; n < STEPS; n++) {                                                        \
      _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS; i++) x[i] = x[i] * factor + term; \
      __asm__ volatile("");                                                                  \
    }                                                                                        \
    const double elapsed = seconds() - start;                                                \
    for (int i = 1; i < CHAINS; i++) x[0] += x[i];                                           \
    volatile float sink = x[0][0];                                                           \
    (void)sink;                                                                              \
    return 2.0 * STEPS * CHAINS * (double)(sizeof(lanes) / sizeof(float)) / elapsed;         \
  }
DEFINE_FMA_PEAK(16)
#if defined(__AVX__)
DEFINE_FMA_PEAK(32)
#endif
#if defined(__AVX512F__)
DEFINE_FMA_PEAK(64)
#endif

double fma_peak(int bytes) {
#if defined(__AVX512F__)
  if (bytes == 64) return fma_peak_64();
#endif
#if defined(__AVX__)
  if (bytes == 32) return fma_peak_32();
#endif
  (void)bytes;
  return fma_peak_16();
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
