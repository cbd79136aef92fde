/* SPDX-License-Identifier: Apache-2.0
 *
 * libFuzzer target: wkv6_check() on structs of any bytes, and the kernels on whatever it accepts. Every tensor and all
 * scratch is a malloc of its own, exactly as large as sizes and strides say, so AddressSanitizer sees the first byte
 * beyond. Results are not looked at: the property tests do that.
 *
 * It brings its own dispatch and pool: one instruction set, FUZZ_ISA, cut as if for three threads.
 */
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/wkv6_cpu.h"

#include <stdlib.h>
#include <string.h>

#define PASTE(a, b, c) a##b##c
#define KERNELS(isa, type) PASTE(wkv6_, isa, type)

static const wkv6_isa isa = {"", NULL, &KERNELS(FUZZ_ISA, _f32), &KERNELS(FUZZ_ISA, _f64)};
const wkv6_isa *wkv6_current_isa(void) { return &isa; }

int64_t wkv6_parallel_threads(void) { return 3; }
void wkv6_parallel_for(int64_t count, void (*range)(int64_t, int64_t, void *), void *context) {
  for (int64_t i = 0; i < 3; i++)
    if (count * i / 3 < count * (i + 1) / 3) range(count * i / 3, count * (i + 1) / 3, context);
}

static void *scratch;
void *wkv6_scratch(size_t bytes) {
  return scratch = bytes > (size_t)1 << 28 ? NULL : aligned_alloc(64, (bytes + 63) / 64 * 64);
}
void wkv6_scratch_done(void) {
  free(scratch);
  scratch = NULL;
}

/* ---- What the fuzzer's bytes mean ---- */

typedef struct {
  const uint8_t *at;
  size_t left;
} bytes;

static uint8_t next(bytes *b) {
  if (!b->left) return 0;
  b->left--;
  return *b->at++;
}

static void *blocks[32];
static int block_count;

/* `size` bytes in a malloc of their own, filled from the input's last byte on: NaN, infinities and subnormals too. */
static char *filled(bytes *b, size_t size) {
  char *const memory = blocks[block_count++] = malloc(size ? size : 1);
  memset(memory, next(b), size);
  for (size_t i = 0; i < size && b->left > 200; i += 1 + next(b)) memory[i] = (char)next(b);
  return memory;
}

/* A tensor of that shape: absent, or with any strides, negative and zero ones included, and mostly a fitting dtype. */
static wkv6_tensor tensor(bytes *b, int32_t usual, int optional, const int64_t shape[4]) {
  const uint8_t how = next(b);
  if (optional && how % 4 == 0) return (wkv6_tensor){0};
  wkv6_tensor x = {.dtype = how % 32 == 1 ? next(b) % 6 : usual == WKV6_F64 ? WKV6_F64 : 1 + next(b) % 3};
  const int64_t size = x.dtype == WKV6_F64 ? 8 : x.dtype == WKV6_F32 ? 4 : 2;
  int64_t low = 0, high = 0, stride = 1;
  for (int d = 3; d >= 0; d--) {
    const uint8_t kind = how & 64 ? next(b) : 9;
    x.stride[d] = kind < 2 ? 0 : kind < 5 ? -stride : kind < 9 ? next(b) : stride;
    stride *= shape[d] > 0 ? shape[d] : 1;
    if (shape[d] < 1) continue;
    *(x.stride[d] < 0 ? &low : &high) += (shape[d] - 1) * x.stride[d];
  }
  const int64_t elements = shape[0] * shape[1] * shape[2] * shape[3];
  x.data = filled(b, elements ? (size_t)((high - low + 1) * size) : 0) - (elements ? low * size : 0);
  return x;
}

/* Contiguous, as checkpoints and the parts of du are. */
static wkv6_tensor plain(bytes *b, int32_t dtype, int64_t a, int64_t h, int64_t k, int64_t v) {
  const int64_t elements = a * h * k * v;
  return (wkv6_tensor){filled(b, (size_t)elements * (dtype == WKV6_F64 ? 8 : 4)), {h * k * v, k * v, v, 1}, dtype};
}

static int64_t size_from(bytes *b) {
  const uint8_t x = next(b);
  return x < 200 ? x % 20 : x < 240 ? x - 170 : 128;
}

