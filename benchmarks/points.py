# SPDX-License-Identifier: Apache-2.0
"""The problems that are timed, and the sweeps they form."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from cases import log_decays
from torch import Tensor

PASSES = {"forward": "forward", "both": "forward and backward", "decode": "one token, state in place"}
_FLOP = {"forward": 5, "decode": 5, "both": 17}  # on each element of the state, a token: backward has 12 of its own


@dataclass(frozen=True)
class Point:
    """One problem to time."""

    pass_: str  # a name in PASSES
    B: int
    T: int
    H: int
    D: int = 64
    dtype: str = "float32"
    threads: int = 1
    device: str = "cpu"

    @property
    def key(self) -> str:
        threads = f" {self.threads}thr" if self.device == "cpu" else ""
        return f"{self.pass_} B{self.B} T{self.T} H{self.H} D{self.D} {self.dtype}{threads} {self.device}"

    @property
    def token_heads(self) -> int:
        return self.B * self.T * self.H

    @property
    def flop(self) -> int:
        """Operations that the recurrence itself asks for, whatever a kernel really does."""
        return _FLOP[self.pass_] * self.D * self.D * self.token_heads

    @property
    def bytes(self) -> int:
        """What has to be read and written at least: the operands and results, once; in decoding the state as well."""
        rows = {"forward": 5, "decode": 5, "both": 10}[self.pass_]
        size = getattr(torch, self.dtype).itemsize
        state = 8 * self.D * self.D * self.token_heads if self.pass_ == "decode" else 0
        return rows * self.D * size * self.token_heads + state


def operands(point: Point) -> list[Tensor]:
    """r, k, v, log w and u for a point, w of the kind that trained models have."""
    draw = torch.Generator().manual_seed(0)
    shape = point.B, point.T, point.H, point.D
    r, k, v = (torch.randn(shape, generator=draw) for _ in range(3))
    w, u = log_decays("normal", shape, draw), torch.randn(shape[2:], generator=draw)
    return [x.to(point.device, getattr(torch, point.dtype)) for x in (r, k, v, w, u)]


def growing(pass_: str, largest: int = 16) -> dict[str, list[Point]]:
    """For each of B, T and H, problems in which it alone grows, to `largest` times the first one's; all begin alike."""
    times = [2**n for n in range(largest.bit_length())]
    return {
        "B": [Point(pass_, n, 256, 4) for n in times],
        "T": [Point(pass_, 1, 256 * n, 4) for n in times],
        "H": [Point(pass_, 1, 256, 4 * n) for n in times],
    }


_CPU_SWEEPS = {
    "front": [
        Point("forward", 1, 512, 32),
        Point("forward", 1, 16384, 8),
        Point("both", 1, 512, 8),
        Point("decode", 1, 1, 32),
    ],
    "length": [Point(p, 1, 4**n, 8) for n in range(9) for p in ("forward", "both")],
    "heads": [Point(p, B, 512, H) for B, H in ((1, 1), (1, 8), (1, 32), (8, 12), (4, 64)) for p in ("forward", "both")],
    "growth": [point for p in ("forward", "both") for points in growing(p).values() for point in points],
    "head size": [Point(p, 1, 512, 8, D=D) for D in (32, 60, 64, 128, 256) for p in ("forward", "both")],
    "dtype": [Point(p, 1, 512, 8, dtype=d) for d in ("float32", "bfloat16", "float16") for p in ("forward", "both")],
    "decode": [Point("decode", B, 1, H) for B, H in ((1, 12), (1, 32), (1, 64), (16, 32))],
}
_CUDA_SWEEPS = {
    "front": [Point(p, 8, 4096, 64, dtype="bfloat16", device="cuda") for p in ("forward", "both")],
    "length": [Point(p, 1, 4**n, 32, dtype="bfloat16", device="cuda") for n in range(9) for p in ("forward", "both")],
    "heads": [
        Point(p, B, 1024, H, dtype="bfloat16", device="cuda")
        for B, H in ((1, 32), (8, 8), (8, 32), (8, 64))
        for p in ("forward", "both")
    ],
    "head size": [Point(p, 4, 1024, 16, D=D, device="cuda") for D in (32, 64, 128, 256) for p in ("forward", "both")],
    "dtype": [
        Point(p, 4, 1024, 32, dtype=d, device="cuda")
        for d in ("float32", "bfloat16", "float16")
        for p in ("forward", "both")
    ],
    "decode": [Point("decode", B, 1, 64, device="cuda") for B in (1, 16, 128)],
}
_QUICK = {
    "front": [Point("forward", 1, 64, 2), Point("both", 1, 64, 2), Point("decode", 1, 1, 2)],
    "length": [Point(p, 1, T, 2) for T in (1, 16, 64) for p in ("forward", "both")],
}


def sweeps(device: str = "cpu", quick: bool = False) -> dict[str, list[Point]]:
    """Points by the name of the sweep they belong to; one point may be in several."""
    if quick:
        return _QUICK
    if device == "cuda":
        return _CUDA_SWEEPS
    cores = os.cpu_count() or 1
    counts = sorted({1, 2, cores // 2 or 1, cores} & set(range(1, cores + 1)))
    threads = [
        Point(p, B, T, H, threads=n)
        for p in ("forward", "both")
        for B, T, H in ((1, 512, 8), (1, 512, 32), (4, 1024, 8), (8, 512, 12), (1, 4096, 32), (1, 16384, 8))
        for n in counts
    ]
    return {**_CPU_SWEEPS, "threads": threads}
