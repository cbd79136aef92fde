# SPDX-License-Identifier: Apache-2.0
"""cu_seqlens: sequences of any length behind one another are what they would be alone."""

from itertools import pairwise

import pytest
import torch
from cases import Case, make
from oracle import answer, assert_forward, assert_gradients, call, inputs, true_answer

import rwkv6_ops

OFFSETS = (0, 5, 5, 9, 26, 26, 91)
CASE = Case("varlen", T=91, H=3, K=16, V=24, cu_seqlens=OFFSETS)


@pytest.mark.parametrize("reverse", [False, True])
def test_each_sequence_is_what_it_is_alone(reverse: bool, isa: str):
    problem = make(CASE)
    problem.reverse = reverse
    r, k, v, w, u, state = inputs(problem)
    o, final_state = call(rwkv6_ops.wkv6, problem, [r, k, v, w, u, state])
    for n, (begin, end) in enumerate(pairwise(OFFSETS)):
        alone = [x[:, begin:end] for x in (r, k, v, w)]
        o_n, state_n = rwkv6_ops.wkv6(
            *alone, u, initial_state=state[n : n + 1], output_final_state=True, reverse=reverse
        )
        assert torch.equal(o[:, begin:end], o_n)
        assert torch.equal(final_state[n : n + 1], state_n)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_of_either_integer_type(dtype: torch.dtype, reverse: bool, isa: str):
    problem = make(CASE)
    problem.reverse = reverse
    want = true_answer(problem)
    problem.cu_seqlens = problem.cu_seqlens.to(dtype)
    got = answer(rwkv6_ops.wkv6, problem)
    assert_forward(got.o, got.final_state, want)
    assert_gradients(got.gradients, want)


def test_an_empty_sequence_returns_its_initial_state(isa: str):
    """CASES 14, reported against flash-linear-attention (#103): offsets 0, 5, 5, 9."""
    problem = make(Case("empty sequence", T=9, K=16, V=16, cu_seqlens=(0, 5, 5, 9)))
    got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
    assert torch.equal(got.final_state[1], problem.initial_state[1])
    assert torch.equal(got.gradients["initial_state"][1], problem.grad_final_state[1])
    assert_forward(got.o, got.final_state, want)
    assert_gradients(got.gradients, want)


def test_an_empty_sequence_without_initial_state_returns_zeros(isa: str):
    problem = make(Case("empty zeros", T=9, K=16, V=16, cu_seqlens=(0, 0, 9, 9), initial_state=False))
    _, final_state = call(rwkv6_ops.wkv6, problem, inputs(problem))
    assert torch.equal(final_state[::2], torch.zeros(2, 2, 16, 16))


def test_only_empty_sequences(isa: str):
    problem = make(Case("only empty", T=0, K=4, V=4, cu_seqlens=(0, 0, 0)))
    got = answer(rwkv6_ops.wkv6, problem)
    assert torch.equal(got.final_state, problem.initial_state)
    assert torch.equal(got.gradients["initial_state"], problem.grad_final_state)
    assert torch.equal(got.gradients["u"], torch.zeros(2, 4))


def test_equal_lengths_are_a_batch(isa: str):
    """The gradients too, u's excepted: it sums over sequences in either form, but need not in the same order."""
    problem = make(Case("as batch", B=4, T=17, H=2, K=16, V=16))
    batch = answer(rwkv6_ops.wkv6, problem)
    for name in ("r", "k", "v", "w", "grad_o"):
        setattr(problem, name, getattr(problem, name).reshape(1, 4 * 17, 2, 16))
    problem.cu_seqlens = torch.arange(5) * 17
    sequences = answer(rwkv6_ops.wkv6, problem)
    assert torch.equal(sequences.o.view_as(batch.o), batch.o)
    assert torch.equal(sequences.final_state, batch.final_state)
    for name in ("r", "k", "v", "w", "initial_state"):
        assert torch.equal(sequences.gradients[name].view_as(batch.gradients[name]), batch.gradients[name]), name


def test_offsets_may_be_a_strided_view(isa: str):
    problem = make(CASE)
    problem.cu_seqlens = torch.stack((problem.cu_seqlens, torch.full((7,), -1)), dim=1)[:, 0]
    assert_forward(*call(rwkv6_ops.wkv6, problem, inputs(problem)), true_answer(problem))


def test_changing_the_offsets_before_backward_is_noticed(isa: str):
    problem = make(CASE)
    tensors = [x.requires_grad_() for x in inputs(problem)]
    outputs = call(rwkv6_ops.wkv6, problem, tensors)
    problem.cu_seqlens.zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(outputs, tensors, (problem.grad_o, problem.grad_final_state))
