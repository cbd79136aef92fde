# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks run` measures, `python -m benchmarks report` writes down; see --help of each."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.calls import WrongResultError
from benchmarks.jobs import jobs
from benchmarks.machine import load, machine, machine_line
from benchmarks.peers import PEERS
from benchmarks.points import sweeps
from rwkv6_ops import _native


def run(options: argparse.Namespace) -> int:
    """Do what is not done yet; 1 if a result was wrong, and what was wrong is then not timed."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if options.isa:
        _native.use_isa(options.isa)
    about = machine()
    store = results.Results(options.out or results.default_path(about, options.device, options.quick), about)
    print(f"{machine_line(about)}\n{store.path}", flush=True)
    status, wanted = 0, list(jobs(options.device, options.quick, options.sweep, options.without))
    for n, job in enumerate(wanted, 1):
        if not options.again and store.done(job.key):
            continue
        if time.perf_counter() - begun > options.seconds:
            left = sum(not store.done(job.key) for job in wanted)
            print(f"{options.seconds:.0f} s are over: {left} of {len(wanted)} left, the same command goes on")
            break
        try:
            figures = job.run()
        except WrongResultError as error:
            print(f"WRONG, not timed: {error}", file=sys.stderr)
            status = 1
            if job.key == "accuracy":
                break
            continue
        store.add(job.key, figures, load())
        print(f"{n}/{len(wanted)} {job.key}: {_line(figures)}", flush=True)
    return status


def _line(figures: dict) -> str:
    if "seconds" in figures:
        ours = figures["seconds"]["ours"]
        peers = [f"{name} {t['min'] / ours['min']:.2f}x" for name, t in figures["seconds"].items() if name != "ours"]
        nanoseconds = 1e9 * ours["min"] / figures["point"]["token_heads"]
        times = f"{1e3 * ours['min']:.3f} ms (median {1e3 * ours['median']:.3f}), {nanoseconds:.0f} ns a token and head"
        return "; ".join((times, ", ".join(peers)))
    if "errors" in figures:
        largest = max(e for row in figures["errors"].values() for e in row.values())
        return f"{figures['cases']} cases, largest relative error {largest:.1e}"
    if "bytes" in figures:
        return ", ".join(f"{name} {'?' if b is None else f'{b / 1e6:.1f}'} MB" for name, b in figures["bytes"].items())
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


def report(options: argparse.Namespace) -> int:
    from benchmarks.report import write  # needs matplotlib

    default = options.results == results.FOLDER and options.docs == results.FOLDER.parents[1] / "docs"
    print(write(options.results, options.docs, results.FOLDER.parents[1] / "README.md" if default else None))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="measure what is not measured yet")
    runs.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    runs.add_argument("--sweep", nargs="+", choices=[*sweeps(), "memory"], help="only these")
    runs.add_argument("--without", nargs="+", choices=[peer.name for peer in PEERS], default=(), help="peers left out")
    runs.add_argument("--quick", action="store_true", help="a few small problems, to see that all works")
    runs.add_argument("--isa", choices=_native.isas(), help="instruction set of the CPU kernels (default: the best)")
    runs.add_argument("--out", type=Path, help="file of results (default: benchmarks/results/, by processor)")
    runs.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so many")
    runs.add_argument("--again", action="store_true", help="measure again what these kernels have results of")
    runs.set_defaults(command=run)
    reports = commands.add_parser("report", help="write docs/benchmarks.md and its plots")
    reports.add_argument("--results", type=Path, default=results.FOLDER, help="folder of the files of results")
    reports.add_argument("--docs", type=Path, default=results.FOLDER.parents[1] / "docs", help="folder to write to")
    reports.set_defaults(command=report)
    options = parser.parse_args()
    return options.command(options)


if __name__ == "__main__":
    sys.exit(main())
