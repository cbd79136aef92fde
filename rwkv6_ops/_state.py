# SPDX-License-Identifier: Apache-2.0
"""The operator ``rwkv6_ops::wkv6_state``: what a run of tokens does to the state before it, as (S, sum of w).

It always goes by way of the dispatcher: unlike a decoding step, nobody calls it for a single token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native, _ops

_SEGMENT = 64  # no checkpoints are saved, so any will do

_ops._library.define(
    "wkv6_state(Tensor k, Tensor v, Tensor w, Tensor? initial_state, Tensor? cu_seqlens, float scale, bool reverse, "
    "bool raw_decay) -> (Tensor state, Tensor w_sum)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
state_op = torch.ops.rwkv6_ops.wkv6_state.default


def _allocate(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    shape, dtype = _ops._state_shape(k, v, cu_seqlens), _ops._state_dtype(k)
    return k.new_empty(shape, dtype=dtype), k.new_empty(shape[:3], dtype=dtype)


def _kernel(k, v, w, initial_state, cu_seqlens, scale, reverse, raw_decay):
    outputs = _allocate(k, v, cu_seqlens)
    _native.state(k, v, w, initial_state, *outputs, cu_seqlens, scale, _ops._flags(reverse, raw_decay), _SEGMENT)
    return outputs


for _key in ("CPU", "CUDA"):
    _ops._library.impl("wkv6_state", _kernel, _key)


@torch.library.register_fake("rwkv6_ops::wkv6_state", lib=_ops._library)
def _(k, v, w, initial_state, cu_seqlens, scale, reverse, raw_decay):
    return _allocate(k, v, cu_seqlens)


def _save(ctx, inputs, output):
    k, v, w, initial_state, cu_seqlens, ctx.scale, ctx.reverse, ctx.raw_decay = inputs
    ctx.save_for_backward(k, v, w, initial_state, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_state, grad_w_sum, backward=_ops._backward_op):
    """Equations (4) to (7) without r and u: those of the whole operator, whose output nobody looked at."""
    k, v, w, initial_state, cu_seqlens = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:4])
    grads = [None] * 4
    if grad_state is not None:
        r, u = k.new_zeros(()).expand_as(k), k.new_zeros(()).expand(k.shape[2:])
        scaled = k if ctx.scale == 1 else k * ctx.scale
        tensors = (r, scaled, v, w, u, initial_state, cu_seqlens)
        options = (
            1.0,
            ctx.reverse,
            ctx.raw_decay,
            "auto",
            "default",
            0,
        )  # 0: states between are computed again, not saved
        outputs = (torch.empty(0, dtype=_ops._state_dtype(k), device=k.device), None, grad_state)
        of_six = [False, *wanted[:3], False, wanted[3]]
        _, *grads, _, grad_initial_state = backward(*tensors, *outputs, *options, of_six)
        grads = [*grads, grad_initial_state]
        if ctx.scale != 1:
            grads[0] = grads[0] * ctx.scale
    if grad_w_sum is not None and wanted[2]:
        of_tokens = _to_tokens(grad_w_sum, w, cu_seqlens)
        if ctx.raw_decay:  # of w = -exp(x); nothing where exp(x) overflows, as everywhere
            log_decay = -torch.exp(w.to(of_tokens.dtype))
            of_tokens = torch.where(log_decay.isinf(), 0, of_tokens * log_decay)
        of_tokens = of_tokens.to(w.dtype)
        grads[2] = of_tokens if grad_state is None else grads[2] + of_tokens
    elif wanted[2] and grad_state is None:
        grads[2] = torch.zeros_like(w)
    return (*(x if want else None for x, want in zip(grads, wanted, strict=True)), *(None,) * 4)


def _to_tokens(x: Tensor, w: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """x [N, H, K] at each token of its sequence, [B, T, H, K]."""
    if cu_seqlens is None:
        return x[:, None].expand(w.shape)
    return x.repeat_interleave(cu_seqlens.diff(), dim=0, output_size=w.shape[1])[None]


class _Transformed(torch.autograd.Function):
    """The operator under torch.func's transforms, which want setup_context()."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        return state_op(*inputs)

    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx, grad_state, grad_w_sum):
        return _gradients(ctx, grad_state, grad_w_sum, _ops._OnceDifferentiable.apply)


def wkv6_state(k, v, w, initial_state, cu_seqlens, reverse, raw_decay):
    """The operator on checked arguments."""
    _ops.learn_dtensor(k=k, v=v, w=w, initial_state=initial_state)
    if not _ops._compiling() and _ops._forward_ad._current_level >= 0:
        _ops._refuse_tangents((k, v, w, initial_state))
    operator = _Transformed.apply if not _ops._compiling() and _ops._transforms() is not None else state_op
    return operator(k, v, w, initial_state, cu_seqlens, 1.0, reverse, raw_decay)


torch.library.register_autograd("rwkv6_ops::wkv6_state", _gradients, setup_context=_save, lib=_ops._library)
torch.library.register_vmap(
    "rwkv6_ops::wkv6_state", _ops._vmap_of(state_op, (2, 2, 2, 1), (1, 1), offsets=4), lib=_ops._library
)
