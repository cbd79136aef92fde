/* SPDX-License-Identifier: Apache-2.0
 *
 * How fast the kernels are on one thread, beside the machine's limits and ggml's loop. Everything is timed in turn in
 * one run and the best of many rounds is printed, so that other users of the machine meet all alike; in each round a
 * row runs more than once, so that it finds in the caches what it left there itself. `make check-kernels ARGS=--bench`
 * builds and runs it for all sizes; with arguments, B T H float32|bfloat16 [instruction set], it times that one.
 */
#include "bench_machine.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/wkv6_cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 64, CHECKPOINT = 64, TRIAD_FLOATS = 3 << 22 };

typedef struct {
  int64_t B, T, H;
  int32_t dtype;
  double seconds; /* to spend on it */
} bench_size;

static const bench_size sizes[] = {
    {1, 512, 1, WKV6_F32, 4},
    {1, 512, 1, WKV6_BF16, 4},
    {1, 512, 8, WKV6_F32, 6},
    {1, 512, 8, WKV6_BF16, 6},
    {1, 512, 32, WKV6_F32, 8},
    {4, 1024, 8, WKV6_F32, 8},
    {1, 4096, 32, WKV6_F32, 20},
    {1, 16384, 8, WKV6_F32, 20},
    {1, 1, 32, WKV6_F32, 2},   /* decoding: states that a cache holds, */
    {256, 1, 32, WKV6_F32, 6}, /* and states that none does */
};

static void *allocate(int64_t bytes) {
  void *memory = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
  if (!memory) abort();
  memset(memory, 0, (size_t)bytes);
  return memory;
}

static float uniform(void) { /* in [-1, 1) */
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (float)(int32_t)state * 0x1p-31f;
}

/* Numbers in [middle - 1, middle + 1). */
static wkv6_tensor tensor_of(int32_t dtype, int64_t a, int64_t b, int64_t c, int64_t d, float middle) {
  wkv6_tensor x = {.dtype = dtype, .stride = {b * c * d, c * d, d, 1}};
  x.data = allocate(a * b * c * d * (dtype == WKV6_F32 ? 4 : 2));
  for (int64_t i = 0; i < a * b * c * d; i++) {
    const float value = middle + uniform();
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == WKV6_F32)
      ((float *)x.data)[i] = value;
    else
      ((uint16_t *)x.data)[i] = (uint16_t)(bits >> 16);
  }
  return x;
}

static wkv6_problem problem_of(const bench_size *s) {
  const int64_t B = s->B, T = s->T, H = s->H;
  wkv6_problem p = {.B = B, .T = T, .H = H, .K = D, .V = D, .N = B, .segment = CHECKPOINT, .scale = 1};
  wkv6_tensor *const rows[] = {&p.r, &p.k, &p.v, &p.w, &p.o, &p.grad_o, &p.grad_r, &p.grad_k, &p.grad_v, &p.grad_w};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    *rows[i] = tensor_of(s->dtype, B, T, H, D, rows[i] == &p.w ? -1 : 0);
  p.u = tensor_of(s->dtype, 1, 1, H, D, 0);
  p.grad_u = tensor_of(s->dtype, 1, 1, H, D, 0);
  p.u.stride[0] = p.grad_u.stride[0] = D, p.u.stride[1] = p.grad_u.stride[1] = 1;
  p.final_state = tensor_of(WKV6_F32, B, H, D, D, 0);
  p.grad_final_state = tensor_of(WKV6_F32, B, H, D, D, 0);
  p.checkpoints = tensor_of(WKV6_F32, B * T / CHECKPOINT, H, D, D, 0);
  p.grad_u_parts = tensor_of(WKV6_F32, 1, B, H, D, 0);
  return p;
}

static void free_problem(wkv6_problem *p) {
  wkv6_tensor *const all[] = {&p->r,
                              &p->k,
                              &p->v,
                              &p->w,
                              &p->o,
                              &p->grad_o,
                              &p->grad_r,
                              &p->grad_k,
                              &p->grad_v,
                              &p->grad_w,
                              &p->u,
                              &p->grad_u,
                              &p->final_state,
                              &p->grad_final_state,
                              &p->checkpoints,
                              &p->grad_u_parts};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]->data);
}

/* What is timed, one row of the table each. */
typedef struct {
  const char *isa, *name;
  double flop, rows; /* per token and head: the yardstick, and rows of D elements read or written */
  wkv6_status (*run)(const wkv6_problem *);
  uint32_t flags;
  int width;   /* bytes of its vectors: it is measured against their peak */
  double best; /* seconds */
} row;

static double time_once(const row *x, wkv6_problem *p, const float *ggml_inputs) {
  if (x->isa) wkv6_use_isa(x->isa);
  p->flags = x->flags;
  const wkv6_tensor checkpoints = p->checkpoints;
  if (x->run == wkv6_cpu_forward) p->checkpoints.dtype = WKV6_ABSENT; /* as in inference */
  const double start = seconds();
  if (!x->run) {
    const int64_t n = p->T * p->H * D;
    for (int64_t b = 0; b < p->B; b++)
      ggml_form(p->T,
                p->H,
                D,
                (const float *)p->r.data + b * n,
                (const float *)p->k.data + b * n,
                (const float *)p->v.data + b * n,
                ggml_inputs + b * n,
                p->u.data,
                (float *)p->final_state.data + b * p->H * D * D,
                (float *)p->o.data + b * n);
  } else if (x->run(p) != WKV6_OK) {
    abort();
  }
  const double elapsed = seconds() - start;
  p->checkpoints = checkpoints;
  return elapsed;
}

