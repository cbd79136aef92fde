/* SPDX-License-Identifier: Apache-2.0
 *
 * One WKV-6 problem: the only thing that passes between the Python entry points (module.c) and the kernels (cpu/,
 * ../cuda/). Plain pointers, int64 sizes, strides in elements. Nothing here owns memory. Equations: docs/wkv6.md.
 */
#ifndef WKV6_PROBLEM_H
#define WKV6_PROBLEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Element types. WKV6_ABSENT marks an optional tensor that was not given. */
enum { WKV6_ABSENT = 0, WKV6_F32, WKV6_BF16, WKV6_F16, WKV6_F64 };

/* What a problem asks for, besides which tensors are present. */
enum {
  WKV6_REVERSE = 1,   /* each sequence is read from its last token to its first */
  WKV6_RAW_DECAY = 2, /* w holds RWKV's raw x: the log decay is -exp(x), and dw is the gradient of x */
  WKV6_RECURRENT = 4, /* token by token */
  WKV6_CHUNK = 8,     /* as matrix products over chunks of tokens; neither of the two: whichever is faster */
  WKV6_FAST = 16,     /* CUDA's chunk kernels: operands of 8 significant bits, */
  WKV6_EXACT = 32,    /* of 16 bits; neither: 16 where an input is float32, else 11. CPUs are always exact */
  WKV6_WHOLE = 64,    /* CUDA's chunk kernels: one block a sequence and head and slice of columns, */
  WKV6_SPANS = 128,   /* one for each segment of it; neither: what launch_chunk.cuh expects to be faster */
};

/* Where the caller leaves the algorithm open, sequences shorter than this go to CUDA's recurrent kernels: two of its
 * chunks take about as long as the tokens of one by themselves. */
#define WKV6_CUDA_CHUNK_FROM_TOKENS 32

typedef enum wkv6_status {
  WKV6_OK = 0,
  WKV6_E_DTYPE,      /* a dtype that the problem does not allow where it stands */
  WKV6_E_CU_SEQLENS, /* does not start at 0, decreases, or does not end at T */
  WKV6_E_MEMORY,     /* no memory for scratch */
  WKV6_E_DEVICE,     /* the device's runtime reported an error */
  WKV6_E_SIZE,       /* sizes whose products leave 64 bits */
  WKV6_E_ALIGNMENT,  /* an address that is no multiple of its element's size */
  WKV6_E_OVERLAP,    /* an argument of a step in the memory of the state */
} wkv6_status;

/* A strided view. The dimensions are those of the shape noted beside each member of wkv6_problem. */
typedef struct wkv6_tensor {
  void *data;
  int64_t stride[4]; /* in elements; 0 and negative ones are legal on inputs */
  int32_t dtype;
} wkv6_tensor;

typedef struct wkv6_problem {
  int64_t B, T, H, K, V;
  int64_t N;                 /* sequences: B, or the number that cu_seqlens cuts the one batch row into */
  const int64_t *cu_seqlens; /* [N + 1], or NULL: every batch row is a sequence */
  int64_t segment;           /* tokens from one checkpoint to the next */
  double scale;
  uint32_t flags;

  wkv6_tensor r, k, w;       /* [B, T, H, K] */
  wkv6_tensor v;             /* [B, T, H, V] */
  wkv6_tensor u;             /* [H, K] */
  wkv6_tensor initial_state; /* [N, H, K, V]; absent: zeros */

  /* Written by the forward pass. */
  wkv6_tensor o;           /* [B, T, H, V] */
  wkv6_tensor final_state; /* [N, H, K, V], or absent */

  /* Written by the state pass, with final_state: the sum of each sequence's log decays, [N, H, K]. */
  wkv6_tensor w_sum;

  /* States between segments, [B * T / segment, H, K, V] contiguous, in the type the kernels compute in; or absent. The
   * state before token c * segment (c >= 1) of the sequence whose tokens start at `first` is at wkv6_checkpoint().
   * Written by the forward pass, read by the backward pass, which never needs one before c = 1: that is the initial
   * state. */
  wkv6_tensor checkpoints;

  /* Scratch, each in the type the kernels compute in and contiguous, or absent: CUDA's chunk kernels need it to cut
   * sequences into spans (the forward pass the checkpoints as well). Placed as the checkpoints are. */
  wkv6_tensor span_decays;   /* [B * T / segment, H, K] */
  wkv6_tensor span_adjoints; /* [B * T / segment, H, K, V]; backward pass */

  /* Read by the backward pass: the gradients of o and final_state, absent where they are zero. */
  wkv6_tensor grad_o, grad_final_state;

  /* Written by the backward pass, each absent where it is not wanted; shaped like what they are the gradient of. */
  wkv6_tensor grad_r, grad_k, grad_v, grad_w, grad_u, grad_initial_state;
  wkv6_tensor grad_u_parts; /* scratch, contiguous [N, H, K] in the type the kernels compute in; present with grad_u */

  void *scratch; /* of the device's kernels, as much as they ask for (wkv6_cuda_scratch_bytes) */
} wkv6_problem;

/* First token of sequence n among the B * T tokens. */
static inline int64_t wkv6_first_token(const wkv6_problem *p, int64_t n) {
  return p->cu_seqlens ? p->cu_seqlens[n] : n * p->T;
}

static inline int64_t wkv6_sequence_length(const wkv6_problem *p, int64_t n) {
  return p->cu_seqlens ? p->cu_seqlens[n + 1] - p->cu_seqlens[n] : p->T;
}

/* Index along the first dimension of `checkpoints`. Sequences do not overlap: a sequence of L tokens from `first` on
 * needs ceil(L / segment) - 1 checkpoints, and floor((first + L) / segment) >= floor(first / segment) + ceil(L /
 * segment) - 1. */
static inline int64_t wkv6_checkpoint(const wkv6_problem *p, int64_t first, int64_t c) {
  return first / p->segment + c - 1;
}

/* True where the kernels compute in double: all tensors are float64. */
static inline int wkv6_is_double(const wkv6_problem *p) { return p->k.dtype == WKV6_F64; }

/* What the kernels rely on beyond shapes: sizes, dtypes, alignment, and cu_seqlens where the host can read it
 * (`host_cu_seqlens`). `culprit` receives the name of the argument at fault. */
wkv6_status wkv6_check(const wkv6_problem *p, int host_cu_seqlens, const char **culprit);

/* What a step relies on besides: no other argument lies in the state, which is overwritten while they are read. Of two
 * tensors with gaps between their elements this is not seen: they may share nothing. */
wkv6_status wkv6_check_step(const wkv6_problem *p, const char **culprit);

#ifdef __cplusplus
}
#endif
#endif
