/* SPDX-License-Identifier: Apache-2.0
 *
 * Chooses an instance of chunk_backward.cuh for a problem, lays out its shared memory and launches it.
 */
#include "launch_chunk.cuh"

#include "chunk_backward.cuh"
#include "chunk_backward_spans.cuh"

namespace chunks {
namespace {

bool present(const wkv6_tensor &x) { return x.dtype != WKV6_ABSENT; }

/* A tile of `width` channels of x: of float, or of `parts` bfloat16. Returns where the next may start. */
int tile_layout(chunk_rows &rows, const wkv6_tensor &x, int64_t all, int width, bool wide, int parts, int at) {
  rows.at = at;
  rows.wide = wide;
  rows.direct = x.dtype == (wide ? WKV6_F32 : WKV6_BF16) && copies_by_16(x, all, width);
  return at + chunk_tokens * width * (wide ? 4 : 2 * parts);
}

/* Whether pairs of floats, or four 16-bit numbers, of a row of the gradient `x` can be written at a time. */
bool writes_by_8(const wkv6_tensor &x) {
  const int bytes = element_bytes(x.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(x.data) % 8 == 0 && x.stride[3] == 1;
  for (int d = 0; d < 3; d++) aligned = aligned && x.stride[d] * bytes % 8 == 0;
  return aligned;
}
bool is_float_rows(const wkv6_tensor &x) { return x.dtype == WKV6_F32 && writes_by_8(x); }

/* Places of a stage's tiles, after `at` bytes; returns the bytes of two stages and what comes before. */
template <int KEYS, int COLUMNS, operand Q> int stages_layout(chunk_backward_arguments &a, int stages) {
  const wkv6_problem &p = a.p;
  const auto wide = [](const wkv6_tensor &x) { return x.dtype != WKV6_BF16; };
  int at = tile_layout(a.r, p.r, p.K, KEYS, wide(p.r), 1, 0);
  at = tile_layout(a.k, p.k, p.K, KEYS, wide(p.k), 1, at);
  at = tile_layout(a.w, p.w, p.K, KEYS, wide(p.w), 1, at);
  at = tile_layout(a.v, p.v, p.V, COLUMNS, false, parts_of<Q>, at);
  a.stage_bytes = tile_layout(a.grad_o, p.grad_o, p.V, COLUMNS, false, parts_of<Q>, at);
  a.stages = stages;
  a.slices = static_cast<int>(p.K / KEYS);
  return a.stages + 2 * a.stage_bytes;
}

/* G at the borders between the parts of a sequence. */
template <int KEYS, int COLUMNS> bool launch_borders(chunk_backward_arguments a, const runtime::place &where) {
  const int bytes = stages_layout<KEYS, COLUMNS, operand::split>(a, 0);
  const uint64_t heads = static_cast<uint64_t>(a.p.N) * a.p.H;
  return runtime::launch<&wkv6_adjoint_chunk<KEYS, COLUMNS, operand::split>, 2 * KEYS>(
             "wkv6_adjoint_chunk", heads * (a.parts - 1) * a.slices, 2 * KEYS, bytes, where.stream, a) &&
         runtime::launch<&wkv6_scan_adjoints, border_threads>("wkv6_scan_adjoints",
                                                              runtime::ceil_div(heads * a.p.K * a.p.V, border_threads),
                                                              border_threads,
                                                              0,
                                                              where.stream,
                                                              a);
}
bool launch_fold(const chunk_backward_arguments &a, const runtime::place &where) {
  return runtime::launch<&wkv6_fold_grad_u, border_threads>(
      "wkv6_fold_grad_u", runtime::ceil_div(a.p.N * a.p.H * a.p.K, border_threads), border_threads, 0, where.stream, a);
}

template <int KEYS, int COLUMNS, operand P, operand Q, bool VALUES>
bool launch_instance(chunk_backward_arguments a, const runtime::place &where) {
  using shared = chunk_backward_shared<KEYS, COLUMNS, P, Q, VALUES>;
  const wkv6_problem &p = a.p;
  if (a.parts > 1 && !launch_borders<KEYS, COLUMNS>(a, where)) return false;
  a.states = stages_layout<KEYS, COLUMNS, Q>(a, sizeof(shared));
  /* As many states as let two blocks share a multiprocessor, which has a little more than one block may take; one at
   * least. */
  constexpr int state_bytes = KEYS * COLUMNS * parts_of<P> * 2, reserved = 1024;
  int room = ((where.shared_bytes + reserved) / 2 - reserved - a.states) / state_bytes;
  if (room < 1) room = 1;
  a.first_state = a.segment - 1 <= room;
  a.span = a.first_state ? a.segment : room;
  const int states = a.first_state ? (a.segment > 1 ? a.segment - 1 : 1) : room;
  a.vector_r = writes_by_8(p.grad_r), a.vector_k = writes_by_8(p.grad_k), a.vector_w = writes_by_8(p.grad_w),
  a.vector_v = writes_by_8(p.grad_v);
  a.vector_states[0] = is_float_rows(p.initial_state), a.vector_states[1] = is_float_rows(p.grad_final_state),
  a.vector_states[2] = is_float_rows(p.grad_initial_state);
  if (!VALUES) a.p.grad_v = a.p.grad_initial_state = {};
  return runtime::launch<&wkv6_backward_chunk<KEYS, COLUMNS, P, Q, VALUES>, 2 * KEYS>("wkv6_backward_chunk",
                                                                                      static_cast<uint64_t>(p.N) * p.H *
                                                                                          a.parts * a.slices,
                                                                                      2 * KEYS,
                                                                                      a.states + states * state_bytes,
                                                                                      where.stream,
                                                                                      a) &&
         (a.parts == 1 || !present(p.grad_u) || launch_fold(a, where));
}

/* K = V = 64 has an instance for each precision and kind of input; the other sizes make do with the one that serves
 * all. */
bool launch_sizes(const chunk_backward_arguments &a, bool fast, bool exact_inputs, const runtime::place &where) {
  constexpr operand bf16 = operand::bf16, split = operand::split;
  const int64_t K = a.p.K, V = a.p.V;
  if (K == 64 && V == 64)
    return fast           ? launch_instance<64, 64, bf16, bf16, true>(a, where)
           : exact_inputs ? launch_instance<64, 64, split, bf16, true>(a, where)
                          : launch_instance<64, 64, split, split, true>(a, where);
  if (K == 32)
    return V == 32 ? launch_instance<32, 32, split, split, true>(a, where)
                   : launch_instance<32, 64, split, split, false>(a, where);
  if (K == 64) return launch_instance<64, 32, split, split, true>(a, where);
  return V == 32 ? launch_instance<64, 32, split, split, false>(a, where)
                 : launch_instance<64, 64, split, split, false>(a, where);
}

int64_t slices_of(const wkv6_problem &p) { return p.K == 128 ? 2 : 1; }

} // namespace

bool launch_backward(const wkv6_problem &p, const runtime::place &where) {
  if (p.N * p.H == 0) return true;
  const int64_t span = span_of(p, p.N * p.H * slices_of(p), where);
  const bool cut = span < p.T && p.span_adjoints.dtype != WKV6_ABSENT;
  chunk_backward_arguments a = {};
  a.p = p;
  a.segment = static_cast<int>(p.segment / chunk_tokens);
  a.parts = cut ? static_cast<int>(runtime::ceil_div(p.T, span)) : 1;
  a.part = cut ? static_cast<int>(span / chunk_tokens) : 1 << 30;
  const auto exact = [](const wkv6_tensor &x) { return !present(x) || x.dtype == WKV6_BF16; };
  return launch_sizes(
      a, operands_of(p) == operand::bf16, exact(p.r) && exact(p.k) && exact(p.v) && exact(p.grad_o), where);
}

} // namespace chunks
