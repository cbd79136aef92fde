# SPDX-License-Identifier: Apache-2.0
"""What ranks do for tests/test_distributed.py: the cut operator against the float64 loop, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, log_decays
from oracle import relative_error
from torch import Tensor

from rwkv6_ops import distributed, reference
from rwkv6_ops.distributed._scan import scan_op

H, K, V = 2, 4, 5
Ranges = list[list[tuple[int, int]]]


def stretches(lengths: list[int]) -> Ranges:
    """One range a rank, one after the other."""
    return [[(sum(lengths[:i]), sum(lengths[: i + 1]))] for i in range(len(lengths))]


def zigzag(world: int, tokens: int) -> Ranges:
    """Each rank the i-th part from the front and the i-th from the back."""
    part = tokens // (2 * world)
    return [[(r * part, (r + 1) * part), (tokens - (r + 1) * part, tokens - r * part)] for r in range(world)]


# (token ranges by the number of ranks, cu_seqlens)
LAYOUTS = {
    "even": (lambda P: stretches([24 // P] * P), (0, 24)),
    "uneven": (lambda P: stretches([[24], [5, 19], [7, 1, 16], [3, 11, 1, 9]][P - 1]), (0, 24)),
    "empty rank": (lambda P: stretches([[24], [0, 24], [10, 0, 14], [10, 0, 0, 14]][P - 1]), (0, 24)),
    "sequences": (lambda P: stretches([24 // P] * P), (0, 3, 3, 17, 18, 24, 24)),
    "nothing cut": (lambda P: stretches([12, 12] if P == 2 else [12] + [0] * (P - 2) + [12]), (0, 12, 24)),
    "single tokens": (lambda P: stretches([24 // P] * P), tuple(range(25))),
    "zigzag": (lambda P: zigzag(P, 24), (0, 5, 24)),
    "no tokens": (lambda P: stretches([0] * P), (0, 0, 0)),
}


@dataclass
class Piece:
    """Tokens [first, end) of a sequence, the row-th piece of a rank."""

    sequence: int
    first: int
    end: int
    rank: int


def pieces_of(ranges: Ranges, offsets: tuple[int, ...]) -> list[Piece]:
    """Of all ranks, in their order; the oracle's own arithmetic. Sequences without tokens are not among them."""
    found = []
    for rank, of_rank in enumerate(ranges):
        for a, b in of_rank:
            for n, (start, end) in enumerate(pairwise(offsets)):
                if max(a, start) < min(b, end):
                    found.append(Piece(n, max(a, start), min(b, end), rank))
    return found


def tensors(T: int, N: int, dtype: torch.dtype, kind: str = "mixed", raw: bool = False, B: int = 1) -> dict:
    g = torch.Generator().manual_seed(T + N)
    normal = lambda *shape: torch.randn(shape, generator=g).to(dtype)  # noqa: E731
    w = log_decays(kind, (B, T, H, K), g)
    w = torch.log(-w) if raw else w
    return {
        "r": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, H, V),
        "w": w.to(dtype),
        "u": normal(H, K),
        "initial_state": normal(N, H, K, V),
    }


