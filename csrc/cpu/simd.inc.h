/* SPDX-License-Identifier: Apache-2.0
 *
 * The SIMD vocabulary of the kernel templates: one vector type, `lanes`, of LANES reals, and the few operations on it
 * that GCC's vector extension cannot express. Everything else in the kernels is written with +, -, * on `lanes`.
 *
 * Template parameters, defined by kernels_<isa>_<type>.c before it includes kernels.inc.h:
 *   WKV6_REAL_BITS     32 or 64: the type the kernels compute in
 *   WKV6_VECTOR_BYTES  16 (any machine, NEON), 32 (AVX2 + FMA + F16C), 64 (AVX-512 F, BW, DQ, VL)
 */
#if !defined(WKV6_REAL_BITS) || !defined(WKV6_VECTOR_BYTES)
#error "define WKV6_REAL_BITS and WKV6_VECTOR_BYTES"
#endif
#if WKV6_REAL_BITS == 32
typedef float real;
typedef int32_t integer; /* as wide as a real */
#elif WKV6_REAL_BITS == 64
typedef double real;
typedef int64_t integer;
#else
#error "WKV6_REAL_BITS must be 32 or 64"
#endif
#if WKV6_VECTOR_BYTES != 16 && WKV6_VECTOR_BYTES != 32 && WKV6_VECTOR_BYTES != 64
#error "WKV6_VECTOR_BYTES must be 16, 32 or 64"
#endif

#define LANES (WKV6_VECTOR_BYTES * 8 / WKV6_REAL_BITS)
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 16")
#define NO_UNROLL _Pragma("GCC unroll 1")

typedef real lanes __attribute__((vector_size(WKV6_VECTOR_BYTES)));
typedef integer lanes_integer __attribute__((vector_size(WKV6_VECTOR_BYTES)));
typedef real lanes_in_memory __attribute__((vector_size(WKV6_VECTOR_BYTES), aligned(WKV6_REAL_BITS / 8), may_alias));

INLINE lanes load(const real *from) { return *(const lanes_in_memory *)from; }
INLINE void store(real *to, lanes x) { *(lanes_in_memory *)to = x; }

/* All lanes x. The subtraction of a zero vector is what both compilers turn into one broadcast (of memory, where x
 * comes from there). */
INLINE lanes broadcast(real x) { return x - (lanes){0}; }

/* All pairs of lanes the two reals at `from`. An addition of integers, which keeps every bit, for the same single
 * instruction. */
#if LANES == 16
INLINE lanes broadcast_pair(const real *from) {
  typedef int64_t pairs __attribute__((vector_size(WKV6_VECTOR_BYTES)));
  int64_t pair;
  memcpy(&pair, from, sizeof pair);
  return (lanes)(pair + (pairs){0});
}
#endif

