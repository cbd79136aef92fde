# SPDX-License-Identifier: Apache-2.0
"""What docs/training.md reports: parts, each a function from the text to its figures, and the file that keeps them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from corpus import Corpus, draw_batch
from recall import HOLD, OLD, SLOTS, RecallSettings, train_recall
from rwkv6_lm import RWKV6, Config
from torch import Tensor
from train_text import TextSettings, TextTrainer
from validation import (
    algorithm,
    detached,
    exact_parity_run,
    largest_difference,
    parity_run,
    segment_gradients,
    small_model,
    tune_state,
)

import rwkv6_ops
from benchmarks.peers import hf_loop
from benchmarks.timing import peak_memory
from rwkv6_ops import reference

TEXT = TextSettings(steps=300)
ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"  # for models in training
Figures = dict[str, object]


class Store:
    """Figures by part in a JSON file, each with the machine they come from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, Figures] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, figures: Figures, machine: dict[str, object]) -> None:
        # Another part may have been stored meanwhile, by another process.
        self.parts = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.parts[name] = {"figures": figures, "machine": machine}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.parts, indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n")


def best_loop(*operands: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
    """The loop at its fastest: true gradients, outputs stacked."""
    return hf_loop(*operands, true_gradients=True, stack=True, **options)


def parity(corpus: Corpus) -> Figures:
    """Each algorithm and dtype beside the float64 loop, and gradients that are wrong, to see what that would look
    like."""
    exact = exact_parity_run(corpus.train)
    runs = {"exact": asdict(exact)}
    ways = {
        "recurrent, float32": algorithm("recurrent"),
        "chunk, float32": algorithm("chunk"),
        "recurrent, bfloat16": algorithm("recurrent", torch.bfloat16),
        "chunk, bfloat16": algorithm("chunk", torch.bfloat16),
        "HF loop's gradients": detached,
        "gradients of k and v 0.1 % off": _slightly_wrong,
        "no gradient of w": _without_dw,
    }
    for name, wkv in ways.items():
        run = parity_run(corpus.train, wkv)
        runs[name] = asdict(run) | {"off": run.off(exact)}
    return runs


def _slightly_wrong(r: Tensor, k: Tensor, v: Tensor, *others: Tensor, **options: object) -> tuple:
    k, v = (1.001 * x - 0.001 * x.detach() for x in (k, v))
    return rwkv6_ops.wkv6(r, k, v, *others, **options)


def _without_dw(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **options: object) -> tuple:
    return rwkv6_ops.wkv6(r, k, v, w.detach(), u, **options)


def recall(settings: RecallSettings) -> Callable[[Corpus], Figures]:
    def part(_: Corpus) -> Figures:
        ways = {"rwkv6_ops": rwkv6_ops.wkv6, "HF loop's gradients": detached}
        runs = {name: asdict(train_recall(settings, wkv, rwkv6_ops.wkv6, name)) for name, wkv in ways.items()}
        return {"runs": runs, "chance": settings.chance, "old": OLD}

    return part


def text(name: str, settings: TextSettings, wkv: Callable, until: int | None = None) -> Callable[[Corpus], Figures]:
    """Training on text, or its first `until` steps; goes on where it was stopped."""

    def part(corpus: Corpus) -> Figures:
        trainer, file = TextTrainer(corpus, settings, wkv), BUILD / f"report-{name}.pt"
        file.parent.mkdir(exist_ok=True)
        if file.exists():
            trainer.resume(file)
        trainer.train(lambda: trainer.save(file) if trainer.steps % 10 == 0 else None, until)
        trainer.save(file)
        curves = asdict(trainer.curves)
        return {"train": curves["train"], "validation": curves["validation"], "byte_entropy": corpus.byte_entropy}

    return part


def step_times(corpus: Corpus) -> Figures:
    """Seconds of a step of each run on text, and of the operator in it: steps in turn, so that whatever else the
    machine does meets all alike; the median of each."""
    ways = {
        "loop": TextTrainer(corpus, TEXT, best_loop),
        "float32": TextTrainer(corpus, TEXT),
        "bfloat16": TextTrainer(corpus, replace(TEXT, bf16=True)),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    end = time.perf_counter() + 20
    while time.perf_counter() < end or len(samples["loop"]) < 3:
        for name, trainer in ways.items():
            before, operator = trainer.curves.spent, trainer.curves.operator_seconds
            trainer.step()
            samples[name].append((trainer.curves.spent - before, trainer.curves.operator_seconds - operator))
    return {
        name: {"step": _median(s for s, _ in pairs[1:]), "operator": _median(o for _, o in pairs[1:])}
        for name, pairs in samples.items()
    }


def _median(values) -> float:
    return torch.tensor(list(values), dtype=torch.float64).median().item()


def state_tuning(corpus: Corpus) -> Figures:
    """The trained model on text of another kind, C sources, before and after training the initial state alone."""
    sources = sorted((ROOT / "csrc").rglob("*.[ch]")) + sorted((ROOT / "cuda").rglob("*.cu*"))
    data = torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in sources)), dtype=torch.uint8).long()
    train, held_out = data[:-20000], data[-20000:]
    model = RWKV6.from_state_dict(torch.load(BUILD / "report-float32.pt", weights_only=True)["model"])
    tuned, losses = tune_state(model, train, steps=200, length=128)
    x, y = draw_batch(held_out, 32, 128, torch.Generator().manual_seed(9))

    def nats(logits: Tensor) -> float:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()

    with torch.no_grad():
        before, after = nats(model(x)[0]), nats(tuned(x))
    numbers = sum(p.numel() for p in tuned.wkv.parameters())
    weights = sum(p.numel() for p in model.parameters())
    return {"losses": losses, "before": before, "after": after, "numbers": numbers, "weights": weights}


