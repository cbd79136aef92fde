# SPDX-License-Identifier: Apache-2.0
"""docs/training.md, from the figures of report_parts.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import report_plots
from report_parts import TEXT, Store
from validation import PARITY_TOLERANCE

_HEAD = """# Training with the operator

Written by `make report` (`python examples/report.py`), which trains everything on this page; the figures behind it are
in examples/results/training.json. Tests of the same claims, on a smaller scale: tests/test_training.py.
"""


def write(store: Store, docs: Path) -> None:
    """Write training.md, and its plots, for the parts that there are."""
    docs.mkdir(parents=True, exist_ok=True)
    lines = [_HEAD]
    for needs, section in (
        (("parity",), _parity),
        (("hold", "slots"), _recall),
        (("text float32", "text bfloat16", "text loop", "step times"), _text),
        (("memory",), _memory),
        (("state tuning",), _state_tuning),
        (("segments",), _segments),
    ):
        if all(name in store.parts for name in needs):
            figures = [store.parts[name]["figures"] for name in needs]
            lines += [*section(docs, *figures), ""]
    about = next(iter(store.parts.values()))["machine"] if store.parts else None
    if about:
        lines.append(f"Measured on {about['cpu']}, {about['isa']} kernels, one thread, torch {about['torch']}.")
    (docs / "training.md").write_text("\n".join(lines) + "\n")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def _parity(_: Path, runs: dict) -> list[str]:
    exact = runs["exact"]
    tolerances = {str(dtype).removeprefix("torch."): most for dtype, most in PARITY_TOLERANCE.items()}
    rows = []
    for name, run in runs.items():
        if name != "exact":
            most = next((f"{a:.0e}, {b:.0e}" for dtype, (a, b) in tolerances.items() if name.endswith(dtype)), "")
            rows.append((name, f"{run['off'][0]:.1e}", f"{run['off'][1]:.1e}", most))
    return [
        "## Fifty steps beside float64",
        "",
        "The same small model (2 layers, 64 channels, 2 heads), the same data and AdamW at 3e-4, once with the loop in",
        "float64, once with each algorithm in float32 and with the operator's inputs and output in "
        "bfloat16. The loss goes",
        f"from {exact['losses'][0]:.2f} to {exact['losses'][-1]:.2f} nats meanwhile. Last rows: what "
        "wrong gradients do.",
        "",
        *_table(("", "loss off by at most, nats", "gradient norm, relative", "tolerance in the tests"), rows),
    ]


def _recall(docs: Path, hold: dict, slots: dict) -> list[str]:
    report_plots.recall(docs / "training-recall.png", hold, slots)
    rows = []
    for task, figures in (("hold", hold), ("slots", slots)):
        for name, run in figures["runs"].items():
            rows.append((task, name, f"{run['accuracy']:.3f}", f"{figures['chance']:.3f}", str(len(run["curve"]))))
    return [
        "## Gradients through the state",
        "",
        "A language model's loss hardly tells right state gradients from wrong ones. Two tasks do. "
        "**hold**: a few values",
        "among much noise; at every token, name the last value. **slots**: four registers that are "
        "written now and then;",
        "name what is in one when asked. Both need a value kept over many tokens, and that is learned through the",
        "gradients of k, v and w from token to token. The loop that Hugging Face's models run has its state detached:",
        "trained so, from equal weights on equal data, a model stays at chance in hold, and near it in slots.",
        "",
        "![Accuracy by age of the value, and while training](training-recall.png)",
        "",
        *_table(("task", "gradients", f"accuracy at age >= {hold['old']}", "chance", "steps"), rows),
    ]


def _text(docs: Path, float32: dict, bfloat16: dict, loop: dict, times: dict) -> list[str]:
    runs = {"loop": loop, "float32": float32, "bfloat16": bfloat16}
    report_plots.losses(docs / "training-text.png", runs, times)
    rows = []
    for name, run in runs.items():
        step, operator = times[name]["step"], times[name]["operator"]
        last = run["validation"][-1]
        at = dict(map(tuple, run["validation"])).get(loop["validation"][-1][0])
        rows.append(
            (
                name,
                f"{1e3 * step:.0f} ms",
                f"{1e3 * operator:.1f} ms ({operator / step:.0%})",
                f"{at:.3f}" if at else "",
                f"{last[1]:.3f} after {last[0]}",
            )
        )
    s, both = TEXT, times["loop"]["operator"] / times["float32"]["operator"]
    return [
        "## A language model of real text",
        "",
        f"Byte by byte, the plays of Shakespeare: {s.model.layers} layers, {s.model.channels} channels, {s.model.heads}"
        f" heads, {s.batch} x {s.length} bytes a step, AdamW at {s.learning_rate:g}.",
        "loop: the loop over tokens at its best, true gradients and outputs stacked. float32, bfloat16 (autocast): the",
        "operator. Seconds are those of a step measured in turn in one process, so the right plot "
        "compares like with like.",
        "",
        "![Loss by step and by second](training-text.png)",
        "",
        *_table(
            (
                "",
                "a step",
                "the operator in it",
                f"nats a byte after {loop['validation'][-1][0]} steps",
                "nats at the end (validation)",
            ),
            rows,
        ),
        "",
        f"The operator itself takes 1/{both:.0f} of the loop's time; what is left of the step is matrix products. Byte",
        f"frequencies alone leave {float32['byte_entropy']:.2f} nats.",
    ]


def _memory(docs: Path, figures: dict) -> list[str]:
    report_plots.memory(docs / "training-memory.png", figures["rows"])
    names = list(figures["rows"][0][1])

    def megabytes(count: int | None) -> str:
        return f"{count / 1e6:.0f} MB" if count else ""

    return [
        "## Memory of a training step",
        "",
        f"A whole model of {figures['layers']} layers, {figures['channels']} channels and "
        f"{figures['heads']} heads on one text of T"
        " bytes: most bytes held at a time beyond the weights, gradients included.",
        "",
        *_table(("T", *names), ((str(T), *(megabytes(row.get(n)) for n in names)) for T, row in figures["rows"])),
        "",
        "![Memory by length](training-memory.png)",
        "",
        "The loop keeps every token's state, and stops where its graph takes gigabytes. Blocks run twice: activation",
        "checkpointing (`RWKV6(..., checkpoint=True)`, `train_text.py --checkpoint-blocks`).",
    ]


def _state_tuning(docs: Path, figures: dict) -> list[str]:
    return [
        "## Tuning the initial state alone",
        "",
        f"The model above, trained on plays, reads C sources: {figures['before']:.2f} nats a byte. Its "
        "weights stay as they",
        f"are ({figures['weights']:,} numbers); after {len(figures['losses'])} steps on the initial states alone"
        f" ({figures['numbers']:,} numbers) it is {figures['after']:.2f} nats, on sources held out.",
    ]


def _segments(_: Path, figures: dict) -> list[str]:
    rows = ((str(s), f"{full:.1e}", f"{cut:.1e}", f"{lost:.0%}") for s, full, cut, lost in figures["rows"])
    return [
        "## Backpropagation through segments",
        "",
        "A text of 256 bytes by segments, the state handed on. Full: the gradient goes back through the "
        "states; it must be",
        "that of the whole text. Truncated: each state is detached; it must be what the float64 loop "
        "gives in the same way,",
        "which is another gradient. Largest relative difference of any parameter's gradient:",
        "",
        *_table(("segment", "full, from the whole's", "truncated, from float64's", "truncated from the whole's"), rows),
    ]
