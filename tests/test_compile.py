# SPDX-License-Identifier: Apache-2.0
"""torch.compile, torch.export, AOTInductor, fake tensors. Each compilation takes seconds: few, and small ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from cases import Case, make
from oracle import answer, assert_close, assert_forward, assert_gradients, inputs, true_answer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import rwkv6_ops
import rwkv6_ops.distributed  # registers an operator
from rwkv6_ops import compat

OPS = torch.ops.rwkv6_ops


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test sees what another one compiled. Memory is not filled with NaN: that changes what gets compiled."""
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Mix(torch.nn.Module):
    """A time mix reduced to what compilers have to see: a projection before the operator, raw decay, a state."""

    def __init__(self, heads: int = 2, size: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.size = heads, size
        self.project = torch.nn.Linear(heads * size, 4 * heads * size)
        self.u = torch.nn.Parameter(torch.randn(heads, size))

    def forward(self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None):
        r, k, v, w = self.project(x).unflatten(-1, (4, self.heads, self.size)).unbind(2)
        o, state = rwkv6_ops.wkv6(
            r, k, v, w, self.u, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens, decay="raw"
        )
        return torch.tanh(o).flatten(2), state


def sample(T: int, B: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(T)
    return torch.randn(B, T, 16, generator=g), torch.randn(B, 2, 8, 8, generator=g)


def step(model: torch.nn.Module, module: Mix, *arguments: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of the parameters through both of them, of one training step."""
    module.zero_grad()
    o, state = model(*arguments)
    (o.square().sum() + state.square().sum()).backward()
    return [o.detach(), state.detach(), *(p.grad.clone() for p in module.parameters())]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    """Compilers fuse and reorder the arithmetic around the operator: close, not equal."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close(f"result {i}", a, b, 2e-6)


# ---- torch.compile ----


def test_compiled_in_one_graph_and_trained_for_two_steps():
    """CASES 20, flash-linear-attention #52, #779: wrong, or a graph break, under torch.compile. Static shapes first,
    then a second length, which compiles once more with a dynamic T; a third length compiles nothing."""
    module = Mix()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for T in (7, 12, 70):
        for _ in range(2):
            assert_same(step(compiled, module, *sample(T)), step(module, module, *sample(T)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_reduce_overhead_does_not_overwrite_earlier_results():
    """CASES 20. On a CPU the mode records no graph, but it has to run."""
    module = Mix()
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        first, want = compiled(*sample(7)), module(*sample(7))
        compiled(sample(7)[0] + 1, sample(7)[1])
    assert_same(list(first), list(want))


def test_compiled_sequences_of_different_lengths():
    """Offsets are data to the graph: other offsets run without another compilation."""
    module = Mix()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    x, state = sample(20, B=1)[0], sample(1, B=3)[1]
    for offsets in ([0, 7, 7, 20], [0, 1, 2, 20]):
        cu_seqlens = torch.tensor(offsets)
        got = step(compiled, module, x, state, cu_seqlens)
        assert_same(got, step(module, module, x, state, cu_seqlens))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_offsets_are_checked_when_they_are_read():
    module = Mix()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"cu_seqlens: .* expected to start at 0"), torch.no_grad():
        compiled(sample(5, B=1)[0], None, torch.tensor([0, 3, 2, 5]))


def test_wrong_arguments_are_refused_while_compiling():
    compiled = torch.compile(lambda r, u: rwkv6_ops.wkv6(r, r, r, r, u)[0], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="u: shape"):
        compiled(torch.randn(1, 4, 2, 8), torch.randn(2, 9))


def test_every_public_call_compiles_in_one_graph():
    r, u = torch.randn(2, 5, 3, 8), torch.randn(3, 8)
    flat, state, value_first = r.flatten(2), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)

    def all_of_them(r: Tensor, flat: Tensor, u: Tensor, state: Tensor, changed: Tensor) -> list[Tensor]:
        return [
            rwkv6_ops.wkv6_bidirectional(r, r, r, -r.exp(), u),
            *rwkv6_ops.fused_recurrent_rwkv6(r, r, r, -r.exp(), u, output_final_state=True),
            rwkv6_ops.chunk_rwkv6(r, r, r, -r.exp(), u, initial_state=state)[0],
            *rwkv6_ops.rwkv6_linear_attention(True, flat, flat, flat, flat, u, state),
            compat.RUN_CUDA_RWKV6(flat, flat, flat, flat, u),
            *compat.RUN_CUDA_RWKV6_STATE(2, 5, 24, 3, flat, flat, flat, flat, u, state),
            compat.RUN_WKV6STATE_CUDA(2, 5, 24, 3, flat, flat, flat, flat, u, changed),
            rwkv6_ops.wkv6_step_(r[:, 0], r[:, 0], r[:, 0], r[:, 0], u, changed, decay="raw"),
        ]

    compiled = torch.compile(all_of_them, fullgraph=True, backend="aot_eager")
    changed, again = value_first.clone(), value_first.clone()
    with torch.no_grad():
        got, want = compiled(r, flat, u, state, changed), all_of_them(r, flat, u, state, again)
    assert_same([*got, changed], [*want, again])


# ---- torch.export ----


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time", min=2)
    shapes = ({0: batch, 1: time}, {0: batch})
    return torch.export.export(Mix().eval(), sample(9, B=3), dynamic_shapes=shapes)


def test_exported_with_a_dynamic_length_saved_and_loaded(exported: torch.export.ExportedProgram, tmp_path):
    path = tmp_path / "mix.pt2"
    torch.export.save(exported, path)
    loaded = torch.export.load(path).module()
    for T, B in ((5, 1), (130, 2)):
        assert_same(list(loaded(*sample(T, B))), list(Mix()(*sample(T, B))))


def test_exported_programs_can_be_trained():
    module = Mix()
    again = torch.export.export(module, sample(9), strict=False).module()
    want = step(module, module, *sample(9))
    assert_same(step(again, again, *sample(9)), want)


def test_an_aot_inductor_package_runs(exported: torch.export.ExportedProgram, tmp_path):
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "mix_aoti.pt2"))
    model = torch._inductor.aoti_load_package(package)
    for T, B in ((5, 4), (130, 2)):
        with torch.no_grad():
            assert_same(list(model(*sample(T, B))), list(Mix()(*sample(T, B))))


# ---- Operators ----


def test_these_are_all_operators():
    """Each has its opcheck: in test_torch.py, wkv6_state in test_state_pass.py, wkv6_scan in test_distributed.py."""
    names = {"wkv6_forward", "wkv6_backward", "wkv6_step_", "wkv6_state", "wkv6_scan"}
    registered = [name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "rwkv6_ops::" in name]
    assert sorted(registered) == sorted(names)


# ---- Tensors without data ----


def test_fake_tensors_give_shapes_dtypes_and_gradients():
    problem = make(Case("fake", B=2, T=70, H=3, K=16, V=8, dtypes="bf16 f16 bf16 f32 f32"))
    real = answer(rwkv6_ops.wkv6, problem)
    mode = FakeTensorMode()
    fakes = copy.copy(problem)
    for name in ("r", "k", "v", "w", "u", "initial_state", "grad_o", "grad_final_state"):
        setattr(fakes, name, mode.from_tensor(getattr(problem, name)))
    with mode:
        fake = answer(rwkv6_ops.wkv6, fakes)
    pairs = [(fake.o, real.o), (fake.final_state, real.final_state)]
    pairs += [(fake.gradients[name], real.gradients[name]) for name in real.gradients]
    for a, b in pairs:
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_meta_tensors_give_shapes():
    r, u = torch.randn(2, 5, 3, 8, device="meta"), torch.randn(3, 8, device="meta", requires_grad=True)
    o, state = rwkv6_ops.wkv6(r, r, r, r, u, output_final_state=True)
    assert (o.shape, state.shape, o.device.type) == (r.shape, (2, 3, 8, 8), "meta")
    o.sum().backward()
    assert u.grad.shape == u.shape
    assert rwkv6_ops.wkv6_step_(r[:, 0], r[:, 0], r[:, 0], r[:, 0], u.detach(), state.detach()).shape == (2, 3, 8)


def test_a_graph_traced_with_make_fx_is_the_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    problem = make(Case("make_fx", B=2, T=9))
    r, k, v, w, u = inputs(problem)[:5]
    graph = make_fx(lambda *x: rwkv6_ops.wkv6(*x, initial_state=problem.initial_state, output_final_state=True))(
        r, k, v, w, u
    )
    assert OPS.wkv6_forward.default in [node.target for node in graph.graph.nodes]
    want = true_answer(problem)
    assert_forward(*graph(r, k, v, w, u), want)
    assert_gradients(answer(rwkv6_ops.wkv6, problem).gradients, want)
