/* SPDX-License-Identifier: Apache-2.0
 *
 * Equations (9) and (10) of docs/wkv6.md on tensor cores, chunks of 16 tokens one after another. Layouts and operands:
 * chunk_common.cuh.
 *
 * A block has one head of one sequence, or a span of its tokens, and K of the V value columns: K / 16 / TILES warps.
 * A warp prepares the decayed operands of its TILES blocks of key channels, computes some of the dyadic levels of the
 * scores A, and owns as many value columns as it has channels: their state, as S^T [V x K], stays in registers, where
 * the fragments of one product are those of the next.
 *
 * A chunk goes through: operands, exp(sum of w) and r . u k into shared memory, each warp its channels -> barrier ->
 * scores into shared memory; o = R~ S; S = decay S + K^ v -> wait for the next chunk's rows -> barrier -> o += A v,
 * o out, rows of the chunk after next on their way.
 *
 * K: 32, 64 or 128; V is a multiple of 16, shared out to blocks by K columns. P: the operands. TILES: 1 or 2. STATE:
 * no o, only the state at the end of a span and the sum of its w, for chunk_scan.cuh.
 */
#ifndef WKV6_CHUNK_FORWARD_CUH
#define WKV6_CHUNK_FORWARD_CUH

#include "chunk_stage.cuh"

struct chunk_forward_arguments {
  wkv6_problem p;
  int slices;             /* blocks that share a head by columns */
  int spans;              /* blocks that share a sequence by tokens */
  int64_t span;           /* tokens of each but the last */
  int span_segments;      /* the same in segments */
  float *span_decays;     /* with spans: sums of w, placed as the checkpoints are, [K] each */
  int slots, stage_bytes; /* stages: 3, 2, or 1, which fetches nothing ahead */
  stage_rows r, k, w, v;
  result_rows o;
};

/* Threads of a block, and how many blocks a multiprocessor's registers are to hold. */
template <int K, int TILES> constexpr int chunk_threads = K / channels_of_block / TILES * warp_size;
template <int K, int TILES> constexpr int chunk_blocks = K == 32 ? 8 : 256 / chunk_threads<K, TILES>;

template <int K, operand P, int TILES> struct chunk_forward_shared {
  static constexpr int blocks = K / channels_of_block;
  static constexpr int operand_bytes = blocks * tile_bytes<P>, score_words = 3 * warp_size;
  /* Places in bytes. Operands: a tile a block of channels. scores: the words of the lower triangle of A that each lane
   * has of a [token x token] left operand: upper left, lower left, lower right. near: r . u k of each token and
   * r_t . k_{t-1} of odd t, a block of channels each. */
  static constexpr int queries = 0, keys = operand_bytes, levels = 2 * operand_bytes, scores = 5 * operand_bytes;
  static constexpr int near = scores + parts_of<P> * score_words * 4, decay = near + blocks * 24 * 4;
  static constexpr int stages = (decay + K * 4 + 127) / 128 * 128;
};

