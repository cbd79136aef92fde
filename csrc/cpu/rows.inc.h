/* SPDX-License-Identifier: Apache-2.0
 *
 * Between the caller's memory and the kernels' scratch: rows of any dtype and stride become contiguous reals and back.
 * The kernels see nothing but reals, so dtypes and strides cost them nothing. Included by kernels.inc.h after
 * simd.inc.h.
 */
INLINE float float_from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE uint32_t bits_from_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

INLINE float float_from_bf16(uint16_t x) { return float_from_bits((uint32_t)x << 16); }

/* Round to nearest, ties to even; a NaN stays one (its payload may lie in the bits that are cut off). */
INLINE uint16_t bf16_from_float(float x) {
  const uint32_t bits = bits_from_float(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}

#if defined(__aarch64__)
INLINE float float_from_f16(uint16_t x) {
  __fp16 half;
  memcpy(&half, &x, sizeof half);
  return half;
}
INLINE uint16_t f16_from_float(float x) {
  const __fp16 half = (__fp16)x;
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}
#elif WKV6_VECTOR_BYTES >= 32
INLINE float float_from_f16(uint16_t x) { return _cvtsh_ss(x); }
INLINE uint16_t f16_from_float(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
/* Sign, 5 exponent bits (bias 15), 10 fraction bits. Subnormals are fractions of 2^-24. */
INLINE float float_from_f16(uint16_t x) {
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest < 0x400) { /* by integer arithmetic: the kernels run with subnormals flushed */
    if (!rest) return float_from_bits(sign);
    const int top = 31 - __builtin_clz(rest);
    return float_from_bits(sign | (uint32_t)(top - 24 + 127) << 23 | ((rest << (23 - top)) & 0x7fffff));
  }
  const uint32_t exponent = rest >= 0x7c00 ? 255 - 31 : 127 - 15; /* inf and NaN keep all ones */
  return float_from_bits(sign | ((rest << 13) + (exponent << 23)));
}
INLINE uint16_t f16_from_float(float x) {
  const uint32_t bits = bits_from_float(x), sign = bits >> 16 & 0x8000;
  uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to 2^16 or more */
  if (rest < 0x38800000) { /* below 2^-14: how many times 2^-24, rounded by adding 1/2, whose last place is just that */
    const float scaled = float_from_bits(rest) + 0.5f;
    return (uint16_t)(sign | (bits_from_float(scaled) - 0x3f000000));
  }
  rest += 0xfff + (rest >> 13 & 1);
  return (uint16_t)(sign | (rest - ((127 - 15) << 23)) >> 13);
}
#endif

INLINE int64_t element_size(int32_t dtype) { return dtype == WKV6_F64 ? 8 : dtype == WKV6_F32 ? 4 : 2; }

/* Address of element (a, b, c, 0) of a 4-dimensional tensor. */
INLINE char *row_address(const wkv6_tensor *x, int64_t a, int64_t b, int64_t c) {
  return (char *)x->data + element_size(x->dtype) * (a * x->stride[0] + b * x->stride[1] + c * x->stride[2]);
}

/* Whole vectors of the dtypes that convert; `real` itself needs no conversion, and nothing else meets a double. */
#if WKV6_REAL_BITS == 32
#define REAL_DTYPE WKV6_F32
typedef uint16_t halves_in_memory __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));

INLINE lanes load_bf16(const uint16_t *from) {
  return (lanes)(__builtin_convertvector(*(const halves_in_memory *)from, words) << 16);
}

