/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels use of the device, one instruction a wrapper. This file and matrix.cuh are the only ones with
 * inline PTX, and with runtime.cuh the only ones that know of the host emulation: with WKV6_EMULATE each wrapper is its
 * twin there, and the kernels themselves are the same text.
 */
#ifndef WKV6_DEVICE_CUH
#define WKV6_DEVICE_CUH

#if defined(WKV6_EMULATE)
#include "host_emulation/emulator.h"

#include <cmath>
#else
#include <cuda_runtime.h>

#include <cstdint>
#endif

#define WKV6_DEVICE __device__ __forceinline__

constexpr int warp_size = 32;

/* bfloat16 and float16 as they lie in memory. */
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#if defined(WKV6_EMULATE)

using std::exp;
using std::expm1;
using std::fma;

WKV6_DEVICE unsigned thread_index() { return emulation::self().index; }
WKV6_DEVICE unsigned block_index() { return emulation::self().block; }
WKV6_DEVICE unsigned block_threads() { return emulation::self().threads; }
WKV6_DEVICE char *shared_memory() { return emulation::self().shared; }

WKV6_DEVICE void block_barrier(EMULATION_SITE) { emulation::block_barrier(site); }

/* The value of the lane whose index differs in `bits`. */
template <typename T> WKV6_DEVICE T shuffle_xor(T x, unsigned bits, EMULATION_SITE) {
  return emulation::exchange(x, thread_index() % warp_size ^ bits, site);
}

/* Tensor cores: fragments from shared memory, and their product added to d. */
WKV6_DEVICE void load_matrices(uint32_t (&to)[4], const void *row, EMULATION_SITE) {
  emulation::count_shared(row, 16);
  emulation::load_matrices(to, row, false, site);
}
WKV6_DEVICE void load_matrices_transposed(uint32_t (&to)[4], const void *row, EMULATION_SITE) {
  emulation::count_shared(row, 16);
  emulation::load_matrices(to, row, true, site);
}
WKV6_DEVICE void multiply_matrices(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMULATION_SITE) {
  emulation::multiply_matrices(d, a, b, site);
}

WKV6_DEVICE void copy_async_16(void *shared, const void *global) { emulation::copy_async(shared, global, 16, 16); }
WKV6_DEVICE void copy_async_commit() { emulation::copy_commit(); }
WKV6_DEVICE void copy_async_wait() { emulation::copy_wait(0); }

template <typename T> WKV6_DEVICE T load_global(const T *p) {
  emulation::count_global(sizeof(T), 0);
  return *p;
}
template <typename T> WKV6_DEVICE void store_global(T *p, T x) {
  emulation::count_global(0, sizeof(T));
  *p = x;
}
template <typename T> WKV6_DEVICE void load_global_4(const T *p, T (&x)[4]) {
  emulation::count_global(4 * sizeof(T), 0);
  for (int i = 0; i < 4; i++) x[i] = p[i];
}
template <typename T> WKV6_DEVICE void store_global_4(T *p, const T (&x)[4]) {
  emulation::count_global(0, 4 * sizeof(T));
  for (int i = 0; i < 4; i++) p[i] = x[i];
}
/* N consecutive values, N * sizeof(T) = 8 or 16 bytes an instruction. */
template <int N, typename T> WKV6_DEVICE void load_shared(const T *p, T *x) {
  if (reinterpret_cast<uintptr_t>(p) % (N * sizeof(T) < 16 ? N * sizeof(T) : 16))
    emulation::fail("a vector load from shared memory: misaligned");
  constexpr int in_16_bytes = 16 / sizeof(T), at_once = N < in_16_bytes ? N : in_16_bytes;
  for (int i = 0; i < N; i += at_once) emulation::count_shared(p + i, at_once * sizeof(T));
  for (int i = 0; i < N; i++) x[i] = p[i];
}

