# SPDX-License-Identifier: Apache-2.0
"""What training scripts do around the operator: torch.func, autocast, checkpointing, hooks, copies of modules."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from cases import NAMES, Case, make
from oracle import answer, assert_close, assert_forward, assert_gradients, call, inputs, true_answer
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import rwkv6_ops
from rwkv6_ops import _ops

CASE = Case("autograd", B=2, T=70, H=2, K=16, V=8)
VARLEN = Case("autograd varlen", T=70, H=2, K=16, V=8, cu_seqlens=(0, 9, 9, 70))
SECOND = "the operator has first derivatives only"


def loss_of(problem, *tensors: Tensor) -> Tensor:
    """A scalar whose gradients are those of `oracle.answer`."""
    o, final_state = call(rwkv6_ops.wkv6, problem, tensors)
    return (o * problem.grad_o).sum() + (final_state * problem.grad_final_state).sum()


class Block(torch.nn.Module):
    """Projections, the operator with a state through it, and a projection back."""

    def __init__(self, heads: int = 2, size: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.size = heads, size
        self.project = torch.nn.Linear(heads * size, 4 * heads * size)
        self.out = torch.nn.Linear(heads * size, heads * size)
        self.u = torch.nn.Parameter(torch.randn(heads, size))

    def forward(self, x: Tensor, state: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r, k, v, w = self.project(x).unflatten(-1, (4, self.heads, self.size)).unbind(2)
        options = {"initial_state": state, "output_final_state": True, "cu_seqlens": cu_seqlens}
        o, state = rwkv6_ops.wkv6(r, k, v, w, self.u, decay="raw", **options)
        return self.out(o.flatten(2)), state


def block_inputs(T: int = 20, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    B, N = (2, 2) if cu_seqlens is None else (1, len(cu_seqlens) - 1)
    return torch.randn(B, T, 16, generator=g).requires_grad_(), torch.randn(N, 2, 8, 8, generator=g).requires_grad_()


def gradients_of(block: Block, run: Callable[..., tuple[Tensor, Tensor]], *arguments: Tensor) -> list[Tensor]:
    o, state = run(*arguments)
    leaves = [*arguments[:2], *block.parameters()]
    return list(torch.autograd.grad(o.square().sum() + state.square().sum(), leaves))


# ---- torch.func ----


def test_func_vjp_through_one_output():
    problem = make(CASE)
    r, k, v, w, u, _ = inputs(problem)
    o, pullback = vjp(lambda r, u: rwkv6_ops.wkv6(r, k, v, w, u, initial_state=problem.initial_state)[0], r, u)
    want = true_answer(problem, "o")
    assert_forward(o, None, want)
    assert_gradients(dict(zip("ru", pullback(problem.grad_o), strict=True)), want)


def samples(cu_seqlens: tuple[int, ...] | None = None) -> list:
    """Four problems that differ in everything but u."""
    problems = [make(Case(f"sample {i}", B=1, T=40, K=16, V=8, cu_seqlens=cu_seqlens)) for i in range(4)]
    for problem in problems:
        problem.u = problems[0].u
    return problems


@pytest.mark.parametrize("cu_seqlens", [None, (0, 7, 7, 40)], ids=["equal", "varlen"])
def test_vmap_gives_each_sample_its_own_gradients(cu_seqlens: tuple[int, ...] | None):
    """Per-sample gradients, u's included, which all samples share."""
    problems = samples(cu_seqlens)
    stacked = {n: torch.stack([getattr(p, n) for p in problems]) for n in (*NAMES, "grad_o", "grad_final_state")}

    def loss(r, k, v, w, u, state, grad_o, grad_final_state):
        problem = copy.copy(problems[0])
        problem.grad_o, problem.grad_final_state = grad_o, grad_final_state
        return loss_of(problem, r, k, v, w, u, state)

    stacked["u"] = problems[0].u
    dims = tuple(None if name == "u" else 0 for name in stacked)
    gradients = vmap(grad(loss, argnums=tuple(range(6))), in_dims=dims)(*stacked.values())
    for i, problem in enumerate(problems):
        assert_gradients({n: x[i] for n, x in zip(NAMES, gradients, strict=True)}, true_answer(problem))


@pytest.mark.parametrize("dim", [0, 2, -1])
def test_vmap_over_any_dimension(dim: int):
    problems = samples()
    r = torch.stack([p.r for p in problems], dim=dim)
    p = problems[0]
    options = {"initial_state": p.initial_state, "output_final_state": True}
    o, state = vmap(lambda r: rwkv6_ops.wkv6(r, p.k, p.v, p.w, p.u, **options), in_dims=dim)(r)
    for i, problem in enumerate(problems):
        want_o, want_state = rwkv6_ops.wkv6(problem.r, p.k, p.v, p.w, p.u, **options)
        assert torch.equal(o[i], want_o)
        assert torch.equal(state[i], want_state)


