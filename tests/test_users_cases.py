# SPDX-License-Identifier: Apache-2.0
"""What users of other WKV kernels have run into, each report a test of its own, by its issue number.

Reports that have a test elsewhere: wrong strides (test_layouts.py), an empty sequence (test_varlen.py), one state for
the whole batch (test_state.py), any subset of gradients (test_gradients.py).
"""

import pytest
import torch
from cases import NAMES, Case, Problem, make
from oracle import (
    Answer,
    answer,
    assert_close,
    assert_forward,
    assert_gradients,
    call,
    in_float64,
    inputs,
    true_answer,
    true_answer_of,
    true_forward_of,
)

import rwkv6_ops
from rwkv6_ops import reference


def assert_answers(got: Answer, want: Answer) -> None:
    assert_forward(got.o, got.final_state, want)
    assert_gradients(got.gradients, want)


def assert_right(problem: Problem, through: str = "both") -> None:
    assert_answers(answer(rwkv6_ops.wkv6, problem, through), true_answer(problem, through))


def test_w_that_is_no_log_decay_overflows_where_float64_leaves_the_range_of_float32(isa: str):
    """flash-linear-attention #11: sigmoid outputs passed as w. The state grows by exp(w) > 1 a token."""
    problem = make(Case("sigmoid", B=2, T=256, H=4, K=64, V=64))
    problem.w = torch.randn(problem.w.shape, generator=torch.Generator().manual_seed(0)).sigmoid()
    o, final_state = call(rwkv6_ops.wkv6, problem, inputs(problem))
    want, want_state = call(reference.wkv6, in_float64(problem), inputs(in_float64(problem)))
    inside = slice(0, 120)  # no |o| above 1e36 there
    assert want[:, inside].abs().max() < 1e36 < want.abs().max()
    for t in range(0, 120, 8):
        assert_close(f"o at {t}", o[:, t], want[:, t], 2e-5)
    assert not final_state[want_state.abs() > 1e39].isfinite().any()


@pytest.mark.parametrize("state", ["absent", "not requiring grad"])
def test_backward_without_a_state_to_train(state: str, isa: str):
    """flash-linear-attention #48, #102: backward crashed without an initial state."""
    problem = make(Case("no state to train", B=2, T=40, K=16, V=16, initial_state=state != "absent"))
    leaves = [x.requires_grad_(i < 5) for i, x in enumerate(inputs(problem))]
    o, _ = call(rwkv6_ops.wkv6, problem, leaves)
    gradients = torch.autograd.grad(o, leaves[:5], problem.grad_o)
    assert_gradients(dict(zip(NAMES, gradients, strict=False)), true_answer(problem, "o"))


def test_gradients_of_the_sum_of_the_final_state(isa: str):
    """transformers #23979, RWKV-infctx-trainer #64 and #102: the state's gradients were absent."""
    problem = make(Case("state loss", B=2, T=40, K=16, V=16))
    problem.grad_final_state = torch.ones_like(problem.grad_final_state)
    got = answer(rwkv6_ops.wkv6, problem, "final_state").gradients
    assert not got["r"].any()
    assert not got["u"].any()
    assert got["w"][:, -1].all()
    assert got["initial_state"].any()
    assert_right(problem, "final_state")


def test_sequences_longer_than_any_compiled_limit(isa: str):
    """Vision-RWKV #13, #20, #44, #46-48, RWKV-LM #233, #262: illegal access when T passed the compiled T_MAX."""
    case = Case("B8 T488", B=8, T=488, H=4, K=64, V=64, initial_state=False, raw=True)
    assert_answers(answer(rwkv6_ops.wkv6, make(case)), true_answer_of(case))
    case = Case("T10000", T=10000, H=1, K=16, V=16, raw=True)
    problem = make(case)
    assert_forward(*call(rwkv6_ops.wkv6, problem, inputs(problem)), true_forward_of(case))


@pytest.mark.parametrize("decay", [-20.0, -50.0, -318.0])
def test_strong_decay_at_the_start_of_a_chunk(decay: float, isa: str):
    """flash-linear-attention #77, #78: NaN in backward, from the difference of a cumulative sum and its reference."""
    problem = make(Case("strong row", T=64, H=2, K=32, V=32))
    problem.w[:, ::16] = decay
    assert_right(problem)


def test_bfloat16_gradients_of_the_decay(isa: str):
    """flash-linear-attention #29, #36: dw off by 8e-2; the limit in that report is 5e-3, rounding alone gives 2e-3."""
    case = Case("bf16 dw", B=2, T=1024, H=4, K=64, V=64, dtypes="bf16 bf16 bf16 bf16 bf16")
    got, want = answer(rwkv6_ops.wkv6, make(case)), true_answer_of(case)
    assert_close("gradient of w", got.gradients["w"], want.gradients["w"], 2.5e-3)


