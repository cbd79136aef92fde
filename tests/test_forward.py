# SPDX-License-Identifier: Apache-2.0
"""The forward pass equals the float64 loop, on every case of the table and every instruction set."""

import pytest
import torch
from cases import BY_NAME, CASES, CUDA_CHUNK_TOLERANCE, FORWARD_TOLERANCE, Case, make
from oracle import assert_forward, call, inputs, true_answer, true_answer_of

import rwkv6_ops
from rwkv6_ops import _native


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_final_state_equal_the_reference_loop(case: Case, isa: str):
    problem = make(case)
    o, final_state = call(rwkv6_ops.wkv6, problem, inputs(problem))
    assert_forward(o, final_state, true_answer_of(case))


@pytest.mark.parametrize("name", _native.isas_built())
def test_every_instruction_set_built_is_run(name: str):
    if name not in _native.isas():
        pytest.skip(f"not tested: the {name} kernels, which this machine cannot run")
    assert _native.use_isa(_native.use_isa(name)) == name


def test_an_unknown_instruction_set_is_an_error():
    with pytest.raises(ValueError, match="sse9"):
        _native.use_isa("sse9")


@pytest.mark.parametrize("algorithm", ["auto", "recurrent", "chunk"])
@pytest.mark.parametrize("name", ["T130", "K3V5T65", "mixed-raw", "varlen-many"])
def test_every_algorithm_equals_the_reference_loop(
    name: str, algorithm: str, isa: str, monkeypatch: pytest.MonkeyPatch
):
    problem = make(BY_NAME[name])
    if isa.startswith("cuda") and algorithm == "chunk":
        monkeypatch.setitem(FORWARD_TOLERANCE, torch.float32, CUDA_CHUNK_TOLERANCE[torch.float32])
    o, final_state = rwkv6_ops.wkv6(
        *inputs(problem)[:5],
        initial_state=problem.initial_state,
        output_final_state=True,
        algorithm=algorithm,
        **problem.options,
    )
    assert_forward(o, final_state, true_answer_of(BY_NAME[name]))


def test_final_state_is_none_unless_asked_for():
    problem = make(BY_NAME["T17"])
    o, final_state = rwkv6_ops.wkv6(*inputs(problem)[:5], initial_state=problem.initial_state, **problem.options)
    assert final_state is None
    assert_forward(o, None, true_answer_of(BY_NAME["T17"]))


def test_reverse_is_the_forward_pass_on_flipped_time(isa: str):
    r, k, v, w, u, state = inputs(make(BY_NAME["T128"]))
    flipped = [x.flip(1) for x in (r, k, v, w)]
    o, final_state = rwkv6_ops.wkv6(
        r, k, v, w, u, initial_state=state, output_final_state=True, decay="raw", reverse=True
    )
    o2, final_state2 = rwkv6_ops.wkv6(*flipped, u, initial_state=state, output_final_state=True, decay="raw")
    assert torch.equal(o, o2.flip(1))
    assert torch.equal(final_state, final_state2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_output_is_the_same_with_and_without_gradients(mode: type, isa: str):
    problem = make(BY_NAME["T130"])
    tensors = inputs(problem)
    o, final_state = call(rwkv6_ops.wkv6, problem, [x.detach().requires_grad_() for x in tensors])
    with mode():
        o2, final_state2 = call(rwkv6_ops.wkv6, problem, tensors)
    assert torch.equal(o, o2)
    assert torch.equal(final_state, final_state2)
    assert not o2.requires_grad
    assert not final_state2.requires_grad


def test_inputs_stay_as_they_are(isa: str):
    problem = make(BY_NAME["T65"])
    before = [x.clone() for x in inputs(problem)]
    call(rwkv6_ops.wkv6, problem, inputs(problem))
    assert all(torch.equal(x, y) for x, y in zip(inputs(problem), before, strict=True))


@pytest.mark.parametrize("sizes", [(0, 4, 2), (2, 0, 2), (0, 0, 2), (2, 4, 0)], ids=["B0", "T0", "B0T0", "H0"])
def test_empty_problems_give_empty_outputs_and_the_initial_state(sizes: tuple[int, int, int], isa: str):
    problem = make(Case("empty", *sizes, K=4, V=5))
    o, final_state = call(rwkv6_ops.wkv6, problem, inputs(problem))
    assert o.shape == (*sizes, 5)
    assert torch.equal(final_state, problem.initial_state)


def test_large_scale_and_small_scale(isa: str):
    for scale in (1e-20, 1e20):
        problem = make(Case("scales", T=20, K=8, V=8, scale=scale))
        assert_forward(*call(rwkv6_ops.wkv6, problem, inputs(problem)), true_answer(problem))


def test_each_name_chooses_its_algorithm():
    r, k, v, w, u, _ = inputs(make(BY_NAME["T65"]))
    w = -w.exp()
    for name in ("recurrent", "chunk"):
        call_of_that_name = {"recurrent": rwkv6_ops.fused_recurrent_rwkv6, "chunk": rwkv6_ops.chunk_rwkv6}[name]
        o, _ = rwkv6_ops.wkv6(r, k, v, w, u, algorithm=name)
        assert torch.equal(call_of_that_name(r, k, v, w, u, scale=1.0)[0], o)
    assert not torch.equal(o, rwkv6_ops.wkv6(r, k, v, w, u, algorithm="recurrent")[0])


def test_auto_chooses_by_the_length_of_each_sequence():
    r, k, v, w, u = inputs(make(BY_NAME["varlen-long"]))[:5]
    cuts, whole = torch.tensor([0, 5, 500]), {}
    for name in ("auto", "recurrent", "chunk"):
        whole[name], _ = rwkv6_ops.wkv6(r, k, v, w, u, cu_seqlens=cuts, algorithm=name)
    assert torch.equal(whole["auto"][:, :5], whole["recurrent"][:, :5])
    assert torch.equal(whole["auto"][:, 5:], whole["chunk"][:, 5:])
