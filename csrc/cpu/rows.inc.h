/* SPDX-License-Identifier: Apache-2.0
 *
 * Between the caller's memory and the kernels' scratch: rows of any dtype and stride become contiguous reals and back. The kernels see
 * nothing but reals, so dtypes and strides cost them nothing. Included by kernels.inc.h after simd.inc.h.
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

/* One loop a dtype; the stride of 1 is spelled out so that the compiler vectorises it. */
#define CONVERT_ROW(ASSIGN)                                   \
  if (stride == 1) {                                          \
    for (int64_t i = 0, at = 0; i < count; i++, at++) ASSIGN; \
  } else {                                                    \
    for (int64_t i = 0, at = 0; i < count; i++, at += stride) ASSIGN; \
  }

static __attribute__((noinline)) void load_row(real *to, int64_t count, const char *from, int64_t stride, int32_t dtype) {
  if (dtype == WKV6_F32) {
    const float *x = (const float *)from;
    CONVERT_ROW(to[i] = x[at])
  } else if (dtype == WKV6_BF16) {
    const uint16_t *x = (const uint16_t *)from;
    CONVERT_ROW(to[i] = float_from_bf16(x[at]))
  } else if (dtype == WKV6_F16) {
    const uint16_t *x = (const uint16_t *)from;
    CONVERT_ROW(to[i] = float_from_f16(x[at]))
  } else {
    const double *x = (const double *)from;
    CONVERT_ROW(to[i] = (real)x[at])
  }
}

static __attribute__((noinline)) void store_row(char *to, int64_t count, int64_t stride, int32_t dtype, const real *from) {
  if (dtype == WKV6_F32) {
    float *x = (float *)to;
    CONVERT_ROW(x[at] = (float)from[i])
  } else if (dtype == WKV6_BF16) {
    uint16_t *x = (uint16_t *)to;
    CONVERT_ROW(x[at] = bf16_from_float((float)from[i]))
  } else if (dtype == WKV6_F16) {
    uint16_t *x = (uint16_t *)to;
    CONVERT_ROW(x[at] = f16_from_float((float)from[i]))
  } else {
    double *x = (double *)to;
    CONVERT_ROW(x[at] = from[i])
  }
}
#undef CONVERT_ROW

/* The tokens of one sequence in the order in which the recurrence reads them. */
typedef struct {
  int64_t batch, first, length, step; /* token t of the sequence is token first + t * step of batch row `batch` */
} sequence;

INLINE sequence sequence_of(const wkv6_problem *p, int64_t n) {
  const int64_t length = wkv6_sequence_length(p, n), start = p->cu_seqlens ? p->cu_seqlens[n] : 0;
  const int reverse = (p->flags & WKV6_REVERSE) != 0;
  return (sequence){p->cu_seqlens ? 0 : n, reverse ? start + length - 1 : start, length, reverse ? -1 : 1};
}

/* Rows of head h for tokens [t, t + count) of the sequence, to or from [count][stride_row] reals. An absent tensor loads as zeros. */
static void load_tokens(real *to, int64_t stride_row, const wkv6_tensor *x, const sequence *s, int64_t h, int64_t t, int64_t count,
                        int64_t width) {
  for (int64_t i = 0; i < count; i++, to += stride_row) {
    if (x->dtype == WKV6_ABSENT)
      memset(to, 0, (size_t)width * sizeof(real));
    else
      load_row(to, width, row_address(x, s->batch, s->first + (t + i) * s->step, h), x->stride[3], x->dtype);
  }
}

static void store_tokens(const wkv6_tensor *x, const sequence *s, int64_t h, int64_t t, int64_t count, int64_t width, const real *from,
                         int64_t stride_row) {
  if (x->dtype == WKV6_ABSENT) return;
  for (int64_t i = 0; i < count; i++, from += stride_row)
    store_row(row_address(x, s->batch, s->first + (t + i) * s->step, h), width, x->stride[3], x->dtype, from);
}

/* Matrix (n, h) of a [N, H, K, V] tensor to or from [K][stride_row] reals. Absent: zeros, and no store. */
static void load_state(real *to, int64_t stride_row, const wkv6_tensor *x, int64_t n, int64_t h, int64_t K, int64_t V) {
  for (int64_t i = 0; i < K; i++, to += stride_row) {
    if (x->dtype == WKV6_ABSENT)
      memset(to, 0, (size_t)V * sizeof(real));
    else
      load_row(to, V, row_address(x, n, h, i), x->stride[3], x->dtype);
  }
}

static void store_state(const wkv6_tensor *x, int64_t n, int64_t h, int64_t K, int64_t V, const real *from, int64_t stride_row) {
  if (x->dtype == WKV6_ABSENT) return;
  for (int64_t i = 0; i < K; i++, from += stride_row) store_row(row_address(x, n, h, i), V, x->stride[3], x->dtype, from);
}
