# SPDX-License-Identifier: Apache-2.0
"""Memory that training takes: of the operator, measured beside what docs/design.md says it should be."""

from __future__ import annotations

from collections.abc import Callable

import torch

import rwkv6_ops
from benchmarks.calls import both_call
from benchmarks.peers import hf_loop, true_loop
from benchmarks.points import Point, operands
from benchmarks.timing import peak_memory

SEGMENT = 64  # tokens from one stored state to the next
SCRATCH = 400_000  # bytes a thread, heads of 64 x 64
LOOP_TOKENS = 512  # beyond, a loop takes long and gigabytes


def formula(point: Point) -> int:
    """Bytes beyond the inputs that forward and backward should hold at their peak: o and the gradients, the states at
    the segments' ends, the sequences' parts of du, scratch."""
    size = getattr(torch, point.dtype).itemsize
    results = 5 * point.token_heads * point.D * size + point.H * point.D * size
    states = point.B * (point.T // SEGMENT) * point.H * point.D**2 * 4
    parts = point.B * point.H * point.D * 4
    return results + states + parts + (SCRATCH * point.threads if point.device == "cpu" else 0)


def operator_memory(point: Point, loops: bool = True) -> dict[str, int | None]:
    """Peak bytes beyond the inputs, by who computes; the loops, if wanted, only where that is possible."""
    ways: dict[str, Callable] = {"ours": rwkv6_ops.wkv6}
    if loops and point.T <= LOOP_TOKENS:
        ways |= {"HF loop": hf_loop, "loop, true gradients": true_loop}
    torch.set_num_threads(point.threads)
    inputs = operands(point)

    def training(wkv: Callable) -> int | None:
        step = both_call(lambda *x: keep(wkv(*x)), inputs)
        kept = []  # o, which a model holds while gradients are computed

        def keep(result: tuple) -> tuple:
            kept[:] = [result[0].detach()]
            return result

        return peak_memory(lambda: (step(), kept.pop()), point.device)

    return {"formula": formula(point), **{name: training(wkv) for name, wkv in ways.items()}}
