/* SPDX-License-Identifier: Apache-2.0
 *
 * All CPU kernels of one instance (ISA x type), in one translation unit: kernels_<isa>_<type>.c defines the template
 * parameters of simd.inc.h and WKV6_KERNELS, the name of the table at the end, selects the ISA by pragma, and includes
 * this.
 */
#if !defined(WKV6_KERNELS)
#error "define WKV6_KERNELS"
#endif
#include "simd.inc.h"

#include "rows.inc.h"

#include "wkv6_decay.inc.h"

#include "wkv6_pass.inc.h"

#include "wkv6_forward.inc.h"

#include "wkv6_backward.inc.h"

#include "wkv6_step.inc.h"

#include "wkv6_chunk.inc.h"

#include "wkv6_chunk_forward.inc.h"

#include "wkv6_chunk_backward.inc.h"

#include "wkv6_state.inc.h"

const wkv6_kernels WKV6_KERNELS = {
    .lanes = LANES,
    .forward_scratch = forward_scratch,
    .forward = forward,
    .chunk_forward_scratch = chunk_forward_scratch,
    .chunk_forward = chunk_forward,
    .backward_scratch = backward_scratch,
    .backward = backward,
    .chunk_backward_scratch = chunk_backward_scratch,
    .chunk_backward = chunk_backward,
    .reduce_grad_u = reduce_grad_u,
    .step_scratch = step_scratch,
    .step = step,
    .state_scratch = state_scratch,
    .state = state,
};
