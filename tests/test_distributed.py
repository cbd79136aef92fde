# SPDX-License-Identifier: Apache-2.0
"""`rwkv6_ops.distributed` on gloo ranks equals one process: every layout of tokens, both exchanges, all gradients."""

from __future__ import annotations

import re
import time

import distributed_checks as checks
import pytest
import torch
from ranks import Ranks

EXCHANGES = ("all_gather", "transpose")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", list(checks.LAYOUTS))
def test_planned_layouts_equal_one_process(layout: str, world: int, exchange: str, reverse: bool, ranks: Ranks):
    if world == 1 and layout == "nothing cut":
        layout = "sequences"
    ranks.run(world, checks.equals_one_process, layout, exchange, reverse, torch.float64, exchange == "transpose")


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("layout", ["uneven", "zigzag"])
def test_float32_is_as_near_as_one_process(layout: str, exchange: str, ranks: Ranks):
    """480 tokens, to the tolerances of the whole operator: 1e-6, gradients 2e-6."""
    ranks.run(4, checks.equals_one_process, layout, exchange, False, torch.float32, False, 480)


@pytest.mark.parametrize(("layout", "backend"), [("even", "inductor"), ("sequences", "aot_eager")])
def test_compiles_whole(layout: str, backend: str, ranks: Ranks):
    ranks.run(2, checks.equals_one_process, layout, "auto", False, torch.float64, False, 24, backend)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [[5, 4], [0, 7], [7, 0], [3, 0, 1, 6], [0, 0, 0, 0]], ids=str)
def test_without_a_plan_ranks_have_one_stretch_each(lengths: list[int], reverse: bool, ranks: Ranks):
    exchange = EXCHANGES[len(lengths) // 4]
    ranks.run(len(lengths), checks.batch_rows_cut_alike, lengths, exchange, reverse, torch.float64)


def test_both_exchanges_give_the_same_bits(ranks: Ranks):
    ranks.run(4, checks.exchanges_give_the_same_bits)


def test_a_mesh_of_one_dimension_is_a_group(ranks: Ranks):
    ranks.run(2, checks.mesh_is_a_group)


def test_beyond_the_inputs_only_the_incoming_state_is_saved(ranks: Ranks):
    ranks.run(2, checks.saves_the_incoming_state_alone)


def test_opcheck(ranks: Ranks):
    ranks.run(2, checks.opcheck_of_the_scan)


def test_a_rank_whose_loss_uses_one_output_takes_part(ranks: Ranks):
    ranks.run(2, checks.unused_outputs_on_a_rank_take_part)


def test_a_second_derivative_is_refused(ranks: Ranks):
    for kind, text in ranks.run(2, checks.second_derivatives_are_refused):
        assert kind == "RuntimeError"
        assert "first derivatives only" in text


# ---- Token shift ----


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("layout", list(checks.LAYOUTS))
def test_token_shift_equals_one_process(layout: str, exchange: str, ranks: Ranks):
    dtype = torch.bfloat16 if exchange == "transpose" else torch.float32
    ranks.run(4, checks.shift_equals_one_process, layout, exchange, dtype)


def test_token_shift_compiles_whole(ranks: Ranks):
    ranks.run(2, checks.shift_equals_one_process, "sequences", "auto", torch.float32, "aot_eager")


@pytest.mark.parametrize("lengths", [[5, 4], [0, 7], [7, 0], [3, 0, 1, 6], [0, 0, 0, 0]], ids=str)
def test_token_shift_without_a_plan(lengths: list[int], ranks: Ranks):
    ranks.run(len(lengths), checks.shift_of_stretches, lengths, "auto")


# ---- Errors ----

DIFFER = r"^rwkv6_ops\.distributed: rank 1 of the group calls with .*, rank 0 with .*: all ranks have to call alike$"


@pytest.mark.parametrize("what", ["shape", "dtype", "batch", "exchange", "plan"])
def test_ranks_that_call_differently_raise_on_every_rank(what: str, ranks: Ranks):
    for kind, text in ranks.run(4, checks.disagreement, what):
        assert kind == "ValueError"
        assert re.match(DIFFER, text), text


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"group": None}, "TypeError", "group: NoneType, expected a ProcessGroup or a DeviceMesh that this rank is in"),
        ({"plan": "missing"}, "TypeError", "plan: str, expected a Plan from rwkv6_ops.distributed.plan"),
        ({"exchange": "ring"}, "ValueError", "exchange: 'ring', expected one of 'auto', 'all_gather', 'transpose'"),
        ({"decay": "exp"}, "ValueError", "decay: 'exp', expected one of 'log', 'raw'"),
        ({"scale": "1"}, "TypeError", "scale: str, expected a number"),
        (
            {"initial_state": torch.zeros(2, 2, 4, 5)},
            "ValueError",
            "initial_state: shape (2, 2, 4, 5), expected [N, H, K, V] = (1, 2, 4, 5)",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_argument_is_named_before_anything_is_sent(wrong: dict, kind: str, message: str, ranks: Ranks):
    assert ranks.run(2, checks.wrong_arguments, wrong) == [(kind, message)] * 2


@pytest.mark.parametrize(
    ("offsets", "ranges", "kind", "message"),
    [
        ([1, 4], [[(0, 2)], [(2, 4)]], "ValueError", "cu_seqlens: (1, 4), expected to start at 0 and never decrease"),
        ([0, 4], [[(0, 4)]], "ValueError", "token_ranges: of 1 ranks, expected those of the group's 2"),
        ([0, 4], [[(0, 3)], [(2, 4)]], "ValueError", "token_ranges: (2, 4) where the range from token 3 was expected"),
        ([0, 4], [[(0, 1)], [(2, 4)]], "ValueError", "token_ranges: (2, 4) where the range from token 1 was expected"),
        ([0, 4], [[(0, 1)], [(1, 3)]], "ValueError", "token_ranges: end at token 3, expected cu_seqlens' 4"),
        (7, [[(0, 1)], [(1, 3)]], "TypeError", "cu_seqlens: int, expected integers"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_plan_is_refused(offsets: object, ranges: list, kind: str, message: str, ranks: Ranks):
    assert ranks.run(2, checks.wrong_plan, offsets, ranges) == [(kind, message)] * 2


# ---- Failure ----


@pytest.mark.parametrize("how", ["dies", "raises", "stays away"])
def test_a_rank_that_is_missing_raises_on_the_others_within_the_timeout(how: str):
    """Ranks of their own: a group that lost a rank is good for nothing more."""
    pool = Ranks(world=3, seconds=8)
    try:
        begun = time.monotonic()
        first, *others = reversed(pool.answers(3, checks.missing_rank, how))  # the last rank is the one
        waited = time.monotonic() - begun
    finally:
        pool.close()
    assert not first[0] if how == "dies" else first[0]
    for well, (kind, text) in others:
        assert well
        assert kind == "RuntimeError"
        assert re.match(
            r"^rwkv6_ops\.distributed: rank [01] of 3: the exchange of states failed: another rank has", text
        )
    assert waited < 100


def test_a_rank_that_dies_before_the_backward_pass_raises_there_on_the_others():
    pool = Ranks(world=2, seconds=8)
    try:
        (well, (kind, text)), (other_well, _) = pool.answers(2, checks.missing_in_backward)
    finally:
        pool.close()
    assert well
    assert not other_well
    assert kind == "RuntimeError"
    assert "rank 0 of 2: the exchange of states failed" in text
