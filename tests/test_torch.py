# SPDX-License-Identifier: Apache-2.0
"""The rest of PyTorch, on the operator alone: opcheck, compile, export, subclasses, hooks, checkpointing.

Modules around it: test_compile.py and test_autograd.py.
"""

import pytest
import torch
from cases import BY_NAME, NAMES, Case, make
from oracle import answer, assert_forward, assert_gradients, call, inputs, true_answer
from torch.utils.checkpoint import checkpoint

import rwkv6_ops

CASE = Case("torch", B=2, T=21, H=2, K=8, V=12)
OPS = torch.ops.rwkv6_ops


def gradients_of(outputs, tensors, problem) -> dict[str, torch.Tensor]:
    gradients = torch.autograd.grad(outputs, tensors, (problem.grad_o, problem.grad_final_state))
    return dict(zip(NAMES, gradients, strict=True))


# ---- The registered operators ----


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["K3V5T65", "varlen-empty", "f32-bf16-f16-bf16-f16-K16V7"])
def test_opcheck_of_the_forward_operator(name: str, training: bool):
    problem = make(BY_NAME[name])
    tensors = [x.requires_grad_(training) for x in inputs(problem)]
    state = tensors[5] if len(tensors) > 5 else None
    flags = (problem.scale, True, problem.reverse, problem.decay == "raw", "auto", "default", 16)
    torch.library.opcheck(OPS.wkv6_forward.default, (*tensors[:5], state, problem.cu_seqlens, *flags))


@pytest.mark.parametrize("wanted", [[True] * 6, [True, False] * 3])
def test_opcheck_of_the_backward_operator(wanted: list[bool]):
    p = make(CASE)
    tensors = (p.r, p.k, p.v, p.w, p.u, p.initial_state, None)
    *_, saved = OPS.wkv6_forward(*tensors, 1.0, True, False, False, "auto", "default", 16)
    args = (*tensors, saved, p.grad_o, p.grad_final_state, 1.0, False, False, "auto", "default", 16, wanted)
    torch.library.opcheck(OPS.wkv6_backward.default, args)


def test_opcheck_of_the_step_operator():
    p = make(CASE)
    token = [x[:, 0].contiguous() for x in (p.r, p.k, p.v, p.w)]
    torch.library.opcheck(OPS.wkv6_step_.default, (*token, p.u, p.initial_state, 1.0, False))


def test_the_operators_carry_the_compliance_tag():
    for op in (OPS.wkv6_forward, OPS.wkv6_backward, OPS.wkv6_step_):
        assert torch.Tag.pt2_compliant_tag in op.default.tags


# ---- Tracing ----


def operator_of(problem):
    """`wkv6` with the options of `problem`, as a function of the six tensors."""
    return lambda *tensors: call(rwkv6_ops.wkv6, problem, tensors)


def test_torch_compile_takes_the_whole_graph_forward_and_training():
    problem = make(CASE)
    tensors = [x.requires_grad_() for x in inputs(problem)]
    outputs = torch.compile(operator_of(problem), fullgraph=True)(*tensors)
    want = true_answer(problem)
    assert_forward(*(x.detach() for x in outputs), want)
    assert_gradients(gradients_of(outputs, tensors, problem), want)


