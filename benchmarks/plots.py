# SPDX-License-Identifier: Apache-2.0
"""The plots of docs/benchmarks.md: time per token by length, roofline, memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files, on machines without a display too
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.points import growing

GREY = "#8a8f98"
COLOURS = {
    "ours": "#1b6ca8",
    "HF loop": "#d1495b",
    "loop, true gradients": "#edae49",
    "loop, compiled": "#8d5a97",
    "ggml": "#3c8d5a",
    "FLA fused_recurrent": "#e07b39",
    "FLA chunk": "#6c757d",
    "flash-rwkv": "#b5838d",
    "rwkv_ops": "#a3b18a",
    "formula": GREY,
}
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold", "axes.titlesize": 12}
STYLE |= {"axes.titlepad": 12, "font.size": 11, "legend.frameon": False}


@dataclass(frozen=True)
class Drawing:
    """A file beside benchmarks.md."""

    title: str
    file: str


def draw_all(name: str, jobs: dict, device: str, folder: Path) -> list[Drawing]:
    """Draw what there are results for."""
    points = [job for job in jobs.values() if "seconds" in job]
    memory = {key: job["bytes"] for key, job in jobs.items() if key.startswith("memory ")}
    drawings = []
    with plt.rc_context(STYLE):
        for kind, title, draw in (
            ("length", "Nanoseconds a token and head, by length", lambda: by_length(points)),
            ("growth", "Time over B, T and H, each growing alone", lambda: by_growth(jobs)),
            ("roofline", "Roofline", lambda: roofline(points, jobs.get(f"peaks {device}"))),
            ("memory", "Memory of a training step, by length", lambda: by_memory(memory)),
            (
                "profile",
                "A model's training step by kind of operation",
                lambda: by_group(jobs.get(f"profile {device}")),
            ),
        ):
            if figure := draw():
                file = f"benchmarks-{name}-{kind}.png"
                figure.savefig(folder / file, dpi=110)
                plt.close(figure)
                drawings.append(Drawing(title, file))
    return drawings


def by_length(points: list[dict]) -> plt.Figure | None:
    """Lines of ours and each peer over T, forward at the left, training at the right: the sweep with most lengths."""
    shapes: dict[tuple, list[dict]] = {}
    for job in points:
        p = job["point"]
        if p["pass_"] != "decode":
            shapes.setdefault((p["B"], p["H"], p["D"], p["dtype"], p["threads"]), []).append(job)
    if not shapes:
        return None
    shape, chosen = max(shapes.items(), key=lambda item: len({job["point"]["T"] for job in item[1]}))
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained", sharey=True)
    for ax, pass_, title in zip(axes, ("forward", "both"), ("Forward", "Forward and backward"), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for job in sorted(chosen, key=lambda job: job["point"]["T"]):
            if job["point"]["pass_"] == pass_:
                for who, seconds in job["seconds"].items():
                    place = job["point"]["T"], 1e9 * seconds["min"] / job["point"]["token_heads"]
                    lines.setdefault(who, []).append(place)
        for who, line in lines.items():
            ax.plot(*zip(*line, strict=True), marker="o", ms=4, lw=2.5 if who == "ours" else 1.8, color=COLOURS[who])
            _label(ax, line[-1], who)
        ax.set(xscale="log", yscale="log", xlabel="tokens (T)", title=title)
        ax.set_xscale("log", base=2)
        ax.margins(x=0.22)
        ax.grid(axis="y", color="#e6e8eb", lw=0.8)
    axes[0].set_ylabel("ns a token and head")
    figure.suptitle("B {}, H {}, D {}, {}, {} thread(s)".format(*shape), fontsize=10, color=GREY)
    return figure


def _label(ax: Axes, at: tuple[float, float], text: str) -> None:
    ax.annotate(text, at, xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=COLOURS[text])


def by_growth(jobs: dict[str, dict]) -> plt.Figure | None:
    """How often the first problem's time it takes when B, T or H alone is so many times as large."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained", sharey=True)
    for ax, pass_, title in zip(axes, ("forward", "both"), ("Forward", "Forward and backward"), strict=True):
        for (name, points), colour in zip(growing(pass_).items(), ("#1b6ca8", "#d1495b", "#3c8d5a"), strict=True):
            if not all(point.key in jobs for point in points):
                plt.close(figure)
                return None
            times = [jobs[point.key]["seconds"]["ours"]["min"] for point in points]
            sizes = [point.token_heads / points[0].token_heads for point in points]
            ax.plot(sizes, [t / times[0] for t in times], marker="o", ms=4, lw=1.8, color=colour, label=name)
        ax.plot(sizes, sizes, color=GREY, lw=1.2, ls="--", label="linear")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set(xlabel="times as large", title=title)
        ax.grid(color="#e6e8eb", lw=0.8)
    axes[0].set_ylabel("times as long")
    axes[0].legend()
    first = points[0]
    figure.suptitle(f"ours, from B {first.B}, T {first.T}, H {first.H}, D {first.D}", fontsize=10, color=GREY)
    return figure


