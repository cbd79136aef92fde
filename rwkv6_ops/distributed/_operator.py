# SPDX-License-Identifier: Apache-2.0
"""`wkv6` and `token_shift` on tokens that are cut over ranks: local kernels around one scan, forward and backward."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _check, _ops, functional
from .._state import state_op
from ._plan import Plan, process_group
from ._scan import EXCHANGES, MOST_RANKS_GATHERING, scan_op

_CHOICES = ("auto", *EXCHANGES)


class _Layout(NamedTuple):
    """The constants of one call, besides its options."""

    group: str
    exchange: str
    slots: tuple[int, ...] | None  # None: each batch row is a sequence with one piece on every rank
    width: int
    links: tuple[int, ...]
    offsets: tuple[int, ...]
    starts: tuple[bool, ...]
    ends: tuple[bool, ...]


def _layout(group: dist.ProcessGroup | DeviceMesh, plan: Plan | None, exchange: str, rows: int) -> _Layout:
    """Of `rows` batch rows, or as `plan` has it."""
    members = process_group(group)
    rank, world = members.rank(), members.size()
    if exchange == "auto":
        exchange = "all_gather" if world <= MOST_RANKS_GATHERING else "transpose"
    if plan is None:
        first, last = (rank == 0,) * rows, (rank == world - 1,) * rows
        return _Layout(members.group_name, exchange, None, rows if world > 1 else 0, (), (), first, last)
    if (plan.rank, plan.world) != (rank, world):
        raise ValueError(f"plan: for rank {plan.rank} of {plan.world}, expected one for rank {rank} of {world}")
    return _Layout(
        members.group_name, exchange, plan.slots, plan.width, plan.links, plan.offsets, plan.starts, plan.ends
    )


def _check_plan(plan: Plan | None) -> None:
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan: {type(plan).__name__}, expected a Plan from rwkv6_ops.distributed.plan")


def _tokens_agree(name: str, x: Tensor, plan: Plan | None) -> None:
    """x [B, T, ...] is a plain tensor with the tokens of the plan."""
    _check.is_tensor(name, x)
    if hasattr(x, "to_local"):
        raise TypeError(f"{name}: a DTensor, expected the rank's own tokens: {name}.to_local()")
    if plan is not None and x.dim() > 1 and tuple(x.shape[:2]) != (1, plan.offsets[-1]):
        raise ValueError(
            f"{name}: shape {tuple(x.shape)}, expected [B, T, ...] = [1, {plan.offsets[-1]}, ...]: the plan's"
        )


def _mask(rows: tuple[bool, ...], x: Tensor, dims: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool, device=x.device).view(-1, *(1,) * (dims - 1))


def _where(rows: tuple[bool, ...], yes: Tensor | None, no: Tensor | None) -> Tensor | None:
    """`yes` in the given rows, `no` in the others; None stands for zeros. Selected: never times 0."""
    if yes is None and no is None:
        return None
    if all(rows):
        return yes
    if not any(rows):
        return no
    shaped = yes if yes is not None else no
    return torch.where(_mask(rows, shaped, shaped.dim()), 0 if yes is None else yes, 0 if no is None else no)


def _summaries(k, v, w, states, layout: _Layout, silent: tuple[bool, ...], scale, reverse, raw) -> tuple:
    """(S, sum of w) of this rank's slots; zeros for those whose summary nobody waits for, the `silent` rows.

    In a graph nothing is silent, and what has no tokens is made from the tensors all the same: a scan of constants
    would count as part of the forward pass, on some ranks and not on others.
    """
    dtype, (heads, keys), values = _ops._state_dtype(k), k.shape[2:], v.shape[3]
    if torch.compiler.is_compiling():
        silent = (False,) * len(silent)

    def zeros(rows: int) -> tuple[Tensor, Tensor]:
        return k.new_zeros((rows, heads, keys, values), dtype=dtype), k.new_zeros((rows, heads, keys), dtype=dtype)

    if layout.slots is None:
        return zeros(k.shape[0]) if all(silent) else state_op(k, v, w, states, None, scale, reverse, raw)
    parts = [((k[0, :0, :, :, None] * v[0, :0, :, None]).to(dtype), (k[0, :0] * w[0, :0]).to(dtype))]
    for row in layout.slots:
        if silent[row]:
            parts.append(zeros(1))
            continue
        tokens = [x[:, layout.offsets[row] : layout.offsets[row + 1]] for x in (k, v, w)]
        parts.append(state_op(*tokens, None if states is None else states[row : row + 1], None, scale, reverse, raw))
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


def _to_rows(x: Tensor, layout: _Layout) -> Tensor:
    """From one row a slot to one row a piece, zeros where a piece has no slot."""
    if layout.slots is None:
        return x
    rows = x.new_zeros((len(layout.starts), *x.shape[1:]))
    return rows.index_copy(0, torch.tensor(layout.slots, dtype=torch.int64, device=x.device), x)


def _incoming(k, v, w, states, layout: _Layout, silent, scale, reverse, raw) -> Tensor:
    """What comes into each piece from those before it, in the reading order of `reverse`."""
    state, w_sum = _summaries(k, v, w, states, layout, silent, scale, reverse, raw)
    incoming = scan_op(state, w_sum, layout.links, layout.width, layout.group, reverse, layout.exchange)
    return _to_rows(incoming, layout)


class _SequenceParallel(torch.autograd.Function):
    """A local pass that summarises, the scan, and the ordinary operator; in both directions of time. Saved beyond the
    inputs: the states that came in. The states between are computed again in the backward pass."""

    @staticmethod
    def forward(ctx, r, k, v, w, u, initial_state, cu_seqlens, layout, scale, reverse, raw, algorithm, precision):
        layout = _Layout(*layout)
        first, last = (layout.ends, layout.starts) if reverse else (layout.starts, layout.ends)
        own = None if initial_state is None else initial_state.to(_ops._state_dtype(r))
        own = _where(first, own, None)
        incoming = _incoming(k, v, w, own, layout, last, 1.0, reverse, raw)
        before = _where(first, own, incoming)
        o, final_state, _ = _ops._forward_op(
            r, k, v, w, u, before, cu_seqlens, scale, True, reverse, raw, algorithm, precision, 0
        )
        ctx.save_for_backward(r, k, v, w, u, before, cu_seqlens)
        ctx.layout, ctx.options = layout, (scale, reverse, raw, algorithm, precision)
        ctx.state_dtype = None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    def backward(ctx, grad_o, grad_final_state):
        r, k, v, w, u, before, cu_seqlens = ctx.saved_tensors
        layout, (scale, reverse, raw, algorithm, precision) = ctx.layout, ctx.options
        first = layout.ends if reverse else layout.starts
        wanted = list(ctx.needs_input_grad[:6])
        wanted_before = wanted[5] and before is not None
        with torch.no_grad():
            seen = v.new_zeros(()).expand_as(v) if grad_o is None else grad_o
            # (7) is (2) with time reversed, scale * r for k and do for v.
            incoming = _incoming(r, seen, w, grad_final_state, layout, first, scale, not reverse, raw)
            after = incoming if grad_final_state is None else grad_final_state + incoming
        backward = _ops._backward_op if torch.compiler.is_compiling() else _ops._eager_backward
        unsaved = torch.empty(0, dtype=_ops._state_dtype(r), device=r.device)
        gradients = backward(
            *(r, k, v, w, u, before, cu_seqlens, unsaved, grad_o, after),
            *(scale, reverse, raw, algorithm, precision, 0, [*wanted[:5], wanted_before]),
        )
        gradients = [x if want else None for x, want in zip(gradients, wanted, strict=True)]
        if wanted[5]:
            of_state = _where(first, gradients[5] if wanted_before else None, None)
            of_state = torch.zeros_like(after) if of_state is None else of_state
            gradients[5] = of_state.to(ctx.state_dtype)
        return (*gradients, *(None,) * 7)


def wkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    plan: Plan | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    decay: str = "log",
    algorithm: str = "auto",
    precision: str = "default",
    exchange: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`rwkv6_ops.wkv6` on sequences whose tokens are cut over the ranks of a group.

    All ranks of the group call it, each with its own tokens, and each takes part in the backward pass: what a loss
    uses on one rank alone still has to be there in every rank's loss.

    Parameters
    ----------
    r, k, w : Tensor [B, T, H, K]
        This rank's tokens, as in `rwkv6_ops.wkv6`. T may differ from rank to rank and be 0.
    v : Tensor [B, T, H, V]
        Value.
    u : Tensor [H, K]
        Bonus of the present token, the same on every rank. Its gradient is that of this rank's tokens: DDP and FSDP
        add up what the ranks have.
    group : ProcessGroup or DeviceMesh of one dimension
        The ranks that share the sequences.
    plan : Plan, optional
        From `plan`. Without one each batch row is a sequence, and rank i has the i-th stretch of its tokens.
    scale, reverse, decay, algorithm, precision
        As in `rwkv6_ops.wkv6`, the same on every rank.
    initial_state : Tensor [N, H, K, V], optional
        A row for each piece that this rank holds (N = B without a plan). Read where a sequence starts, with
        `reverse` where it ends; rows of other pieces are ignored and get a gradient of zero.
    output_final_state : bool
        Return the running state at the end of each piece; on the rank where the sequence ends it is the sequence's.
    exchange : {"auto", "all_gather", "transpose"}
        How states travel, the same on every rank: every summary to every rank, or transposed over the state's rows so
        that the volume does not grow with the ranks. "auto" takes the first up to 8 ranks.

    Returns
    -------
    o : Tensor [B, T, H, V]
        Of this rank's tokens.
    final_state : Tensor [N, H, K, V] or None
        Both are differentiable with respect to r, k, v, w, u and initial_state of every rank.

    Raises
    ------
    TypeError, ValueError
        As in `rwkv6_ops.wkv6`; or the ranks' shapes, dtypes, plans or options differ: then on all of them.
    RuntimeError
        A rank has died, raised, or did not call within the group's timeout.

    Notes
    -----
    Equal to one process up to rounding. Saved for the backward pass, beyond the inputs: the states that came in, one a
    piece. A summary is K (V + 1) numbers a head however many tokens, docs/scaling.md.

    Examples
    --------
    >>> part = slice(rank * 1024, (rank + 1) * 1024)
    >>> o, state = distributed.wkv6(r[:, part], k[:, part], v[:, part], w[:, part], u, group=dist.group.WORLD)
    """
    _check.choice("decay", decay, functional._DECAYS)
    _check.choice("algorithm", algorithm, functional._ALGORITHMS)
    _check.choice("precision", precision, functional._PRECISIONS)
    _check.choice("exchange", exchange, _CHOICES)
    _check_plan(plan)
    for name, x in (("r", r), ("k", k), ("v", v), ("w", w)):
        _tokens_agree(name, x, plan)
    cu_seqlens = None if plan is None else plan.cu_seqlens
    _check.operator(r, k, v, w, u, initial_state, cu_seqlens, scale)
    layout = _layout(group, plan, exchange, r.shape[0])
    if layout.width == 0:  # nothing is cut
        options = {"scale": scale, "reverse": reverse, "decay": decay, "algorithm": algorithm, "precision": precision}
        state = {"initial_state": initial_state, "output_final_state": output_final_state}
        return functional.wkv6(r, k, v, w, u, cu_seqlens=cu_seqlens, **state, **options)
    offsets = _ops.kernel_cu_seqlens(cu_seqlens, r)
    options = (tuple(layout), float(scale), reverse, decay == "raw", algorithm, precision)
    o, final_state = _SequenceParallel.apply(r, k, v, w, u, initial_state, offsets, *options)
    return o, final_state if output_final_state else None