def test_torch_compile_with_dynamic_shapes_compiles_once():
    compiled = torch.compile(lambda *x: rwkv6_ops.wkv6(*x)[0], fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for B, T in ((5, 40), (3, 77), (4, 130)):
            problem = make(Case("dynamic", B=B, T=T, K=8, V=12, initial_state=False))
            tensors = [x.requires_grad_() for x in inputs(problem)]
            o = compiled(*tensors)
            gradients = torch.autograd.grad(o, tensors, problem.grad_o)
            assert_gradients(dict(zip(NAMES, gradients, strict=False)), true_answer(problem, "o"))


def test_torch_compile_of_the_step_updates_the_state():
    problem = make(CASE)
    state, want = problem.initial_state.clone(), problem.initial_state.clone()
    compiled = torch.compile(rwkv6_ops.wkv6_step_, fullgraph=True)
    for t in range(3):
        token = [x[:, t] for x in (problem.r, problem.k, problem.v, problem.w)]
        o = compiled(*token, problem.u, state)
        assert torch.equal(o, rwkv6_ops.wkv6_step_(*token, problem.u, want))
        assert torch.equal(state, want)


def test_export_keeps_one_operator():
    class Module(torch.nn.Module):
        def forward(self, r, k, v, w, u):
            return rwkv6_ops.wkv6(r, k, v, w, u, decay="raw")[0]

    tensors = inputs(make(CASE))[:5]
    program = torch.export.export(Module(), tuple(tensors))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(OPS.wkv6_forward.default) == 1
    assert torch.equal(program.module()(*tensors), rwkv6_ops.wkv6(*tensors, decay="raw")[0])


def test_a_tensor_subclass_is_dispatched():
    class Named(torch.Tensor):
        pass

    problem = make(CASE)
    tensors = inputs(problem)
    want = call(rwkv6_ops.wkv6, problem, tensors)
    got = call(rwkv6_ops.wkv6, problem, [x.as_subclass(Named) for x in tensors])
    assert torch.equal(got[0].as_subclass(torch.Tensor), want[0])


# ---- Function transforms and second derivatives ----


def test_func_grad_equals_autograd():
    problem = make(CASE)

    def loss(*tensors):
        o, final_state = call(rwkv6_ops.wkv6, problem, tensors)
        return (o * problem.grad_o).sum() + (final_state * problem.grad_final_state).sum()

    gradients = torch.func.grad(loss, argnums=tuple(range(6)))(*inputs(problem))
    assert_gradients(dict(zip(NAMES, gradients, strict=True)), true_answer(problem))


def test_double_backward_through_the_registered_operator_is_an_error():
    p = make(CASE)
    r = p.r.requires_grad_()
    o, *_ = OPS.wkv6_forward(
        r, p.k, p.v, p.w, p.u, p.initial_state, None, 1.0, True, False, False, "auto", "default", 16
    )
    (gradient,) = torch.autograd.grad(o, r, torch.ones_like(o).requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        gradient.sum().backward()


# ---- Around autograd ----


def test_saved_tensor_hooks_see_every_saved_tensor():
    problem = make(CASE)
    tensors = [x.requires_grad_() for x in inputs(problem)]
    packed = []

    def pack(x: torch.Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
        outputs = call(rwkv6_ops.wkv6, problem, tensors)
    assert len(packed) >= 6
    assert_gradients(gradients_of(outputs, tensors, problem), true_answer(problem))


@pytest.mark.parametrize("name", ["r", "k", "v", "w", "u", "initial_state"])
def test_an_input_changed_before_backward_is_noticed(name: str):
    problem = make(CASE)
    tensors = [x.requires_grad_() for x in inputs(problem)]
    outputs = call(rwkv6_ops.wkv6, problem, tensors)
    with torch.no_grad():
        getattr(problem, name).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_of(outputs, tensors, problem)


def test_a_step_on_a_state_that_autograd_needs_is_noticed():
    problem = make(CASE)
    tensors = [x.requires_grad_(i < 5) for i, x in enumerate(inputs(problem))]
    o, _ = call(rwkv6_ops.wkv6, problem, tensors)
    with torch.no_grad():
        token = [x[:, 0] for x in (problem.r, problem.k, problem.v, problem.w)]
        rwkv6_ops.wkv6_step_(*token, problem.u, problem.initial_state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["K3V5T65", "varlen-many", "T65"])
def test_activation_checkpointing_equals_plain(name: str, reentrant: bool):
    """flash-linear-attention #422: the offsets were lost on the way."""
    problem = make(BY_NAME[name])
    plain = answer(rwkv6_ops.wkv6, problem, "o")
    leaves = [x.detach().requires_grad_() for x in inputs(problem)]

    def block(*tensors):  # the state by position: the reentrant mode sees positional tensors only
        return call(rwkv6_ops.wkv6, problem, tensors)[0]

    o = checkpoint(block, *leaves, use_reentrant=reentrant)
    o.backward(problem.grad_o)
    assert torch.equal(o, plain.o)
    for n, leaf in zip(NAMES, leaves, strict=False):
        assert torch.equal(leaf.grad, plain.gradients[n]), n


def test_reentrant_checkpointing_of_whole_blocks():
    problem = make(CASE)
    x = problem.r.detach().requires_grad_()

    def block(x):
        return rwkv6_ops.wkv6(x.tanh(), problem.k, problem.v, problem.w, problem.u)[0].sum(-1)

    want = torch.autograd.grad(block(x).sum(), x)[0]
    leaf = x.detach().requires_grad_()
    checkpoint(block, leaf, use_reentrant=True).sum().backward()
    assert torch.equal(leaf.grad, want)
