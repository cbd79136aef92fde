/* SPDX-License-Identifier: Apache-2.0
 *
 * Several threads call the kernels at once, each on several threads of the pool, while another switches instruction
 * sets; for ThreadSanitizer (make sanitize), with dispatch.c and parallel.c as they are shipped. torch's pool is played
 * by pool.c in a library named like torch's. Everything must equal, bit for bit, what the first call gave.
 */
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/wkv6_cpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLERS = 4, CALLS = 12, B = 2, T = 140, H = 4, K = 40, V = 48, SEGMENT = 64 };
enum { KEYS = B * T * H * K, VALUES = B * T * H * V, STATES = B * H * K * V };

static float inputs[4 * KEYS + 2 * VALUES + H * K + STATES];

/* All that a caller writes: o and the final state, the checkpoints, then the gradients, du and its parts. */
typedef struct {
  float o[VALUES], final[STATES], checkpoints[B * T / SEGMENT * H * K * V];
  float grad_r[KEYS], grad_k[KEYS], grad_v[VALUES], grad_w[KEYS], grad_u[H * K], grad_state[STATES], parts[B * H * K];
} results;

static wkv6_tensor view(float *data, int64_t a, int64_t b, int64_t c) {
  return (wkv6_tensor){data, {a * b * c, b * c, c, 1}, WKV6_F32};
}

static void call(results *x) {
  float *at = inputs;
  wkv6_problem p = {.B = B, .T = T, .H = H, .K = K, .V = V, .N = B, .segment = SEGMENT, .scale = 0.5};
  p.r = view(at, T, H, K), p.k = view(at += KEYS, T, H, K), p.w = view(at += KEYS, T, H, K);
  p.v = view(at += KEYS, T, H, V), p.initial_state = view(at += VALUES, H, K, V);
  const wkv6_tensor grad_o = view(at += STATES, T, H, V);
  p.u = (wkv6_tensor){at + VALUES, {K, 1}, WKV6_F32};
  p.o = view(x->o, T, H, V), p.final_state = view(x->final, H, K, V), p.checkpoints = view(x->checkpoints, H, K, V);
  int failed = wkv6_cpu_forward(&p) != WKV6_OK;
  p.o = p.final_state = (wkv6_tensor){0};
  p.grad_o = grad_o, p.grad_r = view(x->grad_r, T, H, K), p.grad_k = view(x->grad_k, T, H, K);
  p.grad_v = view(x->grad_v, T, H, V), p.grad_w = view(x->grad_w, T, H, K);
  p.grad_u = (wkv6_tensor){x->grad_u, {K, 1}, WKV6_F32}, p.grad_initial_state = view(x->grad_state, H, K, V);
  p.grad_u_parts = view(x->parts, 1, H, K);
  failed |= wkv6_cpu_backward(&p) != WKV6_OK;
  if (failed) memset(x, 0xff, sizeof *x);
}

static results want;
static _Atomic int different;

static void *caller(void *unused) {
  results *mine = calloc(1, sizeof *mine);
  for (int i = 0; mine && i < CALLS; i++) {
    call(mine);
    if (memcmp(mine, &want, sizeof want) != 0) different++;
  }
  different += !mine;
  free(mine);
  return unused;
}

static void *switcher(void *unused) {
  const char *name = wkv6_current_isa()->name;
  for (int i = 0; i < 10000; i++) wkv6_use_isa(name);
  return unused;
}

int main(void) {
  uint64_t seed = 1;
  for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    inputs[i] = (float)((int64_t)(seed >> 33) % 2001 - 1000) / 1000 - (i / KEYS == 2 ? 1.0f : 0.0f);
  }
  if (!wkv6_parallel_init() || wkv6_parallel_threads() != 3) {
    puts("the pool was not found");
    return 2;
  }
  call(&want);
  pthread_t threads[CALLERS + 1];
  for (int i = 0; i <= CALLERS; i++) pthread_create(&threads[i], NULL, i < CALLERS ? caller : switcher, NULL);
  for (int i = 0; i <= CALLERS; i++) pthread_join(threads[i], NULL);
  printf("%d calls, %d differ\n", CALLERS * CALLS, different);
  return different != 0;
}
