/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums of parts. Heads with more channels than a block can hold are computed in parts of the channels (launch.cu): each
 * part's o and dv are over its own keys, its dr, dk and dw over its own values. Here they are added, in order.
 *
 * A thread has one element.
 */
#ifndef WKV6_RECURRENT_PARTS_CUH
#define WKV6_RECURRENT_PARTS_CUH

#include "elem.cuh"

constexpr int sum_threads = 256;

struct sum_arguments {
  wkv6_tensor to; /* [B, T, H, C] */
  int64_t elements, T, H, C;
  const void *parts; /* [count][elements] */
  int count;
};

template <typename real>
__global__ void __launch_bounds__(sum_threads) wkv6_sum_parts(const __grid_constant__ sum_arguments a) {
  const int64_t i = static_cast<int64_t>(block_index()) * sum_threads + thread_index();
  if (i >= a.elements) return;
  const real *const parts = static_cast<const real *>(a.parts);
  real sum = load_global(parts + i);
  for (int part = 1; part < a.count; part++) sum += load_global(parts + part * a.elements + i);
  const int64_t c = i % a.C, h = i / a.C % a.H, t = i / a.C / a.H % a.T, b = i / a.C / a.H / a.T;
  store_element<real>(a.to, b * a.to.stride[0] + t * a.to.stride[1] + h * a.to.stride[2] + c * a.to.stride[3], sum);
}

#endif
