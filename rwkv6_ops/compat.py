# SPDX-License-Identifier: Apache-2.0
"""The calls that RWKV-6 training and inference code makes today, each under its own name, argument for argument.

Importing the name from here instead of compiling a CUDA extension is the whole change: see docs/migration.md. What
these calls have in common, and what sets them apart from `wkv6`:

* r, k, v, w are [B, T, C] with C = H * N, and w is raw: the log decay is ``-exp(w)``. The scale is 1.
* States are [.., H, V, K]: the value index comes first. They are read through strides, not copied into another layout.
* Head sizes, lengths, dtypes and devices are free; the originals fix them when they compile.
* Gradients are those of the operator, for each input and through each output. Where an original drops or distorts one,
  the function says so.
"""

# Annotations are evaluated here, unlike elsewhere: torch.jit.script reads them when a scripted model calls a function.
import torch
from torch import Tensor

from . import _check, functional

# RUN_CUDA_RWKV6's arguments by their number.
_FORMS = {5: tuple("rkvwu"), 6: tuple("rkvwus"), 9: tuple("BTCHrkvwu")}


def RUN_CUDA_RWKV6(*arguments: int | Tensor, **named: int | Tensor) -> Tensor:
    """The operator of RWKV-LM, Vision-RWKV and their descendants, in the three forms that are about.

    ``(r, k, v, w, u)`` and ``(B, T, C, H, r, k, v, w, u)`` have no state; ``(r, k, v, w, u, s)`` changes one in place.

    Parameters
    ----------
    B, T, C, H : int
        Sizes; left out by newer code, where they follow from r and u.
    r, k, v, w : Tensor [B, T, C]
        `w` raw.
    u : Tensor [H, N]
        The bonus.
    s : Tensor [B, H, V, K]
        As in `RUN_WKV6STATE_CUDA`. The originals stop gradients at it; here they flow.

    Returns
    -------
    Tensor [B, T, C]
        In v's dtype.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        Another number of arguments, or as in `rwkv6_ops.wkv6`.
    """
    count = len(arguments) + len(named)
    names = _FORMS.get(count, ())
    given = dict(zip(names, arguments, strict=False)) | named
    if len(given) != count or set(given) != set(names):
        wanted = "(r, k, v, w, u), (r, k, v, w, u, s) or (B, T, C, H, r, k, v, w, u)"
        raise TypeError(f"RUN_CUDA_RWKV6: {count} arguments, expected {wanted}")
    r, k, v, w, u = (given[name] for name in "rkvwu")
    B, T, C, H = (given[name] for name in "BTCH") if "B" in given else _sizes(r, u)
    if "s" in given:
        return RUN_WKV6STATE_CUDA(B, T, C, H, r, k, v, w, u, given["s"])
    return _wkv6(B, T, C, H, r, k, v, w, u)[0]


