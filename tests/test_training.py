# SPDX-License-Identifier: Apache-2.0
"""Training with the operator is right: beside float64, on a task that wrong gradients cannot learn, through states."""
# ruff: noqa: E402 (the examples are imported from the checkout, where there is one)

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_close
from torch import Tensor

import rwkv6_ops
from rwkv6_ops import reference

ROOT = Path(__file__).parents[1]
if not (ROOT / "examples").is_dir():
    pytest.skip("not tested: the examples, which are in the checkout only", allow_module_level=True)
sys.path += [str(ROOT), str(ROOT / "examples")]

from corpus import Corpus, draw_batch
from recall import HOLD, SLOTS, train_recall
from rwkv6_lm import RWKV6, Config
from train_text import TextSettings, TextTrainer
from validation import (
    PARITY_TOLERANCE,
    ParityRun,
    TunedState,
    algorithm,
    detached,
    exact_parity_run,
    largest_difference,
    parity_run,
    segment_gradients,
    small_model,
    tune_state,
)

from benchmarks.peers import hf_loop


@pytest.fixture(scope="module")
def data() -> Tensor:
    return torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8).long()


# ---- fifty steps beside the float64 loop ----


@pytest.fixture(scope="module")
def exact(data: Tensor) -> ParityRun:
    return exact_parity_run(data)


@pytest.mark.parametrize("dtype", PARITY_TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["recurrent", "chunk"])
def test_fifty_steps_follow_the_float64_loop(name: str, dtype: torch.dtype, data: Tensor, exact: ParityRun):
    losses, norms = parity_run(data, algorithm(name, dtype)).off(exact)
    most_loss, most_norm = PARITY_TOLERANCE[dtype]
    assert losses <= most_loss
    assert norms <= most_norm
    assert exact.losses[-1] < exact.losses[0] - 1


def test_fifty_steps_with_the_gradients_of_the_loop_that_is_replaced_do_not(data: Tensor, exact: ParityRun):
    """The comparison can tell: beyond the tolerance of bfloat16, even."""
    losses, norms = parity_run(data, detached).off(exact)
    most_loss, most_norm = PARITY_TOLERANCE[torch.bfloat16]
    assert losses > 2 * most_loss
    assert norms > 2 * most_norm


# ---- remembering ----


def test_true_gradients_learn_to_hold_a_value():
    run = train_recall(replace(HOLD, steps=160), rwkv6_ops.wkv6, rwkv6_ops.wkv6, "ours")
    assert run.accuracy > 0.95
    assert min(accuracy for age, accuracy in run.by_age if age < 100) > 0.8


def test_the_replaced_loops_gradients_do_not_learn_to_hold_a_value():
    """Its state is detached: what it learns is the values a token or two old, and of the old ones nothing."""
    run = train_recall(replace(HOLD, steps=160), detached, rwkv6_ops.wkv6, "HF loop's gradients")
    assert run.accuracy < 3 * HOLD.chance


def test_the_fast_stand_in_has_the_replaced_loops_gradients():
    g = torch.Generator().manual_seed(0)
    r, k, v, w = (torch.randn(2, 19, 3, 8, generator=g, requires_grad=True) for _ in range(4))
    inputs, do = (r, k, v, w, torch.randn(3, 8, generator=g, requires_grad=True)), torch.randn(2, 19, 3, 8, generator=g)
    state = torch.randn(2, 3, 8, 8, generator=g)
    results = []
    for wkv in (detached, hf_loop):
        o, final = wkv(*inputs, initial_state=state, output_final_state=True, decay="raw")
        gradients = torch.autograd.grad(o, inputs, do, allow_unused=True)
        assert gradients[3] is None
        results.append([o, final, *gradients[:3], gradients[4]])
    for name, got, want in zip(("o", "final_state", "dr", "dk", "dv", "du"), *results, strict=True):
        assert_close(name, got, want, 2e-6)


