# SPDX-License-Identifier: Apache-2.0
"""Time and memory of the operator beside the loop it replaces, in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import rwkv6_ops
from benchmarks.peers import hf_loop
from benchmarks.timing import interleaved, peak_memory

SHAPE = 1, 512, 8, 64  # B, T, H, D


@dataclass(frozen=True)
class Row:
    """One way of computing the operator at `SHAPE`, float32, one thread."""

    name: str
    forward: float  # seconds, the least of several
    both: float  # forward and backward
    memory: int | None  # bytes beyond the inputs, at most, during forward and backward
    error: float  # relative L2 of the output against float64


def compare() -> list[Row]:
    """Ours first. Leaves torch's number of threads as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _compare()
    finally:
        torch.set_num_threads(threads)


def _compare() -> list[Row]:
    B, T, H, D = SHAPE
    draw = torch.Generator().manual_seed(0)
    r, k, v, w = (torch.randn(B, T, H, D, generator=draw) for _ in range(4))
    w, u = w - 2, torch.randn(H, D, generator=draw)
    do = torch.randn(B, T, H, D, generator=draw)
    inputs = [x.requires_grad_() for x in (r, k, v, w, u)]
    calls = {
        "rwkv6_ops": rwkv6_ops.wkv6,
        "HF loop": hf_loop,
        "loop, true gradients": lambda *x, **options: hf_loop(*x, true_gradients=True, **options),
    }
    with torch.no_grad():
        exact, _ = rwkv6_ops.reference.wkv6(*(x.double() for x in inputs), decay="raw")
        errors = {
            name: ((f(*inputs, decay="raw")[0] - exact).norm() / exact.norm()).item() for name, f in calls.items()
        }
    # Without gradients the two loops are the same program.
    forward = interleaved({name: _forward(calls[name], inputs) for name in ("rwkv6_ops", "HF loop")}, rounds=25)
    forward["loop, true gradients"] = forward["HF loop"]
    both = {name: _both(f, inputs, do) for name, f in calls.items()}
    both_times = interleaved(both, rounds=8, budget_seconds=12)
    return [Row(name, forward[name].min, both_times[name].min, peak_memory(both[name]), errors[name]) for name in calls]


def _forward(wkv: Callable, inputs: list[Tensor]) -> Callable[[], object]:
    def call() -> Tensor:
        with torch.inference_mode():
            return wkv(*inputs, decay="raw")[0]

    return call


def _both(wkv: Callable, inputs: list[Tensor], do: Tensor) -> Callable[[], object]:
    def call() -> tuple[Tensor, tuple[Tensor | None, ...]]:
        o, _ = wkv(*inputs, decay="raw")
        return o, torch.autograd.grad(o, inputs, do, allow_unused=True)  # the HF loop gives w no gradient

    return call


def table(rows: list[Row]) -> str:
    """The rows as text, with ratios to the first."""
    first = rows[0]
    lines = [
        f"{'B, T, H, D = ' + str(SHAPE):24s}{'forward':>20s}{'forward + backward':>24s}{'memory':>12s}{'error':>10s}"
    ]
    for row in rows:
        memory = "not known" if row.memory is None else f"{row.memory / 1e6:.1f} MB"
        forward = f"{1e3 * row.forward:.2f} ms ({row.forward / first.forward:.0f}x)"
        both = f"{1e3 * row.both:.1f} ms ({row.both / first.both:.0f}x)"
        lines.append(f"{row.name:24s}{forward:>20s}{both:>24s}{memory:>12s}{row.error:>10.0e}")
    return "\n".join(lines)