def gradients(outputs: Sequence[Tensor], leaves: dict[str, Tensor], starts: Sequence[Tensor]) -> dict[str, Tensor]:
    """By name; zeros for what the outputs do not depend on."""
    found = torch.autograd.grad(outputs, list(leaves.values()), starts, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def whole(x: dict, pieces: list[Piece], grads: dict, options: dict) -> tuple[list, list, dict]:
    """One process, float64, a piece after the other: o and state of each piece, and the gradients of the inputs."""
    leaves = {name: y.double().requires_grad_() for name, y in x.items()}
    states = list(leaves["initial_state"].split(1))
    outputs: list = [None] * len(pieces)
    order = sorted(range(len(pieces)), key=lambda i: pieces[i].first, reverse=options["reverse"])
    for i in order:
        p = pieces[i]
        cut = [leaves[name][:, p.first : p.end] for name in ("r", "k", "v", "w")]
        o, states[p.sequence] = reference.wkv6(
            *cut, leaves["u"], initial_state=states[p.sequence], output_final_state=True, **options
        )
        outputs[i] = (o, states[p.sequence])
    ends = [y for pair in outputs for y in pair]
    starts = [y.double() for pair in grads for y in pair]
    return [o for o, _ in outputs], [s for _, s in outputs], gradients(ends, leaves, starts)


def near(name: str, got: Tensor, want: Tensor, table: dict) -> None:
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    error = relative_error(got.detach(), want.detach()) if want.numel() else 0.0
    assert error <= table[got.dtype], f"{name}: {error:.2e}"


def equals_one_process(rank, group, layout, exchange, reverse, dtype, raw=False, tokens=24, compiled=False):
    """Outputs, running states and all gradients, states of pieces that start no sequence being NaN."""
    world = group.size()
    ranges, offsets = LAYOUTS[layout][0](world), LAYOUTS[layout][1]
    factor = tokens // 24
    ranges = [[(a * factor, b * factor) for a, b in of_rank] for of_rank in ranges]
    offsets = tuple(factor * at for at in offsets)
    T, N = offsets[-1], len(offsets) - 1
    x, options = tensors(T, N, dtype, raw=raw), {"scale": 0.5, "reverse": reverse, "decay": "raw" if raw else "log"}
    pieces = pieces_of(ranges, offsets)
    g = torch.Generator().manual_seed(1)
    grads = [
        (torch.randn(1, p.end - p.first, H, V, generator=g).to(dtype), torch.randn(1, H, K, V, generator=g).to(dtype))
        for p in pieces
    ]
    want_o, want_state, want = whole(x, pieces, grads, options)

    plan = distributed.plan(torch.tensor(offsets), ranges, group)
    index = torch.tensor([t for a, b in ranges[rank] for t in range(a, b)], dtype=torch.int64)
    rows = torch.tensor(plan.sequence, dtype=torch.int64)
    begins = torch.tensor(plan.ends if reverse else plan.starts, dtype=torch.bool)
    mine = {name: x[name][:, index] for name in ("r", "k", "v", "w")} | {"u": x["u"].clone()}
    state = x["initial_state"][rows].clone()
    state[~begins] = torch.nan
    mine["initial_state"] = state
    leaves = {name: y.requires_grad_() for name, y in mine.items()}

    def call(r, k, v, w, u, initial_state):
        return distributed.wkv6(
            r,
            k,
            v,
            w,
            u,
            group=group,
            plan=plan,
            initial_state=initial_state,
            output_final_state=True,
            exchange=exchange,
            **options,
        )

    if compiled:
        call = torch.compile(call, fullgraph=True, backend=compiled)
    o, final = call(*leaves.values())
    local = [i for i, p in enumerate(pieces) if p.rank == rank]
    lengths = torch.tensor(plan.offsets).diff()
    filled = lengths.nonzero()[:, 0]
    grad_final = torch.zeros_like(final)
    grad_o = torch.zeros_like(o)
    for row, i in zip(filled.tolist(), local, strict=True):
        grad_final[row] = grads[i][1][0]
        grad_o[:, plan.offsets[row] : plan.offsets[row + 1]] = grads[i][0]
    found = gradients((o, final), leaves, (grad_o, grad_final))

    for row, i in zip(filled.tolist(), local, strict=True):
        near("o", o[:, plan.offsets[row] : plan.offsets[row + 1]], want_o[i], FORWARD_TOLERANCE)
        near("state", final[row : row + 1], want_state[i], FORWARD_TOLERANCE)
    empty = (lengths == 0).nonzero()[:, 0]
    assert torch.equal(final[empty], state[empty])
    for name in ("r", "k", "v", "w"):
        near(f"gradient of {name}", found[name], want[name][:, index], GRADIENT_TOLERANCE)
    du = found["u"].clone()
    dist.all_reduce(du, group=group)
    near("gradient of u", du, want["u"], GRADIENT_TOLERANCE)
    filled_begins = begins & (lengths > 0)
    near(
        "gradient of initial_state",
        found["initial_state"][filled_begins],
        want["initial_state"][rows][filled_begins],
        GRADIENT_TOLERANCE,
    )
    assert not found["initial_state"][~begins].any()


def batch_rows_cut_alike(rank, group, lengths, exchange, reverse, dtype):
    """Without a plan: rank i has the i-th stretch of every batch row; only the first gives an initial state."""
    B, T = 3, sum(lengths)
    x, options = tensors(T, B, dtype, B=B), {"scale": 1.0, "reverse": reverse, "decay": "log"}
    (a, b), P = stretches(lengths)[rank][0], group.size()
    first, last = (P - 1, 0) if reverse else (0, P - 1)
    leaves = {name: y.double().requires_grad_() for name, y in x.items()}
    outputs = reference.wkv6(
        *list(leaves.values())[:5], initial_state=leaves["initial_state"], output_final_state=True, **options
    )
    g = torch.Generator().manual_seed(2)
    grad_o, grad_final = (torch.randn(y.shape, generator=g).to(dtype) for y in outputs)
    want = gradients(outputs, leaves, (grad_o.double(), grad_final.double()))
    mine = {
        name: (y[:, a:b] if y.dim() == 4 and name != "initial_state" else y).clone().requires_grad_()
        for name, y in x.items()
    }
    if rank != first:
        del mine["initial_state"]
    o, final = distributed.wkv6(
        *list(mine.values())[:5],
        group=group,
        initial_state=mine.get("initial_state"),
        output_final_state=True,
        exchange=exchange,
        **options,
    )
    found = gradients((o, final), mine, (grad_o[:, a:b], grad_final * (rank == last)))
    near("o", o, outputs[0][:, a:b], FORWARD_TOLERANCE)
    if rank == last:
        near("final_state", final, outputs[1], FORWARD_TOLERANCE)
    for name in ("r", "k", "v", "w"):
        near(f"gradient of {name}", found[name], want[name][:, a:b], GRADIENT_TOLERANCE)
    if rank == first:
        near("gradient of initial_state", found["initial_state"], want["initial_state"], GRADIENT_TOLERANCE)


def exchanges_give_the_same_bits(rank, group):
    x = tensors(6, 2, torch.float32, B=2)
    given = list(x.values())[:5]
    found = [
        distributed.wkv6(*given, group=group, output_final_state=True, exchange=name)
        for name in ("all_gather", "transpose")
    ]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def saves_the_incoming_state_alone(rank, group):
    """Bytes that autograd keeps and that are not the inputs': one state a sequence, whatever T."""
    x = {name: y.requires_grad_() for name, y in tensors(256, 2, torch.float32, B=2).items()}
    kept: dict[int, int] = {}
    inputs = {y.untyped_storage().data_ptr() for y in x.values()}

    def pack(y: Tensor) -> Tensor:
        if y.untyped_storage().data_ptr() not in inputs:
            kept[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        distributed.wkv6(*list(x.values())[:5], group=group, initial_state=x["initial_state"])
    assert sum(kept.values()) <= 2 * H * K * V * 4, kept


def opcheck_of_the_scan(rank, group):
    state, w_sum = torch.rand(2, 3, 4, 5), -torch.rand(2, 3, 4)
    for exchange in ("all_gather", "transpose"):
        torch.library.opcheck(scan_op, (state, w_sum, [], 2, group.group_name, False, exchange))


def shift_equals_one_process(rank, group, layout, exchange, dtype, compiled=False):
    ranges, offsets = LAYOUTS[layout][0](group.size()), LAYOUTS[layout][1]
    x = torch.randn(1, offsets[-1], 3, 2, generator=torch.Generator().manual_seed(3)).to(dtype)
    if offsets[-1]:
        x[0, -1] = torch.inf  # the last token: it is nobody's predecessor
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    want, want_grad = torch.zeros_like(x), torch.zeros_like(x)
    for start, end in pairwise(offsets):
        want[:, start + 1 : end] = x[:, start : max(end - 1, start)]
        want_grad[:, start : max(end - 1, start)] = grad[:, start + 1 : end]
    plan = distributed.plan(list(offsets), ranges, group)
    index = torch.tensor([t for a, b in ranges[rank] for t in range(a, b)], dtype=torch.int64)
    leaf = x[:, index].requires_grad_()
    call = lambda y: distributed.token_shift(y, group, plan, exchange=exchange)  # noqa: E731
    got = (torch.compile(call, fullgraph=True, backend=compiled) if compiled else call)(leaf)
    assert torch.equal(got, want[:, index])
    assert torch.equal(torch.autograd.grad(got, leaf, grad[:, index])[0], want_grad[:, index])


def shift_of_stretches(rank, group, lengths, exchange):
    """Without a plan, ranks without tokens among them."""
    (a, b), T = stretches(lengths)[rank][0], sum(lengths)
    x = torch.randn(2, T, 3, generator=torch.Generator().manual_seed(3))
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    leaf = x[:, a:b].clone().requires_grad_()
    got = distributed.token_shift(leaf, group, exchange=exchange)
    zero = torch.zeros_like(x[:, :1])
    assert torch.equal(got, torch.cat([zero, x], 1)[:, a:b])
    (found,) = torch.autograd.grad(got, leaf, grad[:, a:b])
    assert torch.equal(found, torch.cat([grad[:, 1:], zero], 1)[:, a:b])


def mesh_is_a_group(rank, group):
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
    given = list(tensors(6, 1, torch.float64).values())[:5]
    assert torch.equal(distributed.wkv6(*given, group=mesh)[0], distributed.wkv6(*given, group=group)[0])


def unused_outputs_on_a_rank_take_part(rank, group):
    """A loss of o on one rank and of the last state on another: no rank may leave the others waiting."""
    x = {name: y.requires_grad_() for name, y in tensors(6, 1, torch.float64).items()}
    o, state = distributed.wkv6(*list(x.values())[:5], group=group, output_final_state=True)
    (o[:, :0] if rank == 0 else state).square().sum().backward()  # nothing of o, but its node in the graph
    assert all(y.grad.isfinite().all() for name, y in x.items() if name != "initial_state" and y.grad is not None)


def second_derivatives_are_refused(rank, group):
    x = list(tensors(6, 1, torch.float64).values())[:5]
    x[0].requires_grad_()
    o, _ = distributed.wkv6(*x, group=group)
    (gradient,) = torch.autograd.grad(o.square().sum(), x[0], create_graph=True)
    return raised(gradient.sum().backward)


def raised(function, *args, **options) -> tuple[str, str]:
    """The type and text of what the call raises."""
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def wrong_arguments(rank, group, wrong: dict):
    x = tensors(6, 1, torch.float32)
    return raised(distributed.wkv6, *list(x.values())[:5], **{"group": group} | wrong)


def disagreement(rank, group, what: str):
    """Rank 1 calls with something else than the others."""
    x = tensors(6, 1, torch.float32)
    call = {"group": group}
    if rank == 1 and what == "shape":
        x = {name: y[..., :3, :] if name == "initial_state" else y[..., :3] for name, y in x.items()}
    if rank == 1 and what == "dtype":
        x = {name: y.double() for name, y in x.items()}
    if rank == 1 and what == "batch":
        x = {name: torch.cat([y, y]) if y.dim() == 4 else y for name, y in x.items()}
    if rank == 1 and what == "exchange":
        call["exchange"] = "transpose"
    if what == "plan":
        call["plan"] = distributed.plan(
            [0, 6 * group.size()] if rank else [0, 6, 6 * group.size()], stretches([6] * group.size()), group
        )
    return raised(distributed.wkv6, *list(x.values())[:5], **call)


def wrong_plan(rank, group, offsets, ranges):
    return raised(distributed.plan, offsets, ranges, group)


def missing_rank(rank, group, how):
    """The last rank dies, raises before it calls, or does not call; the others say what they saw."""
    x = list(tensors(6, 1, torch.float32).values())[:5]
    if rank == group.size() - 1:
        if how == "dies":
            os._exit(1)
        if how == "raises":
            return raised(distributed.wkv6, *x[:4], x[4][:1], group=group)
        return None
    return raised(distributed.wkv6, *x, group=group)


def missing_in_backward(rank, group):
    x = [y.requires_grad_() for y in list(tensors(6, 1, torch.float32).values())[:5]]
    o, _ = distributed.wkv6(*x, group=group)
    if rank == 1:
        os._exit(1)
    return raised(o.sum().backward)
