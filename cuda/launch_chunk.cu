/* SPDX-License-Identifier: Apache-2.0
 *
 * The chunk kernels of the forward pass: how a problem is cut into blocks.
 */
#include "launch_chunk.cuh"

#include "chunk_forward.cuh"
#include "chunk_scan.cuh"

namespace chunks {
namespace {

using runtime::ceil_div;
using runtime::place;

bool launch_scan(const chunk_scan_arguments &a, const place &where) {
  const uint64_t blocks = static_cast<uint64_t>(a.p.N) * a.p.H * ceil_div(a.p.K * a.p.V, scan_threads);
  return runtime::launch<&wkv6_scan_spans, scan_threads>("wkv6_scan_spans", blocks, scan_threads, 0, where.stream, a);
}

/* How many stages there are, three where four blocks have room in what one may have; returns a block's shared memory,
 * of which `before` bytes are not stages. */
int choose_stages(chunk_forward_arguments &a, int before, const place &where) {
  const auto bytes = [&](int slots) { return before + slots * a.stage_bytes; };
  a.slots = 3;
  while (a.slots > 1 && (a.slots == 3 ? 4 : 1) * bytes(a.slots) > where.shared_bytes) a.slots--;
  return bytes(a.slots);
}

/* The states between spans, in the checkpoints. With 16 significant bits or 11: it takes no less time with 8. */
template <int K, operand P> bool launch_states(chunk_forward_arguments a, const place &where) {
  constexpr operand Q = P == operand::split ? P : operand::tf32;
  constexpr int threads = chunk_threads<K, 1>;
  const uint64_t blocks = static_cast<uint64_t>(a.p.N) * a.p.H * a.spans * a.slices;
  const int bytes = choose_stages(a, chunk_forward_shared<K, Q, 1>::stages, where);
  const chunk_scan_arguments scan = {a.p, a.span};
  return runtime::launch<&wkv6_state_chunk<K, Q, 1>, threads>(
             "wkv6_state_chunk", blocks, threads, bytes, where.stream, a) &&
         launch_scan(scan, where);
}

template <int K, operand P> bool launch_forward_instance(const wkv6_problem &p, const place &where) {
  constexpr int tiles = K == 64 ? 2 : 1, threads = K / channels_of_block / tiles * warp_size;
  using at_shared = chunk_forward_shared<K, P, tiles>;
  const bool reverse = p.flags & WKV6_REVERSE;
  chunk_forward_arguments a = {};
  a.p = p;
  a.slices = static_cast<int>(ceil_div(p.V, K));
  a.span = span_of(p, p.N * p.H * a.slices, where);
  a.spans = a.span < p.T ? static_cast<int>(ceil_div(p.T, a.span)) : 1;
  a.span_segments = a.spans > 1 ? static_cast<int>(a.span / p.segment) : 0;
  a.span_decays = static_cast<float *>(p.span_decays.data);
  int at = stage_layout(a.r, p.r, reverse, K, K, 0);
  at = stage_layout(a.k, p.k, reverse, K, K, at);
  at = stage_layout(a.w, p.w, reverse, K, K, at);
  a.stage_bytes = stage_layout(a.v, p.v, reverse, p.V, K, at);
  a.o = result_layout(p.o, reverse);
  const int bytes = choose_stages(a, at_shared::stages, where);
  const uint64_t blocks = static_cast<uint64_t>(p.N) * p.H * a.spans * a.slices;
  if (blocks == 0) return true;
  if (a.spans > 1 && !launch_states<K, P>(a, where)) return false;
  return runtime::launch<&wkv6_forward_chunk<K, P, tiles>, threads>(
      "wkv6_forward_chunk", blocks, threads, bytes, where.stream, a);
}

template <int K> bool launch_forward_of(const wkv6_problem &p, const place &where) {
  switch (operands_of(p)) {
  case operand::bf16: return launch_forward_instance<K, operand::bf16>(p, where);
  case operand::tf32: return launch_forward_instance<K, operand::tf32>(p, where);
  default: return launch_forward_instance<K, operand::split>(p, where);
  }
}

} // namespace

/* The model: the unit is what a block takes for a chunk; up to `at_once` blocks a multiprocessor do not slow each other
 * down. With spans the tokens are gone through twice, the first time for the states alone; then comes the scan over
 * the spans, and two launches more. */
int64_t span_of(const wkv6_problem &p, int64_t blocks, const place &where) {
  const int64_t most = p.segment > 0 ? ceil_div(p.T, p.segment) : 1;
  const bool possible = p.span_decays.dtype != WKV6_ABSENT && p.segment % chunk_tokens == 0 && most > 1;
  if (!possible || p.flags & WKV6_WHOLE || blocks == 0) return p.T;
  if (p.flags & WKV6_SPANS) return p.segment;
  constexpr double at_once = 2, twice = 1.6, of_span = 0.25, of_launches = 6;
  const double chunks = static_cast<double>(ceil_div(p.T, chunk_tokens));
  const auto cost = [&](int64_t spans) {
    const double load = static_cast<double>(blocks * spans) / (at_once * where.multiprocessors);
    const double pass = chunks / static_cast<double>(spans) * (load > 1 ? load : 1);
    return spans == 1 ? pass : twice * pass + of_span * static_cast<double>(spans) + of_launches;
  };
  int64_t best = 1;
  for (int64_t spans = 2; spans <= most; spans++)
    if (cost(spans) < cost(best)) best = spans;
  return best == 1 ? p.T : ceil_div(ceil_div(p.T, best), p.segment) * p.segment;
}

bool launch_forward(const wkv6_problem &p, const place &where) {
  return p.K == 32   ? launch_forward_of<32>(p, where)
         : p.K == 64 ? launch_forward_of<64>(p, where)
                     : launch_forward_of<128>(p, where);
}

} // namespace chunks