def _ends_of(offsets: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """First and last tokens of the pieces that have any, and which pieces those are."""
    rows = tuple(n for n in range(len(offsets) - 1) if offsets[n] < offsets[n + 1])
    first = torch.tensor([offsets[n] for n in rows], dtype=torch.int64, device=device)
    last = torch.tensor([offsets[n + 1] - 1 for n in rows], dtype=torch.int64, device=device)
    return first, last, rows


def _halo(tokens: Tensor, layout: _Layout, empty: list[bool], reverse: bool) -> Tensor:
    """From one token a slot to the nearest token before it, or after it: a scan of states that forget everything,
    but for pieces without a token, which leave what comes in."""
    state = tokens.reshape(tokens.shape[0], 1, math.prod(tokens.shape[1:]), 1)
    w_sum = torch.where(_mask(tuple(empty), state, 3), state.new_zeros(()), -torch.inf).expand(state.shape[:3])
    halo = scan_op(state, w_sum.contiguous(), layout.links, layout.width, layout.group, reverse, layout.exchange)
    return halo.view_as(tokens)


class _TokenShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layout):
        layout = _Layout(*layout)
        ctx.layout = layout
        return _shift(x, layout, forward=True)

    @staticmethod
    def backward(ctx, grad):
        return _shift(grad, ctx.layout, forward=False), None


