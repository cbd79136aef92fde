/* SPDX-License-Identifier: Apache-2.0
 *
 * Every instruction set and algorithm of the CPU kernels against a plain loop in double, on inputs that are hard on them, with every
 * tensor up against a page that may not be touched; and how fast they are. Built and run by `make check-kernels`.
 *
 *   checkasm            check; exit status 1 where anything is wrong
 *   checkasm --bench    check, then print times beside this machine's limits, measured in the same run
 */
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/wkv6_cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  int64_t B, T, H, K, V;
  int dtype, state;
  const char *decay;
  uint32_t flags;
} shape;

/* ---- Memory: blocks that end where a page begins that may not be touched ---- */

static struct {
  void *at;
  size_t size;
} blocks[64];
static int block_count;

static void *guarded(size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
  char *at = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED || mprotect(at + whole, page, PROT_NONE)) abort();
  memset(at, 0xff, whole); /* NaN in every type */
  blocks[block_count].at = at;
  blocks[block_count++].size = whole + page;
  return at + whole - bytes;
}

static void release(void) {
  while (block_count) block_count--, munmap(blocks[block_count].at, blocks[block_count].size);
}

/* ---- Numbers ---- */

static uint64_t random_state = 1;
static double uniform(void) { /* xorshift64* */
  random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
  return (double)((random_state * UINT64_C(0x2545F4914F6CDD1D)) >> 11) * 0x1p-53;
}
static double normal(void) { return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform()); }

static double log_decay(const char *kind, int64_t t, int64_t i) {
  if (!strcmp(kind, "weak")) return -1e-4;
  if (!strcmp(kind, "fading")) return -80.0 / 64;
  if (!strcmp(kind, "strong") && i % 3 == 0) return -20 - 40 * uniform();
  if (!strcmp(kind, "spikes") && t % 8 == 7) return -22026.4658;
  if (!strcmp(kind, "mixed")) {
    const double chance = uniform();
    return chance < 0.05 ? -INFINITY : chance > 0.9 ? 0 : -exp(normal()) * pow(10, floor(7 * uniform()) - 4);
  }
  return -exp(normal());
}

/* A tensor in the kernels' dtype and the same numbers, as the kernels read them, in double. */
typedef struct {
  wkv6_tensor view;
  double *exact;
  int64_t count;
} tensor;

static double element(const wkv6_tensor *x, int64_t i) {
  if (x->dtype == WKV6_F64) return ((double *)x->data)[i];
  if (x->dtype == WKV6_F32) return ((float *)x->data)[i];
  const uint32_t bits = (uint32_t)((uint16_t *)x->data)[i] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void set_element(const wkv6_tensor *x, int64_t i, double value) {
  if (x->dtype == WKV6_F64) {
    ((double *)x->data)[i] = value;
  } else if (x->dtype == WKV6_F32) {
    ((float *)x->data)[i] = (float)value;
  } else {
    const float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    ((uint16_t *)x->data)[i] = (uint16_t)(bits >> 16);
  }
}

static tensor make(int dtype, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t count = a * b * c * d;
  tensor x = {.view = {.dtype = dtype, .stride = {b * c * d, c * d, d, 1}}, .count = count};
  x.view.data = guarded((size_t)count * (dtype == WKV6_F64 ? 8 : dtype == WKV6_F32 ? 4 : 2));
  x.exact = guarded((size_t)count * sizeof(double));
  return x;
}

static tensor random_tensor(int dtype, int64_t a, int64_t b, int64_t c, int64_t d) {
  tensor x = make(dtype, a, b, c, d);
  for (int64_t i = 0; i < x.count; i++) {
    set_element(&x.view, i, normal());
    x.exact[i] = element(&x.view, i);
  }
  return x;
}

/* Relative L2 error; infinite where a NaN or an infinity stands in one of the two only. */
static double error_of(const tensor *x) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < x->count; i++) {
    const double value = element(&x->view, i), difference = value - x->exact[i];
    if (isnan(value) && isnan(x->exact[i])) continue;
    if (!isfinite(difference)) {
      if (value == x->exact[i]) continue;
      return INFINITY;
    }
    error += difference * difference;
    norm += x->exact[i] * x->exact[i];
  }
  return error == 0 ? 0 : sqrt(error / norm);
}

