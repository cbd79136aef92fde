# SPDX-License-Identifier: Apache-2.0
"""Microseconds that a call costs beyond its arithmetic: problems so small that they are all overhead.

    python benchmarks/overhead.py

For scale, the first lines are a torch operation of the same size, and the C entry points on outputs that exist already:
what a call costs over these is Python and allocation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last, so that an installed rwkv6_ops comes first

import rwkv6_ops
from benchmarks.machine import machine, machine_line
from benchmarks.timing import interleaved
from rwkv6_ops import _native


def calls() -> dict[str, Callable[[], object]]:
    """Everything with B = T = H = 1 and D = 8, where the kernel itself takes a fraction of a microsecond."""
    r, k, v, w = (torch.randn(1, 1, 1, 8) for _ in range(4))
    u, state, w = torch.randn(1, 8), torch.zeros(1, 1, 8, 8), -torch.exp(w)
    step = [x[:, 0] for x in (r, k, v, w)]
    out = torch.empty_like(step[2])
    leaves = [x.clone().requires_grad_() for x in (r, k, v, w, u)]
    do = torch.ones_like(v)

    def under(mode: Callable[[], AbstractContextManager], call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with mode():
                return call()

        return run

    def both() -> object:
        return torch.autograd.grad(rwkv6_ops.wkv6(*leaves)[0], leaves, do)

    def both_matmul() -> object:
        a, b = leaves[0][0, 0], leaves[4]
        return torch.autograd.grad(F.linear(a, b), (a, b), do[0, 0, :, :1])

    inference, no_grad = torch.inference_mode, torch.no_grad
    o, final_state, checkpoints = torch.empty_like(v), torch.empty_like(state), torch.empty(0, 1, 8, 8)
    compiled = torch.compile(rwkv6_ops.wkv6, fullgraph=True)
    options = (None, 1.0, 0, 64)  # cu_seqlens, scale, flags, tokens from one checkpoint to the next
    return {
        "torch: F.linear, inference_mode": under(inference, lambda: F.linear(r[0, 0], u)),
        "torch: F.linear, forward and backward": both_matmul,
        "C entry: forward": lambda: _native.forward(r, k, v, w, u, None, o, None, None, None, *options),
        "C entry: forward with states": lambda: _native.forward(
            r, k, v, w, u, state, o, final_state, None, None, *options
        ),
        "C entry: forward with checkpoints": lambda: _native.forward(
            *leaves, None, o, None, checkpoints, None, *options
        ),
        "C entry: step": lambda: _native.step(*step, u, state, out, *options),
        "the mode itself: inference_mode": under(inference, lambda: None),
        "the mode itself: no_grad": under(no_grad, lambda: None),
        "wkv6, inference_mode": under(inference, lambda: rwkv6_ops.wkv6(r, k, v, w, u)),
        "wkv6, no_grad": under(no_grad, lambda: rwkv6_ops.wkv6(r, k, v, w, u)),
        "wkv6, grad mode, nothing requires grad": lambda: rwkv6_ops.wkv6(r, k, v, w, u),
        "wkv6 with states in and out, inference_mode": under(
            inference, lambda: rwkv6_ops.wkv6(r, k, v, w, u, initial_state=state, output_final_state=True)
        ),
        "wkv6, compiled, inference_mode": under(inference, lambda: compiled(r, k, v, w, u)),
        "wkv6, compiled, forward with grad": lambda: compiled(*leaves),
        "wkv6, forward with grad": lambda: rwkv6_ops.wkv6(*leaves),
        "wkv6, forward and backward": both,
        "wkv6_step_, inference_mode": under(inference, lambda: rwkv6_ops.wkv6_step_(*step, u, state)),
        "wkv6_step_ with out, inference_mode": under(inference, lambda: rwkv6_ops.wkv6_step_(*step, u, state, out=out)),
        "wkv6_step_, no_grad": under(no_grad, lambda: rwkv6_ops.wkv6_step_(*step, u, state)),
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(machine_line(machine()) + "\n\nMicroseconds a call, least and median")
    for name, timing in interleaved(calls(), rounds=100, sample_seconds=0.001).items():
        print(f"{name:46s}{1e6 * timing.min:8.2f}{1e6 * timing.median:8.2f}")


if __name__ == "__main__":
    main()