@pytest.mark.parametrize(("T", "K", "V"), [(40, 8, 8), (40, 64, 16), (16, 64, 64), (500, 256, 256), (500, 288, 288)])
def test_small_unequal_and_wide_heads(T: int, K: int, V: int, isa: str):
    """flash-linear-attention #18, #22, #556 and its wide heads: sizes that its kernels refused or took wrongly."""
    case = Case("head sizes", T=T, H=1, K=K, V=V, scale=K**-0.5)
    assert_answers(answer(rwkv6_ops.wkv6, make(case)), true_answer_of(case))


def test_more_sequences_times_heads_than_65535(isa: str):
    """flash-linear-attention #172, #1097: a grid dimension of a CUDA launch."""
    case = Case("grid", B=10923, T=2, H=6, K=16, V=16)
    problem = make(case)
    assert_forward(*call(rwkv6_ops.wkv6, problem, inputs(problem)), true_forward_of(case))


def test_heads_before_time_is_an_error():
    """RWKV-PEFT: [B, H, T, D] passed where [B, T, H, D] is expected computes nonsense unless u's shape is checked."""
    r = torch.randn(1, 4, 16, 64)
    with pytest.raises(ValueError, match=r"u: shape \(4, 64\), expected r's \[H, K\] = \(16, 64\)"):
        rwkv6_ops.wkv6(r, r, r, -r.exp(), torch.randn(4, 64))


def test_shapes_that_aborted_the_process_are_python_exceptions():
    """Vision-RWKV #25 and asserts in C: channels not divisible by heads, u of another shape, heads of size 0."""
    wide, state = torch.randn(1, 4, 65), torch.zeros(1, 2, 32, 32)
    with pytest.raises(ValueError, match="receptance"):
        rwkv6_ops.rwkv6_linear_attention_cpu(wide, wide, wide, wide, torch.randn(2, 32), state)
    r = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="u: shape"):
        rwkv6_ops.wkv6(r, r, r, r, torch.randn(2, 9))
    none = torch.randn(1, 4, 2, 0)
    with pytest.raises(ValueError, match="r: shape"):
        rwkv6_ops.wkv6(none, none, r, none, torch.randn(2, 0))
    with pytest.raises(ValueError, match="v: shape"):
        rwkv6_ops.wkv6(r, r, none, r, torch.randn(2, 8))


def test_a_float32_state_with_bfloat16_inputs_is_not_updated_in_secret(isa: str):
    """RWKV-infctx-trainer: a converted copy was updated, the caller's state stayed as it was without a word."""
    problem = make(Case("bf16 with state", T=20, K=32, V=32, dtypes="bf16 bf16 bf16 bf16 bf16"))
    before = problem.initial_state.clone()
    o, final_state = call(rwkv6_ops.wkv6, problem, inputs(problem))
    assert final_state.dtype == torch.float32
    assert torch.equal(problem.initial_state, before)
    assert_forward(o, final_state, true_answer(problem))


def test_state_tuning_where_only_the_state_is_trained(isa: str):
    """RWKV-LM #246: "element does not require grad" when the model is frozen."""
    problem = make(Case("state tuning", B=2, T=40, K=16, V=16))
    state = problem.initial_state.requires_grad_()
    o, _ = call(rwkv6_ops.wkv6, problem, [*inputs(problem)[:5], state])
    (o * problem.grad_o).sum().backward()
    assert_gradients({"initial_state": state.grad}, true_answer(problem, "o"))


@pytest.mark.parametrize("B", [0, 2])
@pytest.mark.parametrize("T", [0, 1, 2, 3])
def test_the_shortest_sequences_and_the_emptiest_batch(T: int, B: int, isa: str):
    """BlinkDL's kernel wrote out of bounds at T = 1."""
    assert_right(make(Case("short", B=B, T=T, H=3, K=16, V=16)))


def test_nothing_compiles_at_import_or_at_first_use(python, tmp_path):
    """Missing ninja, failing JIT builds, Windows: it starts no program and writes no file."""
    script = """
import subprocess, sys, torch
events = []
programs = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
sys.addaudithook(lambda event, args: events.append((event, args)) if event in programs else None)
import rwkv6_ops
x = torch.randn(1, 4, 2, 8, requires_grad=True)
o, _ = rwkv6_ops.wkv6(x, x, x, -x.exp(), x[0, 0])
o.sum().backward()
assert not events, events
assert "torch.utils.cpp_extension" not in sys.modules
"""
    run = python(script)
    assert run.returncode == 0, run.stderr
    assert not list(tmp_path.iterdir())