/* ---- The plain loop ---- */

typedef struct {
  tensor r, k, v, w, u, initial_state, o, final_state, checkpoints;
  tensor grad_o, grad_final_state, grad_r, grad_k, grad_v, grad_w, grad_u, grad_initial_state, grad_u_parts;
  wkv6_problem p;
} problem;

#define CHECKPOINT 64

static problem make_problem(const shape *s) {
  problem x;
  const int real = s->dtype == WKV6_F64 ? WKV6_F64 : WKV6_F32;
  const int64_t B = s->B, T = s->T, H = s->H, K = s->K, V = s->V;
  memset(&x, 0, sizeof x);
  x.r = random_tensor(s->dtype, B, T, H, K);
  x.k = random_tensor(s->dtype, B, T, H, K);
  x.v = random_tensor(s->dtype, B, T, H, V);
  x.w = make(s->dtype, B, T, H, K);
  for (int64_t i = 0; i < x.w.count; i++) {
    const double log_w = log_decay(s->decay, i / (H * K) % T, i % K);
    set_element(&x.w.view, i, s->flags & WKV6_RAW_DECAY ? log(-log_w) : log_w);
    x.w.exact[i] = element(&x.w.view, i);
  }
  x.u = random_tensor(s->dtype, H, 1, 1, K);
  x.u.view.stride[1] = 1;
  x.o = make(s->dtype, B, T, H, V);
  x.final_state = make(real, B, H, K, V);
  x.checkpoints = make(real, B * T / CHECKPOINT, H, K, V);
  x.grad_o = random_tensor(s->dtype, B, T, H, V);
  x.grad_final_state = random_tensor(real, B, H, K, V);
  x.grad_r = make(s->dtype, B, T, H, K);
  x.grad_k = make(s->dtype, B, T, H, K);
  x.grad_v = make(s->dtype, B, T, H, V);
  x.grad_w = make(s->dtype, B, T, H, K);
  x.grad_u = make(s->dtype, H, 1, 1, K);
  x.grad_u.view.stride[1] = 1;
  x.grad_u_parts = make(real, B, H, 1, K);
  x.initial_state = random_tensor(real, B, H, K, V);
  x.grad_initial_state = make(real, B, H, K, V);
  x.p = (wkv6_problem){.B = B, .T = T, .H = H, .K = K, .V = V, .N = B, .segment = CHECKPOINT, .scale = 0.5, .flags = s->flags};
  x.p.r = x.r.view, x.p.k = x.k.view, x.p.v = x.v.view, x.p.w = x.w.view, x.p.u = x.u.view;
  if (s->state) x.p.initial_state = x.initial_state.view, x.p.grad_initial_state = x.grad_initial_state.view;
  x.p.o = x.o.view, x.p.final_state = x.final_state.view, x.p.checkpoints = x.checkpoints.view;
  x.p.grad_o = x.grad_o.view, x.p.grad_final_state = x.grad_final_state.view;
  x.p.grad_r = x.grad_r.view, x.p.grad_k = x.grad_k.view, x.p.grad_v = x.grad_v.view, x.p.grad_w = x.grad_w.view;
  x.p.grad_u = x.grad_u.view, x.p.grad_u_parts = x.grad_u_parts.view;
  return x;
}

