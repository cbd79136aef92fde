# SPDX-License-Identifier: Apache-2.0
"""The problems that `bench_wkv6` times, and the calls that solve each: ours and its peers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from cases import FORWARD_TOLERANCE, log_decays
from oracle import relative_error
from torch import Tensor

import rwkv6_ops
from benchmarks.peers import GgmlWKV6, hf_loop
from rwkv6_ops import reference

Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Point:
    """One problem to time, and the ratio to a peer that the project means to reach there."""

    pass_: str  # "forward", "both" (forward and backward) or "decode" (one token, state in place)
    B: int
    T: int
    H: int
    D: int = 64
    dtype: str = "float32"
    threads: int = 1
    wanted: dict[str, float] = field(default_factory=dict)

    @property
    def token_heads(self) -> int:
        return self.B * self.T * self.H

    @property
    def flop(self) -> int:
        """Operations on the state that the recurrence itself asks for; backward counts its own pass and forward's."""
        return (17 if self.pass_ == "both" else 5) * self.D * self.D * self.token_heads


QUICK = [
    Point("forward", 1, 512, 32, wanted={"HF loop": 12}),
    Point("forward", 1, 16384, 8, wanted={"HF loop": 20}),
    Point("forward", 1, 512, 32, threads=2),
    Point("forward", 1, 512, 32, dtype="bfloat16"),
    Point("both", 1, 512, 8, wanted={"loop, true gradients": 40}),
    Point("both", 1, 512, 8, threads=2),
    Point("both", 1, 512, 8, dtype="bfloat16"),
    Point("decode", 1, 1, 32),
    Point("decode", 16, 1, 32),
]
FULL = [
    *QUICK,
    *(Point("forward", 1, T, 32) for T in (16, 64, 256, 1024, 4096)),
    *(Point("forward", B, 512, H) for B, H in ((1, 1), (8, 12), (4, 64))),
    *(Point("forward", 1, 512, 16, D=D) for D in (32, 128, 60)),
    *(Point("both", 1, T, 32) for T in (16, 128, 1024)),
    *(Point("both", 4, 256, 8, D=D) for D in (32, 128, 60)),
    *(Point("decode", B, 1, 64) for B in (1, 8)),
]


def operands(point: Point) -> list[Tensor]:
    """r, k, v, log w and u for a point, w of the kind that trained models have."""
    draw = torch.Generator().manual_seed(0)
    shape = point.B, point.T, point.H, point.D
    r, k, v = (torch.randn(shape, generator=draw) for _ in range(3))
    w, u = log_decays("normal", shape, draw), torch.randn(shape[2:], generator=draw)
    return [x.to(getattr(torch, point.dtype)) for x in (r, k, v, w, u)]


def true_loop(*x: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
    return hf_loop(*x, true_gradients=True, **options)


def calls(point: Point) -> Calls:
    """What to time at a point, by name, "ours" first. Raises SystemExit where ours is wrong there."""
    inputs = operands(point)
    _refuse_if_wrong(point, inputs)
    found = {"forward": _forward, "both": _both, "decode": _decode}[point.pass_](point, inputs)
    if point.threads > 1:
        # The loop's operations are too small for threads: they only slow it down. Our own single thread instead.
        found = {name: call for name, call in found.items() if name in ("ours", "ggml")}
        found |= {
            "ours": _with_threads(point.threads, found["ours"]),
            "ours, 1 thread": _with_threads(1, found["ours"]),
        }
    return found


def _with_threads(threads: int, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        torch.set_num_threads(threads)
        return call()

    return run


def _forward(point: Point, inputs: list[Tensor]) -> Calls:
    def of(wkv: Callable) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with torch.inference_mode():
                return wkv(*inputs)[0]

        return call

    return {"ours": of(rwkv6_ops.wkv6), "HF loop": of(hf_loop)} | _ggml(point, inputs)


def _both(_: Point, inputs: list[Tensor]) -> Calls:
    inputs = [x.requires_grad_() for x in inputs]
    do = torch.randn_like(inputs[2])

    def of(wkv: Callable) -> Callable[[], object]:
        # The loop answers in float32 whatever the inputs are; the HF loop gives w no gradient.
        return lambda: torch.autograd.grad(o := wkv(*inputs)[0], inputs, do.to(o.dtype), allow_unused=True)

    return {"ours": of(rwkv6_ops.wkv6), "HF loop": of(hf_loop), "loop, true gradients": of(true_loop)}


def _decode(point: Point, inputs: list[Tensor]) -> Calls:
    r, k, v, w = (x[:, 0] for x in inputs[:4])
    state = torch.zeros(point.B, point.H, point.D, point.D)

    def ours() -> None:
        with torch.inference_mode():
            rwkv6_ops.wkv6_step_(r, k, v, w, inputs[4], state)

    def loop() -> None:
        with torch.inference_mode():
            hf_loop(*inputs, initial_state=state, output_final_state=True)

    return {"ours": ours, "HF loop": loop} | _ggml(point, inputs)


def _refuse_if_wrong(point: Point, inputs: list[Tensor]) -> None:
    with torch.no_grad():
        exact, _ = reference.wkv6(*(x.double() for x in inputs))
        got, _ = rwkv6_ops.wkv6(*inputs)
    error, most = relative_error(got, exact), FORWARD_TOLERANCE[got.dtype]
    if not error <= most:  # NaN is refused too
        raise SystemExit(f"{point}: relative error {error:.1e}, wanted at most {most:.0e}: not timed")


def _ggml(point: Point, inputs: list[Tensor]) -> Calls:
    """ggml on the same problem; nothing where it is not installed or has no such operator."""
    if point.dtype != "float32" or ggml_missing():
        return {}
    peer = GgmlWKV6(point.B, point.T, point.H, point.D)
    peer.set(*inputs, torch.zeros(point.B, point.H, point.D, point.D))
    peer.run(point.threads)
    with torch.no_grad():
        ours, _ = rwkv6_ops.wkv6(*inputs)
    difference = relative_error(peer.result()[0], ours)
    if not difference < 1e-5:
        raise SystemExit(f"{point}: ggml differs by {difference:.1e}: the two do not compute the same thing")
    return {"ggml": lambda: peer.run(point.threads)}


def ggml_missing() -> str:
    """Why ggml is not among the peers; empty where it is."""
    try:
        GgmlWKV6(1, 1, 1, 64)
    except ModuleNotFoundError as error:
        return str(error)
    return ""
