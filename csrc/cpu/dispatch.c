/* SPDX-License-Identifier: Apache-2.0
 *
 * The ladder of instruction sets. A new one is a row here, two kernels_*.c files and a block in simd.inc.h.
 */
#include "dispatch.h"

#include "cpu_features.h"

#include <stdatomic.h>
#include <string.h>

const wkv6_isa wkv6_isas[] = {
#if defined(__x86_64__)
    {"avx512", wkv6_cpu_has_avx512, &wkv6_avx512_f32, &wkv6_avx512_f64},
    {"avx2", wkv6_cpu_has_avx2, &wkv6_avx2_f32, &wkv6_avx2_f64},
#endif
    {"generic", wkv6_cpu_is_any, &wkv6_generic_f32, &wkv6_generic_f64},
    {NULL, NULL, NULL, NULL},
};

static _Atomic(const wkv6_isa *) current;

const wkv6_isa *wkv6_current_isa(void) {
  const wkv6_isa *isa = atomic_load_explicit(&current, memory_order_acquire);
  if (isa) return isa;
  for (isa = wkv6_isas; !isa->runs_here();) isa++; /* the last one always does */
  atomic_store_explicit(&current, isa, memory_order_release);
  return isa;
}

int wkv6_use_isa(const char *name) {
  for (const wkv6_isa *isa = wkv6_isas; isa->name; isa++) {
    if (strcmp(isa->name, name) == 0 && isa->runs_here()) {
      atomic_store_explicit(&current, isa, memory_order_release);
      return 0;
    }
  }
  return -1;
}
