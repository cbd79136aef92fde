/* SPDX-License-Identifier: Apache-2.0
 *
 * Element types of tensors. The kernels compute in `real` (float or double); a tensor's dtype is looked at where its
 * elements are loaded or stored, never inside the recurrences, so kernels are not instantiated for combinations of
 * dtypes.
 */
#ifndef WKV6_ELEM_CUH
#define WKV6_ELEM_CUH

#include "../csrc/wkv6_problem.h"
#include "device.cuh"

constexpr __host__ __device__ int element_bytes(int dtype) { return dtype == WKV6_F64 ? 8 : dtype == WKV6_F32 ? 4 : 2; }

WKV6_DEVICE void read_element(float x, float &y) { y = x; }
WKV6_DEVICE void read_element(double x, double &y) { y = x; }
WKV6_DEVICE void read_element(bf16 x, float &y) { y = float_of(x); }
WKV6_DEVICE void read_element(f16 x, float &y) { y = float_of(x); }

WKV6_DEVICE void round_element(float x, float &y) { y = x; }
WKV6_DEVICE void round_element(double x, double &y) { y = x; }
WKV6_DEVICE void round_element(float x, bf16 &y) { y = bf16_of(x); }
WKV6_DEVICE void round_element(float x, f16 &y) { y = f16_of(x); }

template <typename element, typename real> WKV6_DEVICE real real_of(element x) {
  real y;
  read_element(x, y);
  return y;
}

/* Calls f with a value of the element type that `dtype` names: float64 where real is double, one of the others where it
 * is float. */
template <typename real, typename function> WKV6_DEVICE void with_element(int dtype, function f) {
  if constexpr (sizeof(real) == 8)
    f(double());
  else if (dtype == WKV6_F32)
    f(float());
  else if (dtype == WKV6_BF16)
    f(bf16());
  else
    f(f16());
}

/* Element at `offset` of a tensor. */
template <typename real> WKV6_DEVICE real load_element(const wkv6_tensor &x, int64_t offset) {
  real y;
  with_element<real>(
      x.dtype, [&](auto type) { read_element(load_global(static_cast<const decltype(type) *>(x.data) + offset), y); });
  return y;
}

template <typename real> WKV6_DEVICE void store_element(const wkv6_tensor &x, int64_t offset, real value) {
  with_element<real>(x.dtype, [&](auto type) {
    round_element(value, type);
    store_global(static_cast<decltype(type) *>(x.data) + offset, type);
  });
}

#endif
