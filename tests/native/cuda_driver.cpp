/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs the CUDA kernels on the emulated device against a plain loop in double: small problems of every kind, all kernel
 * instances, through the C API. It links to nothing but the emulated library, so it runs under any sanitizer; the case
 * table of tests/cases.py is for Python.
 *
 *     cuda_driver [order [seed [what]]]
 *
 * order: 0, 1 or 2 as in wkv6_emulation_set. what: run only the problems with this in their names; with a minus before
 * it, only those without.
 */
#include "../../cuda/host_emulation/emulator.h"
#include "../../cuda/wkv6_cuda.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

using std::vector;

/* What a test problem is; see problems() for what they are for. */
struct problem {
  const char *name;
  int64_t B, T, H, K, V, segment;
  const char *dtypes;  /* of r, k, v, w, u and state: f, b, h or d each */
  const char *options; /* r reverse, w raw decay, i initial state, s strided, o only do, f only d(final_state), - none
                          of du; l decays that let a state live long; c chunk kernels, F precision "fast", E "exact", S
                          spans; R, K, V, W, D a NaN in one token of r, k, v, w or do, with I an infinity; x infinities
                          in k and v of token 1, and all else positive, so that they stay what they are */
  vector<int64_t> cu_seqlens;
  int64_t multiprocessors;
};

uint64_t random_state = 1;
double uniform() {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<double>(random_state >> 11) / 9007199254740992.0;
}
double normal() { return std::sqrt(-2 * std::log(uniform() + 1e-300)) * std::cos(6.283185307179586 * uniform()); }

int bytes_of(int dtype) { return dtype == WKV6_F64 ? 8 : dtype == WKV6_F32 ? 4 : 2; }
int dtype_of(char c) { return c == 'f' ? WKV6_F32 : c == 'b' ? WKV6_BF16 : c == 'h' ? WKV6_F16 : WKV6_F64; }

double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 0    ? std::ldexp(fraction, -24)
                      : exponent == 31 ? (fraction ? NAN : INFINITY)
                                       : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -size : size;
}
uint16_t
half_bits(double x) { /* of numbers inside the range: counts half values up to |x|, 1024 for each power of two */
  int exponent;
  const double size = std::fmin(std::fabs(x), 65504.0);
  std::frexp(size, &exponent);
  if (exponent < -13) exponent = -13;
  const int digits = static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent)));
  const int bits = size == 0 ? 0 : ((exponent + 13) << 10) + digits;
  return static_cast<uint16_t>(bits | (x < 0 ? 0x8000 : 0));
}

double get(const void *data, int64_t i, int dtype) {
  if (dtype == WKV6_F64) return static_cast<const double *>(data)[i];
  if (dtype == WKV6_F32) return static_cast<const float *>(data)[i];
  const uint16_t bits = static_cast<const uint16_t *>(data)[i];
  if (dtype == WKV6_F16) return half_value(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float y;
  std::memcpy(&y, &wide, 4);
  return y;
}
void put(void *data, int64_t i, int dtype, double x) {
  if (dtype == WKV6_F64) static_cast<double *>(data)[i] = x;
  if (dtype == WKV6_F32) static_cast<float *>(data)[i] = static_cast<float>(x);
  if (dtype == WKV6_F16) static_cast<uint16_t *>(data)[i] = half_bits(x);
  if (dtype != WKV6_BF16) return;
  const float y = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &y, 4);
  static_cast<uint16_t *>(data)[i] = static_cast<uint16_t>(bits >> 16);
}

/* A tensor in a buffer of its exact size. Strided ones have a gap after every element and their second and third
 * dimensions exchanged. */
struct tensor {
  wkv6_tensor t = {};
  int64_t shape[4] = {1, 1, 1, 1};
  void *buffer = nullptr;
  tensor() = default;
  tensor(const tensor &) = delete;
  ~tensor() { std::free(buffer); }