template <int K, operand P, int TILES> struct chunk_forward_block {
  using at_shared = chunk_forward_shared<K, P, TILES>;
  static constexpr int warps = K / channels_of_block / TILES, threads = warps * warp_size;
  static constexpr int blocks = at_shared::blocks;

  const chunk_forward_arguments &a;
  const wkv6_problem &p;
  const sequence s;
  const int64_t column;     /* the slice's first */
  const int width;          /* its columns */
  const int64_t begin, end; /* tokens of the span */
  int64_t saved;            /* index of the next checkpoint */
  const chunk_lane at;
  const tile_places places;
  const stage_places<K> read;
  const char *from_r, *from_k, *from_w, *from_v; /* rows of the chunk that is fetched next */
  float state[TILES][K / 8][4]; /* column 16 tile + g (+ 8: 2, 3), permuted_channel(8 n % 16 + 2p) (next: 1, 3) */
  float u[TILES][2], rest[TILES], sum_w[TILES];

  WKV6_DEVICE chunk_forward_block(const chunk_forward_arguments &arguments, const sequence &of, int64_t first_column,
                                  int span, int64_t first, int64_t last)
      : a(arguments), p(arguments.p), s(of), column(first_column),
        width(static_cast<int>(p.V - first_column < K ? p.V - first_column : K)), begin(first), end(last),
        saved(s.first / p.segment + span * a.span_segments), places(at), read(at) {
    const auto row = [&](const wkv6_tensor &x, int64_t channel) {
      return static_cast<const char *>(x.data) +
             (row_offset(x, s, begin) + channel * x.stride[3]) * element_bytes(x.dtype);
    };
    from_r = row(p.r, 0), from_k = row(p.k, 0), from_w = row(p.w, 0), from_v = row(p.v, column);
  }

  WKV6_DEVICE char *shared(int place) const { return shared_memory() + place; }
  WKV6_DEVICE char *stage(int slot) const { return shared_memory() + at_shared::stages + slot * a.stage_bytes; }
  WKV6_DEVICE int channel_tile(int m) const { return at.warp * TILES + m; } /* of channels, and of columns */
  WKV6_DEVICE bool has_columns(int m) const { return channel_tile(m) * channels_of_block < width; }

  /* Rows of the next chunk, `count` of which exist. */
  template <bool STATE> WKV6_DEVICE void fetch(int slot, int count) {
    const auto one = [&](const stage_rows &rows, const wkv6_tensor &x, const char *&from, int channels) {
      fetch_chunk<K, threads>(stage(slot), rows, from, x.stride[3] * (rows.dtype == WKV6_F32 ? 4 : 2), count, channels);
      from += chunk_tokens * rows.row_step;
    };
    if (!STATE) one(a.r, p.r, from_r, K);
    one(a.k, p.k, from_k, K);
    one(a.w, p.w, from_w, K);
    one(a.v, p.v, from_v, width);
  }

  /* Calls use(x, row, column of the slice) for the numbers of the state that this thread has. */
  template <typename function> WKV6_DEVICE void each_of_state(function use) {
#pragma unroll
    for (int m = 0; m < TILES; m++)
      if (has_columns(m))
#pragma unroll
        for (int n = 0; n < K / 8; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            use(state[m][n][i], n / 2 * 16 + n % 2 * 4 + at.p + i % 2 * 8, channel_tile(m) * 16 + at.g + i / 2 * 8);
  }
  template <bool STATE> WKV6_DEVICE void load_state() {
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int n = 0; n < K / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) state[m][n][i] = 0;
    if (STATE) return;
    if (begin > 0) {
      const float *const from = checkpoint_at(saved - 1);
      each_of_state([&](float &x, int row, int j) { x = load_global(from + (row * static_cast<int>(p.V) + j)); });
    } else if (p.initial_state.dtype != WKV6_ABSENT) {
      each_of_state([&](float &x, int row, int j) {
        x = load_element<float>(p.initial_state, state_offset(p.initial_state, s, row, column + j));
      });
    }
  }
  WKV6_DEVICE float *checkpoint_at(int64_t index) const {
    return static_cast<float *>(p.checkpoints.data) + (index * p.H + s.h) * K * p.V + column;
  }
  WKV6_DEVICE void store_checkpoint() {
    float *const to = checkpoint_at(saved);
    each_of_state([&](float &x, int row, int j) { store_global(to + (row * static_cast<int>(p.V) + j), x); });
  }
  WKV6_DEVICE void store_final() {
    each_of_state([&](float &x, int row, int j) {
      store_element<float>(p.final_state, state_offset(p.final_state, s, row, column + j), x);
    });
  }

  template <bool STATE> WKV6_DEVICE void start() {
    load_state<STATE>();
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      rest[m] = sum_w[m] = 0;
#pragma unroll
      for (int c = 0; c < 2; c++)
        u[m][c] =
            STATE
                ? 0
                : load_element<float>(p.u, s.h * p.u.stride[0] + (channel_tile(m) * 16 + c * 8 + at.g) * p.u.stride[1]);
    }
    /* What no level writes, the upper halves of the blocks on the diagonal, stays zero. */
    const uint32_t zero = 0;
    if (!STATE)
      for (int i = static_cast<int>(thread_index()); i < parts_of<P> * at_shared::score_words; i += threads)
        store_words<1>(shared(at_shared::scores + i * 4), &zero);
  }

  /* The operands of one block of channels; `left` tokens of the chunk exist. */
  template <bool STATE> WKV6_DEVICE void prepare(const char *rows, int m, int left) {
    const int block = channel_tile(m);
    float r[4][2], k[4][2], w[4][2];
    load_tile<K>(w, rows, a.w, read, block);
    if (p.flags & WKV6_RAW_DECAY) log_of_raw(w, left, at);
    half_factors f[4];
    const float sum = factors_of(f, w, at), decay = chunk_decay(sum, rest[m]);
    const uint32_t bits = bits_of(decay);
    /* One of 16 bytes for the channels 4 n + p and 4 n + p + 8 that a lane's columns 2p, 2p + 1 of the state are. */
    store_words<1>(shared(at_shared::decay + (block * 16 + at.g % 4 * 4 + at.g / 4 * 2 + at.odd) * 4), &bits, !at.high);
    if (STATE) sum_w[m] += sum;
    load_tile<K>(k, rows, a.k, read, block);
    if (!STATE) load_tile<K>(r, rows, a.r, read, block);
    float near_bonus[2][2] = {{0, 0}, {0, 0}}, near_before[2] = {0, 0};
    left_fragment<P> queries, keys, level[3]; /* h = 8, 4, 2 */
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int half = i / 2, c = i % 2;
      const half_factors &x = f[i];
      const float other = f[i ^ 2].all;
      const float kb = k[i][1], ka = k[i][0] * x.of[1];
      const float to_middle_a = ka * x.k8, to_middle_b = kb * x.k8;
      put_pair(keys, i, half ? to_middle_a : to_middle_a * other, half ? to_middle_b : to_middle_b * other);
      if constexpr (!STATE) {
        const float ra = r[i][0], rb = r[i][1] * x.of[0];
        near_bonus[half][0] = fma(r[i][0] * u[m][c], k[i][0], near_bonus[half][0]);
        near_bonus[half][1] = fma(r[i][1] * u[m][c], k[i][1], near_bonus[half][1]);
        near_before[half] = fma(r[i][1], k[i][0], near_before[half]);
        put_pair(level[2], i, at.odd ? ra : ka, at.odd ? rb : kb);
        const float factor = at.high ? x.r4 : x.k4;
        put_pair(level[1], i, (at.high ? ra : ka) * factor, (at.high ? rb : kb) * factor);
        const float from_middle_a = ra * x.r8, from_middle_b = rb * x.r8;
        put_pair(level[0], i, half ? from_middle_a : to_middle_a, half ? from_middle_b : to_middle_b);
        put_pair(
            queries, i, half ? from_middle_a * other : from_middle_a, half ? from_middle_b * other : from_middle_b);
      }
    }
    const auto tile = [&](int operand) { return shared(operand + block * tile_bytes<P>); };
    store_columns<P>(tile(at_shared::keys), places, keys);
    if constexpr (!STATE) {
      store_rows<P>(tile(at_shared::queries), places, queries);
#pragma unroll
      for (int h = 0; h < 3; h++)
        store_rows<P>(tile(at_shared::levels + h * at_shared::operand_bytes), places, level[h]);
      const uint32_t near = bits_of(sum_near(near_bonus, near_before, at));
      store_words<1>(shared(at_shared::near + (block * 24 + at.g * 4 + at.p) * 4), &near, at.g < 6);
    }
  }

  /* Two neighbours of a row of A, as a lane has them of a left operand; `which` of the three corners. */
  WKV6_DEVICE void store_score(int which, int lane, float low, float high, bool active) const {
    if constexpr (P == operand::tf32) {
      const uint32_t words[2] = {tf32_of(low), tf32_of(high)};
      store_words<2>(shared(at_shared::scores + (which * warp_size + lane) * 8), words, active);
    } else {
      fragment<P, 1> x;
      put_pair(x, 0, low, high);
#pragma unroll
      for (int part = 0; part < parts_of<P>; part++)
        store_words<1>(shared(at_shared::scores + part * at_shared::score_words * 4 + (which * warp_size + lane) * 4),
                       x.part[part],
                       active);
    }
  }
  WKV6_DEVICE void load_scores(left_fragment<P> &x) const {
#pragma unroll
    for (int which = 0; which < 3; which++) {
      const int pair = which < 2 ? which : 3;
      if constexpr (P == operand::tf32) {
        uint32_t words[2];
        load_words<2>(shared(at_shared::scores + (which * warp_size + at.lane) * 8), words);
        x.part[pair / 2][pair % 2] = words[0], x.part[pair / 2][pair % 2 + 2] = words[1];
      } else {
#pragma unroll
        for (int part = 0; part < parts_of<P>; part++)
          load_words<1>(
              shared(at_shared::scores + part * at_shared::score_words * 4 + (which * warp_size + at.lane) * 4),
              &x.part[part][pair]);
      }
    }
    if constexpr (P == operand::tf32)
      x.part[1][0] = x.part[1][2] = 0;
    else
#pragma unroll
      for (int part = 0; part < parts_of<P>; part++) x.part[part][2] = 0;
  }

  /* The scores of level h = 8 >> LEVEL, of the first (c = 0) or the last eight tokens or (c = 2) both. */
  template <int LEVEL> WKV6_DEVICE void score(int c) const {
    const char *const operand = shared(at_shared::levels + LEVEL * at_shared::operand_bytes);
    float d[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
    for (int block = 0; block < blocks; block++) {
      left_fragment<P> x;
      load_rows<P>(x, operand + block * tile_bytes<P>, places);
      if (c != 1) multiply(d[0], x, columns_of<P>(x, 0));
      if (c != 0) multiply(d[1], x, columns_of<P>(x, 1));
    }
    const int g = at.g, p = at.p;
    const bool mine = LEVEL == 0 || (LEVEL == 1 ? g >= 4 && p < 2 : g / 4 == p / 2 && (g & 2) && !(p & 1));
    if (LEVEL == 0) d[0][0] = d[0][2], d[0][1] = d[0][3];
    if (c != 1) store_score(LEVEL == 0 ? 1 : 0, at.lane, d[0][0], d[0][1], mine);
    if (c != 0) store_score(2, at.lane, d[1][2], d[1][3], mine);
  }
  /* The diagonal and what lies beside it in odd rows: lane 8 half + i has row i of a half. */
  WKV6_DEVICE void score_near() const {
    const int half = at.lane / 8 % 2, row = at.lane % 8, pair = row / 2, odd = row & 1;
    float low = 0, high = 0;
#pragma unroll
    for (int block = 0; block < blocks; block++) {
      const auto of = [&](int kind) {
        uint32_t bits;
        load_words<1>(shared(at_shared::near + (block * 24 + kind * 4 + pair) * 4), &bits);
        return float_of_bits(bits);
      };
      low += of(odd ? 4 + half : half);
      high += of(2 + half);
    }
    store_score(2 * half, row * 4 + pair, low, odd ? high : 0.f, at.lane < 16);
  }
  WKV6_DEVICE void scores() const {
    constexpr int by = warps < 4 ? warps : 4; /* with eight warps, the last four take the last eight tokens */
    const int c = warps == 8 ? at.warp / 4 : 2;
    if (at.warp == 0) score<0>(0);
    if (at.warp % by == 1 % by) score<1>(c);
    if (at.warp % by == 2 % by) score<2>(c);
    if (at.warp == 3 % by) score_near();
  }

  /* o = R~ S; S = decay S + K^ v. */
  template <bool STATE> WKV6_DEVICE void pass_state(float (&o)[TILES][2][4], const left_fragment<P> (&v)[TILES]) {
#pragma unroll
    for (int block = 0; block < blocks; block++) {
      left_fragment<P> queries;
      right_fragment<P> keys[2];
      uint32_t bits[4];
      if (!STATE) load_rows<P>(queries, shared(at_shared::queries + block * tile_bytes<P>), places);
      load_columns<P>(keys, shared(at_shared::keys + block * tile_bytes<P>), places);
      load_words<4>(shared(at_shared::decay + (block * 16 + at.p * 4) * 4), bits);
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        if constexpr (!STATE) {
          right_fragment<P> of_state[2];
#pragma unroll
          for (int n = 0; n < 2; n++) {
            const float (&x)[4] = state[m][block * 2 + n];
            put_pair(of_state[0], n, x[0], x[1]), put_pair(of_state[1], n, x[2], x[3]);
          }
          multiply(o[m][0], queries, of_state[0]), multiply(o[m][1], queries, of_state[1]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
          float (&x)[4] = state[m][block * 2 + n];
#pragma unroll
          for (int i = 0; i < 4; i++) x[i] *= float_of_bits(bits[n * 2 + i % 2]);
          multiply(x, v[m], keys[n]);
        }
      }
    }
  }

  /* o += A v, and out. `row`: of token g of the chunk; `left`: tokens from that one on. */
  WKV6_DEVICE void finish(float (&o)[TILES][2][4], const left_fragment<P> (&v)[TILES], char *row, int left) const {
    left_fragment<P> x;
    load_scores(x);
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      if (!has_columns(m)) break;
      const right_fragment<P> b[2] = {columns_of<P>(v[m], 0), columns_of<P>(v[m], 1)};
      if (any_lane(not_finite(v[m])))
        multiply_selected<false>(o[m], x, b, at);
      else
        multiply(o[m][0], x, b[0]), multiply(o[m][1], x, b[1]);
      const float scale = static_cast<float>(p.scale);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float out[4] = {o[m][0][half * 2] * scale,
                              o[m][0][half * 2 + 1] * scale,
                              o[m][1][half * 2] * scale,
                              o[m][1][half * 2 + 1] * scale};
        store_row(row + m * 16 * a.o.channel_step + half * 8 * a.o.row_step, a.o, half * 8 < left, out, at);
      }
    }
  }

  /* All but the chunks ahead of the next one have come, and every warp is here. (With one stage, at the end of a chunk
   * there is nothing to wait for but the warps.) */
  WKV6_DEVICE void await_next() const {
    if (a.slots == 3)
      copy_async_wait_for<1>();
    else
      copy_async_wait_for<0>();
    block_barrier();
  }

  template <bool STATE> WKV6_DEVICE void run() {
    int64_t t = begin, ahead = begin; /* of the chunk at hand, and of the one that is fetched next */
    const auto fetch_next = [&](int slot) {
      if (ahead < end) fetch<STATE>(slot, static_cast<int>(end - ahead < chunk_tokens ? end - ahead : chunk_tokens));
      copy_async_commit();
      ahead += chunk_tokens;
    };
    for (int i = 0; i < a.slots; i++) fetch_next(i);
    start<STATE>();
    char *o_row = STATE ? nullptr
                        : static_cast<char *>(p.o.data) + row_offset(p.o, s, begin + at.g) * element_bytes(p.o.dtype) +
                              (column + channel_tile(0) * 16) * a.o.channel_step;
    const bool checkpoints = !STATE && p.checkpoints.dtype != WKV6_ABSENT;
    int64_t until_checkpoint = p.segment;
    if (a.slots > 1) await_next();
    int slot = 0;
#pragma unroll 1
    for (; t < end; t += chunk_tokens) {
      const char *const rows = stage(slot);
      if (a.slots == 1) await_next();
      const int left = static_cast<int>(end - t < chunk_tokens ? end - t : chunk_tokens);
      if (checkpoints && until_checkpoint == 0) {
        store_checkpoint();
        saved++;
        until_checkpoint = p.segment;
      }
      until_checkpoint -= chunk_tokens;
#pragma unroll
      for (int m = 0; m < TILES; m++) prepare<STATE>(rows, m, left);
      block_barrier(); /* operands */
      if (!STATE) scores();
      float o[TILES][2][4];
      left_fragment<P> v[TILES];
#pragma unroll
      for (int m = 0; m < TILES; m++) {
#pragma unroll
        for (int i = 0; i < 8; i++) o[m][i / 4][i % 4] = 0;
        load_operand<P, K>(v[m], rows, a.v, read, channel_tile(m));
      }
      pass_state<STATE>(o, v);
      await_next(); /* scores; operands and rows are used; the next chunk's rows are here */
      fetch_next(slot);
      if (!STATE) {
        finish(o, v, o_row, left - at.g);
        o_row += chunk_tokens * a.o.row_step;
      }
      slot = slot + 1 == a.slots ? 0 : slot + 1;
    }
    if (!STATE && end == s.length && p.final_state.dtype != WKV6_ABSENT) store_final();
    if (STATE) store_span();
  }

  /* For the scan: what the span makes of no state at all, and how much it forgets. */
  WKV6_DEVICE void store_span() {
    saved += a.span_segments - 1;
    store_checkpoint();
    if (at.high || column) return;
    float *const to = a.span_decays + (saved * p.H + s.h) * K;
#pragma unroll
    for (int m = 0; m < TILES; m++) store_global(to + channel_tile(m) * 16 + at.g + at.odd * 8, sum_w[m]);
  }
};

