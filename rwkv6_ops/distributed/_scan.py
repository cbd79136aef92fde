# SPDX-License-Identifier: Apache-2.0
"""The operator ``rwkv6_ops::wkv6_scan``: what comes into each piece of a cut sequence from the pieces before it.

Each piece is known by its summary, the state that it leaves alone and the sum of its log decays; the scan along the
ranks composes them, equation (12) of docs/wkv6.md. One operator, opaque to compilers, holds all communication: eager
and compiled code go the same way, and every failure meets the same words.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor

from .. import _ops

# Above this many ranks the transpose moves less, though it takes two collectives: docs/scaling.md.
MOST_RANKS_GATHERING = 8

_ops._library.define(
    "wkv6_scan(Tensor state, Tensor w_sum, int[] links, int width, str group, bool reverse, str exchange) -> Tensor"
)
scan_op = torch.ops.rwkv6_ops.wkv6_scan.default
torch.fx.node.has_side_effect(scan_op)  # a rank on which nobody uses the result has to take part all the same


@torch.library.register_fake("rwkv6_ops::wkv6_scan", lib=_ops._library)
def _(state, w_sum, links, width, group, reverse, exchange):
    return torch.empty_like(state, memory_format=torch.contiguous_format)


# Its name from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _chains(links: Sequence[int], world: int) -> list[list[tuple]]:
    """The (rank, slot) of each cut sequence in the order of time. No links: all slots are one piece a rank."""
    if not links:
        return [[(rank, slice(None)) for rank in range(world)]]
    found, at = [], 0
    while at < len(links):
        end = at + 1 + 2 * links[at]
        found.append(list(zip(links[at + 1 : end : 2], links[at + 2 : end : 2], strict=True)))
        at = end
    return found


def _compose(part: Tensor, before: Tensor) -> Tensor:
    """(12): the state after a piece that finds `before`. The piece is [.., V + 1], the sum of its log decays last."""
    state, w = part[..., :-1], part[..., -1:]
    # exp(w) of a weak decay is 1 but for its last digits; expm1 of a strong one is -1 but for its own (I2).
    kept = torch.where(w > -0.7, before + before * torch.expm1(w), before * torch.exp(w))
    return state + torch.where(w == -torch.inf, 0, kept)


def _exclusive(chain: list[tuple], parts: Tensor, reverse: bool) -> Iterator[tuple[tuple, Tensor]]:
    """(link, what comes into it) for all links of a chain but the first, into which nothing comes."""
    before = None
    for link in reversed(chain) if reverse else chain:
        if before is None:
            before = parts[link][..., :-1]
        else:
            yield link, before
            before = _compose(parts[link], before)


def _by_all_gather(pack: Tensor, chains: list[list[tuple]], group: dist.ProcessGroup, reverse: bool) -> Tensor:
    """Every rank gets every summary and composes those before its own: one collective, volume as the ranks."""
    world, me = group.size(), group.rank()
    parts = pack.new_empty(world, *pack.shape)
    _all_gather(parts.view(-1, *pack.shape[1:]), pack, group=group)
    incoming = torch.zeros_like(pack[..., :-1])
    for chain in chains:
        mine = [link for link in chain if link[0] == me]
        for link, before in _exclusive(chain, parts, reverse) if mine else ():
            if link[0] == me:
                incoming[link[1]] = before
                if link == (mine[0] if reverse else mine[-1]):
                    break
    return incoming


def _by_transpose(pack: Tensor, chains: list[list[tuple]], group: dist.ProcessGroup, reverse: bool) -> Tensor:
    """Each rank composes all summaries, but a part of their rows: rows fade apart. Two collectives, constant volume."""
    world, (width, rows, columns) = group.size(), pack.shape
    share = -(-rows // world)
    cut = torch.nn.functional.pad(pack, (0, 0, 0, share * world - rows)).view(width, world, share, columns)
    sent = cut.transpose(0, 1).contiguous()
    parts = torch.empty_like(sent)
    dist.all_to_all_single(parts, sent, group=group)
    incoming = sent.new_zeros(world, width, share, columns - 1)
    for chain in chains:
        for link, before in _exclusive(chain, parts, reverse):
            incoming[link] = before
    back = torch.empty_like(incoming)
    dist.all_to_all_single(back, incoming, group=group)
    return back.transpose(0, 1).reshape(width, world * share, columns - 1)[:, :rows]


EXCHANGES = {"all_gather": _by_all_gather, "transpose": _by_transpose}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_agreed: set[tuple] = set()


def _agree(state: Tensor, links: Sequence[int], width: int, group: dist.ProcessGroup, options: tuple) -> None:
    """Raises on every rank where they do not all call alike: what collectives make of that is anything but an error.

    On a CPU at every call. On CUDA it would make the host wait for the device, so at the first one of its kind alone.
    """
    call = [*state.shape[1:], _DTYPES.index(state.dtype), width, zlib.crc32(repr((tuple(links), options)).encode())]
    key = (group.group_name, *call)
    if state.is_cuda and key in _agreed:
        return
    mine = torch.tensor(call, device=state.device)
    calls = mine.new_empty(group.size() * len(call))
    _all_gather(calls, mine, group=group)
    calls = calls.view(group.size(), len(call)).tolist()
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise ValueError(
                f"rwkv6_ops.distributed: rank {rank} of the group calls with {_words(other)}, rank 0 with "
                f"{_words(calls[0])}: all ranks have to call alike"
            )
    _agreed.add(key)


def _words(call: list[int]) -> str:
    *sizes, dtype, width, rest = call
    return f"[H, K, V] = {tuple(sizes)}, {_DTYPES[dtype]}, {width} states at most, plan and options no. {rest:08x}"


def _scan(state, w_sum, links, width, group_name, reverse, exchange):
    group = dist.distributed_c10d._resolve_process_group(group_name)
    slots, heads, keys, values = state.shape
    try:
        _agree(state, links, width, group, (reverse, exchange))
        pack = state.new_zeros(width, heads * keys, values + 1)
        pack[:slots, :, :values] = state.reshape(slots, heads * keys, values)
        pack[:slots, :, values] = w_sum.reshape(slots, heads * keys)
        incoming = EXCHANGES[exchange](pack, _chains(links, group.size()), group, reverse)
    except RuntimeError as error:
        raise RuntimeError(
            f"rwkv6_ops.distributed: rank {group.rank()} of {group.size()}: the exchange of states failed: another "
            f"rank has died, raised, or did not call within the group's timeout ({error})"
        ) from error
    return incoming[:slots].reshape(state.shape)


for _key in ("CPU", "CUDA"):
    _ops._library.impl("wkv6_scan", _scan, _key)
