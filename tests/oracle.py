# SPDX-License-Identifier: Apache-2.0
"""What the right answer is and how far from it a result may be: the float64 reference loop, and relative L2 errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, NAMES, WITH_SHORT_INPUTS, Case, Problem, make
from torch import Tensor

from rwkv6_ops import reference

# Values this small are 0 in float32 arithmetic that flushes subnormal numbers, so a difference of this size is none.
_NOTHING = 1e-36

_SHORT = (torch.bfloat16, torch.float16)


@dataclass
class Answer:
    """Output, final state and the gradient of each input by its name; None for an input that the problem lacks."""

    o: Tensor
    final_state: Tensor
    gradients: dict[str, Tensor | None]


def inputs(problem: Problem) -> list[Tensor]:
    """The tensors with gradients, in the order of NAMES; the initial state last, where there is one."""
    return [x for name in NAMES if (x := getattr(problem, name)) is not None]


def call(op: Callable, problem: Problem, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """op on `tensors` (as from `inputs`) with the options of `problem`."""
    state = tensors[5] if len(tensors) > 5 else None
    return op(*tensors[:5], initial_state=state, output_final_state=True, **problem.options)


def answer(op: Callable, problem: Problem, through: str = "both") -> Answer:
    """What `op` gives for `problem`, and the gradients of all inputs through "o", "final_state" or "both"."""
    leaves = [x.detach().requires_grad_() for x in inputs(problem)]
    o, final_state = call(op, problem, leaves)
    outputs = {"o": (o, problem.grad_o), "final_state": (final_state, problem.grad_final_state)}
    used = outputs.values() if through == "both" else [outputs[through]]
    used = [(x, gradient) for x, gradient in used if x.requires_grad]  # the loop's zeros at T = 0 do not
    ends, starts = [x for x, _ in used], [gradient for _, gradient in used]
    gradients = torch.autograd.grad(ends, leaves, starts, allow_unused=True)
    return Answer(o.detach(), final_state.detach(), dict(zip(NAMES, gradients, strict=False)))


def in_float64(problem: Problem) -> Problem:
    """The same values, in float64."""
    values = {f.name: getattr(problem, f.name) for f in fields(problem)}
    return replace(
        problem, **{n: x.double() for n, x in values.items() if isinstance(x, Tensor) and x.is_floating_point()}
    )


def true_answer(problem: Problem, through: str = "both") -> Answer:
    """The float64 loop's answer. A gradient that autograd does not reach is zero."""
    problem = in_float64(problem)
    result = answer(reference.wkv6, problem, through)
    for name, x in zip(NAMES, inputs(problem), strict=False):
        if result.gradients[name] is None:
            result.gradients[name] = torch.zeros_like(x)
    return result


@cache
def true_answer_of(case: Case) -> Answer:
    return true_answer(make(case))


@cache
def true_forward_of(case: Case) -> Answer:
    """For sequences too long to keep every state of."""
    problem = in_float64(make(case))
    return Answer(*call(reference.wkv6, problem, inputs(problem)), {})


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error of `got`. Both are to be finite: a NaN anywhere makes it NaN, which is below no tolerance."""
    difference = (got.double() - want.double()).norm().item()
    return 0.0 if difference <= _NOTHING * max(1, want.numel()) else difference / want.double().norm().item()


def assert_close(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    error = relative_error(got, want)
    assert error <= tolerance, f"{name}: relative L2 error {error:.2e}, tolerance {tolerance:.0e}"


def tolerance_of(x: Tensor, table: dict, short_inputs: bool) -> float:
    """The tolerance of a result; see WITH_SHORT_INPUTS."""
    return max(table[x.dtype], table.get(WITH_SHORT_INPUTS, 0.0) if short_inputs else 0.0)


def assert_forward(got_o: Tensor, got_state: Tensor | None, want: Answer) -> None:
    assert_close("o", got_o, want.o, FORWARD_TOLERANCE[got_o.dtype])
    if got_state is not None:
        tolerance = tolerance_of(got_state, FORWARD_TOLERANCE, got_o.dtype in _SHORT)
        assert_close("final_state", got_state, want.final_state, tolerance)


def assert_gradients(got: dict[str, Tensor | None], want: Answer) -> None:
    short = all(got[name].dtype in _SHORT for name in "rkv" if got.get(name) is not None)
    for name, gradient in got.items():
        assert gradient is not None, f"gradient of {name}: None"
        tolerance = tolerance_of(gradient, GRADIENT_TOLERANCE, short)
        assert_close(f"gradient of {name}", gradient, want.gradients[name], tolerance)
