# SPDX-License-Identifier: Apache-2.0
"""The checks of the public functions' arguments: each raises, naming the argument, what came and what was wanted."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT_NAMES = "float32, bfloat16, float16 (or float64 for all of them)"


def is_tensor(name: str, x: object) -> None:
    """`x` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: {type(x).__name__}, expected a torch.Tensor")
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: layout {x.layout}, expected torch.strided")


def shape(name: str, x: Tensor, wanted: tuple[int, ...], meaning: str) -> None:
    """`x` has the shape `wanted`, called `meaning`."""
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {meaning} {wanted}")


def choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """`value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}: {value!r}, expected one of {', '.join(map(repr, allowed))}")


def dtypes(**tensors: Tensor | None) -> None:
    """All tensors are float64, or each is one of the shorter floats. The first one decides which."""
    given = {name: x for name, x in tensors.items() if x is not None}
    first = next(iter(given))
    double = given[first].dtype == torch.float64
    for name, x in given.items():
        if double and x.dtype != torch.float64:
            raise TypeError(f"{name}: dtype {x.dtype}, expected {first}'s torch.float64")
        if not double and x.dtype not in FLOATS:
            wanted = "float32, bfloat16 or float16 like the others" if x.dtype == torch.float64 else FLOAT_NAMES
            raise TypeError(f"{name}: dtype {x.dtype}, expected {wanted}")


def devices(**tensors: Tensor | None) -> None:
    """All tensors are where the first one is."""
    given = {name: x for name, x in tensors.items() if x is not None}
    first = next(iter(given))
    for name, x in given.items():
        if x.device != given[first].device:
            raise ValueError(f"{name}: on {x.device}, expected {first}'s {given[first].device}")


def tokens(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, layout: str = "[B, T, H, K]") -> None:
    """r, k, w (laid out as `layout`), v (likewise, with V) and u [H, K] fit together."""
    for name, x in (("r", r), ("k", k), ("v", v), ("w", w), ("u", u)):
        is_tensor(name, x)
    if r.dim() not in [part.count(",") + 1 for part in layout.split(" or ")]:
        raise ValueError(f"r: shape {tuple(r.shape)}, expected {layout}")
    shape("k", k, tuple(r.shape), "r's")
    if v.dim() != r.dim() or v.shape[:-1] != r.shape[:-1]:
        wanted = ", ".join(map(str, r.shape[:-1]))
        raise ValueError(f"v: shape {tuple(v.shape)}, expected r's ({wanted}, V)")
    shape("w", w, tuple(r.shape), "r's")
    if tuple(u.shape) != tuple(r.shape[-2:]):
        transposed = r.dim() == 4 and tuple(u.shape) == (r.shape[1], r.shape[3])
        hint = " (are r, k, v, w [B, H, T, K]? The layout here is [B, T, H, K])" if transposed else ""
        raise ValueError(f"u: shape {tuple(u.shape)}, expected r's [H, K] = {tuple(r.shape[-2:])}{hint}")
    for name, x in (("r", r), ("v", v)):
        if x.shape[-1] < 1:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, expected at least one channel")


def cu_seqlens(cu_seqlens: Tensor | None, batch: int) -> None:
    """A vector of int32 or int64, and one batch row. What it holds is checked where it is read: in C."""
    if cu_seqlens is None:
        return
    is_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: dtype {cu_seqlens.dtype}, expected torch.int32 or torch.int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: shape {tuple(cu_seqlens.shape)}, expected [N + 1]")
    if batch != 1:
        raise ValueError(f"cu_seqlens: given with batch size {batch}, expected 1: the sequences lie end to end")


def state(name: str, x: Tensor | None, sequences: int, r: Tensor, v: Tensor) -> None:
    """`x` is [N, H, K, V], if given."""
    if x is not None:
        is_tensor(name, x)
        shape(name, x, (sequences, r.shape[-2], r.shape[-1], v.shape[-1]), "[N, H, K, V] =")


def scale(scale: object) -> None:
    """A number."""
    if not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"scale: {type(scale).__name__}, expected a number")


def operator(r, k, v, w, u, initial_state, cu_seqlens_, scale_) -> None:
    """All arguments of `wkv6` that are no flags."""
    scale(scale_)
    tokens(r, k, v, w, u)
    cu_seqlens(cu_seqlens_, r.shape[0])
    sequences = r.shape[0] if cu_seqlens_ is None else cu_seqlens_.shape[0] - 1
    state("initial_state", initial_state, sequences, r, v)
    dtypes(r=r, k=k, v=v, w=w, u=u, initial_state=initial_state)
    devices(r=r, k=k, v=v, w=w, u=u, initial_state=initial_state)


def state_pass(k, v, w, initial_state, cu_seqlens_) -> None:
    """All arguments of `wkv6_state` that are no flags."""
    for name, x in (("k", k), ("v", v), ("w", w)):
        is_tensor(name, x)
    if k.dim() != 4:
        raise ValueError(f"k: shape {tuple(k.shape)}, expected [B, T, H, K]")
    if v.dim() != 4 or v.shape[:-1] != k.shape[:-1]:
        wanted = ", ".join(map(str, k.shape[:-1]))
        raise ValueError(f"v: shape {tuple(v.shape)}, expected k's ({wanted}, V)")
    shape("w", w, tuple(k.shape), "k's")
    for name, x in (("k", k), ("v", v)):
        if x.shape[-1] < 1:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, expected at least one channel")
    cu_seqlens(cu_seqlens_, k.shape[0])
    state("initial_state", initial_state, k.shape[0] if cu_seqlens_ is None else cu_seqlens_.shape[0] - 1, k, v)
    dtypes(k=k, v=v, w=w, initial_state=initial_state)
    devices(k=k, v=v, w=w, initial_state=initial_state)


def step(r, k, v, w, u, state_, scale_, out) -> None:
    """All arguments of `wkv6_step_` that are no flags."""
    scale(scale_)
    is_tensor("r", r)
    tokens(r, k, v, w, u, "[B, H, K] or [B, 1, H, K]")
    if r.dim() == 4 and r.shape[1] != 1:
        raise ValueError(f"r: shape {tuple(r.shape)}, expected one token: [B, H, K] or [B, 1, H, K]")
    is_tensor("state", state_)
    state("state", state_, r.shape[0], r, v)
    dtypes(r=r, k=k, v=v, w=w, u=u)
    wanted = torch.float64 if r.dtype == torch.float64 else torch.float32
    if state_.dtype != wanted:
        raise TypeError(f"state: dtype {state_.dtype}, expected {wanted}: it is updated in place")
    if out is not None:
        is_tensor("out", out)
        shape("out", out, tuple(v.shape), "v's")
        if out.dtype != v.dtype:
            raise TypeError(f"out: dtype {out.dtype}, expected v's {v.dtype}")
    devices(r=r, k=k, v=v, w=w, u=u, state=state_, out=out)
