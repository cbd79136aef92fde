# SPDX-License-Identifier: Apache-2.0
"""wkv6_step_: one token at a time is the whole sequence, and the state is changed where it lies."""

import pytest
import torch
from cases import Case, Problem, lay_out, make
from oracle import assert_forward, true_answer

import rwkv6_ops

SIZES = [(64, 64), (32, 32), (128, 128), (8, 8), (7, 19), (1, 1), (16, 300)]
DTYPES = ["f32 f32 f32 f32 f32", "bf16 bf16 bf16 f32 f32", "f16 bf16 f16 bf16 f32", "f64 f64 f64 f64 f64"]


def steps(problem: Problem, state: torch.Tensor) -> torch.Tensor:
    """The outputs [B, T, H, V] of one step a token from `state`, which is changed."""
    tokens = zip(*(x.unbind(1) for x in (problem.r, problem.k, problem.v, problem.w)), strict=True)
    options = {"scale": problem.scale, "decay": problem.decay}
    return torch.stack([rwkv6_ops.wkv6_step_(*token, problem.u, state, **options) for token in tokens], dim=1)


@pytest.mark.parametrize("raw", [False, True], ids=["log", "raw"])
@pytest.mark.parametrize(("K", "V"), SIZES)
def test_steps_equal_the_reference_loop(K: int, V: int, raw: bool, isa: str):
    problem = make(Case("steps", B=2, T=12, H=3, K=K, V=V, raw=raw, scale=0.3, decays="mixed"))
    state = problem.initial_state.clone()
    assert_forward(steps(problem, state), state, true_answer(problem))


@pytest.mark.parametrize("dtypes", DTYPES)
def test_steps_in_every_dtype(dtypes: str, isa: str):
    problem = make(Case("step dtypes", B=2, T=12, H=3, K=32, V=32, dtypes=dtypes))
    state = problem.initial_state.clone()
    o = steps(problem, state)
    assert o.dtype == problem.v.dtype
    assert_forward(o, state, true_answer(problem))


@pytest.mark.parametrize("layout", ["split", "transposed", "strided", "expanded"])
def test_steps_with_strided_inputs(layout: str, isa: str):
    problem = make(Case("step layouts", B=2, T=12, H=3, K=16, V=24, layout=layout))
    state = problem.initial_state.clone(memory_format=torch.contiguous_format)
    assert_forward(steps(problem, state), state, true_answer(problem))


@pytest.mark.parametrize("layout", ["split", "transposed", "strided"])
def test_steps_on_a_strided_state_change_it_where_it_lies(layout: str, isa: str):
    problem = make(Case("strided state", B=2, T=12, H=3, K=16, V=24))
    state = lay_out(problem.initial_state, layout)
    address = state.data_ptr()
    assert_forward(steps(problem, state), state, true_answer(problem))
    assert state.data_ptr() == address


def test_a_step_on_one_layer_leaves_the_other_layers_alone(isa: str):
    problem = make(Case("layers", B=2, T=1, H=3, K=16, V=16))
    cache = torch.full((2, 3, 16, 16, 4), 5.0)
    cache[..., 2] = problem.initial_state
    o = steps(problem, cache[..., 2])
    assert_forward(o, cache[..., 2], true_answer(problem))
    assert (cache[..., [0, 1, 3]] == 5.0).all()


def test_a_step_raises_the_states_version(isa: str):
    problem = make(Case("version", T=1))
    state = problem.initial_state
    version = state._version
    steps(problem, state)
    assert state._version > version


def test_a_time_axis_of_length_one_is_kept(isa: str):
    problem = make(Case("axis", B=2, T=1, H=3, K=16, V=24))
    state = problem.initial_state.clone()
    o = rwkv6_ops.wkv6_step_(problem.r, problem.k, problem.v, problem.w, problem.u, state)
    assert_forward(o, state, true_answer(problem))


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("axis", [False, True], ids=["no axis", "axis"])
def test_out_receives_the_output(axis: bool, layout: str, isa: str):
    problem = make(Case("out", B=2, T=1, H=3, K=16, V=24))
    token = [x if axis else x[:, 0] for x in (problem.r, problem.k, problem.v, problem.w)]
    out = lay_out(torch.zeros(2, 1, 3, 24), layout)
    out = out if axis else out[:, 0]
    version = out._version
    got = rwkv6_ops.wkv6_step_(*token, problem.u, problem.initial_state.clone(), out=out)
    assert got is out
    assert out._version > version
    assert_forward(out.view(2, 1, 3, 24), None, true_answer(problem))


def test_steps_work_in_inference_mode(isa: str):
    problem = make(Case("inference", T=5))
    want = true_answer(problem)
    with torch.inference_mode():
        state = problem.initial_state.clone()
        assert_forward(steps(problem, state), state, want)


def test_a_batch_of_none(isa: str):
    problem = make(Case("no batch", B=0, T=1))
    assert steps(problem, problem.initial_state).shape == (0, 1, 2, 8)


def test_steps_do_not_depend_on_the_number_of_threads(isa: str):
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        problem = make(Case("step threads", B=8, T=3, H=16, K=64, V=64))
        results.append((steps(problem, problem.initial_state), problem.initial_state))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
