# SPDX-License-Identifier: Apache-2.0
"""The "hold" task, which only a right gradient through the state can teach.

A few value tokens lie among many noise tokens, and at every position the model must name the last value it saw. A value
may be a hundred tokens old, so the state has to keep it: that is learned through the gradients of k, v and w that pass
from token to token, or not at all. A language model's loss hardly tells: most of it comes from the last few bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from progress import Progress
from rwkv6_lm import RWKV6, Config
from torch import Tensor

VALUES, NOISE = 32, 64  # kinds of token; values are 0 .. VALUES - 1
VALUE_RATE = 1 / 48
OLD = 48  # from this age on a value counts as remembered
CHANCE = 1 / VALUES


@dataclass(frozen=True)
class RecallSettings:
    """The decay range is milder than a language model's: its slowest channels would hold a value from the start."""

    model: Config = field(
        default_factory=lambda: Config(
            vocab=VALUES + NOISE, channels=64, layers=1, mix_rank=16, decay_rank=16, decay_range=(-1.0, 0.5)
        )
    )
    batch: int = 16
    length: int = 128
    steps: int = 300
    seconds: float = 60.0  # ends training early where the machine is slow
    learning_rate: float = 1e-2
    warmup: int = 30
    weight_decay: float = 0.01
    test_batches: int = 32
    seed: int = 0


@dataclass
class RecallRun:
    """Accuracy on old values while training, and by age afterwards (on sequences not trained on)."""

    curve: list[tuple[int, float]] = field(default_factory=list)  # (step, accuracy at ages >= OLD), smoothed
    by_age: list[tuple[int, float]] = field(default_factory=list)  # (age, accuracy)
    accuracy: float = 0.0  # at ages >= OLD
    seconds: float = 0.0


def draw(settings: RecallSettings, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the value to name at each, and its age in tokens: three int64 tensors [batch, length]."""
    size = settings.batch, settings.length
    is_value = torch.rand(size, generator=generator) < VALUE_RATE
    is_value[:, 0] = True
    tokens = torch.where(
        is_value,
        torch.randint(VALUES, size, generator=generator),
        VALUES + torch.randint(NOISE, size, generator=generator),
    )
    position = torch.arange(settings.length)
    last = torch.where(is_value, position, 0).cummax(dim=1).values
    return tokens, tokens.gather(1, last), position - last


def train_recall(settings: RecallSettings, wkv: Callable, test_wkv: Callable, label: str) -> RecallRun:
    """Train a new model with `wkv`, whose gradients are on trial, then test it with `test_wkv`, which is fast.

    Equal settings mean equal initial weights and equal data, whatever `wkv` is.
    """
    s = settings
    torch.manual_seed(s.seed)
    data, progress, run = torch.Generator().manual_seed(s.seed), Progress(), RecallRun()
    model = RWKV6(s.model, wkv=wkv)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=s.weight_decay, fused=True)
    begun, smooth = time.perf_counter(), CHANCE
    for step in range(1, s.steps + 1):
        rate = min(1, step / s.warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / s.steps)))
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate * rate
        tokens, wanted, age = draw(s, data)
        logits, _ = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = (logits.argmax(-1) == wanted)[age >= OLD]
        smooth += 0.1 * (right.float().mean().item() - smooth)
        run.curve.append((step, smooth))
        run.seconds = time.perf_counter() - begun
        line = f"{label}: step {step}/{s.steps}  accuracy at age >= {OLD}: {smooth:.3f}  {run.seconds:.0f} s"
        progress.show(line)
        if run.seconds > s.seconds:
            break
    model.wkv = test_wkv
    _test(model, s, run)
    progress.close(
        f"{label}: {step} steps, {run.seconds:.0f} s, accuracy at age >= {OLD} on new data {run.accuracy:.3f}"
    )
    return run


@torch.no_grad()
def _test(model: RWKV6, settings: RecallSettings, run: RecallRun) -> None:
    data = torch.Generator().manual_seed(settings.seed + 1)
    right, seen = torch.zeros(settings.length), torch.zeros(settings.length)
    for _ in range(settings.test_batches):
        tokens, wanted, age = draw(settings, data)
        hit = model(tokens)[0].argmax(-1) == wanted
        right += torch.bincount(age.flatten(), hit.flatten().float(), minlength=settings.length)
        seen += torch.bincount(age.flatten(), minlength=settings.length)
    run.by_age = [(age, (right[age] / seen[age]).item()) for age in range(settings.length) if seen[age] >= 50]
    run.accuracy = (right[OLD:].sum() / seen[OLD:].sum()).item()
