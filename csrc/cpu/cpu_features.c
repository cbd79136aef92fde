/* SPDX-License-Identifier: Apache-2.0
 *
 * CPUID, asked through the compiler's runtime: it also knows whether the operating system saves the wide registers.
 */
#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

int wkv6_cpu_is_any(void) { return 1; }

#if defined(__x86_64__)
int wkv6_cpu_has_avx2(void) {
  unsigned eax, ebx, ecx = 0, edx;
  const int f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  __builtin_cpu_init();
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

int wkv6_cpu_has_avx512(void) {
  return wkv6_cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

int wkv6_cpu_wants_prefetches(void) {
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
}
#else
int wkv6_cpu_wants_prefetches(void) { return 0; }
#endif