def _shift(x: Tensor, layout: _Layout, forward: bool) -> Tensor:
    """x one token later, or one earlier, in each piece; at its border the token of the neighbouring piece."""
    border = x.new_zeros((x.shape[0], 1, *x.shape[2:]))
    shifted = torch.cat([border, x[:, :-1]] if forward else [x[:, 1:], border], dim=1)[:, : x.shape[1]]
    if layout.slots is None:
        if layout.width:
            empty = x.shape[1] == 0
            sent = x.sum(1) if empty else x[:, -1 if forward else 0]  # zeros, but of x: see _summaries
            halo = _halo(sent, layout, [empty] * x.shape[0], not forward)
            if not empty:
                shifted = shifted.select_scatter(halo, 1, 0 if forward else x.shape[1] - 1)
        return shifted
    first, last, rows = _ends_of(layout.offsets, x.device)
    sends, takes = (last, first) if forward else (first, last)
    tokens = x.new_zeros((len(layout.starts), *x.shape[2:]))
    halo = tokens
    if layout.width:
        of_rows = torch.tensor(rows, dtype=torch.int64, device=x.device)
        slots = torch.tensor(layout.slots, dtype=torch.int64, device=x.device)
        tokens = tokens.index_copy(0, of_rows, x[0].index_select(0, sends)).index_select(0, slots)
        empty = [layout.offsets[n] == layout.offsets[n + 1] for n in layout.slots]
        halo = _to_rows(_halo(tokens, layout, empty, not forward), layout)
    halo = halo.index_select(0, torch.tensor(rows, dtype=torch.int64, device=x.device))
    return shifted.index_copy(1, takes, halo[None])


def token_shift(
    x: Tensor, group: dist.ProcessGroup | DeviceMesh, plan: Plan | None = None, *, exchange: str = "auto"
) -> Tensor:
    """Each token's predecessor, for models that mix it in: x shifted by one token along sequences cut over ranks.

    Parameters
    ----------
    x : Tensor [B, T, ...]
        This rank's tokens, floating-point.
    group, plan, exchange
        As in `wkv6`. All ranks call it, and all take part in the backward pass.

    Returns
    -------
    Tensor shaped like x
        Token t - 1 at token t; zero at the first token of a sequence; at the first token of a piece the last one of the
        rank before, or of the nearest one that has any. Differentiable.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `wkv6`.

    Examples
    --------
    >>> x = x + mix * (distributed.token_shift(x, group) - x)
    """
    _check.choice("exchange", exchange, _CHOICES)
    _check_plan(plan)
    _tokens_agree("x", x, plan)
    if x.dim() < 2 or not x.is_floating_point():
        raise ValueError(f"x: shape {tuple(x.shape)} of {x.dtype}, expected [B, T, ...] of a floating-point dtype")
    return _TokenShift.apply(x, tuple(_layout(group, plan, exchange, x.shape[0])))
