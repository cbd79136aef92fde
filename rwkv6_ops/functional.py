# SPDX-License-Identifier: Apache-2.0
"""The public functions: documented, their arguments checked, then handed to ``_ops``. Equations: docs/wkv6.md."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check, _ops, _state

_DECAYS = ("log", "raw")
_ALGORITHMS = ("auto", "recurrent", "chunk")
_PRECISIONS = ("default", "fast", "exact")


def wkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    decay: str = "log",
    algorithm: str = "auto",
    precision: str = "default",
) -> tuple[Tensor, Tensor | None]:
    """The WKV operator of RWKV-6.

    For each sequence and head, with a state S of K x V numbers:

        o_t = scale * r_t^T (S_{t-1} + diag(u) k_t v_t^T)
        S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T

    Parameters
    ----------
    r, k : Tensor [B, T, H, K]
        Receptance and key: float32, bfloat16 or float16, each of its own choice, or everything float64. Any strides.
    v : Tensor [B, T, H, V]
        Value.
    w : Tensor [B, T, H, K]
        With ``decay="log"`` the natural logarithm of the decay, at most 0; -inf forgets everything. With
        ``decay="raw"`` RWKV's own x, any number: the log decay is ``-exp(x)``, computed inside.
    u : Tensor [H, K]
        Bonus of the present token (``time_first``, ``time_faaaa``).
    scale : float
        Factor on the output. RWKV uses 1.
    initial_state : Tensor [N, H, K, V], optional
        State before the first token of each of the N sequences (N = B without `cu_seqlens`); zeros where absent.
        Never written to.
    output_final_state : bool
        Return the state after the last token as well.
    reverse : bool
        Read each sequence from its last token to its first.
    cu_seqlens : Tensor [N + 1] of int32 or int64, optional
        Sequences of different lengths end to end in one batch row (B = 1): sequence n is tokens cu_seqlens[n] to
        cu_seqlens[n + 1] - 1. Starts at 0, never decreases, ends at T. An empty sequence returns its initial state.
    decay : {"log", "raw"}
        What `w` holds.
    algorithm : {"auto", "recurrent", "chunk"}
        Token by token, or as matrix products over chunks of tokens; "auto" takes whichever is faster. The results agree
        to rounding. CUDA has chunk kernels for K and V of 32, 64 and 128, which "auto" takes from 32 tokens on,
        and for gradients of V up to 64; everything else runs token by token.
    precision : {"default", "fast", "exact"}
        Operands of CUDA's chunk kernels: 8 significant bits with "fast" (an error of 3e-3 of the result), 16 with
        "exact" (7e-6). "default" is "exact" where r, k or v is float32, and else 11 bits, 4e-4, a quarter of what
        rounding to bfloat16 does. Sums and states are float32 throughout. Everything else is exact to float32
        rounding whatever the precision.

    Returns
    -------
    o : Tensor [B, T, H, V]
        In v's dtype, contiguous.
    final_state : Tensor [N, H, K, V] or None
        float32 (float64 with float64 inputs); None unless asked for. Differentiable, like o, with respect to r, k, v,
        w, u and initial_state. Gradients come back in the dtype of each input.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type, dtype, shape, device or value; the message names it, what came and what was
        wanted.
    RuntimeError
        A second derivative was asked for; or tensors on CUDA, without a driver or in a build without CUDA kernels.
    NotImplementedError
        A forward-mode derivative was asked for, or ``torch.func.vmap`` over `cu_seqlens`.

    Notes
    -----
    Sums and states are float32 whatever the inputs (float64 if they are). The result does not depend on the number of
    threads. ``torch.func.vmap`` gives the right answer, per-sample gradients included. The same in plain PyTorch:
    `rwkv6_ops.reference.wkv6`. Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic
    Recurrence", 2024, https://arxiv.org/abs/2404.05892.

    Examples
    --------
    >>> r, k, v = (torch.randn(2, 100, 4, 64) for _ in range(3))
    >>> w = -torch.exp(torch.randn(2, 100, 4, 64))
    >>> o, state = rwkv6_ops.wkv6(r, k, v, w, torch.randn(4, 64), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([2, 100, 4, 64]), torch.Size([2, 4, 64, 64]))
    """
    if decay not in _DECAYS or algorithm not in _ALGORITHMS or precision not in _PRECISIONS:
        _check.choice("decay", decay, _DECAYS)
        _check.choice("algorithm", algorithm, _ALGORITHMS)
        _check.choice("precision", precision, _PRECISIONS)
    raw = decay == "raw"
    if _ops.is_plain(r, k, v, w, u, initial_state, cu_seqlens):
        try:  # the C core checks it all in a microsecond; what it refuses goes the long way and meets _check's words
            return _ops.wkv6_eager(
                r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw, algorithm, precision
            )
        except _ops.REFUSALS:
            pass
    tensors = (r, k, v, w, u, initial_state, cu_seqlens)
    _check.operator(*tensors, scale)
    return _ops.wkv6_dispatched(*tensors, scale, output_final_state, reverse, raw, algorithm, precision)


def wkv6_state(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    *,
    initial_state: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    decay: str = "log",
) -> tuple[Tensor, Tensor]:
    """What a run of tokens makes of the state before it: the final state of `wkv6` without the outputs.

    The tokens take any state S before them to ``exp(w_sum)[..., None] * S + state``, where `state` and `w_sum` are
    what this returns without an `initial_state`. So summaries of pieces of a sequence can be computed apart, on
    different devices say, and then composed: equation (12) of docs/wkv6.md, `rwkv6_ops.distributed`.

    Parameters
    ----------
    k, v, w, initial_state, reverse, cu_seqlens, decay
        As in `wkv6`.

    Returns
    -------
    state : Tensor [N, H, K, V]
        State after the last token, float32 (float64 with float64 inputs).
    w_sum : Tensor [N, H, K]
        Sum of the log decays of all tokens of the sequence, in the same dtype: -inf where one of them forgets
        everything, 0 for a sequence without tokens. Both are differentiable with respect to k, v, w and initial_state;
        the gradient of `w_sum` by a raw w whose exp overflows counts as 0.

    Raises
    ------
    TypeError, ValueError, RuntimeError, NotImplementedError
        As in `wkv6`.

    Notes
    -----
    With ``decay="raw"`` and x so large that exp(x) is no float, `w_sum` may be a large negative number instead of -inf.

    Examples
    --------
    >>> state, w_sum = rwkv6_ops.wkv6_state(k[:, :50], v[:, :50], w[:, :50])
    >>> rest, w_rest = rwkv6_ops.wkv6_state(k[:, 50:], v[:, 50:], w[:, 50:])
    >>> both = torch.exp(w_rest)[..., None] * state + rest  # that of all tokens
    """
    if decay not in _DECAYS:
        _check.choice("decay", decay, _DECAYS)
    _check.state_pass(k, v, w, initial_state, cu_seqlens)
    offsets = _ops.kernel_cu_seqlens(cu_seqlens, k)
    return _state.wkv6_state(k, v, w, initial_state, offsets, reverse, decay == "raw")


def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    head_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The recurrent kernels behind flash-linear-attention's call of the same name.

    Parameters
    ----------
    r, k, v, w, u, initial_state, output_final_state, reverse, cu_seqlens
        As in `wkv6`, with `w` the log decay.
    scale : float, optional
        ``None`` means K ** -0.5, which is flash-linear-attention's default. RWKV-6 itself wants 1.0: pass it.
    head_first : bool
        r, k, v, w and o are [B, H, T, K] and [B, H, T, V], as they were until 2024. Done by strides, without a copy.

    Returns
    -------
    o, final_state
        As in `wkv6`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `wkv6`.
    """
    options = {
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "reverse": reverse,
        "cu_seqlens": cu_seqlens,
    }
    return _fla_call(r, k, v, w, u, scale, head_first, algorithm="recurrent", **options)


