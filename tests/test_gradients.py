# SPDX-License-Identifier: Apache-2.0
"""All six gradients equal those of the float64 loop: every case, either output, any subset of inputs."""

import pytest
import torch
from cases import BY_NAME, CASES, NAMES, Case, make
from oracle import answer, assert_close, assert_gradients, call, inputs, true_answer, true_answer_of

import rwkv6_ops

SMALL = Case("small", B=2, T=6, H=2, K=4, V=5)
THROUGH = ("o", "final_state", "both")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_the_reference_loop(case: Case, isa: str):
    assert_gradients(answer(rwkv6_ops.wkv6, make(case)).gradients, true_answer_of(case))


@pytest.mark.parametrize("through", ["o", "final_state"])
@pytest.mark.parametrize(
    "name", ["T17", "T65", "K3V5T65", "mixed-raw", "bf16-f16-f32-bf16-f32-K60V60", "varlen-empty", "T0"]
)
def test_gradients_through_one_output(name: str, through: str, isa: str):
    problem = make(BY_NAME[name])
    assert_gradients(answer(rwkv6_ops.wkv6, problem, through).gradients, true_answer(problem, through))


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize(
    "subset", range(1, 64), ids=lambda bits: "+".join(n for i, n in enumerate(NAMES) if bits >> i & 1)
)
def test_any_subset_of_the_inputs_may_require_gradients(subset: int, through: str):
    problem = make(SMALL)
    tensors = [x.detach().requires_grad_(bool(subset >> i & 1)) for i, x in enumerate(inputs(problem))]
    o, final_state = call(rwkv6_ops.wkv6, problem, tensors)
    loss = 0.0
    if through != "final_state":
        loss = loss + (o * problem.grad_o).sum()
    if through != "o":
        loss = loss + (final_state * problem.grad_final_state).sum()
    loss.backward()

    assert_gradients(
        {n: x.grad for n, x in zip(NAMES, tensors, strict=True) if x.requires_grad}, true_answer(problem, through)
    )
    assert all(x.grad is None for x in tensors if not x.requires_grad)


def test_nothing_requires_gradients_when_no_input_does():
    problem = make(SMALL)
    o, final_state = call(rwkv6_ops.wkv6, problem, inputs(problem))
    assert not o.requires_grad
    assert not final_state.requires_grad


def test_a_gradient_that_is_zero_is_a_tensor_of_zeros(isa: str):
    gradients = answer(rwkv6_ops.wkv6, make(SMALL), "final_state").gradients
    assert torch.equal(gradients["r"], torch.zeros(2, 6, 2, 4))
    assert torch.equal(gradients["u"], torch.zeros(2, 4))


@pytest.mark.parametrize("case", [c for c in CASES if "f16" in c.dtypes or "f64" in c.dtypes], ids=str)
def test_gradients_have_the_shapes_and_dtypes_of_the_inputs(case: Case):
    problem = make(case)
    gradients = answer(rwkv6_ops.wkv6, problem).gradients
    for name in gradients:
        x = getattr(problem, name)
        assert (gradients[name].shape, gradients[name].dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("options", ["log", "raw", "raw reverse", "varlen", "varlen reverse", "no state"])
def test_gradcheck_in_float64(options: str, isa: str):
    case = Case(
        "gradcheck",
        **{"T": 4, "H": 2, "K": 2, "V": 3, "dtypes": "f64 f64 f64 f64 f64", "scale": 0.7},
        raw="raw" in options,
        reverse="reverse" in options,
        cu_seqlens=(0, 1, 1, 4) if "varlen" in options else None,
        initial_state="no state" not in options,
    )
    problem = make(case)
    tensors = [x.requires_grad_() for x in inputs(problem)]
    assert torch.autograd.gradcheck(lambda *x: call(rwkv6_ops.wkv6, problem, x), tensors)


@pytest.mark.parametrize("name", ["T130", "K3V5T65", "varlen-many"])
def test_gradients_where_the_gradient_of_the_output_is_one_number(name: str, isa: str):
    """What o.sum().backward() sends is an expanded tensor: every stride 0."""
    problem = make(BY_NAME[name])
    problem.grad_o = torch.ones(()).expand_as(problem.grad_o)
    problem.grad_final_state = torch.ones(()).expand_as(problem.grad_final_state)
    assert_gradients(answer(rwkv6_ops.wkv6, problem).gradients, true_answer(problem))


def test_backward_runs_twice_on_a_retained_graph(isa: str):
    problem = make(BY_NAME["T130"])
    tensors = [x.requires_grad_() for x in inputs(problem)]
    o, _ = call(rwkv6_ops.wkv6, problem, tensors)
    first = torch.autograd.grad(o, tensors, problem.grad_o, retain_graph=True)
    second = torch.autograd.grad(o, tensors, problem.grad_o)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_gradients_without_asking_for_the_final_state(isa: str):
    problem = make(BY_NAME["T65"])
    tensors = [x.requires_grad_() for x in inputs(problem)]
    o, _ = rwkv6_ops.wkv6(*tensors[:5], initial_state=tensors[5], **problem.options)
    gradients = torch.autograd.grad(o, tensors, problem.grad_o)
    assert_gradients(dict(zip(NAMES, gradients, strict=True)), true_answer(problem, "o"))


def test_the_same_tensor_may_be_passed_twice(isa: str):
    """r is k: the gradients add up."""
    problem = make(SMALL)
    x = problem.r.detach().requires_grad_()
    o, _ = rwkv6_ops.wkv6(x, x, problem.v, problem.w, problem.u, initial_state=problem.initial_state)
    problem.k = problem.r
    want = true_answer(problem, "o").gradients
    assert_close("gradient", torch.autograd.grad(o, x, problem.grad_o)[0], want["r"] + want["k"], 2e-6)
