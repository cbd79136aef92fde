# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which tokens, and what follows from it: arithmetic on the host, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group itself, or that of a mesh with one dimension."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: a DeviceMesh of {group.ndim} dimensions, expected 1: choose one by its name")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: {type(group).__name__}, expected a ProcessGroup or a DeviceMesh that this rank is in")
    return group


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank has to know of how the tokens are spread, made by `plan`.

    A rank holds pieces of sequences, in the order in which its tokens lie; `initial_state` and `final_state` of
    `distributed.wkv6` have one row a piece.
    """

    rank: int
    world: int
    #: Offsets of this rank's pieces among its tokens, [pieces + 1] of int64.
    cu_seqlens: Tensor
    #: The number of the sequence that each piece is of.
    sequence: tuple[int, ...]
    #: Whether each piece has the sequence's first token, and whether it has the last.
    starts: tuple[bool, ...]
    ends: tuple[bool, ...]
    #: This rank's pieces of sequences that are cut; their places in this tuple are their slots.
    slots: tuple[int, ...]
    #: Slots of the rank that has most.
    width: int
    #: Each cut sequence as its number of pieces, then (rank, slot) of each in the order of time, one after the other.
    links: tuple[int, ...]
    #: cu_seqlens as numbers.
    offsets: tuple[int, ...]


def _numbers(name: str, values: object) -> list[int]:
    try:
        return [int(x) for x in (values.tolist() if isinstance(values, Tensor) else values)]
    except (TypeError, ValueError):
        raise TypeError(f"{name}: {type(values).__name__}, expected integers") from None


def _check(offsets: list[int], ranges: list[list[tuple[int, int]]], world: int) -> None:
    if not offsets or offsets[0] != 0 or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"cu_seqlens: {tuple(offsets)}, expected to start at 0 and never decrease")
    if len(ranges) != world:
        raise ValueError(f"token_ranges: of {len(ranges)} ranks, expected those of the group's {world}")
    at = 0
    for a, b in sorted(r for of_rank in ranges for r in of_rank if r[0] != r[1]):
        if a != at or b < a:
            raise ValueError(f"token_ranges: ({a}, {b}) where the range from token {at} was expected")
        at = b
    if at != offsets[-1]:
        raise ValueError(f"token_ranges: end at token {at}, expected cu_seqlens' {offsets[-1]}")


def _pieces(offsets: list[int], ranges: list[list[tuple[int, int]]], world: int) -> list[list[tuple[int, int, int]]]:
    """(sequence, first token, tokens) of each rank's pieces, in its order."""
    total = offsets[-1]
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(world)]
    for rank, of_rank in enumerate(ranges):
        for a, b in of_rank:
            for n, (start, end) in enumerate(pairwise(offsets)):
                low, high = max(a, start), min(b, end)
                # A sequence without tokens goes to the range that has its place; at the very end, to the last one.
                if low < high or (start == end and a <= min(start, total - 1) < b):
                    found[rank].append((n, low, max(high - low, 0)))
    if total == 0:
        found[0] = [(n, 0, 0) for n in range(len(offsets) - 1)]
    return found


def plan(
    cu_seqlens: Tensor | Sequence[int],
    token_ranges: Sequence[Sequence[tuple[int, int]]],
    group: dist.ProcessGroup | DeviceMesh,
) -> Plan:
    """Says which rank holds which tokens of sequences that lie end to end.

    Parameters
    ----------
    cu_seqlens : [N + 1] integers
        Offsets of the N sequences among all tokens of all ranks, as in `rwkv6_ops.wkv6`.
    token_ranges : for each rank of the group a sequence of (first, end)
        The ranges of tokens that it holds, in the order in which they lie in its tensors. Together they hold every
        token once. Lengths may differ, a rank may hold none, or several ranges (zig-zag).
    group : ProcessGroup or DeviceMesh of one dimension
        The ranks that share the sequences.

    Returns
    -------
    Plan
        For `wkv6` and `token_shift` of this module. No rank talks to another: each computes it from the same arguments.

    Raises
    ------
    TypeError, ValueError
        The ranges overlap, leave tokens out or are not those of the group's ranks; cu_seqlens decrease.

    Examples
    --------
    Three sequences of 5, 2 and 9 tokens on two ranks, the second one cut:

    >>> p = distributed.plan([0, 5, 7, 16], [[(0, 6)], [(6, 16)]], group)
    >>> p.cu_seqlens, p.starts, p.ends  # on rank 0
    (tensor([0, 5, 6]), (True, True), (True, False))
    """
    members = process_group(group)
    offsets = _numbers("cu_seqlens", cu_seqlens)
    ranges = [[tuple(_numbers("token_ranges", r)) for r in of_rank] for of_rank in token_ranges]
    _check(offsets, ranges, members.size())
    pieces, me = _pieces(offsets, ranges, members.size()), members.rank()
    chains: dict[int, list[tuple[int, int, int]]] = {}  # (first token, rank, row) by sequence
    for rank, of_rank in enumerate(pieces):
        for row, (n, first, _) in enumerate(of_rank):
            chains.setdefault(n, []).append((first, rank, row))
    slots: list[list[int]] = [[] for _ in pieces]
    links: list[int] = []
    for chain in (sorted(chains[n]) for n in sorted(chains) if len(chains[n]) > 1):
        links.append(len(chain))
        for _, rank, row in chain:
            links += (rank, len(slots[rank]))
            slots[rank].append(row)
    mine = [(n, chains[n], (first, me, row)) for row, (n, first, _) in enumerate(pieces[me])]
    local = [0]
    for _, _, tokens in pieces[me]:
        local.append(local[-1] + tokens)
    device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else None
    return Plan(
        rank=me,
        world=members.size(),
        cu_seqlens=torch.tensor(local, device=device),
        sequence=tuple(n for n, _, _ in mine),
        starts=tuple(min(chain) == piece for _, chain, piece in mine),
        ends=tuple(max(chain) == piece for _, chain, piece in mine),
        slots=tuple(slots[me]),
        width=max(map(len, slots)),
        links=tuple(links),
        offsets=tuple(local),
    )
