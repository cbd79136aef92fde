# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention's two calls, with its defaults and layouts, on its own test cases at its own tolerances."""

import pytest
import torch
import torch.nn.functional as F
from cases import Case, make
from oracle import assert_close, assert_forward, inputs, true_answer
from torch import Tensor

import rwkv6_ops
from rwkv6_ops import reference

CALLS = [rwkv6_ops.fused_recurrent_rwkv6, rwkv6_ops.chunk_rwkv6]

# (dtype, B, T, H, D, divisor of the log decay)
BATCHES = [
    *((torch.float16, 1, 15, 2, 60, 1), (torch.float16, 3, 60, 3, 64, 0.1), (torch.float16, 3, 64, 2, 64, 1)),
    *((torch.float16, 4, 500, 3, 256, 1), (torch.float16, 4, 1000, 4, 64, 10), (torch.float16, 4, 2048, 4, 64, 1)),
    *((torch.float16, 4, 2048, 4, 256, 1), (torch.float32, 1, 64, 2, 32, 1)),
]
SEQUENCES = [(64, (0, 15)), (64, (0, 256, 500, 1000)), (100, (0, 15, 100, 300, 1200, 2000))]

OUTPUT, GRADIENT = 0.004, 0.005  # RMS(error) / RMS(reference): FLA's limits; relative L2 is the same number


def random_problem(dtype: torch.dtype, B: int, T: int, H: int, D: int, divisor: float, N: int) -> list[Tensor]:
    """r, k, v, w, u, the initial state and the gradients of the two outputs."""
    g = torch.Generator().manual_seed(42)
    r, k, v, w, do = (torch.randn(B, T, H, D, generator=g) for _ in range(5))
    u, h0, dht = (
        torch.randn(H, D, generator=g),
        torch.randn(N, H, D, D, generator=g),
        torch.randn(N, H, D, D, generator=g),
    )
    w = F.logsigmoid(w) / divisor
    return [*(x.to(dtype) for x in (r, k, v, w, u)), h0, do.to(dtype), dht]