@torch.jit.ignore
def RUN_CUDA_RWKV6_STATE(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, s: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """Two projects' operator with an initial state, told apart by the dimensions of `s`.

    Parameters
    ----------
    B, T, C, H : int
        Sizes.
    r, k, v, w : Tensor [B, T, C]
        `w` raw.
    u : Tensor [H, N]
        The bonus.
    s : Tensor [H, V, K] or [B, H, V, K]
        Without a batch dimension: RWKV-LM's state tuning, one trained state for the whole batch; its gradient is the
        sum over the batch. With one: RWKV-PEFT's infctx training. Not written to in either case.

    Returns
    -------
    y : Tensor [B, T, C]
        In v's dtype; alone for an `s` of three dimensions.
    s : Tensor [B, H, V, K]
        With an `s` of four dimensions: the state after the last token, in the dtype of `s`. Pass a float32 state to
        keep it in float32. RWKV-PEFT returns the tensor it was given, overwritten; here it is a new one, with gradient.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `rwkv6_ops.wkv6`.

    Notes
    -----
    Layout as in RWKV-LM's wkv6state_cuda.cu and RWKV-PEFT's wkv6infctx_cuda.cu: a thread owns one value, a row of keys.
    """
    _check.is_tensor("s", s)
    if s.dim() == 3:
        _check.shape("s", s, (H, C // H, C // H), "[H, V, K] =")
        return _wkv6(B, T, C, H, r, k, v, w, u, s.expand(B, *s.shape))[0]
    _check.shape("s", s, (B, H, C // H, C // H), "[B, H, V, K] =")
    y, final = _wkv6(B, T, C, H, r, k, v, w, u, s)
    return y, final.to(s.dtype)


@torch.jit.ignore
def RUN_WKV6STATE_CUDA(
    B: int, T: int, C: int, H: int, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, s: Tensor
) -> Tensor:
    """RWKV-infctx-trainer's operator: the state is changed in place.

    Parameters
    ----------
    B, T, C, H : int
        Sizes.
    r, k, v, w : Tensor [B, T, C]
        `w` raw.
    u : Tensor [H, N]
        The bonus.
    s : Tensor [B, H, V, K]
        Read, then overwritten with the state after the last token, whatever its dtype (the original updates a copy
        where it differs from r's, and gives each batch row the first one's state). A state that autograd follows stays
        differentiable: further use of it sends gradients back through this call.

    Returns
    -------
    Tensor [B, T, C]
        In v's dtype.

    Raises
    ------
    TypeError, ValueError
        As in `rwkv6_ops.wkv6`.
    RuntimeError
        `s` is a leaf that requires grad, which cannot be changed in place: pass a clone.
    """
    _check.is_tensor("s", s)
    _check.shape("s", s, (B, H, C // H, C // H), "[B, H, V, K] =")
    return _advance_(B, T, C, H, r, k, v, w, u, s)


@torch.jit.ignore
def RUN_RWKV_6(
    B: int, T: int, C: int, H: int, state: Tensor, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """The operator of the rwkv package and of ChatRWKV: the state comes first, is changed in place and is returned.

    Parameters
    ----------
    B, T, C, H : int
        Sizes. The package calls with B = 1.
    state : Tensor [H, V, K], or [B, H, V, K]
        Read, then overwritten with the state after the last token. The original wants float32.
    r, k, v : Tensor [B, T, C], or [T, C] for B = 1
        Receptance, key and value.
    w : Tensor like r, or [T, H, N, 1]
        Raw.
    u : Tensor [H, N] or [H, N, 1]
        The bonus.

    Returns
    -------
    y : Tensor [B, T, C]
        In v's dtype.
    state : Tensor
        The one that was given.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `RUN_WKV6STATE_CUDA`.
    """
    _check.is_tensor("state", state)
    batched = state
    if state.dim() == 3:
        if B != 1:
            raise ValueError(f"state: shape {tuple(state.shape)} with B = {B}, expected [B, H, V, K]")
        batched = state.unsqueeze(0)
    _check.shape("state", batched, (B, H, C // H, C // H), "[B, H, V, K] =")
    return _advance_(B, T, C, H, r, k, v, w, u, batched), state


@torch.jit.ignore
def rwkv6_cuda_linear_attention(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """flash-rwkv's operator. The original has no gradients; these are the true ones.

    Parameters
    ----------
    receptance, key, value, time_decay : Tensor [B, T, C]
        `time_decay` raw.
    time_first : Tensor [H, N]
        The bonus.
    state : Tensor [B, H, V, K]
        State before the first token. Not written to. Beware of mixing: the Hugging Face model's own state, and so
        `rwkv6_ops.rwkv6_linear_attention`'s, is [B, H, K, V].

    Returns
    -------
    out : Tensor [B, T, H, V]
        In value's dtype.
    state : Tensor [B, H, V, K]
        State after the last token, float32: a transposed view.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `rwkv6_ops.wkv6`.
    """
    _check.is_tensor("state", state)
    B, T, C, H = _sizes(receptance, time_first, "receptance", "time_first")
    _check.shape("state", state, (B, H, C // H, C // H), "[B, H, V, K] =")
    y, final = _wkv6(B, T, C, H, receptance, key, value, time_decay, time_first, state)
    return y.unflatten(2, (H, C // H)), final


def _sizes(r: Tensor, u: Tensor, r_name: str = "r", u_name: str = "u") -> tuple[int, int, int, int]:
    """B, T, C and H as r [B, T, C] and u [H, N] tell them."""
    _check.is_tensor(r_name, r)
    _check.is_tensor(u_name, u)
    if r.dim() != 3:
        raise ValueError(f"{r_name}: shape {tuple(r.shape)}, expected [B, T, C]")
    if u.dim() != 2:
        raise ValueError(f"{u_name}: shape {tuple(u.shape)}, expected [H, N]")
    return (*r.shape, u.shape[0])


def _by_heads(name: str, x: Tensor, B: int, T: int, C: int, H: int) -> Tensor:
    """[B, T, C] as [B, T, H, N]. For B = 1 also from [T, C] and [T, H, N, 1], as the rwkv package has them."""
    _check.is_tensor(name, x)
    shape = tuple(x.shape)
    if shape == (B, T, C):
        return x.unflatten(2, (H, C // H))
    if B == 1 and shape in ((T, C), (T, H, C // H, 1)):
        return x.reshape(1, T, H, C // H)
    raise ValueError(f"{name}: shape {shape}, expected [B, T, C] = {(B, T, C)}")


def _wkv6(B, T, C, H, r, k, v, w, u, state=None) -> tuple[Tensor, Tensor | None]:
    """y [B, T, C], and the final state where there is an initial one, both states [B, H, V, K]."""
    tokens, u = _problem(B, T, C, H, r, k, v, w, u)
    initial = None if state is None else state.mT
    o, final = functional.wkv6(*tokens, u, initial_state=initial, output_final_state=state is not None, decay="raw")
    return o.flatten(2), None if state is None else final.mT


def _problem(B, T, C, H, r, k, v, w, u) -> tuple[list[Tensor], Tensor]:
    """r, k, v, w as [B, T, H, N] and u as [H, N]."""
    if H < 1 or C < 1 or C % H:
        raise ValueError(f"C: {C}, expected a positive multiple of H = {H}")
    tokens = [_by_heads(name, x, B, T, C, H) for name, x in zip("rkvw", (r, k, v, w), strict=True)]
    _check.is_tensor("u", u)
    if tuple(u.shape) not in ((H, C // H), (C,), (H, C // H, 1)):
        raise ValueError(f"u: shape {tuple(u.shape)}, expected [H, N] = {(H, C // H)}")
    return tokens, u.reshape(H, C // H)


def _advance_(B, T, C, H, r, k, v, w, u, state) -> Tensor:
    """y [B, T, C]; `state` [B, H, V, K] is changed in place."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (r, k, v, w, u, state))
    if T == 1 and not recorded and state.dtype == (torch.float64 if r.dtype == torch.float64 else torch.float32):
        tokens, u = _problem(B, T, C, H, r, k, v, w, u)
        return functional.wkv6_step_(*tokens, u, state.mT, decay="raw").flatten(2)
    # What backward reads must not change, so where autograd records, the operator gets a state of its own.
    y, final = _wkv6(B, T, C, H, r, k, v, w, u, state.clone() if recorded else state)
    state.copy_(final)
    return y
