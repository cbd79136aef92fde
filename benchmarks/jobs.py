# SPDX-License-Identifier: Apache-2.0
"""What a run consists of: jobs small enough to be done one at a time, each a name and a function to its figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass

from cases import CASES, FORWARD_TOLERANCE, GRADIENT_TOLERANCE, Case, make
from oracle import answer, relative_error, true_answer

import rwkv6_ops
from benchmarks.calls import WrongResultError, calls
from benchmarks.machine import peaks
from benchmarks.memory import operator_memory
from benchmarks.points import Point, sweeps
from benchmarks.timing import interleaved


@dataclass(frozen=True)
class Job:
    """One thing to measure; `run` may raise `WrongResultError`."""

    key: str
    run: Callable[[], dict]


def jobs(
    device: str, quick: bool, chosen: Collection[str] | None = None, without: Collection[str] = ()
) -> Iterator[Job]:
    """All jobs of a run on `device`, accuracy first; `chosen` names sweeps, `without` peers to leave out."""
    yield Job("accuracy", lambda: accuracy([c for c in CASES if _is_checked(c, quick)], device))
    yield Job(f"peaks {device}", lambda: peaks(device))
    seen = set()
    for sweep, points in sweeps(device, quick).items():
        for point in points if not chosen or sweep in chosen else []:
            if point.key not in seen:
                seen.add(point.key)
                yield Job(point.key, lambda point=point: timings(point, quick, without))
    if not chosen or "memory" in chosen:
        for T in (64,) if quick else (128, 256, 512, 1024, 4096, 16384):
            point = Point("both", 1, T, 8, device=device)
            yield Job(f"memory {point.key}", lambda point=point: {"bytes": operator_memory(point)})


def _is_checked(case: Case, quick: bool) -> bool:
    return case.B > 0 and set(case.dtypes.split()) == {"f32"} and (case.T == 17 if quick else 0 < case.T <= 130)


def accuracy(cases: list[Case], device: str = "cpu") -> dict:
    """The largest relative L2 error of each result by kind of decay; raises if any misses its tolerance."""
    worst: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    failures = []
    for case in cases:
        problem = make(case, device)
        got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
        errors = {
            "o": (got.o, want.o, FORWARD_TOLERANCE),
            "final": (got.final_state, want.final_state, FORWARD_TOLERANCE),
        }
        for name, gradient in got.gradients.items():
            short = "dS0" if name == "initial_state" else f"d{name}"
            errors[short] = gradient, want.gradients[name], GRADIENT_TOLERANCE
        for name, (a, b, tolerance) in errors.items():
            error = relative_error(a, b)
            if not error <= tolerance[a.dtype]:  # NaN fails too
                failures.append(f"{case}: {name}: relative error {error:.1e}, wanted at most {tolerance[a.dtype]:.0e}")
            worst[case.decays][name] = max(worst[case.decays][name], error)
    if failures:
        raise WrongResultError("\n".join(failures))
    return {"cases": len(cases), "errors": {kind: dict(errors) for kind, errors in worst.items()}}


def timings(point: Point, quick: bool, without: Collection[str] = ()) -> dict:
    """Times at a point, ours and the peers' in turn."""
    if quick:
        without = (*without, "loop, compiled")  # minutes of compiling
    found, left_out = calls(point, without)
    measured = interleaved(
        found, rounds=3 if quick else 9, budget_seconds=1 if quick else 3, sample_seconds=0.01, device=point.device
    )
    return {
        "point": {**asdict(point), "flop": point.flop, "bytes": point.bytes, "token_heads": point.token_heads},
        "seconds": {name: asdict(timing) for name, timing in measured.items()},
        "left out": left_out,
    }
