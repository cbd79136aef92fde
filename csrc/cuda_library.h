/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels (../cuda/wkv6_cuda.h), in a library of their own: one build of the extension serves machines with
 * and without CUDA. It is opened on first use, from the extension's own folder. To be called with the GIL held.
 */
#ifndef WKV6_CUDA_LIBRARY_H
#define WKV6_CUDA_LIBRARY_H

#include "wkv6_problem.h"

typedef wkv6_status wkv6_cuda_function(const wkv6_problem *p, int device, void *stream);

typedef struct wkv6_cuda_library {
  wkv6_cuda_function *forward, *backward, *step, *state;
  size_t (*scratch_bytes)(const wkv6_problem *p);
  const char *(*error)(void); /* text for WKV6_E_DEVICE */
  const char *(*archs)(void);
  wkv6_status (*versions)(int *runtime_version, int *driver_version);
} wkv6_cuda_library;

/* The library, or NULL and in *why the reason. A failure is final: it is not looked for again. */
const wkv6_cuda_library *wkv6_cuda_library_open(const char **why);

/* For tests: makes the kernels' build for an emulated device, at `path`, take the place of those for the CPU; NULL
 * undoes it. Returns 0, or -1 and in *why the reason. */
int wkv6_cuda_emulate(const char *path, const char **why);

/* The emulated library while it is in that place, else NULL. */
const wkv6_cuda_library *wkv6_cuda_emulated(void);

#endif
