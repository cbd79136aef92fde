# SPDX-License-Identifier: Apache-2.0
"""Registers the C entry points as torch operators and gives them autograd. Outputs are allocated here.

Arguments have passed ``_check``. Three operators: ``rwkv6_ops::wkv6_forward``, ``wkv6_backward``, ``wkv6_step_``. The
dispatcher costs tens of microseconds a call, so plain eager calls go past it: straight into C, or into an old-style
autograd.Function. Both ways meet in the same two functions, ``_forward_kernel`` and ``_backward_kernel``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _native

# Tokens from one saved state to the next. A trade: the saved states take K * V / CHECKPOINT numbers a token and head,
# and the backward pass recomputes this many states at a time, in the nearest cache.
CHECKPOINT = 32

_NO_DOUBLE_BACKWARD = (
    "rwkv6_ops: the operator has first derivatives only; it was asked for a derivative of its gradients"
)
_NO_VMAP = "rwkv6_ops: no vmap rule; fold the mapped dimension into the batch dimension B"

_library = torch.library.Library("rwkv6_ops", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(
    "wkv6_forward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor? initial_state, Tensor? cu_seqlens, "
    "float scale, bool output_final_state, bool reverse, bool raw_decay, bool checkpoint) "
    "-> (Tensor o, Tensor final_state, Tensor checkpoints)",
    tags=_tags,
)
_library.define(
    "wkv6_backward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor checkpoints, Tensor? grad_o, Tensor? grad_final_state, float scale, bool reverse, bool raw_decay, "
    "bool[6] wanted) "
    "-> (Tensor grad_r, Tensor grad_k, Tensor grad_v, Tensor grad_w, Tensor grad_u, Tensor grad_initial_state)",
    tags=_tags,
)
_library.define(
    "wkv6_step_(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor(a!) state, float scale, bool raw_decay) "
    "-> Tensor",
    tags=_tags,
)


def _flags(reverse: bool, raw_decay: bool) -> int:
    return (_native.REVERSE if reverse else 0) | (_native.RAW_DECAY if raw_decay else 0)


def _state_dtype(r: Tensor) -> torch.dtype:
    return torch.float64 if r.dtype == torch.float64 else torch.float32


def _state_shape(r: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple:
    sequences = r.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (sequences, r.shape[2], r.shape[3], v.shape[3])


def _allocate_forward(r, v, cu_seqlens, output_final_state, checkpoint) -> tuple[Tensor, Tensor, Tensor]:
    """What the forward pass fills: o, final_state (no elements where not asked for), checkpoints (likewise)."""
    state = _state_shape(r, v, cu_seqlens)
    saved = r.shape[0] * r.shape[1] // CHECKPOINT if checkpoint else 0
    options = {"dtype": _state_dtype(r), "device": r.device}
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        torch.empty(state if output_final_state else (0,), **options),
        torch.empty((saved, *state[1:]), **options),
    )


# ---- Kernels: real tensors in, C called, real tensors out ----


def _forward_kernel(
    r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, checkpoint
):
    o, final_state, checkpoints = _allocate_forward(r, v, cu_seqlens, output_final_state, checkpoint)
    _native.forward(
        r,
        k,
        v,
        w,
        u,
        initial_state,
        o,
        final_state if output_final_state else None,
        checkpoints if checkpoint else None,
        cu_seqlens,
        scale,
        _flags(reverse, raw_decay),
        CHECKPOINT,
    )
    return o, final_state, checkpoints


def _backward_kernel(
    r, k, v, w, u, initial_state, cu_seqlens, checkpoints, grad_o, grad_final_state, scale, reverse, raw_decay, wanted
):
    if checkpoints.shape[0] != r.shape[0] * r.shape[1] // CHECKPOINT:  # a forward pass that was told of no gradient
        checkpoints = _forward_kernel(r, k, v, w, u, initial_state, cu_seqlens, scale, False, reverse, raw_decay, True)[
            2
        ]
    inputs = (r, k, v, w, u, initial_state)
    gradients = [
        torch.empty_like(x) if want and x is not None else None for x, want in zip(inputs, wanted, strict=True)
    ]
    parts = None
    if gradients[4] is not None:
        sequences, heads, width, _ = _state_shape(r, v, cu_seqlens)
        parts = torch.empty((sequences, heads, width), dtype=_state_dtype(r), device=r.device)
    _native.backward(
        *inputs,
        checkpoints,
        grad_o,
        grad_final_state,
        *gradients,
        parts,
        cu_seqlens,
        scale,
        _flags(reverse, raw_decay),
        CHECKPOINT,
    )
    return gradients


def _backward_op_kernel(r, *args):
    """As an operator it may not return None: unwanted gradients have no elements."""
    return tuple(r.new_empty(0) if x is None else x for x in _backward_kernel(r, *args))


def _step_kernel(r, k, v, w, u, state, scale, raw_decay, out=None):
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    _native.step(r, k, v, w, u, state, o, None, scale, _flags(False, raw_decay), 1)
    return o


for _key in ("CPU", "CUDA"):
    _library.impl("wkv6_forward", _forward_kernel, _key)
    _library.impl("wkv6_backward", _backward_op_kernel, _key)
    _library.impl("wkv6_step_", _step_kernel, _key)


# ---- Shapes alone, for torch.compile, export and FakeTensor ----


@torch.library.register_fake("rwkv6_ops::wkv6_forward", lib=_library)
def _(r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, checkpoint):
    return _allocate_forward(r, v, cu_seqlens, output_final_state, checkpoint)


@torch.library.register_fake("rwkv6_ops::wkv6_backward", lib=_library)
def _(
    r, k, v, w, u, initial_state, cu_seqlens, checkpoints, grad_o, grad_final_state, scale, reverse, raw_decay, wanted
):
    inputs = (r, k, v, w, u, initial_state)
    return tuple(
        torch.empty_like(x) if want and x is not None else r.new_empty(0)
        for x, want in zip(inputs, wanted, strict=True)
    )


@torch.library.register_fake("rwkv6_ops::wkv6_step_", lib=_library)
def _(r, k, v, w, u, state, scale, raw_decay):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


# ---- Autograd ----


def _save(ctx, inputs, output):
    r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, _ = inputs
    ctx.save_for_backward(r, k, v, w, u, initial_state, cu_seqlens, output[2])
    ctx.has_final_state = output_final_state
    ctx.options = (scale, reverse, raw_decay)
    ctx.set_materialize_grads(False)


def _saved_gradients(ctx, backward, grad_o, grad_final_state):
    """Gradients of the six differentiable inputs by `backward`, None where the input does not require one."""
    wanted = list(ctx.needs_input_grad[:6])
    if not ctx.has_final_state:
        grad_final_state = None
    gradients = backward(*ctx.saved_tensors, grad_o, grad_final_state, *ctx.options, wanted)
    return [x if want else None for x, want in zip(gradients, wanted, strict=True)]


def _registered_backward(ctx, grad_o, grad_final_state, _):
    return (*_saved_gradients(ctx, _backward_op, grad_o, grad_final_state), *(None,) * 6)


def _refuse_double_backward(ctx, *_):
    raise RuntimeError(_NO_DOUBLE_BACKWARD)


def _refuse_vmap(info, in_dims, *_):
    raise NotImplementedError(_NO_VMAP)


torch.library.register_autograd("rwkv6_ops::wkv6_forward", _registered_backward, setup_context=_save, lib=_library)
torch.library.register_autograd("rwkv6_ops::wkv6_backward", _refuse_double_backward, lib=_library)
for _name in ("wkv6_forward", "wkv6_backward", "wkv6_step_"):
    torch.library.register_vmap(f"rwkv6_ops::{_name}", _refuse_vmap, lib=_library)

_forward_op = torch.ops.rwkv6_ops.wkv6_forward.default
_backward_op = torch.ops.rwkv6_ops.wkv6_backward.default
_step_op = torch.ops.rwkv6_ops.wkv6_step_.default


class _EagerWKV6(torch.autograd.Function):
    """The operator in eager mode, past the dispatcher. With ctx in forward(), apply() inspects no signatures."""

    @staticmethod
    def forward(ctx, r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay):
        inputs = (r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, True)
        output = _forward_kernel(*inputs)
        _save(ctx, inputs, output)
        return output[0], output[1] if output_final_state else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final_state):
        return (*_saved_gradients(ctx, _backward_kernel, grad_o, grad_final_state), *(None,) * 5)


class _TransformedWKV6(torch.autograd.Function):
    """The operator under torch.func's transforms, which want setup_context() and vmap()."""

    @staticmethod
    def forward(*inputs):
        return _forward_op(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final_state, _):
        return (*_saved_gradients(ctx, _backward_op, grad_o, grad_final_state), *(None,) * 6)

    vmap = staticmethod(_refuse_vmap)


