# SPDX-License-Identifier: Apache-2.0
"""The calls that solve a point, ours and its peers', each checked before it may be timed."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE
from oracle import relative_error
from torch import Tensor

import rwkv6_ops
from benchmarks.peers import PEERS, ggml_call, load
from benchmarks.points import Point, operands
from rwkv6_ops import reference

Calls = dict[str, Callable[[], object]]
CHECKED_TOKENS = 256  # of each point against the float64 loop
# Enough to tell another operator from another rounding.
PEER_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}


class WrongResultError(Exception):
    """What was to be timed does not compute the operator."""


def calls(point: Point, without: Collection[str] = ()) -> tuple[Calls, dict[str, str]]:
    """What to time at a point, by name, "ours" first, and the peers left out, with the reason.

    `without` names peers to leave out.

    Raises
    ------
    WrongResultError
        If a result is not within the tolerance of the case table; nothing of that point is to be timed then.
    """
    inputs = operands(point)
    refuse_if_wrong(point, inputs)
    found, left_out = {"ours": _call(point, rwkv6_ops.wkv6, inputs)}, {}
    for peer in PEERS:
        reason = "not asked for" if peer.name in without else peer.unfit(point)
        wkv = None
        if not reason:
            wkv, reason = load(peer)
        if wkv is None:
            left_out[peer.name] = reason
            continue
        if peer.name == "ggml":
            call, result = ggml_call(point)
            call()
        else:
            call, result = _call(point, wkv, inputs), lambda wkv=wkv: _output(wkv, inputs)
        _refuse_another_operator(peer.name, point, result(), inputs)
        found[peer.name] = call
    found = {name: _with_threads(point.threads, call) for name, call in found.items()}
    if point.threads > 1:
        found["ours, 1 thread"] = _with_threads(1, _call(point, rwkv6_ops.wkv6, inputs))
    return found, left_out


def refuse_if_wrong(point: Point, inputs: list[Tensor]) -> None:
    """Compare ours at this very point, and the gradients of its first tokens, with the float64 loop."""
    torch.set_num_threads(point.threads)
    first = [x[:1, :CHECKED_TOKENS, :2] for x in inputs[:4]]
    first.append(inputs[4][:2])
    leaves, exact_leaves = ([x.detach().to(t).requires_grad_() for x in first] for t in (None, torch.float64))
    exact, _ = reference.wkv6(*exact_leaves)
    _refuse(point, "o", _output(rwkv6_ops.wkv6, inputs)[:1, :CHECKED_TOKENS, :2], exact, FORWARD_TOLERANCE)
    if point.pass_ == "both":
        do = torch.randn_like(leaves[2])
        got = torch.autograd.grad(rwkv6_ops.wkv6(*leaves)[0], leaves, do)
        want = torch.autograd.grad(exact, exact_leaves, do.double(), allow_unused=True)  # one token: w is of no use
        for name, a, b in zip("rkvwu", got, want, strict=True):
            _refuse(point, f"d{name}", a, torch.zeros_like(a) if b is None else b, GRADIENT_TOLERANCE)


def _refuse(point: Point, name: str, got: Tensor, exact: Tensor, tolerance: dict[torch.dtype, float]) -> None:
    error, most = relative_error(got, exact), tolerance[got.dtype]
    if not error <= most:  # NaN is refused too
        raise WrongResultError(f"{point.key}: {name}: relative error {error:.1e}, wanted at most {most:.0e}: not timed")


def _refuse_another_operator(name: str, point: Point, got: Tensor, inputs: list[Tensor]) -> None:
    difference = relative_error(got, _output(rwkv6_ops.wkv6, inputs))
    if not difference <= PEER_TOLERANCE[point.dtype]:
        raise WrongResultError(f"{point.key}: {name} differs by {difference:.1e}: it does not compute the same thing")


def _output(wkv: Callable, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return wkv(*inputs)[0]


def _with_threads(threads: int, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        torch.set_num_threads(threads)
        return call()

    return run


def _call(point: Point, wkv: Callable, inputs: list[Tensor]) -> Callable[[], object]:
    return {"forward": forward_call, "both": both_call, "decode": _decode_call}[point.pass_](wkv, inputs)


def forward_call(wkv: Callable, inputs: list[Tensor]) -> Callable[[], object]:
    def call() -> Tensor:
        with torch.inference_mode():
            return wkv(*inputs)[0]

    return call


def both_call(wkv: Callable, inputs: list[Tensor]) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    do = torch.randn_like(leaves[2])
    # The loop answers in float32 whatever the inputs are; the HF loop gives w no gradient.
    return lambda: torch.autograd.grad(o := wkv(*leaves)[0], leaves, do.to(o.dtype), allow_unused=True)


def _decode_call(wkv: Callable, inputs: list[Tensor]) -> Callable[[], object]:
    r, k, v, w = (x[:, 0] for x in inputs[:4])
    B, H, D = r.shape
    state = torch.zeros(B, H, D, D, device=r.device)

    def ours() -> None:
        with torch.inference_mode():
            rwkv6_ops.wkv6_step_(r, k, v, w, inputs[4], state)

    def other() -> None:
        with torch.inference_mode():
            wkv(*inputs, initial_state=state, output_final_state=True)

    return ours if wkv is rwkv6_ops.wkv6 else other
