# SPDX-License-Identifier: Apache-2.0
"""wkv6_bidirectional: the float64 reference run forward and backward in time, the bonus counted once."""

import pytest
import torch
from cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, Case, make
from oracle import assert_close, in_float64, inputs
from torch import Tensor

import rwkv6_ops
from rwkv6_ops import reference

# An image of 14 x 14 patches; several images of different sizes; odd head sizes and strong decays; half precision.
CASES = [
    Case("image", B=2, T=196, H=3, K=64, V=64, raw=True),
    Case("images", T=91, H=2, K=16, V=24, cu_seqlens=(0, 5, 5, 9, 26, 91)),
    Case("odd", B=2, T=33, K=3, V=5, decays="mixed", scale=0.5),
    Case("bf16", B=2, T=65, K=32, V=32, dtypes="bf16 bf16 bf16 bf16 bf16"),
    Case("token", B=2, T=1),
    Case("none", B=2, T=0),
]


def twice(problem, leaves: list[Tensor], behind: Tensor) -> Tensor:
    """The reference, forward and then backward without bonus. The last leaf is the forward direction's state."""
    options = {"scale": problem.scale, "cu_seqlens": problem.cu_seqlens, "decay": problem.decay}
    r, k, v, w, u, state = leaves
    ahead, _ = reference.wkv6(r, k, v, w, u, initial_state=state, **options)
    back, _ = reference.wkv6(r, k, v, w, torch.zeros_like(u), initial_state=behind, reverse=True, **options)
    return ahead + back


def check(case: Case, algorithm: str = "auto", slack: float = 1) -> None:
    """Output and gradients of `case` are those of the reference in float64, within `slack` tolerances."""
    problem = make(case)
    exact = in_float64(problem)
    behind = problem.grad_final_state
    leaves = [x.detach().requires_grad_() for x in (*inputs(problem), behind)]
    truths = [x.detach().requires_grad_() for x in (*inputs(exact), exact.grad_final_state)]
    options = {"scale": problem.scale, "cu_seqlens": problem.cu_seqlens, "decay": problem.decay}
    o = rwkv6_ops.wkv6_bidirectional(
        *leaves[:5], initial_state=leaves[5], reverse_initial_state=leaves[6], algorithm=algorithm, **options
    )
    want = twice(exact, truths[:6], truths[6])
    assert o.dtype == problem.v.dtype
    assert_close("o", o, want, slack * FORWARD_TOLERANCE[o.dtype])
    gradients = torch.autograd.grad(o, leaves, problem.grad_o)
    true_gradients = torch.autograd.grad(want, truths, exact.grad_o, allow_unused=True)
    for name, got, true, leaf in zip("rkvwuhb", gradients, true_gradients, leaves, strict=True):
        true = torch.zeros_like(leaf) if true is None else true
        assert_close(f"gradient of {name}", got, true, slack * GRADIENT_TOLERANCE[got.dtype])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_reference_run_twice(case: Case, isa: str):
    check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_reference_run_twice_in_chunks_on_cuda(case: Case, cuda_chunk: str):
    check(case, slack=1.5)  # two results are rounded, and their sum


@pytest.mark.parametrize("algorithm", ["recurrent", "chunk"])
def test_it_takes_an_algorithm(algorithm: str):
    check(CASES[0], algorithm)


def test_the_bonus_is_counted_once():
    """Where the decay forgets everything at once, a token sees its neighbours and, through u, itself."""
    r = k = torch.ones(1, 3, 1, 1)
    v = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1)
    w = torch.full((1, 3, 1, 1), -float("inf"))
    o = rwkv6_ops.wkv6_bidirectional(r, k, v, w, torch.full((1, 1), 1000.0))
    assert o.flatten().tolist() == [1010.0, 10101.0, 100010.0]


def test_mirrored_input_gives_the_mirrored_output():
    problem = make(Case("mirror", B=2, T=37, H=2, K=16, V=16))
    r, k, v, w, u = inputs(problem)[:5]
    o = rwkv6_ops.wkv6_bidirectional(r, k, v, w, u)
    mirrored = rwkv6_ops.wkv6_bidirectional(*(x.flip(1) for x in (r, k, v, w)), u)
    assert_close("o", mirrored.flip(1), o, FORWARD_TOLERANCE[o.dtype])


def test_heads_before_time():
    problem = make(Case("head first", B=2, T=21, H=3, K=16, V=8))
    r, k, v, w, u = inputs(problem)[:5]
    o = rwkv6_ops.wkv6_bidirectional(r, k, v, w, u)
    flipped = rwkv6_ops.wkv6_bidirectional(*(x.transpose(1, 2).contiguous() for x in (r, k, v, w)), u, head_first=True)
    assert torch.equal(flipped, o.transpose(1, 2))


def test_wrong_arguments_are_named():
    r = torch.randn(2, 4, 3, 8)
    with pytest.raises(ValueError, match="u: shape"):
        rwkv6_ops.wkv6_bidirectional(r, r, r, r, torch.randn(3, 9))
    with pytest.raises(TypeError, match="u: NoneType, expected a torch"):
        rwkv6_ops.wkv6_bidirectional(r, r, r, r, None)
    with pytest.raises(ValueError, match=r"k: shape .*, expected \[B, H, T, K\]"):
        rwkv6_ops.wkv6_bidirectional(r, r[0], r, r, torch.randn(3, 8), head_first=True)
