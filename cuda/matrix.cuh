/* SPDX-License-Identifier: Apache-2.0
 *
 * What the chunk kernels use of the device beyond device.cuh, one instruction a wrapper, each with its twin on the
 * emulated device: products of matrices, shared memory by 4 to 16 bytes, copies that leave zeros. With device.cuh the
 * only file that has inline PTX.
 *
 * Fragments of a product d += a b, for lane 4 g + p of a warp, as the PTX ISA has them:
 *   d [16 x 8]   d[0], d[1]: row g, columns 2p, 2p + 1; d[2], d[3]: row g + 8
 *   a [16 x 16]  bfloat16 pairs, a[0]: row g, columns 2p, 2p + 1; a[1]: row g + 8; a[2], a[3]: columns 8 on
 *   b [16 x 8]   bfloat16 pairs, b[0]: rows 2p, 2p + 1, column g; b[1]: rows 8 on
 *   tf32         a[0], a[1]: rows g, g + 8, column p; a[2], a[3]: column p + 4; b[0], b[1]: rows p, p + 4, column g
 */
#ifndef WKV6_MATRIX_CUH
#define WKV6_MATRIX_CUH

#include "device.cuh"

#if defined(WKV6_EMULATE)

WKV6_DEVICE void multiply_bf16_8(float (&d)[4], const uint32_t (&a)[2], uint32_t b, EMULATION_SITE) {
  const uint32_t all_a[4] = {a[0], a[1], 0, 0}, all_b[2] = {b, 0};
  emulation::multiply_matrices(d, all_a, all_b, site);
}
WKV6_DEVICE void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATION_SITE) {
  emulation::multiply_matrices_tf32(d, a, b, site);
}
/* A matrix of 8 x 8 16-bit numbers, row g and columns 2p, 2p + 1 in lane 4 g + p, transposed. */
WKV6_DEVICE uint32_t transpose_matrix(uint32_t word, EMULATION_SITE) { return emulation::transpose_matrix(word, site); }

template <typename T> WKV6_DEVICE T shuffle_from(T x, unsigned lane, EMULATION_SITE) {
  return emulation::exchange(x, lane, site);
}
WKV6_DEVICE int warp_index() { return static_cast<int>(thread_index() / warp_size); }
/* True in all lanes if it is in one. */
WKV6_DEVICE bool any_lane(bool x, EMULATION_SITE) { return emulation::any_lane(x, site); }

