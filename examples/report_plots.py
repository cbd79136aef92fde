# SPDX-License-Identifier: Apache-2.0
"""The plots of docs/training.md."""

from __future__ import annotations

from pathlib import Path

from plots import GREY, LOOP, OURS, STYLE, TRUE_LOOP, plt

_BY_GRADIENTS = {"rwkv6_ops": OURS, "HF loop's gradients": LOOP}
_BY_RUN = {"loop": LOOP, "float32": OURS, "bfloat16": TRUE_LOOP}
_BY_WAY = {"loop": LOOP, "ours": OURS, "ours, blocks run twice": TRUE_LOOP}


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)
    plt.close(figure)


def recall(path: Path, hold: dict, slots: dict) -> None:
    """Accuracy by age after training above, while training below; a task a column."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained", sharey=True)
        for column, (name, task) in enumerate((("hold", hold), ("slots", slots))):
            for ax, curve in ((axes[0][column], "by_age"), (axes[1][column], "curve")):
                for gradients, run in task["runs"].items():
                    ax.plot(*zip(*run[curve], strict=True), color=_BY_GRADIENTS[gradients], lw=2.2, label=gradients)
                ax.axhline(task["chance"], color=GREY, ls="--", lw=1, label="chance")
                ax.set(ylim=(-0.03, 1.05), ylabel="accuracy")
            axes[0][column].axvline(task["old"], color=GREY, ls=":", lw=1)
            axes[0][column].set(xlabel="age of the value, tokens", title=f"{name}: by age, after training, on new data")
            axes[1][column].set(
                xlabel="step", title=f"{name}: values at least {task['old']} tokens old, while training"
            )
        axes[0][0].legend(loc="center right")
        _save(figure, path)


def losses(path: Path, runs: dict, times: dict) -> None:
    """Training loss, smoothed, by step and by second."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
        for name, run in runs.items():
            steps, smooth = [step for step, _ in run["train"]], []
            for n, (_, nats) in enumerate(run["train"]):
                smooth.append(nats if n == 0 else smooth[-1] + max(0.1, 1 / (n + 1)) * (nats - smooth[-1]))
            style = {"color": _BY_RUN[name], "lw": 2.2, "label": name, "ls": "--" if name == "loop" else "-"}
            axes[0].plot(steps, smooth, **style)
            axes[1].plot([step * times[name]["step"] for step in steps], smooth, **style)
        axes[0].set(xlabel="step", ylabel="nats a byte, smoothed", title="By step: the same curve")
        axes[1].set(xlabel="seconds on one core", title="By second")
        axes[1].set_xscale("log")
        axes[0].legend()
        _save(figure, path)


def memory(path: Path, rows: list) -> None:
    """Peak bytes by T."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(8, 4.6), layout="constrained")
        for name, colour in _BY_WAY.items():
            line = [(T, row[name] / 1e6) for T, row in rows if row.get(name)]
            ax.plot(*zip(*line, strict=True), color=colour, lw=2.2, marker="o", ms=4, label=name)
        ax.set_xscale("log", base=2)
        ax.set(
            yscale="log", xlabel="tokens (T)", ylabel="MB beyond the weights", title="Peak memory of a training step"
        )
        ax.legend()
        _save(figure, path)
