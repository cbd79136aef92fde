# SPDX-License-Identifier: Apache-2.0
"""DTensor's sharding rules for the operators: batch and heads stay where they are, without communication; time does not
shard, and says which function does that."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import _ops
from .._state import state_op

_BATCH, _HEADS = "batch", "heads"
_TOKENS = {_BATCH: Shard(0), _HEADS: Shard(2)}  # r, k, v, w, o and their gradients
_STATE = {_BATCH: Shard(0), _HEADS: Shard(1)}  # states, checkpoints, sums of log decays
_BONUS = {_BATCH: Replicate(), _HEADS: Shard(0)}  # u


def _given(tensor: object, placement: object) -> object:
    """The placement of a tensor that may be absent."""
    return None if tensor is None else placement


def _kinds(cu_seqlens: object) -> tuple[str, ...]:
    return (_BATCH, _HEADS) if cu_seqlens is None else (_HEADS,)


@register_sharding(_ops._forward_op)
def _forward(r, k, v, w, u, initial_state, cu_seqlens, *options):
    def rule(tokens, bonus, state):
        inputs = [tokens] * 4 + [bonus, _given(initial_state, state), _given(cu_seqlens, Replicate())]
        # final_state is always asked for, see DTensor in _ops; no checkpoints: a tensor without elements.
        checkpoints = state if options[-1] else Replicate()
        return [tokens, state, checkpoints], inputs + [None] * len(options)

    sharded = [rule(_TOKENS[kind], _BONUS[kind], _STATE[kind]) for kind in _kinds(cu_seqlens)]
    return [rule(Replicate(), Replicate(), Replicate()), *sharded]


@register_sharding(_ops._backward_op)
def _backward(r, k, v, w, u, initial_state, cu_seqlens, checkpoints, grad_o, grad_final_state, *options):
    wanted, saved = options[-1], options[-2]

    def rule(tokens, bonus, grad_bonus, state):
        inputs = [tokens] * 4 + [bonus, _given(initial_state, state), _given(cu_seqlens, Replicate())]
        inputs += [state if saved else Replicate(), _given(grad_o, tokens), _given(grad_final_state, state)]
        outputs = [*[tokens] * 4, grad_bonus, state]
        outputs = [x if want else Replicate() for x, want in zip(outputs, wanted, strict=True)]
        return outputs, inputs + [None] * len(options)

    grad_u = {_BATCH: Partial(), _HEADS: Shard(0)}
    sharded = [rule(_TOKENS[kind], _BONUS[kind], grad_u[kind], _STATE[kind]) for kind in _kinds(cu_seqlens)]
    return [rule(*[Replicate()] * 4), *sharded]


@register_sharding(state_op)
def _state(k, v, w, initial_state, cu_seqlens, *options):
    def rule(tokens, state):
        inputs = [tokens] * 3 + [_given(initial_state, state), _given(cu_seqlens, Replicate())]
        return [state, state], inputs + [None] * len(options)

    sharded = [rule(_TOKENS[kind], _STATE[kind]) for kind in _kinds(cu_seqlens)]
    return [rule(Replicate(), Replicate()), *sharded]


def refuse_time_shards(**tensors: Tensor | None) -> None:
    """DTensor would gather the tokens of a sharded time dimension without a word."""
    for name, x in tensors.items():
        if isinstance(x, DTensor) and any(p.is_shard(1) for p in x.placements) and name != "initial_state":
            raise ValueError(
                f"{name}: sharded over time (dimension 1), expected batch or heads: "
                f"rwkv6_ops.distributed.wkv6 takes each rank's own tokens"
            )
