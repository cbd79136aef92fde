# SPDX-License-Identifier: Apache-2.0
"""Two tasks that only a right gradient through the state can teach.

The model must name a value that it saw many tokens ago, so its state has to keep it: that is learned through the
gradients of k, v and w that pass from token to token, or not at all. A language model's loss hardly tells: most of it
comes from the last few bytes.
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

OLD = 48  # from this age on a value counts as remembered
_UNASKED = -100  # cross_entropy's own "no target here"


@dataclass(frozen=True)
class Hold:
    """A few value tokens among many noise tokens; at every position: which was the last value?"""

    values: int = 32
    noise: int = 64
    value_rate: float = 1 / 48

    @property
    def vocab(self) -> int:
        return self.values + self.noise

    def draw(self, size: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, the value to name at each (or `_UNASKED`), and its age in tokens: three int64 [batch, length]."""
        is_value = torch.rand(size, generator=generator) < self.value_rate
        is_value[:, 0] = True
        tokens = torch.where(
            is_value,
            torch.randint(self.values, size, generator=generator),
            self.values + torch.randint(self.noise, size, generator=generator),
        )
        position = torch.arange(size[1])
        last = torch.where(is_value, position, 0).cummax(dim=1).values
        return tokens, tokens.gather(1, last), position - last


@dataclass(frozen=True)
class Slots:
    """Registers: some tokens write a value into one of them, some ask what is in one, the rest is noise."""

    registers: int = 4
    values: int = 8
    noise: int = 32
    write_rate: float = 4 / 48
    query_rate: float = 0.4

    @property
    def vocab(self) -> int:
        return self.registers * (self.values + 1) + self.noise

    def draw(self, size: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """As `Hold.draw`. A text begins with a write to each register."""
        n = self.registers
        kind, slot = torch.rand(size, generator=generator), torch.randint(n, size, generator=generator)
        kind[:, :n], slot[:, :n] = 0, torch.arange(n)
        value = torch.randint(self.values, size, generator=generator)
        noise = n * (self.values + 1) + torch.randint(self.noise, size, generator=generator)
        writes, asks = kind < self.write_rate, kind > 1 - self.query_rate
        tokens = torch.where(writes, slot * self.values + value, torch.where(asks, n * self.values + slot, noise))
        position = torch.arange(size[1])
        last = [torch.where(writes & (slot == i), position, 0).cummax(dim=1).values for i in range(n)]
        last = torch.stack(last, -1).gather(2, slot[..., None])[..., 0]
        wanted = torch.where(asks, value.gather(1, last), _UNASKED)
        return tokens, wanted, torch.where(asks, position - last, -1)


@dataclass(frozen=True)
class RecallSettings:
    """A task, a model and how to train it. For "hold", the decay range is milder than a language model's: its slowest
    channels would hold a value from the start."""

    task: Hold | Slots = field(default_factory=Hold)
    model: Config = field(
        default_factory=lambda: Config(
            vocab=Hold().vocab, channels=64, layers=1, mix_rank=16, decay_rank=16, decay_range=(-1.0, 0.5)
        )
    )
    batch: int = 16
    length: int = 128
    steps: int = 300
    seconds: float = math.inf  # ends training early where the machine is slow
    learning_rate: float = 1e-2
    warmup: int = 30
    weight_decay: float = 0.01
    test_batches: int = 32
    seed: int = 0

    @property
    def chance(self) -> float:
        return 1 / self.task.values


HOLD = RecallSettings()
SLOTS = RecallSettings(
    Slots(), Config(vocab=Slots().vocab, channels=64, mix_rank=16, decay_rank=16), steps=1000, learning_rate=3e-3
)


@dataclass
class RecallRun:
    """Accuracy on old values while training, and by age afterwards (on sequences not trained on)."""

    curve: list[tuple[int, float]] = field(default_factory=list)  # (step, accuracy at ages >= OLD), smoothed
    by_age: list[tuple[int, float]] = field(default_factory=list)  # (age, accuracy)
    accuracy: float = 0.0  # at ages >= OLD
    seconds: float = 0.0


def train_recall(settings: RecallSettings, wkv: Callable, test_wkv: Callable, label: str) -> RecallRun:
    """Train a new model with `wkv`, whose gradients are on trial, then test it with `test_wkv`, which is fast.

    Equal settings mean equal initial weights and equal data, whatever `wkv` is.
    """
    s = settings
    torch.manual_seed(s.seed)
    data, progress, run = torch.Generator().manual_seed(s.seed), Progress(), RecallRun()
    model = RWKV6(s.model, wkv=wkv)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=s.weight_decay, fused=True)
    begun, smooth = time.perf_counter(), s.chance
    for step in range(1, s.steps + 1):
        rate = min(1, step / s.warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / s.steps)))
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate * rate
        tokens, wanted, age = s.task.draw((s.batch, s.length), data)
        logits, _ = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=_UNASKED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = (logits.argmax(-1) == wanted)[age >= OLD]
        smooth += 0.1 * (right.float().mean().item() - smooth)
        run.curve.append((step, smooth))
        run.seconds = time.perf_counter() - begun
        progress.show(f"{label}: step {step}/{s.steps}  accuracy at age >= {OLD}: {smooth:.3f}  {run.seconds:.0f} s")
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
        tokens, wanted, age = settings.task.draw((settings.batch, settings.length), data)
        asked = age >= 0
        hit = (model(tokens)[0].argmax(-1) == wanted)[asked]
        right += torch.bincount(age[asked], hit.float(), minlength=settings.length)
        seen += torch.bincount(age[asked], minlength=settings.length)
    run.by_age = [(age, (right[age] / seen[age]).item()) for age in range(settings.length) if seen[age] >= 50]
    run.accuracy = (right[OLD:].sum() / seen[OLD:].sum()).item()
