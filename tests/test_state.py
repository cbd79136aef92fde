# SPDX-License-Identifier: Apache-2.0
"""States: the final state resumes the sequence, forward and backward, and the caller's state is never changed."""

import pytest
import torch
from cases import NAMES, Case, make
from oracle import assert_forward, assert_gradients, call, inputs, true_answer

import rwkv6_ops

CASE = Case("state", B=2, T=70, H=2, K=16, V=24)


def in_two_parts(tensors: list[torch.Tensor], cut: int, reverse: bool = False):
    """o and the final state of a sequence read as two, the state of the first handed to the second."""
    r, k, v, w, u, state = tensors
    parts = [slice(0, cut), slice(cut, None)]
    outputs = []
    for part in reversed(parts) if reverse else parts:
        x = [x[:, part] for x in (r, k, v, w)]
        o, state = rwkv6_ops.wkv6(*x, u, initial_state=state, output_final_state=True, reverse=reverse)
        outputs.append(o)
    return torch.cat(outputs[::-1] if reverse else outputs, dim=1), state


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 16, 33, 69, 70])
def test_final_state_resumes_the_sequence(cut: int, reverse: bool, isa: str):
    problem = make(CASE)
    problem.reverse = reverse
    assert_forward(*in_two_parts(inputs(problem), cut, reverse), true_answer(problem))


@pytest.mark.parametrize("cut", [1, 33])
def test_gradients_flow_through_the_state_from_part_to_part(cut: int, isa: str):
    problem = make(CASE)
    tensors = [x.requires_grad_() for x in inputs(problem)]
    outputs = in_two_parts(tensors, cut)
    gradients = torch.autograd.grad(outputs, tensors, (problem.grad_o, problem.grad_final_state))
    assert_gradients(dict(zip(NAMES, gradients, strict=True)), true_answer(problem))


def test_no_initial_state_is_a_state_of_zeros(isa: str):
    problem = make(CASE)
    tensors = inputs(problem)
    o, final_state = call(rwkv6_ops.wkv6, problem, tensors[:5])
    o2, final_state2 = call(rwkv6_ops.wkv6, problem, [*tensors[:5], torch.zeros_like(tensors[5])])
    assert torch.equal(o, o2)
    assert torch.equal(final_state, final_state2)


@pytest.mark.parametrize("T", [0, 1, 70])
def test_the_callers_state_is_neither_changed_nor_returned(T: int, isa: str):
    problem = make(Case("caller", B=2, T=T, H=2, K=16, V=24))
    before = problem.initial_state.clone()
    _, final_state = call(rwkv6_ops.wkv6, problem, inputs(problem))
    final_state.fill_(7.0)
    assert torch.equal(problem.initial_state, before)


def test_each_batch_row_starts_from_its_own_state(isa: str):
    """CASES 2, reported against RWKV-LM (#241): every row read the first row's state."""
    problem = make(Case("own states", B=2, T=3, H=2, K=8, V=8))
    problem.initial_state[0] = 0.0
    problem.initial_state[1] = 1.0
    r, k, v, w, u, state = inputs(problem)
    o, final_state = call(rwkv6_ops.wkv6, problem, [r, k, v, w, u, state])
    for b in range(2):
        row = [x[b : b + 1] for x in (r, k, v, w)]
        o_b, final_state_b = call(rwkv6_ops.wkv6, problem, [*row, u, state[b : b + 1]])
        assert torch.equal(o[b], o_b[0])
        assert torch.equal(final_state[b], final_state_b[0])
    assert_forward(o, final_state, true_answer(problem))