def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    reverse: bool = False,
    chunk_size: int | None = None,
    head_first: bool = False,
    precision: str = "default",
) -> tuple[Tensor, Tensor | None]:
    """The chunk kernels behind flash-linear-attention's call of the same name.

    Parameters
    ----------
    r, k, v, w, u, initial_state, output_final_state, cu_seqlens, reverse, precision
        As in `wkv6`, with `w` the log decay.
    scale : float, optional
        ``None`` means K ** -0.5, which is flash-linear-attention's default. RWKV-6 itself wants 1.0: pass it.
    chunk_size : int, optional
        At least 1. Accepted for flash-linear-attention's sake: the kernels choose for themselves.
    head_first : bool
        r, k, v, w and o are [B, H, T, K] and [B, H, T, V]. Done by strides, without a copy.

    Returns
    -------
    o, final_state
        As in `wkv6`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `wkv6`.
    """
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size: {chunk_size!r}, expected a positive integer or None")
    options = {
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "reverse": reverse,
        "cu_seqlens": cu_seqlens,
    }
    return _fla_call(r, k, v, w, u, scale, head_first, algorithm="chunk", precision=precision, **options)


def _fla_call(r, k, v, w, u, scale, head_first, **options) -> tuple[Tensor, Tensor | None]:
    """`wkv6` with flash-linear-attention's default scale and its older layout."""
    if head_first:
        r, k, v, w = _swap_heads_and_time(r, k, v, w)
    if scale is None:
        _check.is_tensor("r", r)
        scale = r.shape[-1] ** -0.5 if r.dim() and r.shape[-1] else 1.0
    o, final_state = wkv6(r, k, v, w, u, scale=scale, **options)
    return o.transpose(1, 2) if head_first else o, final_state


