# SPDX-License-Identifier: Apache-2.0
"""Strides: any view gives bit for bit what a contiguous copy gives."""

import pytest
import torch
from cases import LAYOUTS, NAMES, Case, Problem, lay_out, make
from oracle import answer, call, inputs

import rwkv6_ops

CASE = Case("layout", B=2, T=19, H=3, K=16, V=16)


def contiguous(problem: Problem) -> Problem:
    for name in (*NAMES, "grad_o", "grad_final_state"):
        setattr(problem, name, getattr(problem, name).contiguous())
    return problem


def assert_same(problem: Problem) -> None:
    """`problem` gives what it gives when every tensor is contiguous."""
    got = answer(rwkv6_ops.wkv6, problem)
    want = answer(rwkv6_ops.wkv6, contiguous(problem))
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.final_state, want.final_state)
    for name in NAMES:
        assert torch.equal(got.gradients[name], want.gradients[name]), name


@pytest.mark.parametrize("name", [*NAMES, "grad_o", "grad_final_state"])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_one_tensor_in_another_layout(layout: str, name: str, isa: str):
    problem = make(CASE)
    setattr(problem, name, lay_out(getattr(problem, name), layout))
    assert not getattr(problem, name).is_contiguous()
    assert_same(problem)


def test_r_k_v_w_from_one_split(isa: str):
    """CASES 12, reported against flash-linear-attention: the four parts of one [B, T, 4C] projection."""
    B, T, C = 2, 19, 48
    projection = torch.randn(B, T, 4 * C, generator=torch.Generator().manual_seed(0)).requires_grad_()
    problem = make(CASE)
    problem.r, problem.k, problem.v, problem.w = (x.view(B, T, 3, 16) for x in projection.split(C, dim=-1))
    problem.w = -problem.w.exp()
    o, _ = call(rwkv6_ops.wkv6, problem, inputs(problem))
    copies = make(CASE)
    copies.r, copies.k, copies.v, copies.w = (getattr(problem, n).contiguous() for n in "rkvw")
    o2, _ = call(rwkv6_ops.wkv6, copies, inputs(copies))
    assert torch.equal(o, o2)
    got, want = (torch.autograd.grad(y, projection, problem.grad_o, retain_graph=True)[0] for y in (o, o2))
    assert torch.equal(got, want)


def test_state_from_a_tensor_of_all_layers(isa: str):
    """CASES 12, Hugging Face's cache: state[..., layer], so the innermost stride is the number of layers."""
    problem = make(CASE)
    cache = torch.full((*problem.initial_state.shape, 5), float("nan"))
    cache[..., 3] = problem.initial_state
    problem.initial_state = cache[..., 3]
    before = cache.clone()
    assert_same(problem)
    assert torch.equal(cache.nan_to_num(0.0), before.nan_to_num(0.0))


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_tensors_at_any_alignment(offset: int, isa: str):
    problem = make(CASE)
    for name in (*NAMES, "grad_o", "grad_final_state"):
        x = getattr(problem, name)
        base = torch.full((x.numel() + offset,), float("nan"))
        base[offset:] = x.flatten()
        setattr(problem, name, base[offset:].view_as(x))
    assert_same(problem)


@pytest.mark.parametrize("name", ["r", "k", "v", "w", "initial_state", "grad_o"])
def test_heads_or_batches_may_share_memory(name: str, isa: str):
    """An input expanded along heads and batch: two zero strides."""
    problem = make(CASE)
    x = getattr(problem, name)
    one = x[:1, :1] if name == "initial_state" else x[:1, :, :1]
    setattr(problem, name, one.expand_as(x))
    assert_same(problem)


def test_dimensions_of_size_one_may_have_any_stride(isa: str):
    problem = make(Case("ones", B=1, T=1, H=1, K=4, V=4))
    for name in (*NAMES, "grad_o", "grad_final_state"):
        x = getattr(problem, name)
        strides = [7919 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        setattr(problem, name, x.as_strided(x.shape, strides))
    assert_same(problem)


def test_gradients_of_a_view_reach_its_base(isa: str):
    problem = make(CASE)
    base = problem.k.transpose(1, 2).contiguous().requires_grad_()
    problem.k = base.transpose(1, 2)
    o, _ = call(rwkv6_ops.wkv6, problem, inputs(problem))
    (got,) = torch.autograd.grad(o, base, problem.grad_o)
    want = answer(rwkv6_ops.wkv6, contiguous(make(CASE)), "o").gradients["k"]
    assert torch.equal(got.transpose(1, 2), want)