/* The best of a few runs in a row. */
static double time_row(const row *x, wkv6_problem *p, const float *ggml_inputs) {
  double best = INFINITY, spent = 0;
  for (int i = 0; i < 2 || (i < 20 && spent < 2e-3); i++) {
    const double elapsed = time_once(x, p, ggml_inputs);
    best = fmin(best, elapsed);
    spent += elapsed;
  }
  return best;
}

/* Adds the rows of every instruction set that runs here, or of the one called only, for both algorithms where there are
 * two. */
static int add_rows(row *rows, const char *only, const char *recurrent, const char *chunk, double flop, double count,
                    wkv6_status (*run)(const wkv6_problem *)) {
  int n = 0;
  for (const wkv6_isa *isa = wkv6_isas; isa->name; isa++) {
    if (!isa->runs_here() || (only && strcmp(only, isa->name) != 0)) continue;
    const int width = (int)(isa->f32->lanes * (int64_t)sizeof(float));
    rows[n++] = (row){isa->name, recurrent, flop * D * D, count, run, WKV6_RECURRENT, width, INFINITY};
    if (chunk) rows[n++] = (row){isa->name, chunk, flop * D * D, count, run, WKV6_CHUNK, width, INFINITY};
  }
  return n;
}

static void bench(const bench_size *s, const char *only, float *triad_memory) {
  wkv6_problem p = problem_of(s);
  const int64_t elements = p.B * p.T * p.H * D, width = s->dtype == WKV6_F32 ? 4 : 2;
  float *decays = allocate(elements * (int64_t)sizeof(float));
  for (int64_t i = 0; i < elements; i++) decays[i] = 0.5f + 0.4f * uniform();
  row rows[32];
  int count = 0;
  if (s->dtype == WKV6_F32) rows[count++] = (row){NULL, "ggml's loop", 5.0 * D * D, 5, NULL, 0, vector_bytes, INFINITY};
  if (s->T == 1) {
    count += add_rows(rows + count, only, "step", NULL, 5, 2.0 * D + 5, wkv6_cpu_step);
  } else {
    count += add_rows(rows + count, only, "forward recurrent", "forward chunk", 5, 5, wkv6_cpu_forward);
    count += add_rows(rows + count, only, "backward recurrent", "backward chunk", 12, 9, wkv6_cpu_backward);
    wkv6_cpu_forward(&p); /* the checkpoints */
  }
  double peaks[65] = {0}, triad = 0; /* by bytes of a vector */
  const double end = seconds() + s->seconds;
  do
    for (int i = 0; i < count; i++) {
      double *peak = &peaks[rows[i].width];
      *peak = fmax(*peak, fma_peak(rows[i].width));
      rows[i].best = fmin(rows[i].best, time_row(&rows[i], &p, decays));
    }
  while (seconds() < end);
  for (int i = 0; i < 5; i++) triad = fmax(triad, triad_bandwidth(triad_memory, TRIAD_FLOATS));

  const double heads = (double)(p.B * p.T * p.H);
  printf("\nB %d T %d H %d %s: triad %.1f GB/s; FMA peak by bytes of a vector:",
         (int)p.B,
         (int)p.T,
         (int)p.H,
         width == 4 ? "float32" : "bfloat16",
         triad * 1e-9);
  for (int bytes = 16; bytes <= 64; bytes *= 2)
    if (peaks[bytes] > 0) printf(" %d: %.0f GF", bytes, peaks[bytes] * 1e-9);
  printf("\n");
  printf("                                ns/token-head  of peak  of triad  x ggml's loop\n");
  for (int i = 0; i < count; i++) {
    const double each = rows[i].best / heads;
    printf("  %-8s %-20s %13.1f %8.2f %9.2f",
           rows[i].isa ? rows[i].isa : "native",
           rows[i].name,
           1e9 * each,
           rows[i].flop / each / peaks[rows[i].width],
           rows[i].rows * D * (double)width / each / triad);
    if (!rows[0].run && rows[i].flop == rows[0].flop) printf(" %14.2f", rows[0].best / rows[i].best);
    printf("\n");
  }
  free(decays);
  free_problem(&p);
}

int main(int count, char **arguments) {
  wkv6_parallel_init(); /* no torch in this process: one thread */
  float *triad_memory = allocate(TRIAD_FLOATS * (int64_t)sizeof(float));
  if (count >= 5) {
    bench_size s = {.dtype = strcmp(arguments[4], "bfloat16") ? WKV6_F32 : WKV6_BF16, .seconds = 6};
    s.B = strtoll(arguments[1], NULL, 10);
    s.T = strtoll(arguments[2], NULL, 10);
    s.H = strtoll(arguments[3], NULL, 10);
    if (s.B < 1 || s.T < 1 || s.H < 1) return 1;
    bench(&s, arguments[5], triad_memory); /* NULL where there is none */
  } else {
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) bench(&sizes[i], NULL, triad_memory);
  }
  free(triad_memory);
  return 0;
}
