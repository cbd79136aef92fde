/* SPDX-License-Identifier: Apache-2.0
 *
 * What is true of every problem that reaches a kernel, on any device.
 */
#include "wkv6_problem.h"

static int is_one_of_three(int32_t dtype) { return dtype == WKV6_F32 || dtype == WKV6_BF16 || dtype == WKV6_F16; }

static wkv6_status check_cu_seqlens(const wkv6_problem *p) {
  if (p->B != 1 || p->cu_seqlens[0] != 0 || p->cu_seqlens[p->N] != p->T) return WKV6_E_CU_SEQLENS;
  for (int64_t n = 0; n < p->N; n++)
    if (p->cu_seqlens[n + 1] < p->cu_seqlens[n]) return WKV6_E_CU_SEQLENS;
  return WKV6_OK;
}

wkv6_status wkv6_check(const wkv6_problem *p, int host_cu_seqlens, const char **culprit) {
  const int is_double = wkv6_is_double(p);
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
    *culprit = free_dtypes[i].name;
    if (dtype != WKV6_ABSENT && (is_double ? dtype != WKV6_F64 : !is_one_of_three(dtype))) return WKV6_E_DTYPE;
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
  return p->cu_seqlens && host_cu_seqlens ? check_cu_seqlens(p) : WKV6_OK;
}
