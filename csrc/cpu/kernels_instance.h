/* SPDX-License-Identifier: Apache-2.0
 *
 * System headers of a kernel instance. They come before the pragma that selects the ISA, so that no inline function of
 * theirs is compiled for an instruction set which the machine may lack.
 */
#ifndef WKV6_KERNELS_INSTANCE_H
#define WKV6_KERNELS_INSTANCE_H

#include "cpu_features.h"
#include "kernels.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#endif