static void run(wkv6_problem *p, int pass) {
  const char *culprit = "";
  if (wkv6_check(p, 1, &culprit) != WKV6_OK || (p->B * p->T + p->N) * p->H * p->K * p->V > 1 << 19) return;
  if (pass == 0) wkv6_cpu_forward(p);
  if (pass == 1) wkv6_cpu_backward(p);
  if (pass == 2 && p->T == 1 && p->N == p->B && p->final_state.dtype == (wkv6_is_double(p) ? WKV6_F64 : WKV6_F32) &&
      p->o.dtype == p->v.dtype && wkv6_check_step(p, &culprit) == WKV6_OK)
    wkv6_cpu_step(p);
}

static void any_problem(bytes *b) {
  const uint8_t kind = next(b);
  const int pass = kind % 3, varlen = kind & 4 && pass != 2;
  wkv6_problem p = {.B = varlen ? 1 : size_from(b) % 4, .H = size_from(b) % 5, .K = size_from(b), .V = size_from(b)};
  p.T = pass == 2 ? 1 : size_from(b);
  p.K += !p.K, p.V += !p.V; /* module.c sees to that */
  p.segment = 1 + next(b) % 80, p.flags = next(b), p.scale = next(b) / 16. - 2;
  p.N = varlen ? next(b) % 6 : p.B;
  if (varlen) {
    int64_t *offsets = blocks[block_count++] = malloc((size_t)(p.N + 1) * sizeof *offsets);
    for (int64_t n = 0; n <= p.N; n++) offsets[n] = n == p.N ? p.T : n ? offsets[n - 1] + next(b) % 8 : 0;
    if (kind & 8) offsets[next(b) % (p.N + 1)] = (int8_t)next(b);
    p.cu_seqlens = offsets;
  }
  const int64_t keys[4] = {p.B, p.T, p.H, p.K}, values[4] = {p.B, p.T, p.H, p.V}, states[4] = {p.N, p.H, p.K, p.V},
                bonus[4] = {p.H, p.K, 1, 1};
  const int32_t usual = kind & 16 ? WKV6_F64 : WKV6_F32;
  p.r = tensor(b, usual, 0, keys), p.k = tensor(b, usual, 0, keys), p.w = tensor(b, usual, 0, keys);
  p.v = tensor(b, usual, 0, values), p.u = tensor(b, usual, 0, bonus);
  if (pass != 2) p.initial_state = tensor(b, usual, 1, states);
  if (pass != 1) p.o = tensor(b, usual, 0, values), p.final_state = tensor(b, usual, pass == 0, states);
  if (pass == 1 || (pass == 0 && kind & 32)) p.checkpoints = plain(b, usual, p.B * p.T / p.segment, p.H, p.K, p.V);
  if (pass == 1) {
    p.grad_o = tensor(b, usual, 1, values), p.grad_final_state = tensor(b, usual, 1, states);
    p.grad_r = tensor(b, usual, 1, keys), p.grad_k = tensor(b, usual, 1, keys), p.grad_w = tensor(b, usual, 1, keys);
    p.grad_v = tensor(b, usual, 1, values), p.grad_u = tensor(b, usual, 1, bonus);
    p.grad_initial_state = tensor(b, usual, 1, states);
    if (p.grad_u.dtype != WKV6_ABSENT) p.grad_u_parts = plain(b, usual, 1, p.N, p.H, p.K);
  }
  run(&p, pass);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  bytes b = {data, size};
  if (next(&b) % 8) {
    any_problem(&b);
  } else { /* any bytes for a struct; its offsets are the only memory that a check reads */
    wkv6_problem p;
    int64_t offsets[4];
    const char *culprit = "";
    memset(&p, next(&b), sizeof p);
    memcpy(&p, b.at, b.left < sizeof p ? b.left : sizeof p);
    for (int i = 0; i < 4; i++) offsets[i] = (int8_t)next(&b);
    p.cu_seqlens = p.N >= 0 && p.N < 4 ? offsets : NULL;
    wkv6_check(&p, 1, &culprit);
  }
  while (block_count) free(blocks[--block_count]);
  return 0;
}