/* Equations (1) to (8) of docs/wkv6.md, one head of one sequence. `states` holds S before each token. */
static void plain_head(problem *x, int64_t b, int64_t h, double *states, double *S, double *G) {
  const wkv6_problem *p = &x->p;
  const int64_t T = p->T, K = p->K, V = p->V, at_state = (b * p->H + h) * K * V;
  const int raw = p->flags & WKV6_RAW_DECAY, has_state = p->initial_state.dtype != WKV6_ABSENT;
  const double scale = p->scale, *u = x->u.exact + h * K;
  for (int64_t m = 0; m < K * V; m++) S[m] = has_state ? x->initial_state.exact[at_state + m] : 0;
  for (int64_t n = 0; n < T; n++) {
    const int64_t t = p->flags & WKV6_REVERSE ? T - 1 - n : n, row = (b * T + t) * p->H + h;
    const double *r = x->r.exact + row * K, *k = x->k.exact + row * K, *w = x->w.exact + row * K, *v = x->v.exact + row * V;
    double *o = x->o.exact + row * V;
    memcpy(states + n * K * V, S, (size_t)(K * V) * sizeof *S);
    for (int64_t j = 0; j < V; j++) o[j] = 0;
    for (int64_t i = 0; i < K; i++)
      for (int64_t j = 0; j < V; j++) {
        const double kv = k[i] * v[j], s = S[i * V + j];
        o[j] += scale * r[i] * (s + u[i] * kv);
        S[i * V + j] = exp(raw ? -exp(w[i]) : w[i]) * s + kv;
      }
  }
  memcpy(x->final_state.exact + at_state, S, (size_t)(K * V) * sizeof *S);
  memcpy(G, x->grad_final_state.exact + at_state, (size_t)(K * V) * sizeof *G);
  for (int64_t n = T; n-- > 0;) {
    const int64_t t = p->flags & WKV6_REVERSE ? T - 1 - n : n, row = (b * T + t) * p->H + h;
    const double *r = x->r.exact + row * K, *k = x->k.exact + row * K, *w = x->w.exact + row * K, *v = x->v.exact + row * V;
    const double *grad_o = x->grad_o.exact + row * V;
    double *grad_v = x->grad_v.exact + row * V, a = 0;
    for (int64_t j = 0; j < V; j++) a += v[j] * grad_o[j], grad_v[j] = 0;
    for (int64_t i = 0; i < K; i++) {
      const double log_w = raw ? -exp(w[i]) : w[i], d = exp(log_w);
      double grad_r = a * u[i] * k[i], grad_k = scale * a * u[i] * r[i], grad_w = 0;
      for (int64_t j = 0; j < V; j++) {
        const double s = states[(n * K + i) * V + j], g = G[i * V + j];
        grad_r += s * grad_o[j];
        grad_k += g * v[j];
        grad_v[j] += g * k[i] + scale * r[i] * u[i] * k[i] * grad_o[j];
        grad_w += d * g * s;
        G[i * V + j] = d * g + scale * r[i] * grad_o[j];
      }
      x->grad_r.exact[row * K + i] = scale * grad_r;
      x->grad_k.exact[row * K + i] = grad_k;
      x->grad_w.exact[row * K + i] = raw ? (isinf(log_w) ? 0 : grad_w * log_w) : grad_w;
      x->grad_u.exact[h * K + i] += scale * a * r[i] * k[i];
    }
  }
  memcpy(x->grad_initial_state.exact + at_state, G, (size_t)(K * V) * sizeof *G);
}

static void plain(problem *x) {
  const wkv6_problem *p = &x->p;
  const size_t state = (size_t)(p->K * p->V) * sizeof(double);
  double *states = malloc((size_t)p->T * state), *S = malloc(state), *G = malloc(state);
  if (!states || !S || !G) abort();
  for (int64_t i = 0; i < x->grad_u.count; i++) x->grad_u.exact[i] = 0;
  for (int64_t b = 0; b < p->B; b++)
    for (int64_t h = 0; h < p->H; h++) plain_head(x, b, h, states, S, G);
  free(states), free(S), free(G);
}

/* ---- Checks ---- */

