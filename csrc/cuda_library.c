/* SPDX-License-Identifier: Apache-2.0
 *
 * Finds and opens the library of CUDA kernels.
 */
#include "cuda_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY "librwkv6_cuda.so"

typedef struct {
  wkv6_cuda_library functions;
  void *handle;
  char error[1024];
} opened;

static opened device, emulation;
static int emulating;

/* POSIX has dlsym return functions as void *, which ISO C cannot convert. */
static int find(opened *o, const char *name, void *function) {
  void *const address = dlsym(o->handle, name);
  if (address) memcpy(function, &address, sizeof address);
  return address != NULL;
}

static int open_at(opened *o, const char *path) {
  o->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!o->handle) {
    snprintf(o->error, sizeof o->error, "%s", dlerror());
    return -1;
  }
  size_t (*problem_bytes)(void) = NULL;
  wkv6_cuda_library *f = &o->functions;
  if (find(o, "wkv6_cuda_forward", &f->forward) && find(o, "wkv6_cuda_backward", &f->backward) &&
      find(o, "wkv6_cuda_step", &f->step) && find(o, "wkv6_cuda_state", &f->state) &&
      find(o, "wkv6_cuda_scratch_bytes", &f->scratch_bytes) && find(o, "wkv6_cuda_error", &f->error) &&
      find(o, "wkv6_cuda_archs", &f->archs) && find(o, "wkv6_cuda_versions", &f->versions) &&
      find(o, "wkv6_cuda_problem_bytes", &problem_bytes) && problem_bytes() == sizeof(wkv6_problem))
    return 0;
  snprintf(o->error, sizeof o->error, "%s: of another version of rwkv6_ops", path);
  dlclose(o->handle);
  o->handle = NULL;
  return -1;
}

const wkv6_cuda_library *wkv6_cuda_library_open(const char **why) {
  if (!device.handle && !*device.error) {
    Dl_info here;
    char path[4096];
    const char *slash = dladdr(&device, &here) ? strrchr(here.dli_fname, '/') : NULL;
    const int folder = slash ? (int)(slash - here.dli_fname) + 1 : 0;
    snprintf(path, sizeof path, "%.*s%s", folder, folder ? here.dli_fname : "", LIBRARY);
    open_at(&device, path);
  }
  *why = device.error;
  return device.handle ? &device.functions : NULL;
}

int wkv6_cuda_emulate(const char *path, const char **why) {
  *why = emulation.error;
  if (path) {
    opened next = {0};
    if (open_at(&next, path)) {
      memcpy(emulation.error, next.error, sizeof next.error);
      return -1;
    }
    if (emulation.handle) dlclose(emulation.handle);
    emulation = next;
  }
  emulating = path != NULL;
  return 0;
}

const wkv6_cuda_library *wkv6_cuda_emulated(void) { return emulating ? &emulation.functions : NULL; }
