# SPDX-License-Identifier: Apache-2.0
"""How right and how fast the operator is on this machine, beside the loop it replaces and ggml's operator.

    python benchmarks/bench_wkv6.py [--full] [--isa NAME] [--json FILE]

Accuracy comes first, against the float64 reference loop; a kernel that misses its tolerance is not timed. All ratios
are between calls that ran in turn in this process, each the least of several samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # last, so that an installed rwkv6_ops comes first
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from cases import CASES, FORWARD_TOLERANCE, GRADIENT_TOLERANCE, Case, make
from oracle import answer, relative_error, true_answer

import rwkv6_ops
from benchmarks.peers import hf_loop
from benchmarks.points import FULL, QUICK, Point, calls, ggml_missing, operands, true_loop
from benchmarks.timing import Timing, interleaved, machine, machine_line, peak_memory
from rwkv6_ops import _native

MEMORY_ALLOWANCE = 4_000_000  # bytes beyond inputs, outputs and gradients that training may hold


def check_accuracy(cases: list[Case]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The largest relative L2 error of each result by kind of decay, and a line for each that misses its tolerance."""
    worst: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    failures = []
    for case in cases:
        problem = make(case)
        got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
        errors = {
            "o": (got.o, want.o, FORWARD_TOLERANCE),
            "final": (got.final_state, want.final_state, FORWARD_TOLERANCE),
        }
        names = {"initial_state": "dS0"}
        for name, gradient in got.gradients.items():
            errors[names.get(name, f"d{name}")] = gradient, want.gradients[name], GRADIENT_TOLERANCE
        for name, (a, b, tolerance) in errors.items():
            error = relative_error(a, b)
            if not error <= tolerance[a.dtype]:  # NaN fails too
                failures.append(f"{case}: {name}: relative error {error:.1e}, wanted at most {tolerance[a.dtype]:.0e}")
            worst[case.decays][name] = max(worst[case.decays][name], error)
    return {kind: dict(errors) for kind, errors in worst.items()}, failures


def time_point(point: Point, rounds: int) -> dict[str, Timing]:
    before = torch.get_num_threads()
    torch.set_num_threads(point.threads)
    try:
        return interleaved(calls(point), rounds=rounds, budget_seconds=8)
    finally:
        torch.set_num_threads(before)


def peak_flops() -> float:
    """float32 operations a second of one thread, as torch's matrix product reaches them."""
    a = torch.randn(768, 768)
    return 2 * 768**3 / interleaved({"mm": lambda: a @ a}, rounds=9)["mm"].min


def training_memory() -> dict[str, int | None]:
    """Bytes that forward and backward at (1, 512, 8, 64) add to the inputs, beside what they may add."""
    point = Point("both", 1, 512, 8)
    inputs = [x.requires_grad_() for x in operands(point)]
    do = torch.randn_like(inputs[2])

    def train(wkv: Callable) -> object:
        o, _ = wkv(*inputs)
        return o, torch.autograd.grad(o, inputs, do, allow_unused=True)

    needed = sum(x.nbytes for x in (*inputs, do))  # gradients and o, which is shaped like do
    measured = {
        name: peak_memory(lambda wkv=wkv: train(wkv))
        for name, wkv in {"ours": rwkv6_ops.wkv6, "HF loop": hf_loop, "loop, true gradients": true_loop}.items()
    }
    return {"outputs and gradients": needed, "allowed": needed + MEMORY_ALLOWANCE, **measured}


def print_accuracy(errors: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(errors.values())))
    print("Largest relative L2 error against float64, by kind of decay\n")
    print(f"{'':10s}" + "".join(f"{name:>10s}" for name in names))
    for kind, row in errors.items():
        print(f"{kind:10s}" + "".join(f"{row[name]:10.1e}" for name in names))


def print_point(point: Point, timings: dict[str, Timing], peak: float) -> None:
    ours = timings["ours"]
    share = point.flop / ours.min / peak / point.threads
    what = "forward+backward" if point.pass_ == "both" else point.pass_
    shape = f"{point.B:3d} {point.T:6d} {point.H:3d} {point.D:4d}  {point.dtype:8s} {point.threads:2d}"
    peers = []
    for name, peer in timings.items():
        if name != "ours":
            goal = f" (wanted {point.wanted[name]:.0f})" if name in point.wanted else ""
            peers.append(f"{name} {peer.min / ours.min:.2f}x{goal}")
    ours_text = f"{1e3 * ours.min:9.3f} {1e3 * ours.median:9.3f} {1e9 * ours.min / point.token_heads:7.0f} {share:5.0%}"
    print(f"{what:16s} {shape} {ours_text}   {', '.join(peers)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Accuracy and speed of rwkv6_ops beside its peers.")
    parser.add_argument("--full", action="store_true", help="more cases and shapes (several minutes)")
    parser.add_argument("--isa", choices=_native.isas(), help="instruction set of the kernels (default: the best)")
    parser.add_argument("--json", type=Path, help="write all results to this file as well")
    options = parser.parse_args()
    if options.isa:
        _native.use_isa(options.isa)
    torch.set_num_threads(1)
    about = machine()
    print(machine_line(about) + "\n")

    cases = [c for c in CASES if c.B and c.T and set(c.dtypes.split()) == {"f32"} and (options.full or c.T == 130)]
    errors, failures = check_accuracy(cases)
    print_accuracy(errors)
    if failures:
        print("\nNot timed, because results are wrong:", *failures, sep="\n  ", file=sys.stderr)
        return 1

    peak = peak_flops()
    print(
        f"\nTimes, least of interleaved samples; share of {peak / 1e9:.0f} GF/s, torch.mm's float32 rate on one thread"
    )
    print("Peers: their time as a multiple of ours\n")
    print(f"{'':16s}   B      T   H    D  dtype   thr  least ms median ms ns/t.h. share")
    results = []
    for point in FULL if options.full else QUICK:
        timings = time_point(point, rounds=15 if options.full else 7)
        print_point(point, timings, peak)
        results.append({**asdict(point), "seconds": {name: asdict(timing) for name, timing in timings.items()}})
    if reason := ggml_missing():
        print(f"\nNot compared with ggml: {reason}")

    memory = training_memory()
    print("\nPeak memory of forward and backward at B 1 T 512 H 8 D 64, float32, beyond the inputs")
    for name, count in memory.items():
        print(f"  {name:24s}" + ("not known here" if count is None else f"{count / 1e6:8.1f} MB"))
    if options.json:
        everything = {"machine": about, "accuracy": errors, "mm_flops": peak, "timings": results, "memory": memory}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