  void make(vector<int64_t> sizes, int dtype, bool strided) {
    int64_t elements = 1;
    for (size_t d = 0; d < sizes.size(); d++) shape[d] = sizes[d], elements *= sizes[d];
    t.dtype = dtype;
    int64_t order[4] = {0, 1, 2, 3}, stride = strided ? 2 : 1;
    if (strided && sizes.size() == 4) order[1] = 2, order[2] = 1;
    for (int d = static_cast<int>(sizes.size()) - 1; d >= 0; d--) {
      t.stride[order[d]] = stride;
      stride *= shape[order[d]];
    }
    const size_t bytes = static_cast<size_t>(elements ? (strided ? 2 * elements - 1 : elements) : 0) * bytes_of(dtype);
    buffer = std::malloc(bytes ? bytes : 1);
    for (size_t i = 0; i < bytes / 2; i++) static_cast<uint16_t *>(buffer)[i] = 0xffff; /* NaN */
    t.data = buffer;
  }
  int64_t at(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3];
  }
  double operator()(int64_t a, int64_t b, int64_t c = 0, int64_t d = 0) const {
    return t.dtype ? get(buffer, at(a, b, c, d), t.dtype) : 0;
  }
  template <typename function> void fill(function f) {
    for (int64_t a = 0; a < shape[0]; a++)
      for (int64_t b = 0; b < shape[1]; b++)
        for (int64_t c = 0; c < shape[2]; c++)
          for (int64_t d = 0; d < shape[3]; d++) put(buffer, at(a, b, c, d), t.dtype, f());
  }
};

/* The same shape in double, contiguous. */
struct truth {
  int64_t n1, n2, n3;
  vector<double> x;
  void make(const tensor &t) {
    n1 = t.shape[1], n2 = t.shape[2], n3 = t.shape[3];
    x.assign(static_cast<size_t>(t.shape[0] * n1 * n2 * n3), 0.0);
  }
  double &operator()(int64_t a, int64_t b, int64_t c = 0, int64_t d = 0) {
    return x[static_cast<size_t>(((a * n1 + b) * n2 + c) * n3 + d)];
  }
};

int failures = 0, compared = 0;

bool has(const problem &q, char option) { return std::strchr(q.options, option) != nullptr; }

/* Largest relative L2 error. Chunk kernels: operands of 8 bits (fast), of 11 or 16 (default, see cases.py), of 16. */
double tolerance_of(const problem &q, int dtype) {
  const bool wide = std::strchr(q.dtypes, 'f') && std::strchr(q.dtypes, 'f') - q.dtypes < 3;
  const double rounding = dtype == WKV6_F64 ? 1e-12 : dtype == WKV6_F32 ? 1.5e-6 : dtype == WKV6_F16 ? 5e-4 : 4e-3;
  if (!has(q, 'c')) return rounding;
  return has(q, 'F') ? 5e-3 : std::fmax(rounding, wide || has(q, 'E') ? 1.5e-5 : 5e-4);
}

void compare(const problem &q, const char *what, const tensor &got, truth &want) {
  double difference = 0, size = 0;
  int64_t spoilt = 0, hidden = 0; /* not finite and should be, finite and should not be (I4) */
  for (int64_t a = 0; a < got.shape[0]; a++)
    for (int64_t b = 0; b < got.shape[1]; b++)
      for (int64_t c = 0; c < got.shape[2]; c++)
        for (int64_t d = 0; d < got.shape[3]; d++) {
          const double x = got(a, b, c, d), y = want(a, b, c, d);
          if ((x == y && std::isinf(y)) || (x != x && y != y)) continue;
          if (std::isfinite(x) != std::isfinite(y)) (std::isfinite(y) ? spoilt : hidden)++;
          if (!std::isfinite(y) && !has(q, 'x')) continue;
          difference += (x - y) * (x - y);
          size += y * y;
        }
  const double error = size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
  const double tolerance = tolerance_of(q, got.t.dtype);
  compared++;
  if (error <= tolerance && !spoilt && !hidden) return; /* so a NaN fails */
  failures++;
  std::printf("FAIL %s: %s: relative error %.2e, tolerance %.1e; %lld elements spoilt, %lld hidden\n",
              q.name,
              what,
              error,
              tolerance,
              static_cast<long long>(spoilt),
              static_cast<long long>(hidden));
}

