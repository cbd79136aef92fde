# SPDX-License-Identifier: Apache-2.0
"""Problems nobody thought of: sizes, dtypes, strides, decays, options and ways to call drawn together, against the
float64 loop, with gradients. 300 problems and some for the other functions; `make fuzz` draws 10,000.

Sums of a few random numbers may cancel, so errors are measured against the same sums of absolute values, and rounding
to a short dtype against the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from cases import DTYPES, FORWARD_TOLERANCE, GRADIENT_TOLERANCE, NAMES, Case, Problem, make
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Answer, call, in_float64, inputs
from torch import Tensor

import rwkv6_ops
from rwkv6_ops import _native, _ops, reference

TENSORS = (*NAMES, "grad_o", "grad_final_state")
DECAYS = ["normal", "weak", "zero", "strong", "spikes", "forget", "mixed"]
EXAMPLES = settings().max_examples  # conftest.py: 300, or as many as the profile says

# Of what flushing subnormal numbers to zero, or rounding to float16's, loses of an element.
SMALLEST = {torch.float64: 1e-300, torch.float32: 1e-36, torch.bfloat16: 1e-36, torch.float16: 2.0**-25}


@dataclass(frozen=True)
class Drawn:
    """A problem, how it is called and where its tensors lie."""

    case: Case
    layouts: tuple[int, ...]  # a seed for each of TENSORS; 0: contiguous
    state_dtype: str
    way: str
    algorithm: str
    checkpoint: int
    wanted: frozenset[str]
    through: str
    isa: str
    threads: int


@st.composite
def cases(draw) -> Case:
    varlen = draw(st.booleans())
    T = draw(st.integers(0, 12) | st.integers(13, 40) | st.integers(60, 140))
    cuts = sorted(draw(st.lists(st.integers(0, T), max_size=5)))
    short = st.sampled_from(["f32", "bf16", "f16"])
    dtypes = draw(st.just(["f64"] * 5) | st.lists(short, min_size=5, max_size=5))
    return Case(
        name=f"random {draw(st.integers(0, 99))}",
        B=1 if varlen else draw(st.integers(0, 3)),
        T=T,
        H=draw(st.integers(0, 4)),
        K=draw(st.integers(1, 40) | st.sampled_from([64, 65, 128])),
        V=draw(st.integers(1, 70) | st.sampled_from([128, 129])),
        decays=draw(st.sampled_from(DECAYS)),
        raw=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, -0.25, 0.0])),
        initial_state=draw(st.booleans()),
        reverse=draw(st.booleans()),
        cu_seqlens=(0, *cuts, T) if varlen else None,
        dtypes=" ".join(dtypes),
    )


@st.composite
def problems(draw) -> Drawn:
    case = draw(cases())
    names = [name for name in NAMES if case.initial_state or name != "initial_state"]
    layout = st.just(0) | st.integers(0, 2**32)
    return Drawn(
        case=case,
        layouts=tuple(draw(st.lists(layout, min_size=len(TENSORS), max_size=len(TENSORS)))),
        state_dtype="f64" if case.dtypes.startswith("f64") else draw(st.sampled_from(["f32", "bf16", "f16"])),
        way=draw(st.sampled_from(["wkv6", "wkv6", "operator", *(["fla"] if not case.raw else [])])),
        algorithm=draw(st.sampled_from(["auto", "recurrent", "chunk"])),
        checkpoint=draw(st.sampled_from([0, 1, 5, 16, 64, 200])),
        wanted=frozenset(draw(st.lists(st.sampled_from(names), min_size=1, max_size=6))),
        through=draw(st.sampled_from(["both", "o", "final_state"])),
        isa=draw(st.sampled_from(_native.isas())),
        threads=draw(st.integers(1, 2)),
    )


def lay(x: Tensor, seed: int) -> Tensor:
    """The values of x anywhere in a buffer of NaN: dimensions in any order, gaps, an offset; or some repeated."""
    if not seed:
        return x.contiguous()
    chance = random.Random(seed)
    repeated = [chance.random() < 0.15 for _ in x.shape]
    strides, step = [0] * x.dim(), 1
    for d in chance.sample(range(x.dim()), x.dim()):
        step *= chance.choice([1, 1, 1, 2, 3])
        strides[d] = 0 if repeated[d] else step
        step *= 1 if repeated[d] else max(x.shape[d], 1)
    offset = chance.choice([0, 1, 2, 3, 17])
    buffer = x.new_full((offset + step + 1,), float("nan"))
    first = x[tuple(slice(0, 1) if r else slice(None) for r in repeated)]
    buffer.as_strided(first.shape, strides, offset).copy_(first)
    return buffer.as_strided(x.shape, strides, offset)


def problem_of(drawn: Drawn) -> Problem:
    problem = make(drawn.case)
    if problem.initial_state is not None:
        problem.initial_state = problem.initial_state.to(DTYPES[drawn.state_dtype])
    for name, seed in zip(TENSORS, drawn.layouts, strict=True):
        if getattr(problem, name) is not None:
            setattr(problem, name, lay(getattr(problem, name), seed))
    return problem


def operator(drawn: Drawn) -> Callable:
    """A function called as the reference loop is, which goes the drawn way."""

    def through_torch_ops(r, k, v, w, u, *, initial_state, cu_seqlens, scale, reverse, decay, output_final_state):
        options = (scale, output_final_state, reverse, decay == "raw", drawn.algorithm, "default", drawn.checkpoint)
        return _ops._forward_op(r, k, v, w, u, initial_state, cu_seqlens, *options)[:2]

    def head_first(r, k, v, w, u, *, decay, **options):
        function = rwkv6_ops.chunk_rwkv6 if drawn.algorithm == "chunk" else rwkv6_ops.fused_recurrent_rwkv6
        r, k, v, w = (x.transpose(1, 2) for x in (r, k, v, w))
        o, state = function(r, k, v, w, u, head_first=True, **options)
        return o.transpose(1, 2), state

    def wkv6(*tensors, **options):
        return rwkv6_ops.wkv6(*tensors, algorithm=drawn.algorithm, **options)

    return {"operator": through_torch_ops, "fla": head_first, "wkv6": wkv6}[drawn.way]


@contextmanager
def kernels(isa: str, threads: int = 1) -> Iterator[None]:
    previous = _native.use_isa(isa)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        _native.use_isa(previous)
        torch.set_num_threads(1)


def answer(op: Callable, problem: Problem, wanted: frozenset[str], through: str) -> Answer:
    """What `op` gives, and the gradients of `wanted`; an unreached one is zero."""
    leaves = dict(zip(NAMES, (x.detach() for x in inputs(problem)), strict=False))
    for name in wanted:
        leaves[name].requires_grad_()
    o, state = call(op, problem, list(leaves.values()))
    ends = {"o": (o, problem.grad_o), "final_state": (state, problem.grad_final_state)}
    used = [ends[name] for name in ends if through in (name, "both") and ends[name][0].requires_grad]
    if not used:  # no token, and a final state that is the initial one
        return Answer(o, state, {name: torch.zeros_like(leaves[name]) for name in wanted})
    outputs, starts = zip(*used, strict=True)
    gradients = torch.autograd.grad(outputs, [leaves[name] for name in wanted], starts, allow_unused=True)
    zeros = [torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(wanted, gradients, strict=True)]
    return Answer(o.detach(), state.detach(), dict(zip(wanted, zeros, strict=True)))


def magnitudes(problem: Problem) -> Problem:
    """In float64, every number but the decays without its sign: no sum of its answer cancels."""
    exact = in_float64(problem)
    values = {name: getattr(exact, name).abs() for name in TENSORS if name != "w" and getattr(exact, name) is not None}
    return replace(exact, scale=abs(problem.scale), **values)


def assert_near(name: str, got: Tensor, want: Tensor, size: Tensor, tolerance: dict) -> None:
    """`got` is `want` but for some roundings of float32 (float64) numbers of the `size` and one to its own dtype.

    Only where `want` is finite: there `got` must be too."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    finite = want.isfinite() & size.isfinite()
    dtype, got, want, size = got.dtype, got[finite].double(), want[finite], size[finite]
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    allowed = tolerance[computed] * size.norm() + SMALLEST[dtype] * max(1, got.numel())
    allowed += tolerance[dtype] * want.norm() if dtype.itemsize == 2 else 0
    error = (got - want).norm()
    assert error <= allowed, f"{name}: off by {error:.2e} of {want.norm():.2e}, expected {allowed:.2e} at most"