def _swap_heads_and_time(r: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """From [B, H, T, K] to [B, T, H, K] and back."""
    for name, x in (("r", r), ("k", k), ("v", v), ("w", w)):
        _check.is_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, expected [B, H, T, {'V' if name == 'v' else 'K'}]")
    return tuple(x.transpose(1, 2) for x in (r, k, v, w))


def wkv6_bidirectional(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    reverse_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    decay: str = "log",
    algorithm: str = "auto",
    precision: str = "default",
    head_first: bool = False,
) -> Tensor:
    """`wkv6` forward in time plus `wkv6` backward in time: what each token sees of both its sides, and of itself once.

    Parameters
    ----------
    r, k, v, w, u, scale, cu_seqlens, decay, algorithm, precision
        As in `wkv6`. The bonus u of the present token is counted once, by the forward direction.
    initial_state : Tensor [N, H, K, V], optional
        State of the forward direction before the first token of each sequence.
    reverse_initial_state : Tensor [N, H, K, V], optional
        State of the backward direction after the last token of each sequence.
    head_first : bool
        r, k, v, w and o are [B, H, T, K] and [B, H, T, V]. Done by strides, without a copy.

    Returns
    -------
    Tensor [B, T, H, V]
        o in v's dtype, differentiable with respect to r, k, v, w, u and both states.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `wkv6`.

    Notes
    -----
    For images (Vision-RWKV) and encoders. Code that averages two calls of a one-sided operator counts the bonus twice:
    that is ``wkv6(...)[0] + wkv6(..., reverse=True)[0]``.
    """
    if head_first:
        r, k, v, w = _swap_heads_and_time(r, k, v, w)
    options = {
        "scale": scale,
        "cu_seqlens": cu_seqlens,
        "decay": decay,
        "algorithm": algorithm,
        "precision": precision,
    }
    o, _ = wkv6(r, k, v, w, u, initial_state=initial_state, **options)
    behind, _ = wkv6(r, k, v, w, u.new_zeros(u.shape), initial_state=reverse_initial_state, reverse=True, **options)
    o = o + behind
    return o.transpose(1, 2) if head_first else o


def rwkv6_linear_attention_cpu(
    receptance: Tensor, key: Tensor, value: Tensor, time_decay: Tensor, time_first: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The function of that name in the Hugging Face RWKV-6 model, hundreds of times faster and with true gradients.

    The original updates its state outside autograd, so its gradients of key, value and state lack all but the present
    token, and time_decay gets none. The values here are the same; the gradients are those of the operator.

    Parameters
    ----------
    receptance, key, value, time_decay : Tensor [B, T, H * D]
        `time_decay` is raw: the log decay is ``-exp(time_decay)``.
    time_first : Tensor [H, D]
        The bonus u.
    state : Tensor [B, H, D, D] or None
        State before the first token, any strides (the model passes a slice of a larger tensor); zeros for None. Never
        written to.

    Returns
    -------
    out : Tensor [B, T, H, D]
        float32 (float64 with float64 inputs).
    state : Tensor [B, H, D, D]
        State after the last token, float32 (float64 with float64 inputs).

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `wkv6`, and where the last dimension is not H * D.
    """
    for name, x in (("receptance", receptance), ("key", key), ("value", value), ("time_decay", time_decay)):
        _check.is_tensor(name, x)
    _check.is_tensor("time_first", time_first)
    if time_first.dim() != 2:
        raise ValueError(f"time_first: shape {tuple(time_first.shape)}, expected [H, D]")
    if receptance.dim() != 3 or receptance.shape[2] != time_first.numel():
        wanted = f"[B, T, H * D] with time_first's H * D = {time_first.numel()}"
        raise ValueError(f"receptance: shape {tuple(receptance.shape)}, expected {wanted}")
    for name, x in (("key", key), ("value", value), ("time_decay", time_decay)):
        _check.shape(name, x, tuple(receptance.shape), "receptance's")
    heads, width = time_first.shape
    if state is not None:
        _check.is_tensor("state", state)
        _check.shape("state", state, (receptance.shape[0], heads, width, width), "[B, H, D, D] =")
    named = {"receptance": receptance, "key": key, "value": value, "time_decay": time_decay, "time_first": time_first}
    _check.dtypes(**named, state=state)
    _check.devices(**named, state=state)
    value = value if value.dtype == torch.float64 else value.float()
    r, k, v, w = (x.unflatten(-1, (heads, width)) for x in (receptance, key, value, time_decay))
    return wkv6(r, k, v, w, time_first, initial_state=state, output_final_state=True, decay="raw")


def rwkv6_linear_attention(
    training: bool,
    receptance: Tensor,
    key: Tensor,
    value: Tensor,
    time_decay: Tensor,
    time_first: Tensor,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The dispatching function of the Hugging Face RWKV-6 model: `rwkv6_linear_attention_cpu` behind one more argument.

    Parameters
    ----------
    training : bool
        Ignored: there is one kernel for training and inference.
    receptance, key, value, time_decay, time_first, state
        As in `rwkv6_linear_attention_cpu`.

    Returns
    -------
    out, state
        As in `rwkv6_linear_attention_cpu`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `rwkv6_linear_attention_cpu`.
    """
    return rwkv6_linear_attention_cpu(receptance, key, value, time_decay, time_first, state)


def wkv6_step_(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    state: Tensor,
    *,
    scale: float = 1.0,
    decay: str = "log",
    out: Tensor | None = None,
) -> Tensor:
    """One token of the operator, the state updated in place: the step of a decoding loop.

    Parameters
    ----------
    r, k, w : Tensor [B, H, K] or [B, 1, H, K]
        As in `wkv6`.
    v : Tensor [B, H, V] or [B, 1, H, V]
        Value.
    u : Tensor [H, K]
        Bonus of the present token.
    state : Tensor [B, H, K, V], float32 (float64 with float64 inputs)
        Read, then overwritten with the state after this token. Any strides whose elements do not overlap. No other
        argument may lie in its memory: refused, except between tensors with gaps between their elements.
    scale, decay
        As in `wkv6`.
    out : Tensor shaped like v, optional
        Where to write o.

    Returns
    -------
    Tensor shaped like v
        o in v's dtype, or `out`.

    Raises
    ------
    TypeError, ValueError
        As in `wkv6`.
    RuntimeError
        Autograd would have to record the call: the step has no gradient. Use `wkv6`, or ``torch.no_grad()``.
    """
    if decay not in _DECAYS:
        _check.choice("decay", decay, _DECAYS)
    arguments = (r, k, v, w, u, state, scale, decay == "raw", out)
    refusal = None
    if _ops.is_plain(r, k, v, w, u, state, out):
        if _ops.needs_gradient(r, k, v, w, u, state, out):
            raise RuntimeError("wkv6_step_: has no gradient; use wkv6, or call it under torch.no_grad()")
        try:
            return _ops.wkv6_step_eager_(*arguments)
        except _ops.REFUSALS as error:
            refusal = error
    _check.step(r, k, v, w, u, state, scale, out)
    if isinstance(refusal, ValueError):  # about `out`, which the operator does not know
        raise refusal
    return _ops.wkv6_step_dispatched_(*arguments)