void must(const problem &q, const char *what, wkv6_status status) {
  if (status == WKV6_OK) return;
  failures++;
  std::printf("FAIL %s: %s: %s\n", q.name, what, wkv6_cuda_error());
}

void run(const problem &q) {
  wkv6_emulation_set("multiprocessors", q.multiprocessors);
  random_state = 7;
  const bool strided = has(q, 's'), raw = has(q, 'w'), reverse = has(q, 'r');
  const int64_t N = q.cu_seqlens.empty() ? q.B : static_cast<int64_t>(q.cu_seqlens.size()) - 1;
  const int real = q.dtypes[0] == 'd' ? WKV6_F64 : WKV6_F32;
  tensor span_decays, span_adjoints, r, k, v, w, u, s0, o, s1, checkpoints, go, gs1, gr, gk, gv, gw, gu, gs0, parts, s2,
      w_sum;
  const vector<int64_t> keys = {q.B, q.T, q.H, q.K}, values = {q.B, q.T, q.H, q.V}, states = {N, q.H, q.K, q.V};
  r.make(keys, dtype_of(q.dtypes[0]), strided), k.make(keys, dtype_of(q.dtypes[1]), strided),
      v.make(values, dtype_of(q.dtypes[2]), strided);
  w.make(keys, dtype_of(q.dtypes[3]), strided), u.make({q.H, q.K}, dtype_of(q.dtypes[4]), strided);
  const auto normal_or_positive = [&] { return has(q, 'x') ? std::fabs(normal()) + 0.1 : normal(); };
  for (tensor *x : {&r, &k, &v, &u}) x->fill(normal_or_positive);
  if (has(q, 'x'))
    put(k.buffer, k.at(0, 1, 0, 0), k.t.dtype, INFINITY), put(v.buffer, v.at(0, 1, 0, 0), v.t.dtype, INFINITY);
  w.fill([&] {
    const double kind = uniform(), x = normal();
    if (has(q, 'l')) return raw ? x - 4 : -std::exp(x - 4);
    if (raw) return kind < 0.1 ? 90.0 : kind < 0.2 ? -12.0 : x; /* exp(90) is inf in float */
    return kind < 0.1 ? -INFINITY : kind < 0.2 ? 0.0 : -std::exp(kind < 0.3 ? 4 * x : x);
  });
  if (has(q, 'i')) s0.make(states, dtype_of(q.dtypes[5]), strided), s0.fill(normal_or_positive);
  o.make(values, v.t.dtype, strided), s1.make(states, real, strided);
  if (!has(q, 'f')) go.make(values, v.t.dtype, strided), go.fill(normal_or_positive);
  if (!has(q, 'o')) gs1.make(states, real, strided), gs1.fill(normal_or_positive);
  checkpoints.make({q.B * q.T / q.segment, q.H, q.K, q.V}, real, false);
  gr.make(keys, r.t.dtype, strided), gk.make(keys, k.t.dtype, strided), gv.make(values, v.t.dtype, strided),
      gw.make(keys, w.t.dtype, strided);
  gs0.make(states, real, strided);
  s2.make(states, real, strided), w_sum.make({N, q.H, q.K}, real, strided);
  if (!has(q, '-')) gu.make({q.H, q.K}, u.t.dtype, strided), parts.make({N, q.H, q.K}, real, false);

  const struct {
    char option;
    tensor *x;
  } poisons[] = {{'R', &r}, {'K', &k}, {'V', &v}, {'W', &w}, {'D', &go}};
  for (const auto &[option, x] : poisons) /* in the middle of a half of a chunk */
    if (has(q, option)) put(x->buffer, x->at(0, 21, 0, 3), x->t.dtype, has(q, 'I') ? INFINITY : NAN);

  wkv6_problem p = {};
  p.B = q.B, p.T = q.T, p.H = q.H, p.K = q.K, p.V = q.V, p.N = N, p.segment = q.segment, p.scale = 0.7;
  p.cu_seqlens = q.cu_seqlens.empty() ? nullptr : q.cu_seqlens.data();
  p.flags = (reverse ? WKV6_REVERSE : 0) | (raw ? WKV6_RAW_DECAY : 0) | (has(q, 'c') ? WKV6_CHUNK : WKV6_RECURRENT) |
            (has(q, 'F') ? WKV6_FAST : 0) | (has(q, 'E') ? WKV6_EXACT : 0) | (has(q, 'S') ? WKV6_SPANS : 0);
  if (has(q, 'S')) {
    span_decays.make({q.B * q.T / q.segment, q.H, q.K}, real, false);
    span_adjoints.make({q.B * q.T / q.segment, q.H, q.K, q.V}, real, false);
    p.span_decays = span_decays.t, p.span_adjoints = span_adjoints.t;
  }
  p.r = r.t, p.k = k.t, p.v = v.t, p.w = w.t, p.u = u.t, p.initial_state = s0.t, p.o = o.t, p.final_state = s1.t,
  p.checkpoints = checkpoints.t;
  vector<char> scratch(wkv6_cuda_scratch_bytes(&p), '\xff'); /* NaN */
  p.scratch = scratch.data();
  must(q, "forward", wkv6_cuda_forward(&p, 0, nullptr));
  wkv6_problem state = p;
  state.r = state.u = state.o = state.checkpoints = {};
  state.final_state = s2.t, state.w_sum = w_sum.t;
  must(q, "state", wkv6_cuda_state(&state, 0, nullptr));
  p.grad_o = go.t, p.grad_final_state = gs1.t, p.grad_r = gr.t, p.grad_k = gk.t, p.grad_v = gv.t, p.grad_w = gw.t,
  p.grad_u = gu.t;
  p.grad_initial_state = gs0.t, p.grad_u_parts = parts.t;
  scratch.assign(wkv6_cuda_scratch_bytes(&p), '\xff');
  p.scratch = scratch.data();
  must(q, "backward", wkv6_cuda_backward(&p, 0, nullptr));

  /* Equations (1) to (8) as they stand, the states of a sequence all kept. */
  truth to, ts1, ts2, tr, tk, tv, tw, tu, ts0, tw_sum;
  tw_sum.make(w_sum), ts2.make(s2), to.make(o), ts1.make(s1), tr.make(gr), tk.make(gk), tv.make(gv), tw.make(gw),
      tu.make(gu), ts0.make(gs0);
  const size_t matrix = static_cast<size_t>(q.K * q.V);
  for (int64_t n = 0; n < N; n++)
    for (int64_t h = 0; h < q.H; h++) {
      const int64_t begin = p.cu_seqlens ? p.cu_seqlens[n] : 0,
                    length = p.cu_seqlens ? p.cu_seqlens[n + 1] - begin : q.T, b = p.cu_seqlens ? 0 : n;
      const auto token = [&](int64_t t) { return begin + (reverse ? length - 1 - t : t); };
      const auto log_decay = [&](int64_t t, int64_t i) {
        return raw ? -std::exp(w(b, token(t), h, i)) : w(b, token(t), h, i);
      };
      vector<double> S(matrix * static_cast<size_t>(length + 1)), G(matrix);
      for (int64_t i = 0; i < q.K; i++)
        for (int64_t j = 0; j < q.V; j++)
          S[static_cast<size_t>(i * q.V + j)] = s0(n, h, i, j), G[static_cast<size_t>(i * q.V + j)] = gs1(n, h, i, j);
      for (int64_t t = 0; t < length; t++)
        for (int64_t i = 0; i < q.K; i++) {
          const double lw = log_decay(t, i);
          tw_sum(n, h, i) += real == WKV6_F32 ? static_cast<float>(lw) : lw; /* -exp(90) is -inf in float */
          for (int64_t j = 0; j < q.V; j++) {
            const double before = S[matrix * static_cast<size_t>(t) + static_cast<size_t>(i * q.V + j)],
                         kv = k(b, token(t), h, i) * v(b, token(t), h, j);
            to(b, token(t), h, j) += p.scale * r(b, token(t), h, i) * (before + u(h, i) * kv);
            S[matrix * static_cast<size_t>(t + 1) + static_cast<size_t>(i * q.V + j)] =
                std::exp(log_decay(t, i)) * before + kv;
            ts2(n, h, i, j) = std::exp(log_decay(t, i)) * (t ? ts2(n, h, i, j) : s0(n, h, i, j)) + p.scale * kv;
          }
        }
      for (int64_t i = 0; i < q.K; i++)
        for (int64_t j = 0; j < q.V; j++) {
          ts1(n, h, i, j) = S[matrix * static_cast<size_t>(length) + static_cast<size_t>(i * q.V + j)];
          if (length == 0) ts2(n, h, i, j) = s0(n, h, i, j);
        }
      for (int64_t t = length - 1; t >= 0; t--) {
        double a = 0;
        for (int64_t j = 0; j < q.V; j++) a += v(b, token(t), h, j) * go(b, token(t), h, j);
        for (int64_t i = 0; i < q.K; i++) {
          const double R = p.scale * r(b, token(t), h, i), x = k(b, token(t), h, i), lw = log_decay(t, i),
                       d = std::exp(lw);
          double grad_w = 0;
          tr(b, token(t), h, i) += p.scale * a * u(h, i) * x;
          tk(b, token(t), h, i) += a * u(h, i) * R;
          if (gu.t.dtype) tu(h, i) += a * R * x;
          for (int64_t j = 0; j < q.V; j++) {
            double &g = G[static_cast<size_t>(i * q.V + j)];
            const double before = S[matrix * static_cast<size_t>(t) + static_cast<size_t>(i * q.V + j)],
                         y = go(b, token(t), h, j);
            tr(b, token(t), h, i) += p.scale * before * y;
            tk(b, token(t), h, i) += g * v(b, token(t), h, j);
            tv(b, token(t), h, j) += g * x + R * u(h, i) * x * y;
            grad_w += d * g * before;
            g = d * g + R * y;
          }
          const bool nothing = d == 0 && raw; /* exp(x) overflowed; through a log decay of -inf NaN passes */
          tw(b, token(t), h, i) = nothing ? 0 : raw ? grad_w * lw : grad_w;
        }
      }
      for (int64_t i = 0; i < q.K; i++)
        for (int64_t j = 0; j < q.V; j++) ts0(n, h, i, j) = G[static_cast<size_t>(i * q.V + j)];
    }
  compare(q, "o", o, to), compare(q, "final_state", s1, ts1), compare(q, "state", s2, ts2),
      compare(q, "w_sum", w_sum, tw_sum), compare(q, "dr", gr, tr), compare(q, "dk", gk, tk), compare(q, "dv", gv, tv);
  compare(q, "dw", gw, tw), compare(q, "dS_0", gs0, ts0);
  if (gu.t.dtype) compare(q, "du", gu, tu);
}

