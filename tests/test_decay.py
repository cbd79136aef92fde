# SPDX-License-Identifier: Apache-2.0
"""Decays: any strength at full accuracy, raw decays that overflow, and what a NaN or an infinity may reach.

The decays of the table itself run in test_forward.py and test_gradients.py.
"""

import pytest
import torch
from cases import BY_NAME, NAMES, Case, make
from oracle import answer, assert_close, assert_forward, assert_gradients, call, in_float64, inputs, true_answer

import rwkv6_ops
from rwkv6_ops import reference

INF = float("inf")
NAN = float("nan")


@pytest.mark.parametrize("decay", [-1e-6, -1e-4, -1e-3, 0.0])
def test_weak_decay_over_8192_tokens(decay: float, isa: str):
    """exp(w) rounded to float32 is off by up to 3e-8 in every token alike, which adds up to 5e-5 here."""
    problem = make(Case("long", T=8192, H=1, K=8, V=8))
    problem.w = torch.full_like(problem.w, decay)
    o, final_state = call(rwkv6_ops.wkv6, problem, inputs(problem))
    want_o, want_state = call(reference.wkv6, exact := in_float64(problem), inputs(exact))
    # 2e-6: the sums are longer than those that the table's tolerance is for. Without a fused multiply-add decay * S is
    # rounded by itself, and just below decay = 1 always the same way.
    tolerance = 1e-5 if isa == "generic" else 2e-6
    assert_close("o", o, want_o, tolerance)
    assert_close("final_state", final_state, want_state, tolerance)


@pytest.mark.parametrize(
    "decay", [-0.1, -0.69, -0.71, -1.0, -5.0, -10.0, -17.0, -20.0, -50.0, -86.0, -88.0, -318.0, -1e30]
)
def test_one_decay_everywhere(decay: float, isa: str):
    problem = make(Case("constant", T=40, K=16, V=16))
    problem.w = torch.full_like(problem.w, decay)
    got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
    assert_forward(got.o, got.final_state, want)
    assert_gradients(got.gradients, want)


@pytest.mark.parametrize("x", [-INF, -200.0, -88.0, -20.0, 0.0, 4.4, 6.0, 80.0])
def test_one_raw_decay_everywhere(x: float, isa: str):
    problem = make(Case("constant raw", T=40, K=16, V=16, raw=True))
    problem.w = torch.full_like(problem.w, x)
    got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
    assert_forward(got.o, got.final_state, want)
    # exp(x) in float32 is off by 1e-7 * exp(x), and so is the log decay: 1e-5 at exp(4.4) = 81.
    assert_close("gradient of w", got.gradients.pop("w"), want.gradients.pop("w"), 2e-5)
    assert_gradients(got.gradients, want)


@pytest.mark.parametrize("x", [89.0, 200.0, 3e38, INF])
def test_a_raw_decay_that_overflows_forgets_everything_and_gets_gradient_zero(x: float, isa: str):
    problem = make(Case("overflow", T=20, K=16, V=16, raw=True))
    problem.w[:, 3::5, :, ::2] = x
    got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
    assert_forward(got.o, got.final_state, want)
    assert_gradients(got.gradients, want)
    assert torch.equal(got.gradients["w"][:, 3::5, :, ::2], torch.zeros(1, 4, 2, 8))


def test_the_gradient_of_an_overflowed_raw_decay_is_zero_beside_nan(isa: str):
    """Nothing passes a decay of exactly 0: its gradient is 0 whatever it would have been multiplied by."""
    problem = make(Case("overflow beside NaN", T=19, H=1, raw=True))
    problem.w[0, 3] = INF
    problem.r[0, 5] = NAN
    got = answer(rwkv6_ops.wkv6, problem)
    assert (got.gradients["w"][0, 3] == 0).all()
    assert got.gradients["w"][0, 4].isnan().all()


def test_a_log_decay_of_minus_infinity_gets_what_the_loop_gives_it_beside_nan(isa: str):
    """0 times what is beside it: 0, or NaN where that is NaN or infinite."""
    problem = make(Case("forget beside NaN", T=19, H=1))
    problem.w[0, 3] = -INF
    problem.r[0, 5] = NAN
    got, want = answer(rwkv6_ops.wkv6, problem).gradients["w"], true_answer(problem).gradients["w"]
    assert torch.equal(got[0, 3:].isnan(), want[0, 3:].isnan())


def test_a_log_decay_of_minus_infinity_gets_gradient_zero(isa: str):
    problem = make(Case("forget", T=20, K=16, V=16))
    problem.w[:, 3::5, :, ::2] = -INF
    got = answer(rwkv6_ops.wkv6, problem)
    assert_gradients(got.gradients, true_answer(problem))
    assert torch.equal(got.gradients["w"][:, 3::5, :, ::2], torch.zeros(1, 4, 2, 8))


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_infinite_decays_in_half_precision(dtype: torch.dtype, layout: str, isa: str):
    for raw in (False, True):
        problem = make(Case("forget half", T=20, K=16, V=16, decays="forget", raw=raw, layout=layout))
        problem.w = problem.w.to(dtype)
        got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
        assert_forward(got.o, got.final_state, want)
        assert_gradients(got.gradients, want)


def test_growth_follows_float64(isa: str):
    """w > 0 is no decay, but nothing forbids it."""
    problem = make(Case("growth", T=33, K=8, V=8))
    problem.w = 0.3 * torch.rand_like(problem.w)
    got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
    assert_forward(got.o, got.final_state, want)
    assert_gradients(got.gradients, want)


