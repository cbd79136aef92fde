# SPDX-License-Identifier: Apache-2.0
"""What the demo leaves behind: one figure, and the numbers behind it."""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib
from comparison import SHAPE, Row
from recall import HOLD, OLD, RecallRun
from train_text import TextCurves

matplotlib.use("Agg")  # a file, on machines without a display too
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OURS, LOOP, TRUE_LOOP, GREY = "#1b6ca8", "#d1495b", "#edae49", "#8a8f98"
HF_GRADIENTS = "HF loop (state detached)"


STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold", "axes.titlesize": 12}
STYLE |= {"axes.titlepad": 12, "font.size": 11, "legend.frameon": False}


def draw_loss_curve(path: Path, text: TextCurves, byte_entropy: float) -> None:
    """One run's losses by step."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
        _draw_loss(axes, text, byte_entropy)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def draw(
    path: Path, text: TextCurves, byte_entropy: float, recall: dict[str, RecallRun], rows: list[Row], note: str
) -> None:
    """Write the figure to `path`; `recall` holds ours first, then the HF loop's; `note` says where it was measured."""
    with plt.rc_context(STYLE):
        figure, ((loss, accuracy), (time, age)) = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
        _draw_loss(loss, text, byte_entropy)
        _draw_recall(accuracy, {name: run.curve for name, run in recall.items()})
        accuracy.set(xlabel="training step", title=f"Recall of values at least {OLD} tokens old, while training")
        _draw_recall(age, {name: run.by_age for name, run in recall.items()})
        age.axvline(OLD, color=GREY, linewidth=1, linestyle=":")
        age.set(xlabel="age of the value in tokens", title="Recall by age, after training, on new data")
        _draw_times(time, rows)
        figure.suptitle("rwkv6_ops: training RWKV-6 with the WKV operator", fontsize=16, fontweight="bold")
        figure.supxlabel(note, fontsize=9, color=GREY)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_loss(axes: Axes, text: TextCurves, byte_entropy: float) -> None:
    axes.plot(*zip(*text.train, strict=True), color=OURS, alpha=0.25, linewidth=1, label="training, each batch")
    axes.plot(
        *zip(*text.validation, strict=True), color=OURS, linewidth=2.5, marker="o", markersize=4, label="validation"
    )
    axes.axhline(byte_entropy, color=GREY, linestyle="--", label="byte frequencies alone")
    step, nats = text.validation[-1]
    axes.annotate(
        f"{nats:.2f}", (step, nats), xytext=(0, 10), textcoords="offset points", ha="center", fontweight="bold"
    )
    axes.set(xlabel="training step", ylabel="nats a byte", title="A byte-level language model of real text")
    axes.legend()


def _draw_recall(axes: Axes, curves: dict[str, list[tuple[int, float]]]) -> None:
    for (name, points), colour in zip(curves.items(), (OURS, LOOP), strict=True):
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=2.5, label=name)
    axes.axhline(HOLD.chance, color=GREY, linestyle="--", label="chance")
    axes.set(ylabel="accuracy", ylim=(-0.03, 1.05))
    axes.legend(loc="center right")


def _draw_times(axes: Axes, rows: list[Row]) -> None:
    height = 0.8 / len(rows)
    for i, (row, colour) in enumerate(zip(rows, (OURS, LOOP, TRUE_LOOP), strict=True)):
        milliseconds = [1e3 * row.forward, 1e3 * row.both]
        places = [pass_ + (i - (len(rows) - 1) / 2) * height for pass_ in range(2)]
        axes.barh(places, milliseconds, 0.9 * height, color=colour, label=row.name)
        memory = "" if row.memory is None else f", {row.memory / 1e6:.0f} MB"
        ratios = row.forward / rows[0].forward, row.both / rows[0].both
        for place, value, ratio, more in zip(places, milliseconds, ratios, ("", memory), strict=True):
            times = "" if i == 0 else f" = {ratio:.0f}x"
            time = f"{value:.{1 if value < 100 else 0}f} ms"
            axes.text(value * 1.1, place, time + times + more, va="center", fontsize=10)
    axes.set_xscale("log")
    left, right = 1e3 * rows[0].forward / 3, max(1e3 * row.both for row in rows)
    axes.set_xlim(left, left * (right / left) ** 1.5)  # a third of the width for the labels
    axes.set_yticks([0, 1], ["forward", "forward +\nbackward"])
    axes.invert_yaxis()
    axes.set(
        xlabel="milliseconds, logarithmic; one thread", title="Time and peak memory, B {} T {} H {} D {}".format(*SHAPE)
    )
    axes.legend(loc="upper right", fontsize=10)


def write_csv(
    path: Path, text: TextCurves, recall: dict[str, RecallRun], rows: list[Row], about: dict[str, object]
) -> None:
    """Every number of the figure, one a line: what was measured, of what, at which x, and the value."""
    lines: list[tuple[object, ...]] = [("machine", name, "", value) for name, value in about.items()]
    lines += [("nats a byte by step", "training", *point) for point in text.train]
    lines += [("nats a byte by step", "validation", *point) for point in text.validation]
    lines += [("text training", "seconds a step", "", text.spent / len(text.train))]
    lines += [("text training", "share of the operator", "", text.operator_seconds / text.spent)]
    for name, run in recall.items():
        lines += [(f"accuracy at age >= {OLD} by step", name, *point) for point in run.curve]
        lines += [("accuracy by age", name, *point) for point in run.by_age]
        lines += [(f"accuracy at age >= {OLD}", name, "", run.accuracy)]
    shape = "x".join(map(str, SHAPE))
    for row in rows:
        lines += [("seconds, forward", row.name, shape, row.forward)]
        lines += [("seconds, forward + backward", row.name, shape, row.both)]
        lines += [("peak bytes, forward + backward", row.name, shape, row.memory)]
        lines += [("relative error of o", row.name, shape, row.error)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("measure", "series", "x", "value"))
        writer.writerows(lines)