@pytest.mark.parametrize("settings", [HOLD, SLOTS], ids=["hold", "slots"])
def test_the_answers_of_the_recall_tasks(settings):
    """Token by token: the last value of the register that is asked about, and how long ago it was written."""
    task = settings.task
    registers = getattr(task, "registers", 1)
    tokens, wanted, ages = task.draw((3, 200), torch.Generator().manual_seed(7))
    asked = 0
    for row, answers, row_ages in zip(tokens.tolist(), wanted.tolist(), ages.tolist(), strict=True):
        last = {}
        for t, token in enumerate(row):
            if token < registers * task.values:
                last[token // task.values] = token % task.values, t
            query = token - registers * task.values if registers > 1 else 0
            if 0 <= query < registers:
                value, since = last[query]
                assert (answers[t], row_ages[t]) == (value, t - since)
                asked += 1
            else:
                assert (answers[t], row_ages[t]) == (-100, -1)
    assert asked > 150


# ---- training the initial state alone ----


def frozen_model(wkv, dtype: torch.dtype = torch.float32) -> RWKV6:
    return small_model(wkv, dtype, Config(channels=32, heads=2, mix_rank=8, decay_rank=8))


def test_the_initial_state_alone_can_be_trained(data: Tensor):
    """A model of a text is turned to the same text in capitals; its weights stay as they are."""
    config = Config(channels=64, heads=2, mix_rank=8, decay_rank=8)
    settings = TextSettings(model=config, batch=4, length=64, steps=100, validation_batches=1)
    trainer = TextTrainer(Corpus(data, data), settings)
    trainer.train()
    model = trainer.model
    before = {name: p.clone() for name, p in model.named_parameters()}
    capitals = torch.tensor(list(bytes(data.tolist()).upper()))
    tuned, losses = tune_state(model, capitals, steps=60)
    assert sum(losses[-5:]) < sum(losses[:5]) - 5 * 0.1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(x.grad is not None and x.grad.norm() > 0 for x in tuned.wkv)


def test_gradients_of_the_initial_state_are_those_of_the_float64_loop(data: Tensor):
    x, y = draw_batch(data, 3, 50, torch.Generator().manual_seed(1))
    gradients = []
    for wkv, dtype in ((rwkv6_ops.wkv6, torch.float32), (reference.wkv6, torch.float64)):
        tuned = TunedState(frozen_model(wkv, dtype))
        F.cross_entropy(tuned(x).flatten(0, 1), y.flatten()).backward()
        gradients.append([p.grad for p in tuned.wkv])
    for layer, (got, want) in enumerate(zip(*gradients, strict=True)):
        assert_close(f"state of layer {layer}", got, want, 1e-5)


# ---- backpropagation through segments ----


@pytest.fixture(scope="module")
def batch(data: Tensor) -> tuple[Tensor, Tensor]:
    return draw_batch(data, 2, 96, torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def models() -> tuple[RWKV6, RWKV6]:
    return small_model(rwkv6_ops.wkv6), small_model(reference.wkv6, torch.float64)


def test_segments_chained_through_their_states_give_the_gradients_of_the_whole(batch: tuple, models: tuple):
    ours, exact = models
    whole = segment_gradients(exact, *batch, 96, truncated=False)
    for segment in (7, 32, 96):
        assert largest_difference(segment_gradients(ours, *batch, segment, truncated=False), whole) < 2e-5


def test_truncated_backpropagation_agrees_with_the_float64_loop(batch: tuple, models: tuple):
    ours, exact = models
    whole = segment_gradients(exact, *batch, 96, truncated=False)
    for segment in (7, 32):
        want = segment_gradients(exact, *batch, segment, truncated=True)
        assert largest_difference(segment_gradients(ours, *batch, segment, truncated=True), want) < 2e-5
        assert largest_difference(want, whole) > 1e-2  # it is another gradient than that of the whole
    assert largest_difference(segment_gradients(ours, *batch, 96, truncated=True), whole) < 2e-5
