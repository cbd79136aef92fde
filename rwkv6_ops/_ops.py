# SPDX-License-Identifier: Apache-2.0
"""Registers the C entry points as torch operators and gives them autograd. Outputs are allocated here.

Three operators: ``rwkv6_ops::wkv6_forward``, ``wkv6_backward``, ``wkv6_step_``. The dispatcher costs tens of
microseconds a call, so plain eager calls go past it: straight into C, or into an old-style autograd.Function. The
functions on that way are written for speed: few frames, nothing looked up twice (benchmarks/overhead.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _native

# Tokens from one saved state to the next. A trade: the saved states take K * V / CHECKPOINT numbers a token and head,
# and the backward pass recomputes this many states at a time: as many as stay in a CPU's nearest cache, in the
# registers of a CUDA block, or in the shared memory of one of the chunk kernels. The operators take it as an argument
# (0: save none), so that no graph compiled with one value meets a library with another.
CHECKPOINT = {"cpu": 64, "cuda": 16}
CHUNK_CHECKPOINT = {"cpu": 64, "cuda": 64}
CUDA_CHUNK_SIZES = (32, 64, 128)  # K and V of CUDA's chunk kernels; others take the recurrent ones

# Where long sequences may be cut into spans, and up to how many (sequence, head) pairs there is any use in it: scratch
# is allocated for them, and the C core chooses.
SPAN_DEVICES = {"cuda"}
_SPAN_HEADS, _SPAN_TOKENS = 512, 256

_NO_DOUBLE_BACKWARD = (
    "rwkv6_ops: the operator has first derivatives only; it was asked for a derivative of its gradients"
)
_NO_FORWARD_MODE = "rwkv6_ops: the operator has no forward-mode derivative; use reverse mode"
_NO_VMAP = "rwkv6_ops: wkv6_step_ has no vmap rule; fold the mapped dimension into the batch dimension B"
_NO_VMAP_OVER_OFFSETS = "rwkv6_ops: no vmap over cu_seqlens: the sequences of all samples have to be the same"

# Looked up once: the functions of one call take less time than finding them.
_empty_like, _contiguous_format, _grad_enabled = torch.empty_like, torch.contiguous_format, torch.is_grad_enabled
_native_forward, _native_step, _native_is_plain = _native.forward, _native.step, _native.is_plain
_REVERSE, _RAW_DECAY = _native.REVERSE, _native.RAW_DECAY
_DOUBLE, _SINGLE = torch.float64, torch.float32

_library = torch.library.Library("rwkv6_ops", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(
    "wkv6_forward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor? initial_state, Tensor? cu_seqlens, "
    "float scale, bool output_final_state, bool reverse, bool raw_decay, str algorithm, str precision, int checkpoint) "
    "-> (Tensor o, Tensor final_state, Tensor checkpoints)",
    tags=_tags,
)
_library.define(
    "wkv6_backward(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor checkpoints, Tensor? grad_o, Tensor? grad_final_state, float scale, bool reverse, bool raw_decay, "
    "str algorithm, str precision, int checkpoint, bool[6] wanted) "
    "-> (Tensor grad_r, Tensor grad_k, Tensor grad_v, Tensor grad_w, Tensor grad_u, Tensor grad_initial_state)",
    tags=_tags,
)
_library.define(
    "wkv6_step_(Tensor r, Tensor k, Tensor v, Tensor w, Tensor u, Tensor(a!) state, float scale, bool raw_decay) "
    "-> Tensor",
    tags=_tags,
)


_ALGORITHMS = {"auto": 0, "recurrent": _native.RECURRENT, "chunk": _native.CHUNK}
_PRECISIONS = {"default": 0, "fast": _native.FAST, "exact": _native.EXACT}


def _checkpoint(r: Tensor, v: Tensor, algorithm: str) -> int:
    by_chunks = algorithm != "recurrent" and r.shape[3] in CUDA_CHUNK_SIZES and v.shape[3] in CUDA_CHUNK_SIZES
    distances = CHUNK_CHECKPOINT if by_chunks and r.dtype is not torch.float64 else CHECKPOINT
    return distances.get(r.device.type, distances["cpu"])  # tensors on the meta device have shapes alone


def _flags(reverse: bool, raw_decay: bool, algorithm: str = "auto", precision: str = "default") -> int:
    how = _ALGORITHMS[algorithm] | _PRECISIONS[precision]
    return (_REVERSE if reverse else 0) | (_RAW_DECAY if raw_decay else 0) | how


def _allocate_spans(r: Tensor, v: Tensor, checkpoint: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Scratch for CUDA's kernels to cut sequences into spans, [S, H, K] and [S, H, K, V]; None where it is of no use.

    The second one has the size of the checkpoints.
    """
    if r.device.type not in SPAN_DEVICES:
        return None, None
    batch, time, heads, width = r.shape
    if time < _SPAN_TOKENS or batch * heads > _SPAN_HEADS:
        return None, None
    if r.dtype is torch.float64 or checkpoint not in CHUNK_CHECKPOINT.values():
        return None, None
    decays = r.new_empty((batch * time // checkpoint, heads, width), dtype=torch.float32)
    return decays, r.new_empty((*decays.shape, v.shape[3]), dtype=torch.float32)


def _state_dtype(r: Tensor) -> torch.dtype:
    return torch.float64 if r.dtype == torch.float64 else torch.float32


def _state_shape(r: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple:
    sequences = r.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (sequences, r.shape[2], r.shape[3], v.shape[3])


def _empty_contiguous(x: Tensor) -> Tensor:
    """Like x, contiguous; torch reads a memory_format more slowly than it makes a tensor."""
    like = _empty_like(x)
    return like if like.is_contiguous() else _empty_like(x, memory_format=_contiguous_format)


def _allocate_final_state(r, v, initial_state, cu_seqlens) -> Tensor:
    # empty_like takes half the time of new_empty. Where the initial state is double, everything is.
    if initial_state is not None and ((dtype := initial_state.dtype) is _SINGLE or dtype is _DOUBLE):
        return _empty_contiguous(initial_state)
    return r.new_empty(_state_shape(r, v, cu_seqlens), dtype=_state_dtype(r))


def _allocate_forward(
    r, v, initial_state, cu_seqlens, output_final_state, checkpoint, spare=0
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What the forward pass fills: o, final_state and checkpoints; None for what was not asked for.

    Of the checkpoints, the last `spare` are left unwritten.
    """
    o = _empty_contiguous(v)
    final_state = _allocate_final_state(r, v, initial_state, cu_seqlens) if output_final_state else None
    checkpoints = None
    if checkpoint:
        batch, time, heads, width = r.shape
        shape = (batch * time // checkpoint + spare, heads, width, v.shape[3])
        checkpoints = r.new_empty(shape, dtype=_state_dtype(r))
    return o, final_state, checkpoints


def _allocate_backward(inputs, wanted) -> list[Tensor | None]:
    """What the backward pass fills, None for what is not wanted."""
    return [torch.empty_like(x) if want and x is not None else None for x, want in zip(inputs, wanted, strict=True)]


def _without_none(r: Tensor, tensors) -> tuple[Tensor, ...]:
    """An operator may not return None: what is absent becomes a tensor without elements."""
    return tuple(r.new_empty(0, dtype=_state_dtype(r)) if x is None else x for x in tensors)


# ---- Kernels: real tensors in, C called, real tensors out ----


def _forward_kernel(
    r,
    k,
    v,
    w,
    u,
    initial_state,
    cu_seqlens,
    scale,
    output_final_state,
    reverse,
    raw_decay,
    algorithm,
    precision,
    checkpoint,
    spare=0,
):
    o, final, saved = outputs = _allocate_forward(
        r, v, initial_state, cu_seqlens, output_final_state, checkpoint, spare
    )
    flags, checkpoint = _flags(reverse, raw_decay, algorithm, precision), checkpoint or _checkpoint(r, v, algorithm)
    decays, states = _allocate_spans(r, v, checkpoint)
    saved = states if saved is None else saved
    _native_forward(r, k, v, w, u, initial_state, o, final, saved, decays, cu_seqlens, scale, flags, checkpoint)
    return outputs


def _backward_kernel(
    r, k, v, w, u, initial_state, cu_seqlens, checkpoints, grad_o, grad_final_state, scale, reverse, raw_decay, *options
):
    algorithm, precision, checkpoint, wanted = options
    inputs = (r, k, v, w, u, initial_state)
    if not checkpoint:  # the forward pass was told of no gradient and saved nothing
        checkpoint = _checkpoint(r, v, algorithm)
        how = (scale, False, reverse, raw_decay, algorithm, precision, checkpoint)
        *_, checkpoints = _forward_kernel(*inputs, cu_seqlens, *how)
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
        *_allocate_spans(r, v, checkpoint),
        cu_seqlens,
        scale,
        _flags(reverse, raw_decay, algorithm, precision),
        checkpoint,
    )
    return gradients


# The operator's checkpoints have two rows too many, zeros. Compilers treat sizes of 0 and 1 on their own; like this no
# size that depends on T is one of these, and a graph compiled for one T serves all. (Whoever changes the shape of a
# result also changes the operator's schema: Inductor keeps graphs on disk and tells versions apart by nothing else.)
_SPARE = 2


def _forward_op_kernel(r, *args):
    o, final_state, checkpoints = _forward_kernel(r, *args, _SPARE)
    if checkpoints is not None:
        checkpoints[-_SPARE:].zero_()
    return _without_none(r, (o, final_state, checkpoints))


def _backward_op_kernel(r, k, v, w, u, initial_state, cu_seqlens, checkpoints, *args):
    inputs = (r, k, v, w, u, initial_state, cu_seqlens, checkpoints.contiguous())  # vmap's may be an expanded view
    return _without_none(r, _backward_kernel(*inputs, *args))


def _step_op_kernel(r, k, v, w, u, state, scale, raw_decay):
    o = _empty_contiguous(v)
    _native_step(r, k, v, w, u, state, o, None, scale, _flags(False, raw_decay), 1)
    return o


for _key in ("CPU", "CUDA"):
    _library.impl("wkv6_forward", _forward_op_kernel, _key)
    _library.impl("wkv6_backward", _backward_op_kernel, _key)
    _library.impl("wkv6_step_", _step_op_kernel, _key)


# ---- Shapes alone, for torch.compile, export and FakeTensor ----


@torch.library.register_fake("rwkv6_ops::wkv6_forward", lib=_library)
def _(r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, *options):
    checkpoint = options[-1]
    return _without_none(r, _allocate_forward(r, v, initial_state, cu_seqlens, output_final_state, checkpoint, _SPARE))


@torch.library.register_fake("rwkv6_ops::wkv6_backward", lib=_library)
def _(r, k, v, w, u, initial_state, *options):
    return _without_none(r, _allocate_backward((r, k, v, w, u, initial_state), wanted=options[-1]))


@torch.library.register_fake("rwkv6_ops::wkv6_step_", lib=_library)
def _(r, k, v, w, u, state, scale, raw_decay):
    return _empty_contiguous(v)


# ---- Autograd ----


def _save(ctx, inputs, output):
    *tensors, scale, output_final_state, reverse, raw_decay, algorithm, precision, checkpoint = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.has_final_state = output_final_state
    ctx.options = (scale, reverse, raw_decay, algorithm, precision, checkpoint)
    ctx.set_materialize_grads(False)


def _saved_gradients(ctx, backward, grad_o, grad_final_state):
    """Gradients of the six differentiable inputs by `backward`, None where the input does not require one."""
    wanted = list(ctx.needs_input_grad[:6])
    gradients = backward(*ctx.saved_tensors, grad_o, grad_final_state, *ctx.options, wanted)
    return [x if want else None for x, want in zip(gradients, wanted, strict=True)]


def _registered_backward(ctx, grad_o, grad_final_state, _):
    grad_final_state = grad_final_state if ctx.has_final_state else None
    return (*_saved_gradients(ctx, _backward_op, grad_o, grad_final_state), *(None,) * 8)


def _refuse_double_backward(ctx, *_):
    raise RuntimeError(_NO_DOUBLE_BACKWARD)


def _refuse_vmap(info, in_dims, *_):
    raise NotImplementedError(_NO_VMAP)


torch.library.register_autograd("rwkv6_ops::wkv6_forward", _registered_backward, setup_context=_save, lib=_library)
torch.library.register_autograd("rwkv6_ops::wkv6_backward", _refuse_double_backward, lib=_library)

_forward_op = torch.ops.rwkv6_ops.wkv6_forward.default
_backward_op = torch.ops.rwkv6_ops.wkv6_backward.default
_step_op = torch.ops.rwkv6_ops.wkv6_step_.default


# ---- vmap: what is mapped over becomes more heads. These never mix, and every tensor but cu_seqlens has them ----

_FORWARD_HEADS = (2, 2, 2, 2, 0, 1)  # where r, k, v, w, u and initial_state have their heads
_BACKWARD_HEADS = (*_FORWARD_HEADS, None, 1, 2, 1)  # ... cu_seqlens, checkpoints, grad_o and grad_final_state


def _fold(x: Tensor | None, mapped: int | None, heads: int, size: int) -> Tensor | None:
    """The mapped dimension, or `size` times the same, in front of the heads and in one with them."""
    if x is None or (mapped is None and x.dim() == 1):  # a tensor without elements stands for an absent one
        return x
    if mapped is None:
        x = x.unsqueeze(heads).expand(*x.shape[:heads], size, *x.shape[heads:])
    else:
        x = x.movedim(mapped, heads)
    return x.flatten(heads, heads + 1)


def _unfold(outputs: tuple[Tensor, ...], heads: tuple[int, ...], size: int) -> tuple[tuple, tuple]:
    """The outputs with the mapped dimension of their own again, and where it is."""
    absent = [x.dim() == 1 for x in outputs]
    results = [x if a else x.unflatten(h, (size, -1)) for x, h, a in zip(outputs, heads, absent, strict=True)]
    return tuple(results), tuple(None if a else h for h, a in zip(heads, absent, strict=True))


def _vmap_of(operator, axes: tuple, output_axes: tuple[int, ...], offsets: int = 6):
    """The rule of `operator`, which has its heads at `axes` and `output_axes` and takes cu_seqlens at `offsets`."""

    def rule(info, in_dims, *args):
        if in_dims[offsets] is not None:
            raise NotImplementedError(_NO_VMAP_OVER_OFFSETS)
        folded = [
            x if axis is None else _fold(x, dim, axis, info.batch_size)
            for x, dim, axis in zip(args, in_dims, axes, strict=False)
        ]
        return _unfold(operator(*folded, *args[len(axes) :]), output_axes, info.batch_size)

    return rule


torch.library.register_vmap("rwkv6_ops::wkv6_forward", _vmap_of(_forward_op, _FORWARD_HEADS, (2, 1, 1)), lib=_library)
torch.library.register_vmap(
    "rwkv6_ops::wkv6_backward", _vmap_of(_backward_op, _BACKWARD_HEADS, _FORWARD_HEADS), lib=_library
)
torch.library.register_vmap("rwkv6_ops::wkv6_step_", _refuse_vmap, lib=_library)


# ---- Autograd without the dispatcher, and for torch.func ----


class _OnceDifferentiable(torch.autograd.Function):
    """The backward pass as a part of the graph, whose derivative raises. torch's decorator of that name does so only
    where the incoming gradients require grad, and elsewhere takes the outgoing ones for constants."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        return _backward_op(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_refuse_double_backward)


def _eager_backward(*inputs):
    if torch.is_grad_enabled():  # create_graph=True
        return _OnceDifferentiable.apply(*inputs)
    if not _dispatch_modes() and _native_is_plain(*inputs[8:10]):  # grad_o, grad_final_state
        try:
            return _backward_kernel(*inputs)
        except RuntimeError:  # batched gradients: no memory to read
            pass
    return _backward_op(*inputs)


class _EagerWKV6(torch.autograd.Function):
    """The operator in eager mode, past the dispatcher. With ctx in forward(), apply() inspects no signatures."""

    @staticmethod
    def forward(
        ctx,
        r,
        k,
        v,
        w,
        u,
        initial_state,
        cu_seqlens,
        scale,
        output_final_state,
        reverse,
        raw_decay,
        algorithm,
        precision,
    ):
        checkpoint = _checkpoint(r, v, algorithm)
        options = (scale, output_final_state, reverse, raw_decay, algorithm, precision, checkpoint)
        o, final_state, saved = _forward_kernel(r, k, v, w, u, initial_state, cu_seqlens, *options)
        ctx.save_for_backward(r, k, v, w, u, initial_state, cu_seqlens, saved)
        ctx.options = (scale, reverse, raw_decay, algorithm, precision, checkpoint)
        ctx.set_materialize_grads(False)
        return (o, final_state) if output_final_state else o

    @staticmethod
    def backward(ctx, grad_o, grad_final_state=None):
        gradients = _saved_gradients(ctx, _eager_backward, grad_o, grad_final_state)
        return (*gradients, *(None,) * 7)


# Function.apply() less what it does for torch.func, which does not come this way.
_apply_eager = super(torch.autograd.Function, _EagerWKV6).apply


class _TransformedWKV6(torch.autograd.Function):
    """The operator under torch.func's transforms, which want setup_context()."""

    generate_vmap_rule = True  # from those of the two operators

    @staticmethod
    def forward(*inputs):
        return _forward_op(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx, grad_o, grad_final_state, _):
        grad_final_state = grad_final_state if ctx.has_final_state else None
        return (*_saved_gradients(ctx, _OnceDifferentiable.apply, grad_o, grad_final_state), *(None,) * 8)


# ---- Which way a call goes ----

_compiling = torch.compiler.is_dynamo_compiling  # torch.export without Dynamo has a dispatch mode
_tracing = torch._C._is_tracing
_dispatch_modes = torch._C._len_torch_dispatch_stack  # FakeTensorMode, selective checkpointing, make_fx ...
_transforms = torch._C._functorch.peek_interpreter_stack  # torch.func.grad, vmap ...
_forward_ad = torch.autograd.forward_ad
_increment_version = torch.autograd.graph.increment_version

# What the C core raises before anything is launched, and torch for a tensor without readable memory (meta, sparse).
REFUSALS = (TypeError, ValueError, IndexError, AttributeError, RuntimeError)


def is_plain(r, k, v, w, u, state: Tensor | None, other: Tensor | None) -> bool:
    """True where the dispatcher would find nothing to do but to call autograd and the kernel.

    It runs before every call.
    """
    if _compiling() or _dispatch_modes() or _transforms() is not None or _tracing() or _forward_ad._current_level >= 0:
        return False
    return _native_is_plain(r, k, v, w, u, state, other)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """True where autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _refuse_tangents(tensors: tuple[Tensor | None, ...]) -> None:
    """torch would drop the tangents of inputs that do not require grad without a word."""
    if any(x is not None and _forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(_NO_FORWARD_MODE)


def kernel_cu_seqlens(cu_seqlens: Tensor | None, r: Tensor) -> Tensor | None:
    """As the kernels read it: int64, contiguous, on r's device."""
    if cu_seqlens is None:
        return None
    if cu_seqlens.dtype is not torch.int64 and cu_seqlens.dtype is not torch.int32:
        raise TypeError  # worded by _check
    return cu_seqlens.to(device=r.device, dtype=torch.int64).contiguous()


def wkv6_eager(
    r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, algorithm, precision
):
    """The operator on plain tensors: o, and final_state or None. Raises REFUSALS."""
    if cu_seqlens is not None:
        cu_seqlens = kernel_cu_seqlens(cu_seqlens, r)
    if _grad_enabled() and (
        (r.requires_grad or k.requires_grad or v.requires_grad or w.requires_grad or u.requires_grad)
        or (initial_state is not None and initial_state.requires_grad)
    ):
        options = (scale, output_final_state, reverse, raw_decay, algorithm, precision)
        outputs = _apply_eager(r, k, v, w, u, initial_state, cu_seqlens, *options)
        return outputs if output_final_state else (outputs, None)
    o = _empty_contiguous(v)
    final_state = _allocate_final_state(r, v, initial_state, cu_seqlens) if output_final_state else None
    how = _ALGORITHMS[algorithm] | _PRECISIONS[precision]
    flags = (_REVERSE if reverse else 0) | (_RAW_DECAY if raw_decay else 0) | how
    checkpoint, decays, states = CHECKPOINT["cpu"], None, None
    if not r.is_cpu or "cpu" in SPAN_DEVICES:  # r.device takes thrice as long to make
        checkpoint = _checkpoint(r, v, algorithm)
        decays, states = _allocate_spans(r, v, checkpoint)
    _native_forward(r, k, v, w, u, initial_state, o, final_state, states, decays, cu_seqlens, scale, flags, checkpoint)
    return o, final_state


def learn_dtensor(**tensors: Tensor | None) -> bool:
    """True for DTensors; the first time, their sharding rules are registered. Sharded over time they are refused."""
    first = next(iter(tensors.values()))
    if _compiling() or type(first) is Tensor or not hasattr(first, "placements"):
        return False
    from .distributed import _dtensor  # takes a second to import

    _dtensor.refuse_time_shards(**tensors)
    return True


def wkv6_dispatched(
    r, k, v, w, u, initial_state, cu_seqlens, scale, output_final_state, reverse, raw_decay, algorithm, precision
):
    """The operator on checked arguments by way of torch's dispatcher: o, and final_state or None."""
    sharded = learn_dtensor(r=r, k=k, v=v, w=w, u=u, initial_state=initial_state)
    tensors = (r, k, v, w, u, initial_state)
    # DTensor keeps a placement for each output by the tensors' shapes alone: the outputs have to be always the same.
    asked = output_final_state or sharded
    options = (kernel_cu_seqlens(cu_seqlens, r), scale, asked, reverse, raw_decay, algorithm, precision)
    if not _compiling() and _forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    checkpoint = _checkpoint(r, v, algorithm)
    if not _compiling() and _transforms() is not None:
        o, final_state, _ = _TransformedWKV6.apply(*tensors, *options, checkpoint)
    else:
        o, final_state, _ = _forward_op(*tensors, *options, checkpoint if needs_gradient(*tensors) else 0)
    return o, final_state if output_final_state else None


def wkv6_step_eager_(r, k, v, w, u, state, scale, raw_decay, out):
    """One token on plain tensors, `state` updated in place: o. Raises REFUSALS."""
    o = _empty_contiguous(v) if out is None else out
    _native_step(r, k, v, w, u, state, o, None, scale, _RAW_DECAY if raw_decay else 0, 1)
    if not state.is_inference():
        _increment_version(state)
    if out is not None and not out.is_inference():
        _increment_version(out)
    return o


def wkv6_step_dispatched_(r, k, v, w, u, state, scale, raw_decay, out):
    """One token on checked arguments by way of torch's dispatcher, `state` updated in place: o."""
    o = _step_op(r, k, v, w, u, state, scale, raw_decay)
    return o if out is None else out.copy_(o)