def test_jacobian_and_batched_gradients():
    problem = make(Case("jacobian", B=1, T=5, H=1, K=2, V=3))
    r, k, v, w, u = inputs(problem)[:5]
    jacobian = jacrev(lambda k: rwkv6_ops.wkv6(r, k, v, w, u)[0])(k)
    leaf = k.clone().requires_grad_()
    o, _ = rwkv6_ops.wkv6(r, leaf, v, w, u)
    rows = torch.eye(o.numel()).view(-1, *o.shape)
    one_by_one = torch.stack([torch.autograd.grad(o, leaf, row, retain_graph=True)[0] for row in rows])
    batched = torch.autograd.grad(o, leaf, rows, is_grads_batched=True)[0]
    assert torch.equal(batched, one_by_one)
    assert torch.equal(jacobian.reshape(batched.shape), one_by_one)


def test_func_on_a_module():
    block = Block()
    x, state = (t.detach() for t in block_inputs())
    parameters = {n: p.detach() for n, p in block.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return sum(y.square().sum() for y in functional_call(block, parameters, (x, state)))

    got = grad(loss)(parameters)
    want = gradients_of(block, block, x.requires_grad_(), state.requires_grad_())[2:]
    for name, b in zip(parameters, want, strict=True):
        assert_close(name, got[name], b, 1e-6)


# ---- What the operator does not have is refused in words ----


def test_no_vmap_over_offsets():
    r, u = torch.randn(1, 9, 2, 8), torch.randn(2, 8)
    with pytest.raises(NotImplementedError, match="no vmap over cu_seqlens"):
        vmap(lambda c: rwkv6_ops.wkv6(r, r, r, r, u, cu_seqlens=c)[0])(torch.tensor([[0, 4, 9], [0, 5, 9]]))


def test_no_vmap_of_the_step():
    r, u, state = torch.randn(3, 2, 2, 8), torch.randn(2, 8), torch.zeros(3, 2, 2, 8, 8)
    with pytest.raises(NotImplementedError, match="wkv6_step_ has no vmap rule"):
        vmap(lambda r, s: rwkv6_ops.wkv6_step_(r, r, r, r, u, s))(r, state)


def second_by_create_graph(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    torch.autograd.grad(first.square().sum(), x)


def second_by_func(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    grad(lambda x: grad(f)(x).square().sum())(x.detach())


def second_by_dispatcher(f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with FlopCounterMode(display=False):
        second_by_create_graph(f, x)


@pytest.mark.parametrize("second", [second_by_create_graph, second_by_func, second_by_dispatcher])
def test_no_second_derivative(second: Callable):
    """Not zeros, and not the part that other operations contribute: torch's own once_differentiable gives these."""
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=SECOND):
        second(lambda x: rwkv6_ops.wkv6(x, x, x, -x.exp(), x[0, 0])[0].sum(), x)


def test_a_graph_of_the_first_derivative_is_right_where_the_second_is_not_asked_for():
    problem = make(CASE)
    leaves = [x.requires_grad_() for x in inputs(problem)]
    gradients = torch.autograd.grad(loss_of(problem, *leaves), leaves, create_graph=True)
    assert_gradients({n: x.detach() for n, x in zip(NAMES, gradients, strict=True)}, true_answer(problem))


def test_no_forward_mode_derivative():
    x = torch.randn(1, 5, 2, 8)
    f = lambda x: rwkv6_ops.wkv6(x, x, x, -x.exp(), x[0, 0].detach())[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        jvp(f, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            f(dual)
        assert torch.equal(f(x), f(x))


# ---- Modes ----


def test_inference_mode():
    problem = make(CASE)
    leaves = [x.requires_grad_() for x in inputs(problem)]
    with torch.inference_mode():
        o, state = call(rwkv6_ops.wkv6, problem, leaves)
        step = rwkv6_ops.wkv6_step_(*(x[:, 0] for x in leaves[:4]), leaves[4], state)
    assert o.is_inference()
    assert step.is_inference()
    assert_forward(o, None, true_answer(problem))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_keeps_states_in_float32(dtype: torch.dtype):
    """CASES 18, Vision-RWKV #30, transformers #25918: float32 parameters under autocast, a loss times 65536."""
    block = Block()
    x, state = block_inputs()
    optimiser = torch.optim.SGD(block.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def loss(o: Tensor, state: Tensor) -> Tensor:
        return o.float().square().mean() + state.square().mean()

    exact = torch.autograd.grad(loss(*block(x, state)), list(block.parameters()))
    with torch.autocast("cpu", dtype=dtype):
        o, final_state = block(x, state)
        projected = block.project(x)
    assert (projected.dtype, o.dtype, final_state.dtype) == (dtype, dtype, torch.float32)
    scaler.scale(loss(o, final_state)).backward()
    scaler.unscale_(optimiser)
    for p, want in zip(block.parameters(), exact, strict=True):
        assert p.grad.dtype == torch.float32
        assert_close("gradient", p.grad, want, 0.02)  # the projections round to 8 or 11 bits
    before = block.u.detach().clone()
    scaler.step(optimiser)
    scaler.update()
    assert not torch.equal(block.u, before)


# ---- Activation checkpointing ----


@pytest.mark.parametrize(("policy", "calls"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)])
def test_selective_checkpointing_can_keep_the_operator(
    policy: CheckpointPolicy, calls: int, monkeypatch: pytest.MonkeyPatch
):
    """Projections are recomputed in the backward pass; the operator, where marked as one to save, is not."""
    counted = []
    kernel = _ops._forward_kernel
    monkeypatch.setattr(_ops, "_forward_kernel", lambda *x: counted.append(1) or kernel(*x))
    block, (x, state) = Block(), block_inputs()
    want = gradients_of(block, block, x, state)
    counted.clear()

    def choose(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policy if op == torch.ops.rwkv6_ops.wkv6_forward.default else CheckpointPolicy.PREFER_RECOMPUTE

    def run(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        contexts = lambda: create_selective_checkpoint_contexts(choose)  # noqa: E731
        return checkpoint(block, x, state, use_reentrant=False, context_fn=contexts)

    for a, b in zip(gradients_of(block, run, x, state), want, strict=True):
        assert torch.equal(a, b)
    assert len(counted) == calls


# ---- Saved tensors ----


def test_saved_tensors_may_live_elsewhere():
    problem = make(CASE)
    with torch.autograd.graph.save_on_cpu():
        got = answer(rwkv6_ops.wkv6, problem)
    assert_gradients(got.gradients, true_answer(problem))


def test_outputs_may_be_changed_in_place():
    """Nothing of the output is needed for the gradients."""
    problem = make(CASE)
    leaves = [x.requires_grad_() for x in inputs(problem)]
    o, final_state = call(rwkv6_ops.wkv6, problem, leaves)
    o.mul_(2)
    final_state.mul_(2)
    gradients = torch.autograd.grad((o, final_state), leaves, (problem.grad_o / 2, problem.grad_final_state / 2))
    assert_gradients(dict(zip(NAMES, gradients, strict=True)), true_answer(problem))


def test_freed_graphs_say_so():
    problem = make(CASE)
    loss = loss_of(problem, *(x.requires_grad_() for x in inputs(problem)))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


# ---- Modules ----


def test_copies_and_pickles_of_modules():
    block, arguments = Block(), block_inputs()
    want = block(*arguments)
    saved = io.BytesIO()
    torch.save(block, saved)
    saved.seek(0)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), torch.load(saved, weights_only=False)):
        for a, b in zip(other(*arguments), want, strict=True):
            assert torch.equal(a, b)
        assert gradients_of(other, other, *arguments)[-1].any()


def test_functions_pickle_by_name():
    for function in (rwkv6_ops.wkv6, rwkv6_ops.wkv6_bidirectional, rwkv6_ops.compat.RUN_CUDA_RWKV6_STATE):
        assert pickle.loads(pickle.dumps(function)) is function


def test_backward_hooks_on_modules():
    block, arguments = Block(), block_inputs()
    seen = []
    block.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_in[0].shape))
    sum(y.sum() for y in block(*arguments)).backward()
    assert seen == [arguments[0].shape]


def test_a_module_with_scripted_parts_around_the_operator():
    """RWKV_JIT_ON: projections and gates are scripted, the operator is called between them."""
    block, arguments = Block(), block_inputs()
    want = gradients_of(block, block, *arguments)
    scripted = copy.deepcopy(block)
    scripted.project, scripted.out = torch.jit.script(scripted.project), torch.jit.script(scripted.out)
    for a, b in zip(gradients_of(scripted, scripted, *arguments), want, strict=True):
        assert_close("gradient", a, b, 1e-6)


def test_traced_with_torch_jit_trace():
    """The trace records the registered operator, which runs from then on for any length."""
    r, u = torch.randn(2, 5, 3, 8), torch.randn(3, 8)
    traced = torch.jit.trace(lambda r, u: rwkv6_ops.wkv6(r, r, r, -r.exp(), u)[0], (r, u))
    longer = torch.randn(1, 9, 3, 8)
    assert torch.equal(traced(longer, u), rwkv6_ops.wkv6(longer, longer, longer, -longer.exp(), u)[0])
