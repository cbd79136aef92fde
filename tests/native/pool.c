/* SPDX-License-Identifier: Apache-2.0
 *
 * The two functions of torch's stable C ABI that parallel.c looks for, on threads of their own for each call; built as
 * libtorch_cpu.so for threads.c.
 */
#include <pthread.h>
#include <stdint.h>

enum { THREADS = 3 };

typedef struct {
  int64_t begin, end;
  void (*range)(int64_t, int64_t, void *);
  void *context;
} piece;

static void *run(void *argument) {
  const piece *p = argument;
  if (p->begin < p->end) p->range(p->begin, p->end, p->context);
  return 0;
}

int32_t torch_get_num_threads(uint32_t *threads) {
  *threads = THREADS;
  return 0;
}

int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*range)(int64_t, int64_t, void *),
                           void *context) {
  (void)grain;
  piece pieces[THREADS];
  pthread_t threads[THREADS];
  int started[THREADS];
  for (int i = 0; i < THREADS; i++) {
    const int64_t count = end - begin;
    pieces[i] = (piece){begin + count * i / THREADS, begin + count * (i + 1) / THREADS, range, context};
    started[i] = i > 0 && pthread_create(&threads[i], 0, run, &pieces[i]) == 0;
    if (i > 0 && !started[i]) run(&pieces[i]);
  }
  run(&pieces[0]);
  for (int i = 1; i < THREADS; i++)
    if (started[i]) pthread_join(threads[i], 0);
  return 0;
}
