# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks.md, from the files of results."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import plots
from benchmarks.points import PASSES, sweeps

_TITLES = {
    "front": "In short",
    "length": "By length",
    "heads": "By number of heads",
    "growth": "By B, T and H, each alone",
    "head size": "By head size",
    "dtype": "By dtype",
    "threads": "By threads",
    "decode": "Decoding",
}
_INTRO = """# Benchmarks

Written by `python -m benchmarks report` from the files in benchmarks/results/, which `python -m benchmarks run` makes;
`make bench` does both on your machine. Every problem is compared with the float64 loop before it is timed, and a wrong
result is not timed.

Ours and its peers run in turn, in one process, sample by sample; the tables give the least of the samples, and ours'
median as well. A peer's figure is its time as a multiple of ours. "HF loop" is the loop over tokens of the RWKV-6
models that are loaded through Hugging Face; "true gradients" is the same without its `no_grad`; "compiled" is that
through `torch.compile`, which unrolls it: compiling 64 tokens takes minutes, so it stops at 16. ggml is the operator
in the wheel of pywhispercpp. Decays are of the case table's "normal" kind: log decays -exp(a normal number).
"""


def write(results: Path, docs: Path, readme: Path | None = None) -> str:
    """Write benchmarks.md and its plots to `docs`, and the first CPU's plot and table into `readme` between its marks;
    returns a line that says what was written."""
    files = sorted(results.glob("*.json")) if results.is_dir() else [results]
    if not files:
        raise SystemExit(f"{results}: no results there; `python -m benchmarks run` makes some")
    docs.mkdir(parents=True, exist_ok=True)
    parts, front = [_INTRO], []
    for file in files:
        stored = json.loads(file.read_text())
        parts.append(_section(file.stem, stored, docs))
        front = front or _front(file.stem, stored)
    if readme and front:
        _replace_figures(readme, front)
    (docs / "benchmarks.md").write_text("\n".join(parts))
    return f"{docs / 'benchmarks.md'}, from {', '.join(file.name for file in files)}"


def _front(name: str, stored: dict) -> list[str]:
    """The front page's lines: where, one plot, one table of few rows."""
    about, jobs = stored["machine"], stored["jobs"]
    rows = [jobs[p.key] for p in sweeps()["front"] if p.key in jobs]
    if not rows:
        return []
    lines = [
        f"{about['cpu']}, {about['cores']} virtual CPUs, {about['isa']} kernels, torch {about['torch']}; float32, one",
        "thread, calls in turn in one process, the least time of each. Peers: their time as a multiple of ours.",
        "",
        f"![Nanoseconds a token and head, by length](docs/benchmarks-{name}-length.png)",
        "",
    ]
    peers = ("HF loop", "loop, true gradients", "ggml")
    lines += [_row(["", "B, T, H, D", "ours", *peers]), _row("---" for _ in range(3 + len(peers)))]
    for row in rows:
        p, seconds = row["point"], row["seconds"]
        ratios = [_times(seconds[n]["min"] / seconds["ours"]["min"]) if n in seconds else "" for n in peers]
        shape = ", ".join(str(p[n]) for n in "BTHD")
        lines.append(_row([PASSES[p["pass_"]], shape, milliseconds(seconds["ours"]["min"]), *ratios]))
    memory = next((job["bytes"] for key, job in jobs.items() if key.startswith("memory ") and " T512 " in key), None)
    if memory:
        ratios = [f"{memory[n] / memory['ours']:.0f}x" if memory.get(n) else "" for n in peers]
        shape = "1, 512, 8, 64"
        lines.append(_row(["memory of training, beyond the inputs", shape, f"{memory['ours'] / 1e6:.1f} MB", *ratios]))
    return lines


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def _replace_figures(readme: Path, lines: list[str]) -> None:
    begin, end = "<!-- figures: written by python -m benchmarks report -->", "<!-- end of figures -->"
    text = readme.read_text()
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    readme.write_text("\n".join([before, "", *lines, "", after]))


def _section(name: str, stored: dict, docs: Path) -> str:
    about, jobs = stored["machine"], stored["jobs"]
    device = "cuda" if any(key.endswith(" cuda") for key in jobs) else "cpu"
    points = {key: job for key, job in jobs.items() if "seconds" in job}
    lines = [f"## {about['gpu'] if device == 'cuda' else about['cpu']}", "", _where(about, jobs, device), ""]
    for drawing in plots.draw_all(name, jobs, device, docs):
        lines += [f"![{drawing.title}]({drawing.file})", ""]
    for sweep, title in _TITLES.items():
        keys = [p.key for p in sweeps(device)[sweep]] if sweep in sweeps(device) else []
        quick = [p.key for p in sweeps(device, quick=True).get(sweep, [])]
        rows = [points[key] for key in (keys if any(k in points for k in keys) else quick) if key in points]
        if rows:
            lines += [f"### {title}", "", *_table(rows), ""]
    lines += [*_memory(jobs), *_profile(jobs.get(f"profile {device}")), *_accuracy(jobs), *_left_out(points)]
    return "\n".join(lines)


