# SPDX-License-Identifier: Apache-2.0
"""Registers the C entry points as torch operators and gives them autograd. Outputs are allocated here.

Three operators: ``rwkv6_ops::wkv6_forward``, ``wkv6_backward``, ``wkv6_step_``. The dispatcher costs tens of
microseconds a call, so plain eager calls go past it: straight into C, or into an old-style autograd.Function. Both ways
meet in the same two functions, ``_forward_kernel`` and ``_backward_kernel``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _native

# Tokens from one saved state to the next. A trade: the saved states take K * V / CHECKPOINT numbers a token and head,
# and the backward pass recomputes this many states at a time: as many as stay in a CPU's nearest cache, or in the
# registers of a CUDA block. The operators take it as an argument (0: save none), so that no graph compiled with one
# value meets a library with another.
CHECKPOINT = {"cpu": 64, "cuda": 16}

_NO_DOUBLE_BACKWARD = (
    "rwkv6_ops: the operator has first derivatives only; it was asked for a derivative of its gradients"
)
_NO_VMAP = "rwkv6_ops: no vmap rule; fold the mapped dimension into the batch dimension B"

_library = torch.library.Library("rwkv6_ops", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(
    "wkv6_forward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor? initial_state, Tensor? cu_seqlens, "
    "float scale, bool output_final_state, bool reverse, bool raw_decay, int checkpoint) "
    "-> (Tensor o, Tensor final_state, Tensor checkpoints)",
    tags=_tags,
)
_library.define(
    "wkv6_backward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor checkpoints, Tensor? grad_o, Tensor? grad_final_state, float scale, bool reverse, bool raw_decay, "
    "int checkpoint, bool[6] wanted) "
    "-> (Tensor grad_r, Tensor grad_k, Tensor grad_v, Tensor grad_w, Tensor grad_u, Tensor grad_initial_state)",
    tags=_tags,
)
_library.define(
    "wkv6_step_(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor(a!) state, float scale, bool raw_decay) "
    "-> Tensor",
    tags=_tags,
)


def _checkpoint(r: Tensor) -> int:
    return CHECKPOINT.get(r.device.type, CHECKPOINT["cpu"])  # tensors on the meta device have shapes alone


def _flags(reverse: bool, raw_decay: bool) -> int:
    return (_native.REVERSE if reverse else 0) | (_native.RAW_DECAY if raw_decay else 0)


def _state_dtype(r: Tensor) -> torch.dtype:
    return torch.float64 if r.dtype == torch.float64 else torch.float32


def _state_shape(r: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple:
    sequences = r.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (sequences, r.shape[2], r.shape[3], v.shape[3])


def _allocate_forward(r, v, cu_seqlens, output_final_state, checkpoint) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What the forward pass fills: o, final_state and checkpoints; None for what was not asked for."""
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_state = checkpoints = None
    if output_final_state or checkpoint:
        state, dtype, device = _state_shape(r, v, cu_seqlens), _state_dtype(r), r.device
        if output_final_state:
            final_state = torch.empty(state, dtype=dtype, device=device)
        if checkpoint:
            saved = r.shape[0] * r.shape[1] // checkpoint
            checkpoints = torch.empty((saved, *state[1:]), dtype=dtype, device=device)
    return o, final_state, checkpoints


def _allocate_backward(inputs, wanted) -> list[Tensor | None]:
    """What the backward pass fills, None for what is not wanted."""
    return [torch.empty_like(x) if want and x is not None else None for x, want in zip(inputs, wanted, strict=True)]


def _without_none(r: Tensor, tensors) -> tuple[Tensor, ...]:
    """An operator may not return None: what is absent becomes a tensor without elements."""
    return tuple(r.new_empty(0, dtype=_state_dtype(r)) if x is None else x for x in tensors)


# ---- Kernels: real tensors in, C called, real tensors out ----


def _forward_kernel(
    r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, checkpoint
):
    o, final_state, checkpoints = _allocate_forward(r, v, cu_seqlens, output_final_state, checkpoint)
    outputs = (o, final_state, checkpoints)
    flags = _flags(reverse, raw_decay)
    _native.forward(r, k, v, w, u, initial_state, *outputs, cu_seqlens, scale, flags, checkpoint or _checkpoint(r))
    return outputs


def _backward_kernel(
    r, k, v, w, u, initial_state, cu_seqlens, checkpoints, grad_o, grad_final_state, scale, reverse, raw_decay, *options
):
    checkpoint, wanted = options
    inputs = (r, k, v, w, u, initial_state)
    if not checkpoint:  # the forward pass was told of no gradient and saved nothing
        checkpoint = _checkpoint(r)
        *_, checkpoints = _forward_kernel(*inputs, cu_seqlens, scale, False, reverse, raw_decay, checkpoint)
    gradients = _allocate_backward(inputs, wanted)
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
        checkpoint,
    )
    return gradients


def _forward_op_kernel(r, *args):
    return _without_none(r, _forward_kernel(r, *args))


