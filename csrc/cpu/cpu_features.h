/* SPDX-License-Identifier: Apache-2.0
 *
 * What the processor and the operating system let us run.
 */
#ifndef WKV6_CPU_FEATURES_H
#define WKV6_CPU_FEATURES_H

int wkv6_cpu_is_any(void);     /* always */
int wkv6_cpu_has_avx2(void);   /* AVX2, FMA and F16C */
int wkv6_cpu_has_avx512(void); /* AVX-512 F, BW, DQ, VL and all of the above */

#endif