vector<problem> problems() {
  return {
      /* every instance: K and V of 32, 64, 128, others, double; segments longer and shorter than a tile, and none whole
       */
      {"32", 2, 37, 2, 32, 32, 16, "ffffff", "i", {}, 2},
      {"64", 1, 50, 2, 64, 64, 32, "ffffff", "i", {}, 2},
      {"64 bf16", 1, 35, 1, 64, 64, 16, "bbbbbf", "wi", {}, 1},
      {"128", 1, 19, 1, 128, 128, 5, "ffffff", "", {}, 1},
      {"128 bf16", 1, 17, 1, 128, 128, 16, "bbbbbf", "i", {}, 132},
      {"wide values", 1, 4, 1, 3, 400, 4, "ffffff", "i", {}, 1},
      {"64 32", 1, 21, 2, 64, 32, 16, "hhhhhf", "ri", {}, 8},
      {"odd", 2, 23, 2, 5, 7, 7, "fbhbhf", "wi", {}, 4},
      {"wide", 1, 9, 1, 70, 150, 4, "bfhfbh", "ri", {}, 1},
      {"double", 1, 21, 2, 6, 9, 8, "dddddd", "i", {}, 4},
      {"double wide", 1, 7, 1, 66, 70, 4, "dddddd", "wr", {}, 1},
      /* more channels than a block holds */
      {"many keys", 1, 3, 1, 520, 3, 2, "bfhbbf", "wi", {}, 4},
      {"many values", 1, 3, 1, 3, 800, 2, "fffbff", "ri", {}, 4},
      {"many keys, double", 1, 3, 2, 1030, 2, 2, "dddddd", "i", {}, 4},
      {"many values, double", 1, 3, 2, 2, 390, 2, "dddddd", "wi", {0, 1, 3}, 4},
      /* infinities, with rows and columns to fill up a warp */
      {"infinite", 1, 6, 1, 5, 7, 4, "ffffff", "ix-", {}, 4},
      {"infinite, double", 1, 6, 1, 5, 7, 4, "dddddd", "ix-", {}, 4},
      /* layouts and sequences */
      {"strided", 2, 20, 2, 32, 64, 16, "fbfbff", "sri", {}, 4},
      {"strided double", 2, 9, 2, 3, 5, 4, "dddddd", "swi", {}, 4},
      {"varlen", 1, 45, 2, 64, 64, 16, "ffffff", "i", {0, 0, 1, 18, 18, 45, 45}, 2},
      {"varlen reverse", 1, 33, 1, 32, 20, 8, "bbbbbf", "rw", {0, 17, 33}, 4},
      /* lengths */
      {"no token", 2, 0, 2, 32, 32, 16, "ffffff", "i", {}, 4},
      {"no sequence", 0, 4, 2, 32, 32, 16, "ffffff", "i", {}, 4},
      {"one token", 2, 1, 2, 64, 64, 16, "ffffff", "i", {}, 4},
      {"one token, odd", 1, 1, 2, 300, 40, 16, "hfbfff", "wrs", {}, 4},
      {"many sequences", 20, 3, 2, 4, 4, 16, "ffffff", "i", {}, 4},
      /* chunk kernels: every instance; tails, spans of one segment, checkpoints, rows that are not aligned */
      {"chunk 32", 1, 37, 2, 32, 32, 16, "ffffff", "ci", {}, 2},
      {"chunk 32 fast", 1, 33, 1, 32, 64, 32, "bbbbbf", "ciF", {}, 2},
      {"chunk 32 bf16", 1, 20, 1, 32, 32, 16, "bbbbff", "ciw", {}, 2},
      {"chunk 64", 1, 35, 1, 64, 64, 16, "ffffff", "ciw", {}, 1},
      {"chunk 64 fast", 1, 50, 1, 64, 64, 16, "ffffff", "ciF", {}, 1},
      {"chunk 64 bf16", 2, 50, 1, 64, 64, 32, "bbbbbf", "ci", {}, 1},
      {"chunk 64 f16", 1, 70, 1, 64, 32, 16, "hhhhhf", "cri", {}, 1},
      {"chunk 64 exact", 1, 18, 1, 64, 64, 16, "bbbbbf", "ciE", {}, 1},
      {"chunk 128", 1, 17, 1, 128, 128, 16, "fbffff", "c", {}, 1},
      {"chunk 128 fast", 1, 17, 1, 128, 64, 16, "bbbbbf", "ciF", {}, 1},
      {"chunk 128 bf16", 1, 33, 1, 128, 128, 16, "bbbbbf", "ciwr", {}, 1},
      {"chunk strided", 1, 20, 2, 32, 64, 16, "fbfbff", "csri", {}, 4},
      {"chunk varlen", 1, 60, 2, 64, 64, 16, "hbhbff", "ciw", {0, 0, 1, 18, 18, 60, 60}, 2},
      {"chunk spans", 1, 70, 2, 32, 32, 16, "ffffff", "cirwS", {}, 2},
      {"chunk spans 64", 1, 90, 1, 64, 64, 32, "bbbbbf", "ciSl", {0, 0, 40, 90}, 2},
      {"chunk spans 128", 1, 40, 1, 128, 128, 16, "bbbbbf", "cSl", {}, 2},
      {"chunk no token", 2, 0, 2, 32, 32, 16, "ffffff", "ci", {}, 4},
      /* segments of several chunks, and of more than shared memory has states for; all sizes of the backward pass */
      {"chunk 64 segment", 1, 130, 1, 64, 64, 64, "bbbfbf", "icw", {}, 4},
      {"chunk 64 long segment", 2, 137, 1, 64, 64, 128, "bbbbbf", "icFr", {}, 4},
      {"chunk 32 128", 1, 33, 1, 32, 128, 32, "bbbfff", "ic", {}, 4},
      {"chunk 128 32", 1, 33, 1, 128, 32, 32, "bbbfff", "ic", {}, 4},
      {"chunk spans, several", 1, 110, 2, 64, 64, 16, "bbbfff", "icSwrl", {0, 1, 65, 65, 110}, 4},
      {"chunk spans, shared heads", 1, 70, 1, 64, 128, 32, "bbbfff", "cSl", {}, 4},
      {"chunk, only o", 1, 20, 1, 32, 32, 16, "ffffff", "ioc", {}, 4},
      {"chunk, only final state", 1, 20, 1, 64, 64, 16, "bbbfbf", "ifc-", {}, 4},
      /* what is not finite stays where the recurrence puts it */
      {"chunk, NaN in r", 1, 35, 1, 64, 64, 32, "bbbfbf", "icR", {}, 4},
      {"chunk, NaN in k", 1, 35, 1, 32, 32, 32, "ffffff", "icK", {}, 4},
      {"chunk, NaN in v", 1, 35, 1, 64, 64, 32, "bbbfbf", "icV", {}, 4},
      {"chunk, NaN in w", 1, 35, 1, 32, 32, 32, "ffffff", "icW", {}, 4},
      {"chunk, NaN in do", 1, 35, 1, 64, 64, 32, "bbbfbf", "icD", {}, 4},
      {"chunk fast, infinity in k", 1, 35, 1, 64, 64, 32, "bbbfbf", "icFIK", {}, 4},
      {"chunk, infinity in do", 1, 35, 1, 32, 32, 32, "ffffff", "icID", {}, 4},
      /* gradients of some outputs, for some inputs */
      {"only o", 1, 20, 1, 32, 32, 16, "ffffff", "io", {}, 4},
      {"only final state", 1, 20, 1, 64, 64, 16, "ffffff", "if-", {}, 4},
  };
}

} // namespace

int main(int count, char **words) {
  wkv6_emulation_set("order", count > 1 ? std::atoi(words[1]) : 0);
  wkv6_emulation_set("seed", count > 2 ? std::atoi(words[2]) : 1);
  wkv6_emulation_set("count_banks", 1);
  const bool without = count > 3 && *words[3] == '-';
  const std::string what = count > 3 ? words[3] + without : "";
  for (const problem &q : problems())
    if ((std::string(q.name).find(what) == std::string::npos) == without) run(q);
  std::printf("%d of %d comparisons failed\n", failures, compared);
  return failures || !compared;
}
