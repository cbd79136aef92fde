/* SPDX-License-Identifier: Apache-2.0
 *
 * What is true of every problem that reaches a kernel, on any device.
 */
#include "wkv6_problem.h"

static int is_one_of_three(int32_t dtype) { return dtype == WKV6_F32 || dtype == WKV6_BF16 || dtype == WKV6_F16; }

static size_t size_of(int32_t dtype) { return dtype == WKV6_F64 ? 8 : dtype == WKV6_F32 ? 4 : 2; }

/* Expanded tensors can have any size. The kernels count bytes of scratch, at most some thousand for each element of a
 * state and token of a segment, and steps in 64 bits: in double these products cannot overflow. */
static int counts_fit(const wkv6_problem *p) {
  const double tokens = (double)(p->T < p->segment ? p->T : p->segment), most = 0x1p62;
  return (tokens + 64) * ((double)p->K + 64) * ((double)p->V + 64) * 4096 < most &&
         ((double)p->B * (double)p->T + (double)p->N) * (double)p->H * (double)p->K * (double)p->V < most;
}

static wkv6_status check_cu_seqlens(const wkv6_problem *p) {
  if (p->B != 1 || p->cu_seqlens[0] != 0 || p->cu_seqlens[p->N] != p->T) return WKV6_E_CU_SEQLENS;
  for (int64_t n = 0; n < p->N; n++)
    if (p->cu_seqlens[n + 1] < p->cu_seqlens[n]) return WKV6_E_CU_SEQLENS;
  return WKV6_OK;
}

wkv6_status wkv6_check(const wkv6_problem *p, int host_cu_seqlens, const char **culprit) {
  const int is_double = wkv6_is_double(p);
  *culprit = "r";
  if (!counts_fit(p)) return WKV6_E_SIZE;
  /* Those of the caller's choice: float64 for all of them, or for none. */
  const struct {
    const char *name;
    const wkv6_tensor *tensor;
  } free_dtypes[] = {
      {"r", &p->r},
      {"k", &p->k},
      {"v", &p->v},
      {"w", &p->w},
      {"u", &p->u},
      {"o", &p->o},
      {"grad_o", &p->grad_o},
      {"initial_state", &p->initial_state},
      {"final_state", &p->final_state},
      {"grad_final_state", &p->grad_final_state},
      {"grad_r", &p->grad_r},
      {"grad_k", &p->grad_k},
      {"grad_v", &p->grad_v},
      {"grad_w", &p->grad_w},
      {"grad_u", &p->grad_u},
      {"grad_initial_state", &p->grad_initial_state},
  };
  for (size_t i = 0; i < sizeof free_dtypes / sizeof *free_dtypes; i++) {
    const int32_t dtype = free_dtypes[i].tensor->dtype;
    if (dtype == WKV6_ABSENT) continue;
    *culprit = free_dtypes[i].name;
    if (is_double ? dtype != WKV6_F64 : !is_one_of_three(dtype)) return WKV6_E_DTYPE;
    if ((uintptr_t)free_dtypes[i].tensor->data % size_of(dtype)) return WKV6_E_ALIGNMENT;
  }
  const int32_t real = is_double ? WKV6_F64 : WKV6_F32;
  *culprit = "checkpoints";
  if (p->checkpoints.dtype != WKV6_ABSENT && p->checkpoints.dtype != real) return WKV6_E_DTYPE;
  *culprit = "span_decays";
  if (p->span_decays.dtype != WKV6_ABSENT && p->span_decays.dtype != real) return WKV6_E_DTYPE;
  *culprit = "span_adjoints";
  if (p->span_adjoints.dtype != WKV6_ABSENT && p->span_adjoints.dtype != real) return WKV6_E_DTYPE;
  *culprit = "grad_u_parts";
  if (p->grad_u_parts.dtype != (p->grad_u.dtype == WKV6_ABSENT ? WKV6_ABSENT : real)) return WKV6_E_DTYPE;
  *culprit = "w_sum";
  if (p->w_sum.dtype != WKV6_ABSENT && p->w_sum.dtype != real) return WKV6_E_DTYPE;
  *culprit = "cu_seqlens";
  if ((uintptr_t)p->cu_seqlens % sizeof *p->cu_seqlens) return WKV6_E_ALIGNMENT;
  return p->cu_seqlens && host_cu_seqlens ? check_cu_seqlens(p) : WKV6_OK;
}

/* Where a tensor lies; of one with gaps between its elements the first element alone. */
typedef struct {
  uintptr_t from;
  size_t bytes;
} extent;

static extent extent_of(const wkv6_tensor *x, int64_t a, int64_t b, int64_t c, int64_t d) {
  const int64_t last =
      (a - 1) * x->stride[0] + (b - 1) * x->stride[1] + (c - 1) * x->stride[2] + (d - 1) * x->stride[3];
  const int64_t elements = a * b * c * d, known = last + 1 == elements ? elements : elements > 0;
  return (extent){(uintptr_t)x->data, (size_t)known * size_of(x->dtype)};
}

wkv6_status wkv6_check_step(const wkv6_problem *p, const char **culprit) {
  const extent state = extent_of(&p->final_state, p->B, p->H, p->K, p->V);
  const struct {
    const char *name;
    extent memory;
  } others[] = {
      {"r", extent_of(&p->r, p->B, 1, p->H, p->K)},
      {"k", extent_of(&p->k, p->B, 1, p->H, p->K)},
      {"v", extent_of(&p->v, p->B, 1, p->H, p->V)},
      {"w", extent_of(&p->w, p->B, 1, p->H, p->K)},
      {"u", extent_of(&p->u, p->H, p->K, 1, 1)},
      {"out", extent_of(&p->o, p->B, 1, p->H, p->V)},
  };
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    const extent x = others[i].memory;
    *culprit = others[i].name;
    if (x.from < state.from + state.bytes && state.from < x.from + x.bytes) return WKV6_E_OVERLAP;
  }
  return WKV6_OK;
}
