/* SPDX-License-Identifier: Apache-2.0
 *
 * Torch's own thread pool, reached through its stable C ABI: torch.set_num_threads() holds, and no second pool competes
 * with the one that runs the rest of the model. The symbols are looked up in the libtorch that is already loaded, so
 * nothing links to it.
 */
#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* torch/csrc/stable/c/shim.h, torch >= 2.10. Both return 0 on success. */
typedef int32_t (*torch_parallel_for_fn)(int64_t begin, int64_t end, int64_t grain,
                                         void (*range)(int64_t, int64_t, void *), void *context);
typedef int32_t (*torch_get_num_threads_fn)(uint32_t *threads);

static torch_parallel_for_fn torch_parallel_for; /* written by wkv6_parallel_init() and in forked children only */
static torch_get_num_threads_fn torch_get_num_threads;
static pthread_key_t scratch_key;

/* The pool's threads do not survive fork(), but the pool does not know: a child that used it would wait forever. */
static void forget_pool(void) { torch_parallel_for = NULL; }

static void *find_symbol(void *library, const char *name) { return library ? dlsym(library, name) : NULL; }

static void free_scratch(void *scratch);

int wkv6_parallel_init(void) {
  static int initialised;
  if (!initialised) {
    initialised = 1;
    pthread_key_create(&scratch_key, free_scratch);
    void *library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    void *threads = find_symbol(library, "torch_get_num_threads"),
         *parallel_for = find_symbol(library, "torch_parallel_for");
    if (threads && parallel_for) {
      memcpy(&torch_get_num_threads, &threads, sizeof threads); /* ISO C has no cast from object to function pointers */
      memcpy(&torch_parallel_for, &parallel_for, sizeof parallel_for);
      pthread_atfork(NULL, NULL, forget_pool);
    }
  }
  return torch_parallel_for != NULL;
}

int64_t wkv6_parallel_threads(void) {
  uint32_t threads = 1;
  if (!torch_parallel_for || torch_get_num_threads(&threads) != 0) return 1;
  return threads;
}

void wkv6_parallel_for(int64_t count, void (*range)(int64_t, int64_t, void *), void *context) {
  if (count <= 1 || !torch_parallel_for || torch_parallel_for(0, count, 1, range, context) != 0)
    range(0, count, context);
}

/* What a thread keeps: one block, its size in front. */
typedef struct {
  size_t size;
  char alignment[56];
} scratch_header;
_Static_assert(sizeof(scratch_header) == 64, "scratch stays 64-byte aligned behind its header");

static void free_scratch(void *scratch) { free(scratch); }

void *wkv6_scratch(size_t bytes) {
  scratch_header *kept = pthread_getspecific(scratch_key);
  if (!kept || kept->size < bytes) {
    free(kept);
    const size_t rounded = (bytes + sizeof(scratch_header) + 63) / 64 * 64;
    kept = rounded < bytes ? NULL : aligned_alloc(64, rounded);
    pthread_setspecific(scratch_key, kept);
    if (!kept) return NULL;
    kept->size = rounded - sizeof(scratch_header);
  }
  return kept + 1;
}

void wkv6_scratch_done(void) {
  scratch_header *kept = pthread_getspecific(scratch_key);
  if (kept && kept->size > WKV6_SCRATCH_KEPT) {
    free(kept);
    pthread_setspecific(scratch_key, NULL);
  }
}