def u_gradient(r: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Tensor:
    """Equation (8) of docs/wkv6.md: no state in it, so the whole batch costs nothing."""
    r, k, v, do = (x.double() for x in (r, k, v, do))
    return ((v * do).sum(-1, keepdim=True) * r * k).sum((0, 1))


def check(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name in got:
        assert_close(name, got[name], want[name], OUTPUT if name == "o" else GRADIENT)


@pytest.mark.parametrize("case", BATCHES, ids=str)
@pytest.mark.parametrize("op", CALLS)
def test_its_test_cases(op, case: tuple):
    """The loop runs on the last head of the last batch row only: on all of them it would take minutes."""
    *tensors, do, dht = random_problem(*case, N=case[1])
    leaves = [x.requires_grad_() for x in tensors]
    o, ht = op(*leaves[:5], scale=1.0, initial_state=leaves[5], output_final_state=True)
    gradients = torch.autograd.grad((o, ht), leaves, (do, dht))

    one = [x[-1:, :, -1:].detach().double().requires_grad_() for x in leaves[:4]]
    h0 = leaves[5][-1:, -1:].detach().double().requires_grad_()
    want_o, want_ht = reference.wkv6(*one, leaves[4][-1:].detach().double(), initial_state=h0, output_final_state=True)
    starts = (do[-1:, :, -1:].double(), dht[-1:, -1:].double())
    want = torch.autograd.grad((want_o, want_ht), [*one, h0], starts)

    check(
        {"o": o[-1:, :, -1:], **{f"d{n}": x[-1:, :, -1:] for n, x in zip("rkvw", gradients, strict=False)}},
        {"o": want_o, **{f"d{n}": x for n, x in zip("rkvw", want, strict=False)}},
    )
    check({"ht": ht[-1:, -1:], "dh0": gradients[5][-1:, -1:]}, {"ht": want_ht, "dh0": want[4]})
    check({"du": gradients[4]}, {"du": u_gradient(*(x.detach() for x in leaves[:3]), do)})


@pytest.mark.parametrize("case", SEQUENCES, ids=str)
@pytest.mark.parametrize("op", CALLS)
def test_its_test_cases_of_several_sequences(op, case: tuple):
    D, offsets = case
    *tensors, do, dht = random_problem(torch.float16, 1, offsets[-1], 4, D, 1, N=len(offsets) - 1)
    leaves = [x.requires_grad_() for x in tensors]
    options = {"output_final_state": True, "cu_seqlens": torch.tensor(offsets)}
    o, ht = op(*leaves[:5], scale=1.0, initial_state=leaves[5], **options)
    got = torch.autograd.grad((o, ht), leaves, (do, dht))

    one = [x[:, :, -1:].detach().double().requires_grad_() for x in leaves[:4]]
    h0 = leaves[5][:, -1:].detach().double().requires_grad_()
    want_o, want_ht = reference.wkv6(*one, leaves[4][-1:].detach().double(), initial_state=h0, **options)
    want = torch.autograd.grad((want_o, want_ht), [*one, h0], (do[:, :, -1:].double(), dht[:, -1:].double()))
    check(
        {"o": o[:, :, -1:], **{f"d{n}": x[:, :, -1:] for n, x in zip("rkvw", got, strict=False)}},
        {"o": want_o, **{f"d{n}": x for n, x in zip("rkvw", want, strict=False)}},
    )
    check({"ht": ht[:, -1:], "dh0": got[5][:, -1:]}, {"ht": want_ht, "dh0": want[4]})
    check({"du": got[4]}, {"du": u_gradient(*(x.detach() for x in leaves[:3]), do)})


@pytest.mark.parametrize("chunk_size", [None, 16, 32, 64])
def test_chunk_size_changes_speed_only(chunk_size: int | None):
    problem = make(Case("chunk size", B=1, T=64, H=2, K=32, V=32))
    o, ht = rwkv6_ops.chunk_rwkv6(
        *inputs(problem)[:5],
        scale=1.0,
        initial_state=problem.initial_state,
        output_final_state=True,
        chunk_size=chunk_size,
    )
    assert_forward(o, ht, true_answer(problem))


@pytest.mark.parametrize("op", CALLS)
def test_scale_none_is_one_over_the_root_of_the_key_size(op):
    problem = make(Case("scale none", B=2, T=17, K=16, V=8, scale=0.25))
    tensors, want = inputs(problem), true_answer(problem)
    for options in ({}, {"scale": None}):
        o, ht = op(*tensors[:5], initial_state=tensors[5], output_final_state=True, **options)
        assert_forward(o, ht, want)


@pytest.mark.parametrize("op", CALLS)
def test_positional_arguments_in_its_order(op):
    problem = make(Case("positional", B=2, T=17, scale=0.5))
    o, ht = op(*inputs(problem)[:5], 0.5, problem.initial_state, True)
    assert_forward(o, ht, true_answer(problem))


def test_fused_recurrent_takes_reverse_and_offsets_by_position():
    problem = make(Case("positional reverse", T=17, reverse=True, cu_seqlens=(0, 9, 17)))
    o, ht = rwkv6_ops.fused_recurrent_rwkv6(
        *inputs(problem)[:5], 1.0, problem.initial_state, True, True, problem.cu_seqlens
    )
    assert_forward(o, ht, true_answer(problem))


def test_chunk_takes_offsets_by_position():
    problem = make(Case("positional offsets", T=17, cu_seqlens=(0, 9, 17)))
    o, ht = rwkv6_ops.chunk_rwkv6(*inputs(problem)[:5], 1.0, problem.initial_state, True, problem.cu_seqlens)
    assert_forward(o, ht, true_answer(problem))


@pytest.mark.parametrize("op", CALLS)
def test_final_state_is_none_unless_asked_for_and_float32_otherwise(op):
    problem = make(Case("final state", T=5, dtypes="bf16 bf16 bf16 bf16 bf16"))
    o, ht = op(*inputs(problem)[:5])
    assert ht is None
    assert o.dtype == torch.bfloat16
    assert op(*inputs(problem)[:5], output_final_state=True)[1].dtype == torch.float32


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", CALLS)
def test_head_first_is_the_older_layout(op, reverse: bool):
    """[B, H, T, K], as in April 2024, forward and backward; u and the states keep their shapes."""
    problem = make(Case("head first", B=2, T=21, H=3, K=16, V=8, reverse=reverse))
    r, k, v, w, u, state = inputs(problem)
    flipped = [x.transpose(1, 2).contiguous().requires_grad_() for x in (r, k, v, w)]
    options = {"scale": 1.0, "initial_state": state, "output_final_state": True, "reverse": reverse, "head_first": True}
    o, ht = op(*flipped, u, **options)
    want = true_answer(problem)
    assert_forward(o.transpose(1, 2), ht, want)
    gradients = torch.autograd.grad((o, ht), flipped, (problem.grad_o.transpose(1, 2), problem.grad_final_state))
    for name, x in zip("rkvw", gradients, strict=True):
        assert_close(f"gradient of {name}", x.transpose(1, 2), want.gradients[name], 2e-6)