def roofline(points: list[dict], peaks: dict | None) -> plt.Figure | None:
    """Each point at one thread under the machine's two limits, operations counted as the recurrence has them."""
    chosen = [
        j for j in points if j["point"]["threads"] == 1 and j["point"]["T"] * j["point"]["B"] * j["point"]["H"] >= 64
    ]
    if not chosen or not peaks:
        return None
    figure, ax = plt.subplots(figsize=(8, 5), layout="constrained")
    places = {who: [] for who in ("HF loop", "ggml", "ours")}
    for job in chosen:
        p = job["point"]
        for who, line in places.items():
            if who in job["seconds"]:
                line.append((p["flop"] / p["bytes"], p["flop"] / job["seconds"][who]["min"] / 1e9))
    intensities = [x for line in places.values() for x, _ in line]
    left, right = min(intensities) / 2, max(intensities) * 2
    ridge = peaks["flops"] / peaks["bandwidth"]
    roof = sorted({left, max(left, min(ridge, right)), right})
    ax.plot(roof, [min(x * peaks["bandwidth"], peaks["flops"]) / 1e9 for x in roof], color="black", lw=1.5)
    ax.annotate(
        "measured limits: triad, matrix product",
        (right, peaks["flops"] / 1e9),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    for who, line in places.items():
        if line:
            ax.scatter(*zip(*line, strict=True), s=28, alpha=0.8, color=COLOURS[who], label=who, linewidths=0)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="operations a byte that must be moved",
        ylabel="GF/s",
        title="Roofline, one thread",
    )
    ax.set_xscale("log", base=2)
    ax.legend(loc="lower right")
    return figure


def by_memory(memory: dict[str, dict]) -> plt.Figure | None:
    """Peak bytes over T."""
    from benchmarks.report import job_tokens

    if not memory:
        return None
    figure, ax = plt.subplots(figsize=(8, 4.6), layout="constrained")
    lines: dict[str, list[tuple[int, float]]] = {}
    for key, found in sorted(memory.items(), key=lambda item: job_tokens(item[0])):
        for who, count in found.items():
            if count:
                lines.setdefault(who, []).append((job_tokens(key), count / 1e6))
    for who, line in lines.items():
        dashes = {"ls": "--", "zorder": 3} if who == "formula" else {"marker": "o", "ms": 4}
        ax.plot(*zip(*line, strict=True), lw=2, color=COLOURS[who], label=who, **dashes)
    ax.set(
        yscale="log", xlabel="tokens (T)", ylabel="MB beyond the inputs", title="Peak memory of forward and backward"
    )
    ax.set_xscale("log", base=2)
    ax.legend()
    return figure


def by_group(job: dict | None) -> plt.Figure | None:
    """A bar for each way of running a model's step, cut by kind of operation."""
    if not job:
        return None
    groups = list(dict.fromkeys(row["group"] for step in job["steps"].values() for row in step["operations"]))
    groups.sort(key=lambda group: group != "WKV operator")
    figure, ax = plt.subplots(figsize=(10, 3), layout="constrained")
    for y, step in enumerate(job["steps"].values()):
        total, left = sum(row["seconds"] for row in step["operations"]), 0.0
        for n, group in enumerate(groups):
            share = sum(row["seconds"] for row in step["operations"] if row["group"] == group) / total
            width = 1e3 * share * step["seconds"]
            colour = ("#1b6ca8", "#edae49", "#8a8f98", "#3c8d5a", "#8d5a97")[n % 5]
            ax.barh(y, width, 0.6, left=left, color=colour, edgecolor="white", label=group if y == 0 else None)
            left += width
        ax.text(left * 1.01, y, f"{left:.0f} ms", va="center", fontsize=10)
    ax.set_yticks(range(len(job["steps"])), list(job["steps"]))
    ax.invert_yaxis()
    ax.set(xlabel="milliseconds", title="A model's training step, by kind of operation")
    ax.legend(loc="lower right", fontsize=9)
    return figure