def segments(corpus: Corpus) -> Figures:
    """Gradients over 256 tokens, at once and by segments, beside the float64 loop's."""
    x, y = draw_batch(corpus.train, 2, 256, torch.Generator().manual_seed(4))
    ours, exact = small_model(rwkv6_ops.wkv6), small_model(reference.wkv6, torch.float64)
    whole = segment_gradients(exact, x, y, 256, truncated=False)
    rows = []
    for segment in (16, 64, 256):
        full = segment_gradients(ours, x, y, segment, truncated=False)
        cut = segment_gradients(ours, x, y, segment, truncated=True)
        exact_cut = segment_gradients(exact, x, y, segment, truncated=True)
        lost = largest_difference(exact_cut, whole)
        rows.append((segment, largest_difference(full, whole), largest_difference(cut, exact_cut), lost))
    return {"rows": rows}


def memory(_: Corpus) -> Figures:
    """Peak bytes of a training step of a whole model by T, beyond its weights."""
    config = Config(channels=256, heads=4, layers=4)
    rows = []
    for T in (64, 128, 256, 512, 1024, 4096):
        x = torch.randint(256, (1, T + 1), generator=torch.Generator().manual_seed(0))
        row: dict[str, int | None] = {}
        for name, wkv, again in (
            ("loop", best_loop, False),
            ("ours", rwkv6_ops.wkv6, False),
            ("ours, blocks run twice", rwkv6_ops.wkv6, True),
        ):
            if name != "loop" or T <= 512:  # beyond, the loop's graph takes gigabytes
                torch.manual_seed(0)
                row[name] = peak_memory(_training_step(RWKV6(config, wkv=wkv, checkpoint=again), x))
        rows.append((T, row))
    return {"rows": rows, "layers": config.layers, "channels": config.channels, "heads": config.heads}


def _training_step(model: RWKV6, tokens: Tensor) -> Callable[[], object]:
    def step() -> None:
        model.zero_grad()
        logits, _ = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return step


PARTS: dict[str, Callable[[Corpus], Figures]] = {
    "parity": parity,
    "hold": recall(HOLD),
    "slots": recall(replace(SLOTS, steps=500)),
    "segments": segments,
    "text float32": text("float32", TEXT, rwkv6_ops.wkv6),
    "text bfloat16": text("bfloat16", replace(TEXT, bf16=True), rwkv6_ops.wkv6),
    "text loop": text("loop", TEXT, best_loop, until=100),
    "step times": step_times,
    "state tuning": state_tuning,
    "memory": memory,
}