def assert_answer(got: Answer, want: Answer, size: Answer) -> None:
    assert_near("o", got.o, want.o, size.o, FORWARD_TOLERANCE)
    assert_near("final_state", got.final_state, want.final_state, size.final_state, FORWARD_TOLERANCE)
    for name, gradient in got.gradients.items():
        assert_near(f"gradient of {name}", gradient, want.gradients[name], size.gradients[name], GRADIENT_TOLERANCE)


def check(drawn: Drawn, problem: Problem) -> Answer:
    """The drawn way's answer, which is the reference loop's."""
    with kernels(drawn.isa, drawn.threads):
        got = answer(operator(drawn), problem, drawn.wanted, drawn.through)
    for name in drawn.wanted:
        assert got.gradients[name].dtype == getattr(problem, name).dtype
    truth, size = in_float64(problem), magnitudes(problem)
    want = answer(reference.wkv6, truth, drawn.wanted, drawn.through)
    assert_answer(got, want, answer(reference.wkv6, size, drawn.wanted, drawn.through))
    return got


@settings(max_examples=EXAMPLES)
@given(drawn=problems())
def test_random_problems_equal_the_reference_loop(drawn: Drawn):
    check(drawn, problem_of(drawn))


@settings(max_examples=EXAMPLES // 5)
@given(
    drawn=problems(),
    name=st.sampled_from(TENSORS),
    poison=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    places=st.lists(st.integers(0, 2**20), min_size=1, max_size=3),
)
def test_random_poison_reaches_only_what_the_recurrence_reaches(
    drawn: Drawn, name: str, poison: float, places: list[int]
):
    """NaN or infinity anywhere, decays included: where the float64 loop is finite, so is the operator, and right.

    Through both outputs: autograd skips what an output without gradient needs, the kernels multiply by zero."""
    drawn = replace(drawn, layouts=(0,) * len(TENSORS), through="both")
    problem = problem_of(drawn)
    x = getattr(problem, name)
    if x is not None and x.numel():
        x.view(-1)[[place % x.numel() for place in places]] = poison
    check(drawn, problem)


@settings(max_examples=EXAMPLES // 10)
@given(drawn=problems(), with_out=st.booleans())
def test_random_steps_equal_the_reference_loop(drawn: Drawn, with_out: bool):
    case = replace(drawn.case, T=min(drawn.case.T, 5), cu_seqlens=None, reverse=False, initial_state=True)
    problem = problem_of(replace(drawn, case=case, state_dtype="f64" if "f64" in case.dtypes else "f32"))
    state = problem.initial_state.clone(memory_format=torch.preserve_format)
    options, outputs = {"scale": problem.scale, "decay": problem.decay}, [problem.v[:, :0]]
    with kernels(drawn.isa, drawn.threads):
        for t in range(case.T):
            r, k, v, w = (x[:, t] for x in (problem.r, problem.k, problem.v, problem.w))
            out = torch.empty(v.shape, dtype=v.dtype) if with_out else None
            outputs.append(rwkv6_ops.wkv6_step_(r, k, v, w, problem.u, state, out=out, **options)[:, None])
    truth, size = in_float64(problem), magnitudes(problem)
    want, size = (Answer(*call(reference.wkv6, x, inputs(x)), {}) for x in (truth, size))
    assert_answer(Answer(torch.cat(outputs, dim=1), state, {}), want, size)


def both_ways(r, k, v, w, u, *, initial_state, output_final_state, reverse, **options) -> tuple[Tensor, Tensor]:
    """What wkv6_bidirectional means, as loops; the state of the way back is that of the way there."""
    states = {"initial_state": initial_state, "output_final_state": output_final_state}
    o, state = reference.wkv6(r, k, v, w, u, **states, **options)
    behind, _ = reference.wkv6(r, k, v, w, torch.zeros_like(u), reverse=True, **states, **options)
    return o + behind, state


@settings(max_examples=EXAMPLES // 10)
@given(drawn=problems())
def test_random_bidirectional_problems_equal_two_reference_loops(drawn: Drawn):
    """In float32 and float64: each direction rounds to a shorter dtype once, and their sum again."""
    double = drawn.case.dtypes.startswith("f64")
    case = replace(drawn.case, dtypes=drawn.case.dtypes if double else "f32 f32 f32 f32 f32", reverse=False)
    problem = problem_of(replace(drawn, case=case))

    def operator(*tensors, initial_state, output_final_state, reverse, **options):
        states = {"initial_state": initial_state, "reverse_initial_state": initial_state}
        o = rwkv6_ops.wkv6_bidirectional(*tensors, algorithm=drawn.algorithm, **states, **options)
        return o, torch.zeros(problem.grad_final_state.shape)

    with kernels(drawn.isa, drawn.threads):
        got = answer(operator, problem, drawn.wanted, "o")
    truth, size = in_float64(problem), magnitudes(problem)
    want, size = (answer(both_ways, x, drawn.wanted, "o") for x in (truth, size))
    assert_near("o", got.o, want.o, size.o, FORWARD_TOLERANCE)
    for name, gradient in got.gradients.items():
        assert_near(f"gradient of {name}", gradient, want.gradients[name], size.gradients[name], GRADIENT_TOLERANCE)