/* a * b + c, rounded once where the ISA has it. */
#if WKV6_VECTOR_BYTES == 64 && WKV6_REAL_BITS == 32
INLINE lanes fma_lanes(lanes a, lanes b, lanes c) { return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif WKV6_VECTOR_BYTES == 64
INLINE lanes fma_lanes(lanes a, lanes b, lanes c) { return (lanes)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
#elif WKV6_VECTOR_BYTES == 32 && WKV6_REAL_BITS == 32
INLINE lanes fma_lanes(lanes a, lanes b, lanes c) { return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif WKV6_VECTOR_BYTES == 32
INLINE lanes fma_lanes(lanes a, lanes b, lanes c) { return (lanes)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
#elif defined(__aarch64__) && WKV6_REAL_BITS == 32
INLINE lanes fma_lanes(lanes a, lanes b, lanes c) {
  return (lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#elif defined(__aarch64__)
INLINE lanes fma_lanes(lanes a, lanes b, lanes c) {
  return (lanes)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
INLINE lanes fma_lanes(lanes a, lanes b, lanes c) { return a * b + c; }
#endif

/* Lane by lane: where the mask's bits are all set x, where they are clear y. Comparisons of `lanes` give such masks. */
INLINE lanes choose(lanes_integer mask, lanes x, lanes y) {
  return (lanes)((mask & (lanes_integer)x) | (~mask & (lanes_integer)y));
}

/* x, but at least `low` and at most `high`; NaN stays NaN. x86 returns the second operand where one is NaN. */
#if WKV6_REAL_BITS == 32 && WKV6_VECTOR_BYTES == 64
INLINE lanes clamp(lanes x, lanes low, lanes high) {
  return (lanes)_mm512_min_ps((__m512)high, _mm512_max_ps((__m512)low, (__m512)x));
}
#elif WKV6_REAL_BITS == 32 && WKV6_VECTOR_BYTES == 32
INLINE lanes clamp(lanes x, lanes low, lanes high) {
  return (lanes)_mm256_min_ps((__m256)high, _mm256_max_ps((__m256)low, (__m256)x));
}
#elif WKV6_REAL_BITS == 32 && defined(__x86_64__)
INLINE lanes clamp(lanes x, lanes low, lanes high) {
  return (lanes)_mm_min_ps((__m128)high, _mm_max_ps((__m128)low, (__m128)x));
}
#elif WKV6_REAL_BITS == 32
INLINE lanes clamp(lanes x, lanes low, lanes high) { return choose(x < low, low, choose(x > high, high, x)); }
#endif

/* One level of the pairwise sums of row_sums(): in every block of 2 * S lanes the low half receives lane l + lane l + S
 * of a, the high half the same of b. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE /* GCC before 12 */
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes_integer){__VA_ARGS__})
#endif
#if LANES == 2
#define LEVELS(X) X(1, (0, 2), (1, 3))
#elif LANES == 4
#define LEVELS(X)                  \
  X(2, (0, 1, 4, 5), (2, 3, 6, 7)) \
  X(1, (0, 4, 2, 6), (1, 5, 3, 7))
#elif LANES == 8
#define LEVELS(X)                                                \
  X(4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)) \
  X(2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)) \
  X(1, (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15))
#else
#define LEVELS(X)                                                   \
  X(8,                                                              \
    (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),       \
    (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)) \
  X(4,                                                              \
    (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),     \
    (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))   \
  X(2,                                                              \
    (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),     \
    (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))   \
  X(1,                                                              \
    (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),    \
    (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#endif
#define UNWRAP(...) __VA_ARGS__
#define APPLY(macro, ...) macro(__VA_ARGS__)
#define PAIR_LEVEL(S, LOW, HIGH)       \
  UNROLL for (int l = 0; l < (S); l++) \
    x[l] = APPLY(SHUFFLE, x[l], x[l + (S)], UNWRAP LOW) + APPLY(SHUFFLE, x[l], x[l + (S)], UNWRAP HIGH);

/* Lanes l and l + 1 of a summed up at lane l, of b at lane l + 1, for every even l. */
INLINE lanes add_neighbours(lanes a, lanes b) {
  lanes x[2] = {a, b};
#define LAST_LEVEL(S, LOW, HIGH) \
  if ((S) == 1) PAIR_LEVEL(S, LOW, HIGH)
  LEVELS(LAST_LEVEL)
  return x[0];
}

/* Halves added to halves, then quarters, and so on. */
#define FOLD_LEVEL(S, LOW, HIGH) x = APPLY(SHUFFLE, x, x, UNWRAP LOW) + APPLY(SHUFFLE, x, x, UNWRAP HIGH);
INLINE real sum_of_lanes(lanes x) {
  LEVELS(FOLD_LEVEL)
  return x[0];
}

/* Lane l = the sum of the LANES numbers in row l of a [LANES][LANES] matrix, in three instructions a row. */
INLINE lanes row_sums(const real *matrix) {
  lanes x[LANES];
  UNROLL for (int l = 0; l < LANES; l++)
    x[l] = load(matrix + l * LANES);
  LEVELS(PAIR_LEVEL)
  return x[0];
}

/* The same; leaves the matrix zero. */
INLINE lanes take_row_sums(real *matrix) {
  const lanes sums = row_sums(matrix);
  UNROLL for (int l = 0; l < LANES; l++)
    store(matrix + l * LANES, broadcast(0));
  return sums;
}

/* x = the transpose of a square matrix whose elements are runs of `width` lanes: LANES / width rows of as many
 * elements. Halves are exchanged between rows half the matrix apart, then quarters, and so on. */
#define EXCHANGE_LEVEL(S, LOW, HIGH)                    \
  if ((S) >= width) UNROLL                              \
    for (int l = 0; l < LANES / width; l++) {           \
      const int apart = (S) / width;                    \
      if (l & apart) continue;                          \
      const lanes a = x[l], b = x[l + apart];           \
      x[l] = APPLY(SHUFFLE, a, b, UNWRAP LOW);          \
      x[l + apart] = APPLY(SHUFFLE, a, b, UNWRAP HIGH); \
    }
INLINE void transpose_lanes(const int width, lanes *x){LEVELS(EXCHANGE_LEVEL)}

/* b = the transpose of a [LANES][LANES] block of a; row strides in reals. */
INLINE void transpose_block(const real *a, int64_t stride_a, real *b, int64_t stride_b) {
  lanes x[LANES];
  UNROLL for (int l = 0; l < LANES; l++)
    x[l] = load(a + l * stride_a);
  transpose_lanes(1, x);
  UNROLL for (int l = 0; l < LANES; l++)
    store(b + l * stride_b, x[l]);
}

/* exp(x) and expm1(x) to about one unit in the last place: 0 and -1 from -88 down, NaN for NaN. In float, exp stays at
 * 2.4e38 above 88.37: as a log decay that forgets everything, as inf would, and times a decay of 0 it is 0. */
#if WKV6_REAL_BITS == 32
INLINE void exp_lanes(lanes x, lanes *exp_x, lanes *expm1_x) {
  x = clamp(x, broadcast(-88.0f), broadcast(88.3762f));
  /* Adding 1.5 * 2^23 leaves n = round(x / ln 2) in the low bits, adding 127 more its exponent field: 2^n is a shift
   * away, and n = -127 makes it 0. ln 2 in two parts, the first short enough for its product with n to be exact. */
  const lanes shift = broadcast(12582912.0f + 127.0f);
  const lanes shifted = fma_lanes(x, broadcast(1.44269504f), shift);
  const lanes two_n = (lanes)((lanes_integer)shifted << 23);
  const lanes n = shifted - shift;
  const lanes z = fma_lanes(n, broadcast(2.12194440e-4f), fma_lanes(n, broadcast(-0.693359375f), x));
  /* expm1(z) = z + z^2 p(z), p the minimax polynomial on |z| <= ln(2) / 2, which leaves less than 5e-9. */
  lanes p = broadcast(1.3950492e-3f);
  p = fma_lanes(p, z, broadcast(8.36889e-3f));
  p = fma_lanes(p, z, broadcast(4.1666206e-2f));
  p = fma_lanes(p, z, broadcast(0.16666518f));
  p = fma_lanes(p, z, broadcast(0.5f));
  p = fma_lanes(p * z, z, z);
  *exp_x = fma_lanes(p, two_n, two_n);
  *expm1_x = fma_lanes(p, two_n, two_n - broadcast(1));
}
#else
INLINE void exp_lanes(lanes x, lanes *exp_x, lanes *expm1_x) { /* for checking gradients: libm's accuracy, not speed */
  lanes e = {0}, m = {0};
  for (int l = 0; l < LANES; l++) {
    e[l] = exp(x[l]);
    m[l] = expm1(x[l]);
  }
  *exp_x = e;
  *expm1_x = m;
}
#endif

/* Subnormals as zeros while a kernel runs: a fading state would otherwise slow every operation on it a hundredfold. */
#if defined(__x86_64__)
INLINE uint64_t flush_subnormals(void) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040); /* FTZ and DAZ */
  return mode;
}
INLINE void restore_subnormals(uint64_t mode) { _mm_setcsr((unsigned)mode); }
#elif defined(__aarch64__)
INLINE uint64_t flush_subnormals(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
  __asm__ volatile("msr fpcr, %0" ::"r"(mode | (UINT64_C(1) << 24))); /* FZ */
  return mode;
}
INLINE void restore_subnormals(uint64_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode)); }
#else
INLINE uint64_t flush_subnormals(void) { return 0; }
INLINE void restore_subnormals(uint64_t mode) { (void)mode; }
#endif
