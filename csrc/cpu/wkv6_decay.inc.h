/* SPDX-License-Identifier: Apache-2.0
 *
 * From w to the factors d that the recurrences multiply by, without the systematic error of rounding exp(w).
 *
 * A channel with w = -1e-4 keeps thousands of tokens, and the same rounding error of exp(w), up to 3e-8, would enter at
 * each of them: 5e-5 after 8192. So what the rounding of one factor lost goes into the next one, channel by channel:
 *     d_t = round(exp(w_t) (1 + c)),   c = (exp(w_t) (1 + c) - d_t) / d_t
 * The product of d over any range of tokens is then the product of exp(w) within two roundings, however long the range,
 * and the inner loops multiply by d as they would by exp(w). exp(w) beyond a real's precision comes from expm1. Decays
 * stronger than exp(w) = 1/2 forget before errors can add up: they take exp(w) as it is and leave no rest.
 */

/* The factor d for exp(w) = e = 1 + m; `rest` holds c of these channels. */
INLINE lanes decay_factor(lanes e, lanes m, real *rest) {
  const lanes one = broadcast(1), half = broadcast((real)0.5), c = load(rest);
  const lanes_integer weak = (m > -half) & (m < half);
  const lanes y = fma_lanes(m, c, m + c); /* exp(w) (1 + c) = 1 + y */
  const lanes rounded = one + y;
  const lanes lost = y - (rounded - one);                    /* exact: rounded - 1 is */
  store(rest, choose(weak, lost * (one - y), broadcast(0))); /* 1 - y for 1 / d: c needs few digits */
  return choose(weak, rounded, e);
}

/* A row of w, `width` a multiple of LANES: replaced by the log decay where it held raw x, and turned into d. */
static void decay_row(real *w, real *d, real *rest, int64_t width, int raw) {
  for (int64_t i = 0; i < width; i += LANES) {
    lanes x = load(w + i), e, m;
    if (raw) {
      exp_lanes(x, &e, &m);
      x = -e;
      store(w + i, x);
    }
    exp_lanes(x, &e, &m);
    store(d + i, decay_factor(e, m, rest + i));
  }
}

/* dx = dw * w where w = -exp(x), and 0 where exp(x) overflowed and nothing is left of the state, whatever that was.
 * exp_lanes() of floats stops at 2.4e38, so it is not infinity alone that tells. */
INLINE lanes gradient_of_raw(lanes grad_w, lanes w) {
  return choose(w < broadcast((real)-1e38), broadcast(0), grad_w * w);
}