# ---- Which way a call goes ----

_compiling = torch.compiler.is_compiling
_dispatch_modes = (
    torch._C._len_torch_dispatch_stack
)  # FakeTensorMode, selective checkpointing, make_fx, a FLOP counter ...
_transforms = torch._C._functorch.peek_interpreter_stack  # torch.func.grad, vmap ...
_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _is_plain(*tensors: Tensor | None) -> bool:
    """True where the dispatcher would find nothing to do but to call autograd and the kernel."""
    if _compiling() or _dispatch_modes() or _transforms() is not None or torch.jit.is_tracing():
        return False
    return all(type(x) in _PLAIN_TYPES for x in tensors)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """True where autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def wkv6(r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay):
    """The operator on checked arguments: o, and final_state or None."""
    tensors = (r, k, v, w, u, initial_state)
    options = (cu_seqlens, scale, output_final_state, reverse, raw_decay)
    if _is_plain(*tensors, cu_seqlens):
        if needs_gradient(*tensors):
            return _EagerWKV6.apply(*tensors, *options)
        o, final_state, _ = _forward_kernel(*tensors, *options, False)
    elif not _compiling() and _transforms() is not None:
        o, final_state, _ = _TransformedWKV6.apply(*tensors, *options, True)
    else:
        o, final_state, _ = _forward_op(*tensors, *options, needs_gradient(*tensors))
    return o, final_state if output_final_state else None


def wkv6_step_(r, k, v, w, u, state, scale, raw_decay, out):
    """One token on checked arguments, `state` updated in place: o."""
    if not _is_plain(r, k, v, w, u, state, out):
        o = _step_op(r, k, v, w, u, state, scale, raw_decay)
        return o if out is None else out.copy_(o)
    o = _step_kernel(r, k, v, w, u, state, scale, raw_decay, out)
    written = [x for x in (state, out) if x is not None and not x.is_inference()]
    torch.autograd.graph.increment_version(written)
    return o
