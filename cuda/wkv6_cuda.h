/* SPDX-License-Identifier: Apache-2.0
 *
 * C API of librwkv6_cuda.so, and of its emulated twin for tests. csrc/cuda_library.c opens it on first use.
 *
 * All tensors of a problem lie on `device`; the kernels are put on `stream` (a cudaStream_t) and the functions return
 * without waiting for them. Nothing is allocated, and the current device is the caller's again on return. Problems are
 * checked (wkv6_check) before they come here. cu_seqlens is read on the device, so it cannot be checked: the kernels
 * clamp it to [0, T]. T, B, H and, for one token or the state alone, K and V may be anything; otherwise K and V may be
 * up to some hundreds (launch.cu), beyond which the status is WKV6_E_SIZE and nothing is launched.
 */
#ifndef WKV6_CUDA_H
#define WKV6_CUDA_H

#include "../csrc/wkv6_problem.h"

#ifdef __cplusplus
extern "C" {
#endif

#define WKV6_CUDA_API __attribute__((visibility("default")))

/* Equations (1) and (2): o, final_state and checkpoints. */
WKV6_CUDA_API wkv6_status wkv6_cuda_forward(const wkv6_problem *p, int device, void *stream);

/* Equations (3) to (8): the gradients that are present, from the checkpoints of a forward pass with the same segment.
 */
WKV6_CUDA_API wkv6_status wkv6_cuda_backward(const wkv6_problem *p, int device, void *stream);

/* One token (T = 1) on final_state in place. */
WKV6_CUDA_API wkv6_status wkv6_cuda_step(const wkv6_problem *p, int device, void *stream);

/* final_state and w_sum, any K and V; `scale` is a factor on k. */
WKV6_CUDA_API wkv6_status wkv6_cuda_state(const wkv6_problem *p, int device, void *stream);

/* What went wrong in this thread's last call that returned WKV6_E_DEVICE or WKV6_E_SIZE. */
WKV6_CUDA_API const char *wkv6_cuda_error(void);

/* sizeof(wkv6_problem) as the library was built: a stale library is noticed before it reads a struct that has changed.
 */
WKV6_CUDA_API size_t wkv6_cuda_problem_bytes(void);

#ifdef __cplusplus
}
#endif
#endif