def _backward_op_kernel(r, *args):
    return _without_none(r, _backward_kernel(r, *args))


def _step_kernel(r, k, v, w, u, state, scale, raw_decay, out=None):
    o = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
    _native.step(r, k, v, w, u, state, o, None, scale, _flags(False, raw_decay), 1)
    return o


for _key in ("CPU", "CUDA"):
    _library.impl("wkv6_forward", _forward_op_kernel, _key)
    _library.impl("wkv6_backward", _backward_op_kernel, _key)
    _library.impl("wkv6_step_", _step_kernel, _key)


# ---- Shapes alone, for torch.compile, export and FakeTensor ----


@torch.library.register_fake("rwkv6_ops::wkv6_forward", lib=_library)
def _(r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, checkpoint):
    return _without_none(r, _allocate_forward(r, v, cu_seqlens, output_final_state, checkpoint))


@torch.library.register_fake("rwkv6_ops::wkv6_backward", lib=_library)
def _(r, k, v, w, u, initial_state, *options):
    return _without_none(r, _allocate_backward((r, k, v, w, u, initial_state), wanted=options[-1]))


@torch.library.register_fake("rwkv6_ops::wkv6_step_", lib=_library)
def _(r, k, v, w, u, state, scale, raw_decay):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


# ---- Autograd ----


def _save(ctx, inputs, output):
    r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, checkpoint = inputs
    ctx.save_for_backward(r, k, v, w, u, initial_state, cu_seqlens, output[2])
    ctx.has_final_state = output_final_state
    ctx.options = (scale, reverse, raw_decay, checkpoint)
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
        options = (scale, output_final_state, reverse, raw_decay, _checkpoint(r))
        inputs = (r, k, v, w, u, initial_state, cu_seqlens, *options)
        output = _forward_kernel(*inputs)
        _save(ctx, inputs, output)
        return output[0], output[1]

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
_tracing = torch.jit.is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack  # FakeTensorMode, selective checkpointing, make_fx ...
_transforms = torch._C._functorch.peek_interpreter_stack  # torch.func.grad, vmap ...
_any_requires_grad = torch._C._any_requires_grad
_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))

# What the C core raises before anything is launched, and torch for a tensor without readable memory (meta, sparse).
REFUSALS = (TypeError, ValueError, IndexError, AttributeError, RuntimeError)


def is_plain(*arguments: Tensor | None) -> bool:
    """True where the dispatcher would find nothing to do but to call autograd and the kernel."""
    if _compiling() or _dispatch_modes() or _transforms() is not None or _tracing():
        return False
    for x in arguments:  # noqa: SIM110 - a generator would cost as much as the rest of this function
        if x is not None and (type(x) not in _PLAIN_TYPES or x.is_neg()):  # the C core would not see a lazy minus sign
            return False
    return True


def needs_gradient(*tensors: Tensor | None) -> bool:
    """True where autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def kernel_cu_seqlens(cu_seqlens: Tensor | None, r: Tensor) -> Tensor | None:
    """As the kernels read it: int64, contiguous, on r's device."""
    if cu_seqlens is None:
        return None
    if cu_seqlens.dtype is not torch.int64 and cu_seqlens.dtype is not torch.int32:
        raise TypeError  # worded by _check
    return cu_seqlens.to(device=r.device, dtype=torch.int64).contiguous()


def wkv6_eager(r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay):
    """The operator on plain tensors: o, and final_state or None. Raises REFUSALS."""
    cu_seqlens = kernel_cu_seqlens(cu_seqlens, r)
    if torch.is_grad_enabled() and _any_requires_grad(r, k, v, w, u, initial_state):
        return _EagerWKV6.apply(r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay)
    o, final_state, _ = _forward_kernel(
        r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, 0
    )
    return o, final_state


def wkv6_dispatched(r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay):
    """The operator on checked arguments by way of torch's dispatcher: o, and final_state or None."""
    tensors = (r, k, v, w, u, initial_state)
    options = (kernel_cu_seqlens(cu_seqlens, r), scale, output_final_state, reverse, raw_decay)
    checkpoint = _checkpoint(r)
    if not _compiling() and _transforms() is not None:
        o, final_state, _ = _TransformedWKV6.apply(*tensors, *options, checkpoint)
    else:
        o, final_state, _ = _forward_op(*tensors, *options, checkpoint if needs_gradient(*tensors) else 0)
    return o, final_state if output_final_state else None


def wkv6_step_eager_(r, k, v, w, u, state, scale, raw_decay, out):
    """One token on plain tensors, `state` updated in place: o. Raises REFUSALS."""
    o = _step_kernel(r, k, v, w, u, state, scale, raw_decay, out)
    if not state.is_inference():
        torch.autograd.graph.increment_version(state)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return o


def wkv6_step_dispatched_(r, k, v, w, u, state, scale, raw_decay, out):
    """One token on checked arguments by way of torch's dispatcher, `state` updated in place: o."""
    o = _step_op(r, k, v, w, u, state, scale, raw_decay)
    return o if out is None else out.copy_(o)