/* 2^x within two units in the last place, subnormals as 0; here always that much too large. */
WKV6_DEVICE float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 1.1754944e-38f ? 0.f : x == 0 ? y : y * (1 + 2.4e-7f);
}
WKV6_DEVICE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
WKV6_DEVICE float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
WKV6_DEVICE uint32_t pack_bf16(float low, float high) {
  return bf16_of(low).bits | static_cast<uint32_t>(bf16_of(high).bits) << 16;
}
/* The bytes of a and b, numbered 0 to 7, that the four digits of `order` name, lowest first. */
WKV6_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t order) {
  const uint64_t all = static_cast<uint64_t>(b) << 32 | a;
  uint32_t word = 0;
  for (int i = 0; i < 4; i++) word |= static_cast<uint32_t>(all >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
  return word;
}
/* x, which the compiler cannot work out again: it keeps its register. */
WKV6_DEVICE int keep(int x) { return x; }

/* 16 bytes, or zeros where they are not `valid`. */
WKV6_DEVICE void copy_async_16_or_zero(void *shared, const void *global, bool valid) {
  static const uint32_t zeros[4] = {0, 0, 0, 0};
  emulation::copy_async(shared, valid ? global : zeros, 16, valid ? 16 : 0);
}
template <int PENDING> WKV6_DEVICE void copy_async_wait_for() { emulation::copy_wait(PENDING); }

/* WORDS words of 4 bytes at once. */
template <int WORDS> WKV6_DEVICE void load_words(const void *shared, uint32_t *x) {
  if (reinterpret_cast<uintptr_t>(shared) % (4 * WORDS)) emulation::fail("a load from shared memory: misaligned");
  emulation::count_shared(shared, 4 * WORDS);
  std::memcpy(x, shared, 4 * WORDS);
}
template <int WORDS> WKV6_DEVICE void store_words(void *shared, const uint32_t *x, bool active = true) {
  if (reinterpret_cast<uintptr_t>(shared) % (4 * WORDS)) emulation::fail("a store to shared memory: misaligned");
  emulation::count_shared(active ? shared : nullptr, 4 * WORDS);
  if (active) std::memcpy(shared, x, 4 * WORDS);
}
template <int WORDS> WKV6_DEVICE void load_global_words(const void *global, uint32_t *x) {
  emulation::count_global(4 * WORDS, 0);
  std::memcpy(x, global, 4 * WORDS);
}
template <int WORDS> WKV6_DEVICE void store_global_words(void *global, const uint32_t *x) {
  emulation::count_global(0, 4 * WORDS);
  std::memcpy(global, x, 4 * WORDS);
}

#else

WKV6_DEVICE void multiply_bf16_8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}
WKV6_DEVICE void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
WKV6_DEVICE uint32_t transpose_matrix(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

template <typename T> WKV6_DEVICE T shuffle_from(T x, unsigned lane) { return __shfl_sync(0xffffffff, x, lane); }
/* By way of a shuffle: the compiler then knows that the lanes of a warp do not differ. */
WKV6_DEVICE int warp_index() { return static_cast<int>(__shfl_sync(0xffffffff, thread_index() / warp_size, 0)); }
WKV6_DEVICE bool any_lane(bool x) { return __any_sync(0xffffffff, x); }

WKV6_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
WKV6_DEVICE uint32_t bits_of(float x) { return __float_as_uint(x); }
WKV6_DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
WKV6_DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
WKV6_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t order) { return __byte_perm(a, b, order); }
WKV6_DEVICE int keep(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

WKV6_DEVICE void copy_async_16_or_zero(void *shared, const void *global, bool valid) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0)
      : "memory");
}
template <int PENDING> WKV6_DEVICE void copy_async_wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <int WORDS> WKV6_DEVICE void get_words(const void *from, uint32_t *x) {
  if constexpr (WORDS == 4) {
    const uint4 y = *static_cast<const uint4 *>(from);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else if constexpr (WORDS == 2) {
    const uint2 y = *static_cast<const uint2 *>(from);
    x[0] = y.x, x[1] = y.y;
  } else {
    x[0] = *static_cast<const uint32_t *>(from);
  }
}
template <int WORDS> WKV6_DEVICE void put_words(void *to, const uint32_t *x) {
  if constexpr (WORDS == 4)
    *static_cast<uint4 *>(to) = make_uint4(x[0], x[1], x[2], x[3]);
  else if constexpr (WORDS == 2)
    *static_cast<uint2 *>(to) = make_uint2(x[0], x[1]);
  else
    *static_cast<uint32_t *>(to) = x[0];
}
template <int WORDS> WKV6_DEVICE void load_words(const void *shared, uint32_t *x) { get_words<WORDS>(shared, x); }
template <int WORDS> WKV6_DEVICE void load_global_words(const void *global, uint32_t *x) {
  get_words<WORDS>(global, x);
}
template <int WORDS> WKV6_DEVICE void store_words(void *shared, const uint32_t *x, bool active = true) {
  if (active) put_words<WORDS>(shared, x);
}
template <int WORDS> WKV6_DEVICE void store_global_words(void *global, const uint32_t *x) {
  put_words<WORDS>(global, x);
}

#endif

/* A float as an operand in tf32, of which the product takes the upper 19 bits: 11 significant ones. The factor adds
 * 0.35 to 0.69 units of the last of them, on average a half, before the rest is cut off: one operation where cvt.rna
 * takes four, an error 3 % larger, and NaN, infinity and numbers of 11 bits stay what they are. */
WKV6_DEVICE uint32_t tf32_of(float x) { return bits_of(x * (1 + 0.34657f / 1024)); }

WKV6_DEVICE float low_float(uint32_t pair) { return float_of_bits(pair << 16); }
WKV6_DEVICE float high_float(uint32_t pair) { return float_of_bits(pair & 0xffff0000); }
/* Of a pair of float16. */
WKV6_DEVICE float low_half(uint32_t pair) { return float_of(f16{static_cast<uint16_t>(pair)}); }
WKV6_DEVICE float high_half(uint32_t pair) { return float_of(f16{static_cast<uint16_t>(pair >> 16)}); }
WKV6_DEVICE uint32_t pack_f16(float low, float high) {
  return f16_of(low).bits | static_cast<uint32_t>(f16_of(high).bits) << 16;
}

#endif