static int check(const shape *s, const char *isa, uint32_t algorithm) {
  random_state = 1 + (uint64_t)(s->T * 31 + s->K * 7 + s->V);
  problem x = make_problem(s);
  x.p.flags |= algorithm;
  plain(&x);
  int wrong = wkv6_cpu_forward(&x.p) != WKV6_OK || wkv6_cpu_backward(&x.p) != WKV6_OK;
  const double epsilon = s->dtype == WKV6_F64 ? 1e-12 : s->dtype == WKV6_F32 ? 1e-6 : 0x1p-8;
  const int fading = !strcmp(s->decay, "fading"), deep = s->T >= 4096;
  const struct {
    const char *name;
    const tensor *tensor;
    double allowed;
  } results[] = {
      {"o", &x.o, epsilon * (deep ? 2 : 1)},
      {"final_state", &x.final_state, s->dtype == WKV6_F64 ? 1e-12 : fading ? 1e-5 : deep ? 2e-6 : 1e-6},
      {"grad_r", &x.grad_r, epsilon * (deep ? 4 : 2)},
      {"grad_k", &x.grad_k, epsilon * (deep ? 4 : 2)},
      {"grad_v", &x.grad_v, epsilon * (deep ? 4 : 2)},
      {"grad_w", &x.grad_w, epsilon * (fading ? 10 : deep ? 4 : 2)},
      {"grad_u", &x.grad_u, epsilon * (deep ? 4 : 2)},
      {"grad_initial_state", &x.grad_initial_state, s->dtype == WKV6_F64 ? 1e-12 : fading ? 1e-5 : deep ? 4e-6 : 2e-6},
  };
  for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
    if (results[i].tensor == &x.grad_initial_state && !s->state) continue;
    const double error = error_of(results[i].tensor);
    const int bad = !(error <= results[i].allowed);
    wrong |= bad;
    if (bad || getenv("VERBOSE"))
      printf("%s %s B%d T%d H%d K%d V%d dtype %d %s%s%s: %s off by %.2g, at most %.2g\n", isa,
             algorithm == WKV6_CHUNK ? "chunk" : "recurrent", (int)s->B, (int)s->T, (int)s->H, (int)s->K, (int)s->V, s->dtype, s->decay,
             s->flags & WKV6_RAW_DECAY ? " raw" : "", s->flags & WKV6_REVERSE ? " reverse" : "", results[i].name, error,
             results[i].allowed);
  }
  release();
  return wrong;
}

static const shape shapes[] = {
    {1, 1, 1, 1, 1, WKV6_F32, 1, "normal", 0},
    {1, 7, 2, 3, 5, WKV6_F32, 1, "normal", WKV6_RAW_DECAY},
    {2, 8, 2, 64, 64, WKV6_F32, 0, "normal", 0},
    {2, 33, 2, 64, 64, WKV6_F32, 1, "mixed", WKV6_REVERSE},
    {1, 130, 2, 64, 64, WKV6_F32, 1, "mixed", WKV6_RAW_DECAY},
    {1, 130, 2, 64, 64, WKV6_F32, 1, "strong", 0},
    {1, 130, 2, 64, 64, WKV6_F32, 1, "spikes", 0},
    {1, 500, 1, 64, 64, WKV6_F32, 1, "normal", WKV6_RAW_DECAY | WKV6_REVERSE},
    {1, 64, 1, 64, 64, WKV6_F32, 1, "fading", 0},
    {1, 8192, 1, 32, 16, WKV6_F32, 1, "weak", 0},
    {1, 65, 2, 60, 100, WKV6_F32, 1, "normal", 0},
    {1, 65, 2, 100, 60, WKV6_F32, 1, "mixed", 0},
    {1, 40, 1, 128, 16, WKV6_F32, 1, "normal", 0},
    {1, 40, 1, 16, 144, WKV6_F32, 1, "normal", 0},
    {1, 40, 3, 8, 8, WKV6_F32, 1, "normal", WKV6_REVERSE},
    {2, 65, 2, 64, 64, WKV6_BF16, 1, "normal", 0},
    {2, 65, 2, 60, 36, WKV6_BF16, 1, "normal", WKV6_RAW_DECAY},
    {2, 65, 2, 64, 64, WKV6_F64, 1, "mixed", 0},
    {1, 65, 2, 3, 5, WKV6_F64, 1, "normal", WKV6_RAW_DECAY | WKV6_REVERSE},
};

static int check_all(void) {
  int wrong = 0;
  for (const wkv6_isa *isa = wkv6_isas; isa->name; isa++) {
    if (!isa->runs_here()) {
      printf("%s: skipped, this machine lacks it\n", isa->name);
      continue;
    }
    wkv6_use_isa(isa->name);
    for (uint32_t algorithm = WKV6_RECURRENT; algorithm <= WKV6_CHUNK; algorithm *= 2) {
      int failures = 0;
      for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) failures += check(&shapes[i], isa->name, algorithm);
      printf("%s %s: %d of %d wrong\n", isa->name, algorithm == WKV6_CHUNK ? "chunk" : "recurrent", failures,
             (int)(sizeof shapes / sizeof *shapes));
      wrong |= failures;
    }
  }
  return wrong;
}

#include "bench.inc.h"

int main(int argc, char **argv) {
  wkv6_parallel_init(); /* no torch here: one thread */
  const int wrong = check_all();
  if (argc > 1 && !strcmp(argv[1], "--bench")) bench_all();
  return wrong != 0;
}
