/* SPDX-License-Identifier: Apache-2.0
 *
 * Which instance of the kernels runs: the best that the machine has, unless one was asked for by name.
 */
#ifndef WKV6_DISPATCH_H
#define WKV6_DISPATCH_H

#include "kernels.h"

typedef struct wkv6_isa {
  const char *name;
  int (*runs_here)(void);
  const wkv6_kernels *f32, *f64;
} wkv6_isa;

/* The instances compiled in, best first; the end has no name. */
extern const wkv6_isa wkv6_isas[];

/* The instance in use: at first the best one that runs here. */
const wkv6_isa *wkv6_current_isa(void);

/* Uses the instance of that name from the next call on. 0, or -1 where there is none that runs here. */
int wkv6_use_isa(const char *name);

#endif