def _where(about: dict, jobs: dict, device: str) -> str:
    versions = "".join(f", {package} {version}" for package, version in about["versions"].items())
    loads = [job["load"] for job in jobs.values() if job.get("load") is not None]
    builds = sorted({job["build"] for job in jobs.values()})
    peaks = jobs.get(f"peaks {device}")
    text = (
        f"{about['cores']} processors, {about['isa']} kernels (build {', '.join(builds)}), {about['system']}, "
        f"Python {about['python']}, torch {about['torch']}{versions}."
    )
    if peaks:
        text += (
            f" The machine's measured limits: {peaks['flops'] / 1e9:.0f} GF/s in torch's float32 matrix product"
            f"{' on one thread' if device == 'cpu' else ''}, {peaks['bandwidth'] / 1e9:.1f} GB/s in a triad."
        )
    if loads:
        text += f" Load average while measuring: {min(loads):.1f} to {max(loads):.1f}."
    return text


def _table(rows: list[dict]) -> list[str]:
    peers = [n for n in dict.fromkeys(name for row in rows for name in row["seconds"]) if n != "ours"]
    head = ["", "B, T, H, D", "dtype", "threads", "ours", "median", "ns a token and head", *peers]
    lines = [_row(head), _row("---" for _ in head)]
    for row in rows:
        p, seconds = row["point"], row["seconds"]
        ours = seconds["ours"]
        ratios = [f"{seconds[n]['min'] / ours['min']:.3g}x" if n in seconds else "" for n in peers]
        shape = ", ".join(str(p[n]) for n in "BTHD")
        times = [milliseconds(ours["min"]), milliseconds(ours["median"]), f"{1e9 * ours['min'] / p['token_heads']:.0f}"]
        lines.append(_row([PASSES[p["pass_"]], shape, p["dtype"], str(p["threads"]), *times, *ratios]))
    return lines


def milliseconds(seconds: float) -> str:
    """A time to three digits, with its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e6 * seconds:.3g} µs"


def _row(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _memory(jobs: dict) -> list[str]:
    rows = {job_tokens(key): job["bytes"] for key, job in jobs.items() if key.startswith("memory ")}
    if not rows:
        return []
    names = list(max(rows.values(), key=len))
    lines = [
        "### Memory of training",
        "",
        "Most bytes that forward and backward hold beyond the inputs; B 1, H 8, D 64, float32. Formula: design.md.",
        "",
        _row(["T", *names]),
        _row("---" for _ in (0, *names)),
    ]
    for T, found in sorted(rows.items()):
        lines.append(_row([str(T), *(f"{found[n] / 1e6:.1f} MB" if found.get(n) else "" for n in names)]))
    return [*lines, ""]


def job_tokens(key: str) -> int:
    """T of a job's key."""
    return int(re.search(r" T(\d+) ", key)[1])


def _profile(job: dict | None) -> list[str]:
    """The operations with the largest shares of a model's training step, by whose operator it runs."""
    if job is None:
        return []
    shape = ", ".join(f"{value} {name}" for name, value in job["shape"].items())
    lines = [
        "### Where the time of a model step goes",
        "",
        f"A stack of RWKV-6 blocks (examples/rwkv6_lm.py; {shape}), trained under torch.profiler",
        "(`python -m benchmarks.profile_model`). Shares are of the sum of all operations' own time; calls: what torch",
        "ran, on a GPU its kernels; a step's time is without the profiler.",
        "",
    ]
    head = ("", "a step", "calls", "the operator's share", "its calls", "largest others")
    rows = []
    for name, step in job["steps"].items():
        total = sum(row["seconds"] for row in step["operations"])
        own = [row for row in step["operations"] if row["group"] == "WKV operator"]
        others = [row for row in step["operations"] if row["group"] != "WKV operator"][:3]
        rows.append(
            (
                name,
                milliseconds(step["seconds"]),
                f"{sum(row['calls'] for row in step['operations']):,}",
                f"{sum(row['seconds'] for row in own) / total:.0%}",
                f"{sum(row['calls'] for row in own):,}",
                ", ".join(f"{row['name']} {row['seconds'] / total:.0%} ({row['calls']:,})" for row in others),
            )
        )
    return [*lines, _row(head), _row("---" for _ in head), *map(_row, rows), ""]


def _accuracy(jobs: dict) -> list[str]:
    if "accuracy" not in jobs:
        return []
    errors = jobs["accuracy"]["errors"]
    names = list(next(iter(errors.values())))
    count = jobs["accuracy"]["cases"]
    return [
        "### Accuracy",
        "",
        f"Largest relative L2 error against float64 in {count} float32 problems of tests/cases.py, by kind of decay.",
        "",
        _row(["decays", *names]),
        _row("---" for _ in (0, *names)),
        *(_row([kind, *(f"{row[n]:.1e}" if n in row else "" for n in names)]) for kind, row in errors.items()),
        "",
    ]


def _left_out(points: dict) -> list[str]:
    reasons: dict[str, set[str]] = {}
    measured = {name for job in points.values() for name in job["seconds"]}
    for job in points.values():
        for name, reason in job["left out"].items():
            if name not in measured:
                reasons.setdefault(name, set()).add(reason)
    if not reasons:
        return []
    return [
        "### Peers that were not timed here",
        "",
        *(f"- {n}: {'; '.join(sorted(r))}" for n, r in reasons.items()),
        "",
    ]