template <int K, operand P, int TILES, bool STATE> WKV6_DEVICE void run_block(const chunk_forward_arguments &a) {
  const unsigned slice = block_index() % a.slices, of_head = block_index() / a.slices;
  const int span = static_cast<int>(of_head % a.spans);
  const unsigned heads = static_cast<unsigned>(a.p.H), head = of_head / a.spans;
  const sequence s = sequence_of(a.p, head / heads, head % heads);
  const int64_t begin = span * a.span, end = s.length - begin < a.span ? s.length : begin + a.span;
  if (STATE && end >= s.length) return;                /* nobody goes on from the last one's */
  if (!STATE && span > 0 && begin >= s.length) return; /* an empty sequence has its final state to write */
  chunk_forward_block<K, P, TILES>(a, s, static_cast<int64_t>(slice) * K, span, begin, end).template run<STATE>();
}

template <int K, operand P, int TILES>
__global__ void __launch_bounds__(chunk_threads<K, TILES>, chunk_blocks<K, TILES>)
    wkv6_forward_chunk(const __grid_constant__ chunk_forward_arguments a) {
  run_block<K, P, TILES, false>(a);
}

/* The state that each span but the last leaves, from zeros. */
template <int K, operand P, int TILES>
__global__ void __launch_bounds__(chunk_threads<K, TILES>, chunk_blocks<K, TILES>)
    wkv6_state_chunk(const __grid_constant__ chunk_forward_arguments a) {
  run_block<K, P, TILES, true>(a);
}

#endif