def poisoned(name: str, poison: float, **options: object):
    """A problem, and the same with one element of one input replaced, in batch row 1, token 9 of 19, head 1."""
    case = Case("poison", B=3, T=19, H=3, K=11, V=13, **options)
    clean, dirty = make(case), make(case)
    getattr(dirty, name)[1, 9, 1, 6] = poison
    return clean, dirty


OTHERS = [(b, h) for b in range(3) for h in range(3) if (b, h) != (1, 1)]


@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("name", ["r", "k", "v", "w", "grad_o"])
def test_nan_stays_in_its_batch_row_and_head(name: str, poison: float, isa: str):
    clean, dirty = poisoned(name, poison)
    want, got = answer(rwkv6_ops.wkv6, clean), answer(rwkv6_ops.wkv6, dirty)
    for b, h in OTHERS:
        assert torch.equal(got.o[b, :, h], want.o[b, :, h])
        assert torch.equal(got.final_state[b, h], want.final_state[b, h])
        assert torch.equal(got.gradients["initial_state"][b, h], want.gradients["initial_state"][b, h])
        for x in "rkvw":
            assert torch.equal(got.gradients[x][b, :, h], want.gradients[x][b, :, h]), x
    assert torch.equal(got.gradients["u"][::2], want.gradients["u"][::2])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["r", "k", "v", "w"])
def test_nan_never_reaches_an_earlier_output(name: str, reverse: bool, isa: str):
    clean, dirty = poisoned(name, NAN, reverse=reverse)
    earlier = slice(10, None) if reverse else slice(0, 9)
    want, got = answer(rwkv6_ops.wkv6, clean), answer(rwkv6_ops.wkv6, dirty)
    assert torch.equal(got.o[:, earlier], want.o[:, earlier])
    assert torch.equal(got.gradients["r"][:, earlier], want.gradients["r"][:, earlier])


def test_nan_in_r_reaches_the_output_of_its_token_only(isa: str):
    clean, dirty = poisoned("r", NAN)
    want, got = answer(rwkv6_ops.wkv6, clean), answer(rwkv6_ops.wkv6, dirty)
    others = [t for t in range(19) if t != 9]
    assert got.o[1, 9, 1].isnan().all()
    assert torch.equal(got.o[:, others], want.o[:, others])
    assert torch.equal(got.final_state, want.final_state)
    assert torch.equal(got.gradients["r"], want.gradients["r"])


def test_nan_in_v_stays_in_its_channel(isa: str):
    clean, dirty = poisoned("v", NAN)
    want, got = answer(rwkv6_ops.wkv6, clean), answer(rwkv6_ops.wkv6, dirty)
    others = [j for j in range(13) if j != 6]
    assert torch.equal(got.o[..., others], want.o[..., others])
    assert torch.equal(got.final_state[..., others], want.final_state[..., others])
    assert torch.equal(got.gradients["v"], want.gradients["v"])


def test_nan_in_one_sequence_never_reaches_the_next(isa: str):
    case = Case("poisoned sequence", T=19, K=11, V=13, cu_seqlens=(0, 6, 12, 19))
    clean, dirty = make(case), make(case)
    for name in "rkvw":
        getattr(dirty, name)[0, 8, 0, 3] = NAN
    dirty.grad_final_state[1] = INF
    want, got = answer(rwkv6_ops.wkv6, clean), answer(rwkv6_ops.wkv6, dirty)
    others = [*range(6), *range(12, 19)]
    assert torch.equal(got.o[:, others], want.o[:, others])
    assert torch.equal(got.final_state[::2], want.final_state[::2])
    for name in "rkvw":
        assert torch.equal(got.gradients[name][:, others], want.gradients[name][:, others])
    assert torch.equal(got.gradients["initial_state"][::2], want.gradients["initial_state"][::2])


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", [*NAMES, "grad_o", "grad_final_state"])
def test_nan_and_infinity_reach_only_what_the_recurrence_reaches(name: str, poison: float, isa: str):
    """Wherever the float64 loop is finite, so is the operator, and as close to it as ever."""
    problem = make(Case("reach", T=67, H=1, K=11, V=13))
    x = getattr(problem, name)
    x[(0,) * (x.dim() - 2) + (x.shape[-2] // 2, 6)] = poison
    if x.dim() == 4 and x.shape[1] == 67:
        x[0, 40, 0, 6] = poison
    got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)

    def compare(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        finite = want.isfinite()
        assert got[finite].isfinite().all(), (
            f"{what}: {(~got[finite].isfinite()).sum()} elements are not finite, expected none"
        )
        assert_close(what, got[finite], want[finite], 2e-6)

    compare("o", got.o, want.o)
    compare("final_state", got.final_state, want.final_state)
    for n in NAMES:
        compare(f"gradient of {n}", got.gradients[n], want.gradients[n])


def test_the_reference_loop_itself_passes_gradcheck():
    problem = in_float64(make(Case("reference", T=4, K=2, V=3, cu_seqlens=(0, 3, 3, 4), raw=True, reverse=True)))
    tensors = [x.requires_grad_() for x in inputs(problem)]
    assert torch.autograd.gradcheck(lambda *x: call(reference.wkv6, problem, x), tensors)


@pytest.mark.parametrize("name", ["forget-raw", "forget-log", "mixed-raw"])
def test_the_reference_loop_itself_is_finite_under_infinite_decay(name: str):
    want = true_answer(make(BY_NAME[name]))
    assert all(x.isfinite().all() for x in (want.o, want.final_state, *want.gradients.values()))
