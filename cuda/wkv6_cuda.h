/* SPDX-License-Identifier: Apache-2.0
 *
 * C API of librwkv6_cuda.so, and of its emulated twin for tests. csrc/cuda_library.c opens it on first use.
 *
 * All tensors of a problem lie on `device`; the kernels are put on `stream` (a cudaStream_t) and the functions return
 * without waiting for them. Nothing is allocated, and the current device is the caller's again on return. Problems are
 * checked (wkv6_check) before they come here. cu_seqlens is read on the device, so it cannot be checked: the kernels
 * clamp it to [0, T].
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

/* final_state and w_sum; `scale` is a factor on k. */
WKV6_CUDA_API wkv6_status wkv6_cuda_state(const wkv6_problem *p, int device, void *stream);

/* Bytes that p->scratch has to have for the first two: 0 but for heads of some hundreds of channels or more. Without it
 * their status is WKV6_E_MEMORY. */
WKV6_CUDA_API size_t wkv6_cuda_scratch_bytes(const wkv6_problem *p);

/* What went wrong in this thread's last call that returned WKV6_E_DEVICE. */
WKV6_CUDA_API const char *wkv6_cuda_error(void);

/* The devices that the library has code for: compute capabilities times 100, in ascending order, "800,900". */
WKV6_CUDA_API const char *wkv6_cuda_archs(void);

/* 1000 * major + 10 * minor of the CUDA runtime inside, and of the newest that the driver serves: 0 without a driver.
 */
WKV6_CUDA_API wkv6_status wkv6_cuda_versions(int *runtime_version, int *driver_version);

/* sizeof(wkv6_problem) as the library was built: a stale library is noticed before it reads a struct that has changed.
 */
WKV6_CUDA_API size_t wkv6_cuda_problem_bytes(void);

#ifdef __cplusplus
}
#endif
#endif
