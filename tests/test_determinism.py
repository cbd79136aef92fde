# SPDX-License-Identifier: Apache-2.0
"""Results are bit for bit the same in every run, for any number of threads, and whatever else is in the batch."""

import pytest
import torch
from cases import NAMES, Case, make
from oracle import Answer, answer, call, inputs

import rwkv6_ops

CASES = [
    Case("one head", T=200, H=1, K=64, V=64),
    Case("three heads", T=200, H=3, K=32, V=32, raw=True),
    Case("many heads", B=4, T=130, H=8, K=16, V=16, dtypes="bf16 bf16 bf16 bf16 bf16"),
    Case("odd sizes", B=2, T=131, H=3, K=7, V=19, reverse=True),
    Case("double", T=65, H=3, K=16, V=16, dtypes="f64 f64 f64 f64 f64"),
    Case("wide values", T=33, H=1, K=8, V=512),
    Case("sequences", T=200, H=2, K=32, V=32, cu_seqlens=(0, 1, 70, 70, 200)),
]


def assert_equal(a: Answer, b: Answer) -> None:
    assert torch.equal(a.o, b.o)
    assert torch.equal(a.final_state, b.final_state)
    for name in NAMES:
        assert torch.equal(a.gradients[name], b.gradients[name]), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(case: Case, isa: str):
    one = answer(rwkv6_ops.wkv6, make(case))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_equal(answer(rwkv6_ops.wkv6, make(case)), one)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_the_same_in_every_run(case: Case, isa: str):
    torch.set_num_threads(2)
    first = answer(rwkv6_ops.wkv6, make(case))
    for _ in range(3):
        assert_equal(answer(rwkv6_ops.wkv6, make(case)), first)


def test_results_do_not_depend_on_the_rest_of_the_batch(isa: str):
    problem = make(Case("batch", B=5, T=40, H=3, K=16, V=16))
    r, k, v, w, u, state = inputs(problem)
    o, final_state = call(rwkv6_ops.wkv6, problem, [r, k, v, w, u, state])
    for b in range(5):
        one = [x[b : b + 1] for x in (r, k, v, w)]
        o_b, final_state_b = call(rwkv6_ops.wkv6, problem, [*one, u, state[b : b + 1]])
        assert torch.equal(o_b[0], o[b])
        assert torch.equal(final_state_b[0], final_state[b])


def test_results_do_not_depend_on_the_other_heads(isa: str):
    problem = make(Case("heads", B=2, T=40, H=5, K=16, V=16))
    r, k, v, w, u, state = inputs(problem)
    o, final_state = call(rwkv6_ops.wkv6, problem, [r, k, v, w, u, state])
    h = slice(3, 4)
    o_h, final_state_h = call(rwkv6_ops.wkv6, problem, [*(x[:, :, h] for x in (r, k, v, w)), u[h], state[:, h]])
    assert torch.equal(o_h, o[:, :, h])
    assert torch.equal(final_state_h, final_state[:, h])
