# SPDX-License-Identifier: Apache-2.0
"""What the operator is compared with, each peer behind one signature, that of `rwkv6_ops.wkv6`.

A peer that is not installed, or cannot do a point, says why; nothing is dropped in silence.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.ggml import GGML_PACKAGE, GgmlWKV6
from benchmarks.points import Point, operands

_LOOP_TOKENS = 16384  # over which one call of a loop takes seconds
_LOOP_BYTES = 1e9  # that autograd may keep for a loop: some five states a token
_UNROLLED = 16  # tokens; torch.compile unrolls the loop, which takes it minutes already at 64


def hf_loop(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    decay: str = "log",
    true_gradients: bool = False,
    stack: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One step a token in float32, as the RWKV-6 that people load through Hugging Face computes on a CPU.

    Parameters
    ----------
    r, k, v, w, u, scale, initial_state, output_final_state, decay
        As in `rwkv6_ops.wkv6`.
    true_gradients : bool
        False: the state moves on under `no_grad`, so k, v and the initial state get only part of their gradients and w
        gets none. True: the same loop with autograd seeing the state.
    stack : bool
        False: each token's output is written into one tensor, which autograd answers with a copy of all of its gradient
        for every token. True: outputs are collected and stacked, the best this loop can do.
    """
    r, k, v, w, u = (x.float() for x in (r, k, v, w, u))
    B, T, H, K = k.shape
    r_rows, k_columns, v_rows = r.transpose(1, 2), k.permute(0, 2, 3, 1), v.transpose(1, 2)
    factor = (torch.exp(-torch.exp(w)) if decay == "raw" else torch.exp(w)).permute(0, 2, 3, 1)
    bonus = u.unsqueeze(-1)
    state = r.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    outputs: list[Tensor] = []
    o = torch.zeros_like(v)
    for t in range(T):
        kv = k_columns[..., t : t + 1] @ v_rows[:, :, t : t + 1]
        token = scale * (r_rows[:, :, t : t + 1] @ (bonus * kv + state)).squeeze(2)
        if stack:
            outputs.append(token)
        else:
            o[:, t] = token
        with torch.set_grad_enabled(torch.is_grad_enabled() and true_gradients):
            state = kv + factor[..., t : t + 1] * state
    if outputs:
        o = torch.stack(outputs, dim=1)
    return o, state if output_final_state else None


def true_loop(*x: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
    """The loop without its `no_grad`."""
    return hf_loop(*x, true_gradients=True, **options)


@dataclass(frozen=True)
class Peer:
    """Another implementation; `load` imports it and raises ImportError where it cannot."""

    name: str
    load: Callable[[], Callable]
    unfit: Callable[[Point], str]  # why it is not run at a point; "" where it is


def _loop_unfit(point: Point) -> str:
    if point.T > _LOOP_TOKENS:
        return f"a loop over {point.T} tokens"
    if point.pass_ == "both" and 20 * point.token_heads * point.D**2 > _LOOP_BYTES:
        return "autograd would keep gigabytes of states"
    return ""


def _compiled_unfit(point: Point) -> str:
    if point.pass_ == "decode":
        return "one token: the loop without a loop"
    return f"more than {_UNROLLED} tokens to unroll" if point.T > _UNROLLED else _loop_unfit(point)


def _ggml_unfit(point: Point) -> str:
    if point.device != "cpu":
        return "the wheel has its CPU operator"
    if point.pass_ == "both":
        return "no backward pass"
    return "" if point.dtype == "float32" else "float32 only"


def _gpu_unfit(point: Point) -> str:
    if point.device != "cuda":
        return "GPU only"
    return "states as they are needed for decoding were not mapped" if point.pass_ == "decode" else ""


def _flash_rwkv_unfit(point: Point) -> str:
    if point.pass_ == "both":
        return "its backward pass returns None"
    return _gpu_unfit(point) or ("" if point.D == 64 else "compiled for heads of 64")


def _rwkv_ops_unfit(point: Point) -> str:
    if point.pass_ == "decode":
        return "no state in place"
    if point.device == "cuda":
        return "" if point.D == 64 and point.T <= 4096 else "compiled for heads of 64 and 4096 tokens"
    if point.pass_ == "both" or point.D != 64:
        return "its loop in keras, heads of 64: forward only"
    return _loop_unfit(point) or ("another loop: once is enough" if point.T > 1024 else "")


@cache
def _compiled_loop() -> Callable:
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(true_loop, fullgraph=True, dynamic=False)


def _load_ggml() -> Callable:
    GgmlWKV6(1, 1, 1, 64)  # raises ImportError where the package is absent

    def never_called(*x: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("ggml's graphs are run by `ggml_call`")

    return never_called


def _load_fla(name: str) -> Callable:
    op = getattr(importlib.import_module("fla.ops.rwkv6"), name)
    return lambda *x, **options: op(*x, scale=1.0, **options)


def _load_flash_rwkv() -> Callable:
    try:
        op = importlib.import_module("flash_rwkv").rwkv6_cuda_linear_attention
    except (OSError, RuntimeError) as error:  # it compiles at import
        raise ImportError(f"flash_rwkv: {str(error).splitlines()[0]}") from error

    def wkv(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        B, _, H, K = k.shape
        state = torch.zeros(B, H, K, K, device=k.device)
        return op(*(x.flatten(2).contiguous() for x in (r, k, v, torch.log(-w))), u, state)

    return wkv


def _load_rwkv_ops() -> Callable:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    op = importlib.import_module("rwkv_ops").rwkv6_op

    def wkv(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, None]:
        return op(*(x.flatten(2) for x in (r, k, v, torch.log(-w))), u).view(v.shape), None

    return wkv


PEERS = (
    Peer("HF loop", lambda: hf_loop, _loop_unfit),
    Peer("loop, true gradients", lambda: true_loop, lambda p: _loop_unfit(p) if p.pass_ == "both" else "same forward"),
    Peer("loop, compiled", _compiled_loop, _compiled_unfit),
    Peer("ggml", _load_ggml, _ggml_unfit),
    Peer("FLA fused_recurrent", lambda: _load_fla("fused_recurrent_rwkv6"), _gpu_unfit),
    Peer("FLA chunk", lambda: _load_fla("chunk_rwkv6"), _gpu_unfit),
    Peer("flash-rwkv", _load_flash_rwkv, _flash_rwkv_unfit),
    Peer("rwkv_ops", _load_rwkv_ops, _rwkv_ops_unfit),
)
PACKAGES = {
    "ggml": GGML_PACKAGE,
    "FLA fused_recurrent": "flash-linear-attention",
    "FLA chunk": "flash-linear-attention",
    "flash-rwkv": "flash-rwkv",
    "rwkv_ops": "rwkv-ops keras",
}


def load(peer: Peer) -> tuple[Callable | None, str]:
    """The peer's operator, or None and why it is not there."""
    try:
        return peer.load(), ""
    except ImportError as error:
        package = PACKAGES.get(peer.name)
        return None, f"{error}" + (f" (pip install {package})" if package else "")


def ggml_call(point: Point) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """What runs ggml at a point, and what then gives its output."""
    peer = GgmlWKV6(point.B, point.T, point.H, point.D)
    peer.set(*operands(point), torch.zeros(point.B, point.H, point.D, point.D))
    return lambda: peer.run(point.threads), lambda: peer.result()[0]