WKV6_DEVICE float float_of(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
WKV6_DEVICE float float_of(f16 x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                     : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return x.bits >> 15 ? -size : size;
}
WKV6_DEVICE bf16 bf16_of(float x) {
  if (x != x) return {0x7fff};
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
WKV6_DEVICE f16 f16_of(float x) {
  if (x != x) return {0x7fff};
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (size >= 65520) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (size == 0) return {sign};
  int exponent;
  std::frexp(size, &exponent); /* size < 2^exponent */
  const int unit = exponent - 11 > -24 ? exponent - 11 : -24;
  const int digits =
      static_cast<int>(std::nearbyint(std::ldexp(size, -unit))); /* to even; 2^11 carries into the exponent by itself */
  return {static_cast<uint16_t>(sign | (((unit + 24) << 10) + digits))};
}

#else

WKV6_DEVICE unsigned thread_index() { return threadIdx.x; }
WKV6_DEVICE unsigned block_index() { return blockIdx.x; }
WKV6_DEVICE unsigned block_threads() { return blockDim.x; }
WKV6_DEVICE char *shared_memory() {
  extern __shared__ __align__(128) char wkv6_shared[];
  return wkv6_shared;
}

WKV6_DEVICE void block_barrier() { __syncthreads(); }

template <typename T> WKV6_DEVICE T shuffle_xor(T x, unsigned bits) { return __shfl_xor_sync(0xffffffff, x, bits); }

WKV6_DEVICE uint32_t shared_address(const void *shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
WKV6_DEVICE void load_matrices(uint32_t (&to)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
WKV6_DEVICE void load_matrices_transposed(uint32_t (&to)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
WKV6_DEVICE void multiply_matrices(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

WKV6_DEVICE void copy_async_16(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
WKV6_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
WKV6_DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

template <typename T> WKV6_DEVICE T load_global(const T *p) { return *p; }
template <typename T> WKV6_DEVICE void store_global(T *p, T x) { *p = x; }
WKV6_DEVICE void load_global_4(const float *p, float (&x)[4]) {
  const float4 y = *reinterpret_cast<const float4 *>(p);
  x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
WKV6_DEVICE void load_global_4(const double *p, double (&x)[4]) {
  const double2 y = reinterpret_cast<const double2 *>(p)[0], z = reinterpret_cast<const double2 *>(p)[1];
  x[0] = y.x, x[1] = y.y, x[2] = z.x, x[3] = z.y;
}
WKV6_DEVICE void store_global_4(float *p, const float (&x)[4]) {
  *reinterpret_cast<float4 *>(p) = make_float4(x[0], x[1], x[2], x[3]);
}
WKV6_DEVICE void store_global_4(double *p, const double (&x)[4]) {
  reinterpret_cast<double2 *>(p)[0] = make_double2(x[0], x[1]);
  reinterpret_cast<double2 *>(p)[1] = make_double2(x[2], x[3]);
}
template <int N> WKV6_DEVICE void load_shared(const float *p, float *x) {
  static_assert(N == 2 || N == 4, "two or four values");
  if constexpr (N == 4) {
    const float4 y = *reinterpret_cast<const float4 *>(p);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
    const float2 y = *reinterpret_cast<const float2 *>(p);
    x[0] = y.x, x[1] = y.y;
  }
}
template <int N> WKV6_DEVICE void load_shared(const double *p, double *x) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const double2 y = *reinterpret_cast<const double2 *>(p + i);
    x[i] = y.x, x[i + 1] = y.y;
  }
}

WKV6_DEVICE float float_of(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
WKV6_DEVICE float float_of(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
WKV6_DEVICE bf16 bf16_of(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
WKV6_DEVICE f16 f16_of(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

#endif

/* Sums of N values over L lanes, lane indices differing in the log2(L) lowest bits, N a power of two. Each step hands
 * half of the values over and keeps half, so N values take N - 1 shuffles while there is more than one. Afterwards lane
 * l holds, in the first max(1, N / L) places, the sums of the values from scattered<N, L>(l) on. The order of addition
 * is fixed. */
template <int N, int L, typename T> WKV6_DEVICE void scatter_sum(T (&x)[N], unsigned lane) {
  int values = N;
#pragma unroll
  for (int bit = 1; bit < L; bit *= 2) {
    if (values > 1) {
      values /= 2;
#pragma unroll
      for (int i = 0; i < N / 2; i++) {
        if (i >= values) break;
        const T mine = lane & bit ? x[i + values] : x[i], theirs = lane & bit ? x[i] : x[i + values];
        x[i] = mine + shuffle_xor(theirs, bit);
      }
    } else {
      x[0] += shuffle_xor(x[0], bit);
    }
  }
}

template <int N, int L> WKV6_DEVICE int scattered(unsigned lane) {
  int first = 0;
#pragma unroll
  for (int bit = 1, half = N / 2; bit < L && half > 0; bit *= 2, half /= 2) first += lane & bit ? half : 0;
  return first;
}

#endif
