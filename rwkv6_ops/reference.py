# SPDX-License-Identifier: Apache-2.0
"""The WKV operator of RWKV-6 as a plain PyTorch loop: equations (1) and (2) of docs/wkv6.md, one token at a time.

Slow, short and differentiable by autograd in float64: what the operator means, and the oracle of every test. It needs
torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

# exp(-exp(x)) is exactly 0 in float32 and float64 long before x gets here, and exp(x) is still finite in float32.
_LARGEST_RAW_DECAY = 88.0


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
    cu_seqlens: Tensor | Sequence[int] | None = None,
    decay: str = "log",
) -> tuple[Tensor, Tensor | None]:
    """WKV of RWKV-6, token by token.

    Parameters
    ----------
    r, k : Tensor [B, T, H, K]
        Receptance and key.
    v : Tensor [B, T, H, V]
        Value.
    w : Tensor [B, T, H, K]
        ``decay="log"``: the logarithm of the decay, -inf to 0. ``decay="raw"``: RWKV's x, where the log decay is
        -exp(x).
    u : Tensor [H, K]
        The bonus of the present token.
    scale : float
        Factor on the output.
    initial_state : Tensor [N, H, K, V], optional
        State before the first token of each of the N sequences; zeros where absent.
    output_final_state : bool
        Return the state after the last token too.
    reverse : bool
        Read each sequence from its last token to its first.
    cu_seqlens : [N + 1] integers, optional
        Offsets that cut the one batch row (B = 1) into N sequences; without it N = B.
    decay : {"log", "raw"}
        What `w` holds.

    Returns
    -------
    o : Tensor [B, T, H, V]
        In the dtype of `v`.
    final_state : Tensor [N, H, K, V] or None
        In the dtype of the computation: float64 if any input is float64, else float32.

    Raises
    ------
    ValueError
        `decay` is neither "log" nor "raw". Shapes and dtypes are not checked: torch's own errors come through.
    """
    inputs = [x for x in (r, k, v, w, u, initial_state) if x is not None]
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32
    out_dtype = v.dtype
    r, k, v, w, u = (x.to(dtype) for x in (r, k, v, w, u))

    if decay == "raw":  # the clamp keeps exp(x) finite, so that its gradient is 0 where it would overflow, not inf * 0
        w = -torch.exp(w.clamp(max=_LARGEST_RAW_DECAY))
    elif decay != "log":
        raise ValueError(f'decay: {decay!r}, expected "log" or "raw"')

    if cu_seqlens is None:
        sequences = [(r, k, v, w)]
        states = [initial_state]
    else:
        offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        lengths = [end - begin for begin, end in pairwise(offsets)]
        sequences = list(zip(*(x.split(lengths, dim=1) for x in (r, k, v, w)), strict=True))
        states = [None] * len(lengths) if initial_state is None else list(initial_state.split(1))

    outputs, final_states = [], []
    for (r_n, k_n, v_n, w_n), state in zip(sequences, states, strict=True):
        if state is None:
            state = r.new_zeros(r_n.shape[0], *r_n.shape[2:], v_n.shape[3])
        o_n, state = _one_sequence(r_n, k_n, v_n, w_n, u, scale, state.to(dtype), reverse)
        outputs.append(o_n)
        final_states.append(state)

    o = torch.cat([v[:, :0], *outputs], dim=1).to(out_dtype)
    if not output_final_state:
        return o, None
    return o, torch.cat([v.new_empty(0, *r.shape[2:], v.shape[3]), *final_states])


def _one_sequence(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float, state: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Equations (1) and (2) over time, all rows and heads at once: o [B, T, H, V], and the last state [B, H, K, V]."""
    tokens = list(zip(*(x.unbind(1) for x in (r, k, v, torch.exp(w))), strict=True))
    outputs = []
    for r_t, k_t, v_t, decay_t in reversed(tokens) if reverse else tokens:
        seen = torch.einsum("bhk,bhkv->bhv", r_t, state)
        own = (r_t * u * k_t).sum(-1, keepdim=True) * v_t
        outputs.append(scale * (seen + own))
        state = decay_t[..., None] * state + k_t[..., None] * v_t[..., None, :]
    if reverse:
        outputs.reverse()
    return torch.stack(outputs, dim=1) if outputs else v, state
