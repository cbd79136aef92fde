# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: streams, graphs, the current device. Not yet run on a GPU.

The numbers themselves are for the tests that take the `isa` fixture, which run on the GPU too where there is one.
"""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, NAMES, Case, make
from oracle import answer, assert_forward, assert_gradients, call, inputs, true_answer

import rwkv6_ops

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the CUDA kernels were not run on one"),
    pytest.mark.usefixtures("cuda_algorithm"),
]


@pytest.mark.parametrize("name", ["T130", "bf16-bf16-bf16-bf16-bf16-K64V64", "varlen-many", "mixed-raw"])
def test_a_side_stream_is_the_stream_that_is_used(name: str):
    problem = make(BY_NAME[name], "cuda")
    want = answer(rwkv6_ops.wkv6, problem)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # what is put on another stream overtakes this
        for tensor in NAMES[:5]:
            setattr(problem, tensor, getattr(problem, tensor) * 1)
        got = answer(rwkv6_ops.wkv6, problem)
    stream.synchronize()
    assert torch.equal(got.o, want.o)
    assert all(torch.equal(got.gradients[n], want.gradients[n]) for n in NAMES if want.gradients[n] is not None)


def test_a_captured_graph_computes_anew_when_replayed():
    problem, other = make(BY_NAME["T130"], "cuda"), make(Case("other", B=2, T=130, K=64, V=64), "cuda")
    leaves = [x.detach().requires_grad_() for x in inputs(problem)]

    def run():
        o, final_state = call(rwkv6_ops.wkv6, problem, leaves)
        return o, torch.autograd.grad([o, final_state], leaves, [problem.grad_o, problem.grad_final_state])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, gradients = run()
    with torch.no_grad():
        for leaf, x in zip(leaves, inputs(other), strict=True):
            leaf.copy_(x)
    problem.grad_o.copy_(other.grad_o)
    problem.grad_final_state.copy_(other.grad_final_state)
    graph.replay()
    torch.cuda.synchronize()
    want = true_answer(other)
    assert_forward(o, None, want)
    assert_gradients(dict(zip(NAMES, gradients, strict=True)), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU: the current device was not another one's")
def test_tensors_on_another_device_than_the_current_one():
    problem = make(BY_NAME["T65"], "cuda:1")
    with torch.cuda.device(0):
        got = answer(rwkv6_ops.wkv6, problem)
        assert torch.cuda.current_device() == 0
    assert_gradients(got.gradients, true_answer(problem))


def test_more_than_2_31_elements():
    """CASES 23: offsets are int64."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("less than 60 GiB free: offsets beyond 2^31 were not tried")
    shape = (2049, 512, 32, 64)
    r = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    w, u = torch.full(shape, -0.5, dtype=torch.bfloat16, device="cuda"), torch.zeros(32, 64, device="cuda")
    o, _ = rwkv6_ops.wkv6(r, r, r, w, u)
    last = [x[-1:] for x in (r, r, r, w)]
    assert torch.equal(o[-1:], rwkv6_ops.wkv6(*last, u)[0])
