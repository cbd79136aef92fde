/* SPDX-License-Identifier: Apache-2.0
 *
 * Which problems the chunk kernels take, and with what operands.
 */
#ifndef WKV6_LAUNCH_CHUNK_CUH
#define WKV6_LAUNCH_CHUNK_CUH

#include "chunk_common.cuh"
#include "runtime.cuh"

namespace chunks {

inline bool has_instance(int64_t size) { return size == 32 || size == 64 || size == 128; }

/* Where the caller leaves it open, short sequences go to the recurrent kernels: two chunks take about as long as the
 * tokens of one by themselves. */
constexpr int64_t fewest_tokens = 32;

/* Everything else is for the recurrent kernels. */
inline bool take(const wkv6_problem &p) {
  const bool open = !(p.flags & (WKV6_RECURRENT | WKV6_CHUNK));
  const bool segments = p.checkpoints.dtype == WKV6_ABSENT || p.segment % chunk_tokens == 0;
  return !(p.flags & WKV6_RECURRENT) && !wkv6_is_double(&p) && has_instance(p.K) && has_instance(p.V) && segments &&
         (!open || p.T >= fewest_tokens);
}

/* What precision a problem asks for. Inputs of 16 bits are exact in tf32, so only their products are rounded. */
inline operand operands_of(const wkv6_problem &p) {
  const bool wide = p.r.dtype == WKV6_F32 || p.k.dtype == WKV6_F32 || p.v.dtype == WKV6_F32;
  if (p.flags & WKV6_FAST) return operand::bf16;
  return wide || p.flags & WKV6_EXACT ? operand::split : operand::tf32;
}

bool launch_forward(const wkv6_problem &p, const runtime::place &where);

} // namespace chunks

#endif
