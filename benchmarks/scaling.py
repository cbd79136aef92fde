# SPDX-License-Identifier: Apache-2.0
"""What cutting sequences over ranks costs: measured here, and from that a model of more ranks. Writes docs/scaling.md's
tables.

    python benchmarks/scaling.py [--heads N] [--tokens N]

Local passes and the composition of summaries are timed on one thread of one process; weak scaling on one and two
processes with one thread each. The links of the model are stated, not measured.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.append(str(Path(__file__).resolve().parent.parent))

import rwkv6_ops
from rwkv6_ops import distributed
from rwkv6_ops.distributed._scan import _compose

WIDTH = 64  # K and V
TOKENS = 1 << 20
HEADS = 64
LINKS = {"25 GB/s, 5 µs": (25e9, 5e-6), "1.25 GB/s, 30 µs": (1.25e9, 30e-6)}
MESSAGE = 1e-6  # seconds that a rank spends on each further message of an all_to_all


@dataclass
class Local:
    """Seconds a token and head of each pass, and a number of a summary to compose."""

    forward: float
    backward: float  # with the states that the forward pass has saved
    state: float
    compose: float


def least(call: Callable[[], object], rounds: int = 20) -> float:
    call()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def inputs(tokens: int, heads: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    r, k, v, x = (torch.randn(1, tokens, heads, WIDTH, generator=g) for _ in range(4))
    return [r, k, v, -torch.exp(x), torch.randn(heads, WIDTH, generator=g)]


def measure_local(tokens: int, heads: int) -> Local:
    given = inputs(tokens, heads)
    leaves = [x.clone().requires_grad_() for x in given]
    gradient = torch.randn(given[2].shape, generator=torch.Generator().manual_seed(1))

    def both() -> None:
        torch.autograd.grad(rwkv6_ops.wkv6(*leaves)[0], leaves, gradient)

    forward, training = least(lambda: rwkv6_ops.wkv6(*given)), least(both)
    state = least(lambda: rwkv6_ops.wkv6_state(*given[1:4]))
    summary = torch.randn(heads * WIDTH, WIDTH + 1)
    before = torch.randn(heads * WIDTH, WIDTH)
    compose = least(lambda: _compose(summary, before))
    size = tokens * heads
    return Local(forward / size, (training - forward) / size, state / size, compose / summary.numel())


def seconds(local: Local, ranks: int, link: tuple[float, float], exchange: str) -> float:
    """A forward and backward pass of TOKENS tokens: local passes and two exchanges."""
    speed, latency = link
    numbers = HEADS * WIDTH * (WIDTH + 1)  # of a summary
    if exchange == "all_gather":
        wire = math.ceil(math.log2(ranks)) * latency + (ranks - 1) * numbers * 4 / speed
        composing = (ranks - 1) * numbers * local.compose
    else:
        share = (ranks - 1) / ranks
        wire = 2 * (latency + (ranks - 1) * MESSAGE + share * numbers * 4 / speed)
        composing = numbers * local.compose
    # The states between are computed again in the backward pass: one more forward pass.
    passes = 2 * local.state + 2 * local.forward + local.backward
    return passes * TOKENS * HEADS / ranks + 2 * (wire + composing)


def print_model(local: Local) -> None:
    alone = (local.forward + local.backward) * TOKENS * HEADS
    print(f"| ranks | tokens each | {' | '.join(f'{x}: {e}' for x in LINKS for e in ('all_gather', 'transpose'))} |")
    print("|---|---|" + "---|" * (2 * len(LINKS)))
    for ranks in (8, 16, 64, 256, 1024):
        cells = []
        for link in LINKS.values():
            for exchange in ("all_gather", "transpose"):
                took = seconds(local, ranks, link, exchange)
                cells.append(f"{1e3 * took:.0f} ms, {100 * alone / ranks / took:.0f} %")
        print(f"| {ranks} | {TOKENS // ranks} | {' | '.join(cells)} |")


def _weak(rank: int, world: int, tokens: int, heads: int, store: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    leaves = [x.requires_grad_() for x in inputs(tokens, heads)]
    gradient = torch.ones_like(leaves[2])
    group = dist.group.WORLD

    def training(operator: Callable) -> Callable[[], object]:
        def call() -> None:
            dist.barrier()
            torch.autograd.grad(operator(*leaves), leaves, gradient)

        return call

    scan = torch.ops.rwkv6_ops.wkv6_scan
    state, w_sum = torch.zeros(1, heads, WIDTH, WIDTH), torch.zeros(1, heads, WIDTH)
    calls = {
        "each by itself": training(lambda *x: rwkv6_ops.wkv6(*x)[0]),
        "one sequence": training(lambda *x: distributed.wkv6(*x, group=group)[0]),
    }
    if world > 1:
        for name in ("all_gather", "transpose"):
            calls[f"exchange, {name}"] = lambda name=name: scan(state, w_sum, (), 1, group.group_name, False, name)
    times = {name: least(call) for name, call in calls.items()}
    if rank == 0:
        results.put(times)
    dist.destroy_process_group()


def print_weak(tokens: int, heads: int) -> None:
    """One and two processes, the same tokens each."""
    for world in (1, 2):
        results = multiprocessing.get_context("spawn").SimpleQueue()
        store = tempfile.mkdtemp() + "/store"
        multiprocessing.spawn(_weak, (world, tokens, heads, store, results), nprocs=world)
        print(f"{world} processes: " + ", ".join(f"{name} {1e3 * x:.2f} ms" for name, x in results.get().items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="What cutting sequences over ranks costs.")
    parser.add_argument("--heads", type=int, default=8, help="of the measurements")
    parser.add_argument("--tokens", type=int, default=2048, help="of the measurements, a process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    local = measure_local(options.tokens, options.heads)
    print(f"K = V = {WIDTH}, float32, {options.heads} heads, {options.tokens} tokens, one thread. A token and head:")
    print(
        f"forward {1e9 * local.forward:.0f} ns, backward {1e9 * local.backward:.0f} ns, state alone "
        f"{1e9 * local.state:.0f} ns; a number to compose {1e9 * local.compose:.2f} ns\n"
    )
    print_weak(options.tokens, options.heads)
    print(f"\nForward and backward of {TOKENS} tokens, {HEADS} heads:\n")
    print_model(local)


if __name__ == "__main__":
    main()