INLINE void store_bf16(uint16_t *to, lanes x) {
  const words bits = (words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, is_nan = (words)(x != x);
  *(halves_in_memory *)to =
      __builtin_convertvector((is_nan & ((bits >> 16) | 0x40)) | (~is_nan & rounded), halves_in_memory);
}

#if WKV6_VECTOR_BYTES == 64
INLINE lanes load_f16(const uint16_t *from) {
  return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
INLINE void store_f16(uint16_t *to, lanes x) {
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif WKV6_VECTOR_BYTES == 32
INLINE lanes load_f16(const uint16_t *from) { return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
INLINE void store_f16(uint16_t *to, lanes x) {
  _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#else
INLINE lanes load_f16(const uint16_t *from) {
  lanes x;
  UNROLL for (int l = 0; l < LANES; l++)
    x[l] = float_from_f16(from[l]);
  return x;
}
INLINE void store_f16(uint16_t *to, lanes x) {
  UNROLL for (int l = 0; l < LANES; l++)
    to[l] = f16_from_float(x[l]);
}
#endif
#else
#define REAL_DTYPE WKV6_F64
#endif

/* `rows` rows of `width` elements; `next` is the distance in bytes from one row to the next, `stride` in elements
 * within a row. Whole vectors where elements lie side by side, then one by one. */
#define CONVERT_ROWS(TYPE, VECTORS, ELEMENT)                                        \
  for (int64_t row = 0; row < rows; row++, reals += stride_reals, others += next) { \
    TYPE *const x = (TYPE *)others;                                                 \
    int64_t i = 0;                                                                  \
    if (stride == 1) VECTORS                                                        \
    for (; i < width; i++) ELEMENT;                                                 \
  }
#define WHOLE_VECTORS(VECTOR) \
  for (; i + LANES <= width; i += LANES) VECTOR;

NOINLINE void load_rows(real *reals, int64_t stride_reals, int64_t rows, int64_t width, const char *others,
                        int64_t next, int64_t stride, int32_t dtype) {
  if (dtype == REAL_DTYPE) {
    CONVERT_ROWS(const real, WHOLE_VECTORS(store(reals + i, load(x + i))), reals[i] = x[i * stride])
#if WKV6_REAL_BITS == 32
  } else if (dtype == WKV6_BF16) {
    CONVERT_ROWS(
        const uint16_t, WHOLE_VECTORS(store(reals + i, load_bf16(x + i))), reals[i] = float_from_bf16(x[i * stride]))
  } else {
    CONVERT_ROWS(
        const uint16_t, WHOLE_VECTORS(store(reals + i, load_f16(x + i))), reals[i] = float_from_f16(x[i * stride]))
#endif
  }
}

NOINLINE void store_rows(char *others, int64_t next, int64_t stride, int32_t dtype, int64_t rows, int64_t width,
                         const real *reals, int64_t stride_reals) {
  if (dtype == REAL_DTYPE) {
    CONVERT_ROWS(real, WHOLE_VECTORS(store(x + i, load(reals + i))), x[i * stride] = reals[i])
#if WKV6_REAL_BITS == 32
  } else if (dtype == WKV6_BF16) {
    CONVERT_ROWS(uint16_t, WHOLE_VECTORS(store_bf16(x + i, load(reals + i))), x[i * stride] = bf16_from_float(reals[i]))
  } else {
    CONVERT_ROWS(uint16_t, WHOLE_VECTORS(store_f16(x + i, load(reals + i))), x[i * stride] = f16_from_float(reals[i]))
#endif
  }
}
#undef CONVERT_ROWS
#undef WHOLE_VECTORS

/* The tokens of one sequence in the order in which the recurrence reads them. */
typedef struct {
  int64_t batch, first, length, step; /* token t of the sequence is token first + t * step of batch row `batch` */
} sequence;

INLINE sequence sequence_of(const wkv6_problem *p, int64_t n) {
  const int64_t length = wkv6_sequence_length(p, n), start = p->cu_seqlens ? p->cu_seqlens[n] : 0;
  const int reverse = (p->flags & WKV6_REVERSE) != 0;
  return (sequence){p->cu_seqlens ? 0 : n, reverse ? start + length - 1 : start, length, reverse ? -1 : 1};
}

/* Rows of head h for tokens [t, t + count) of the sequence, to or from [count][stride_row] reals. An absent tensor
 * loads as zeros. */
static void load_tokens(real *to, int64_t stride_row, const wkv6_tensor *x, const sequence *s, int64_t h, int64_t t,
                        int64_t count, int64_t width) {
  if (x->dtype == WKV6_ABSENT)
    for (int64_t i = 0; i < count; i++) memset(to + i * stride_row, 0, (size_t)width * sizeof(real));
  else
    load_rows(to,
              stride_row,
              count,
              width,
              row_address(x, s->batch, s->first + t * s->step, h),
              s->step * x->stride[1] * element_size(x->dtype),
              x->stride[3],
              x->dtype);
}

static void store_tokens(const wkv6_tensor *x, const sequence *s, int64_t h, int64_t t, int64_t count, int64_t width,
                         const real *from, int64_t stride_row) {
  if (x->dtype == WKV6_ABSENT) return;
  store_rows(row_address(x, s->batch, s->first + t * s->step, h),
             s->step * x->stride[1] * element_size(x->dtype),
             x->stride[3],
             x->dtype,
             count,
             width,
             from,
             stride_row);
}

/* Matrix (n, h) of a [N, H, K, V] tensor to or from [K][stride_row] reals. Absent: zeros, and no store. */
static void load_state(real *to, int64_t stride_row, const wkv6_tensor *x, int64_t n, int64_t h, int64_t K, int64_t V) {
  if (x->dtype == WKV6_ABSENT)
    for (int64_t i = 0; i < K; i++) memset(to + i * stride_row, 0, (size_t)V * sizeof(real));
  else
    load_rows(
        to, stride_row, K, V, row_address(x, n, h, 0), x->stride[2] * element_size(x->dtype), x->stride[3], x->dtype);
}

static void store_state(const wkv6_tensor *x, int64_t n, int64_t h, int64_t K, int64_t V, const real *from,
                        int64_t stride_row) {
  if (x->dtype == WKV6_ABSENT) return;
  store_rows(
      row_address(x, n, h, 0), x->stride[2] * element_size(x->dtype), x->stride[3], x->dtype, K, V, from, stride_row);
}

/* Row h of u [H, K]. */
static void load_u(real *to, const wkv6_problem *p, int64_t h) {
  load_rows(to, 0, 1, p->K, row_address(&p->u, h, 0, 0), 0, p->u.stride[1], p->u.dtype);
}
