/* SPDX-License-Identifier: Apache-2.0
 *
 * Instance of kernels.inc.h: float with AVX-512 F, BW, DQ and VL.
 */
#if defined(__x86_64__)
#include "kernels_instance.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define WKV6_REAL_BITS 32
#define WKV6_VECTOR_BYTES 64
#define WKV6_KERNELS wkv6_avx512_f32
#include "kernels.inc.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int no_kernels_for_this_machine; /* C wants something in a translation unit */
#endif
