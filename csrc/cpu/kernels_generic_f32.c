/* SPDX-License-Identifier: Apache-2.0
 *
 * Instance of kernels.inc.h: float on 16-byte vectors, for any machine (SSE2 on x86-64, NEON on aarch64).
 */
#include "kernels_instance.h"

#define WKV6_REAL_BITS 32
#define WKV6_VECTOR_BYTES 16
#define WKV6_KERNELS wkv6_generic_f32
#include "kernels.inc.h"
