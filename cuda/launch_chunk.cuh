/* SPDX-License-Identifier: Apache-2.0
 *
 * Which problems the chunk kernels take, with what operands, and how they are launched.
 */
#ifndef WKV6_LAUNCH_CHUNK_CUH
#define WKV6_LAUNCH_CHUNK_CUH

#include "chunk_common.cuh"
#include "runtime.cuh"

namespace chunks {

inline bool has_instance(int64_t size) { return size == 32 || size == 64 || size == 128; }

/* Everything else is for the recurrent kernels. */
inline bool take(const wkv6_problem &p) {
  const bool open = !(p.flags & (WKV6_RECURRENT | WKV6_CHUNK));
  const bool segments = p.checkpoints.dtype == WKV6_ABSENT || p.segment % chunk_tokens == 0;
  return !(p.flags & WKV6_RECURRENT) && !wkv6_is_double(&p) && has_instance(p.K) && has_instance(p.V) && segments &&
         (!open || p.T >= WKV6_CUDA_CHUNK_FROM_TOKENS);
}

/* Of the backward pass, wide values too: their states leave too few registers. */
inline bool take_backward(const wkv6_problem &p) { return take(p) && p.V != 128; }

/* What precision a problem asks for. Inputs of 16 bits are exact in tf32, so only their products are rounded. */
inline operand operands_of(const wkv6_problem &p) {
  const bool wide = p.r.dtype == WKV6_F32 || p.k.dtype == WKV6_F32 || p.v.dtype == WKV6_F32;
  if (p.flags & WKV6_FAST) return operand::bf16;
  return wide || p.flags & WKV6_EXACT ? operand::split : operand::tf32;
}

/* Tokens of a block where `blocks` would each go through a whole sequence: p.T, or a multiple of p.segment. */
int64_t span_of(const wkv6_problem &p, int64_t blocks, const runtime::place &where);

bool launch_forward(const wkv6_problem &p, const runtime::place &where);

/* Whether the kernels of the backward pass make dv and dS_0 as well: a block has all channels of a head, and a warp
 * registers for its columns of dv. */
inline bool backward_has_values(const wkv6_problem &p) { return p.K <= 64 && p.V <= p.K; }

/* dr, dk, dw, the parts of du, and dv and dS_0 where backward_has_values(). */
bool launch_backward(const wkv6_problem &p, const runtime::place &where);

} // namespace chunks

#endif
