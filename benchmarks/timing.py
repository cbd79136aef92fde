# SPDX-License-Identifier: Apache-2.0
"""Time and memory of calls that are compared with each other."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


@dataclass(frozen=True)
class Timing:
    """Seconds a call took, over `rounds` samples."""

    min: float
    median: float
    rounds: int


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    rounds: int = 7,
    sample_seconds: float = 0.01,
    budget_seconds: float = 20.0,
    device: str = "cpu",
) -> dict[str, Timing]:
    """Time several calls in turn, so that whatever else the machine does meets them all alike.

    Parameters
    ----------
    calls : mapping of str to callable
        What to time.
    rounds : int
        Samples of each, one of every call a round. Fewer, but at least two, if `budget_seconds` run out.
    sample_seconds : float
        Short calls are repeated until a sample lasts about this long.
    device : str
        "cuda": a sample ends when the GPU has done its work.

    Returns
    -------
    dict of str to Timing
        Minimum and median of the samples, per call. The minimum is what to compare on a machine with other users.
    """

    def seconds(call: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    repeats, samples = {}, {name: [] for name in calls}
    for name, call in calls.items():
        call()  # caches, page faults and lazy imports
        once = seconds(call, 1)
        if once < sample_seconds:
            once = min(once, *(seconds(call, 1) for _ in range(5)))
        repeats[name] = max(1, round(sample_seconds / max(once, 1e-7)))
    end = time.perf_counter() + budget_seconds
    for n in range(rounds):
        if n >= 2 and time.perf_counter() > end:
            break
        for name, call in calls.items():
            if repeats[name] > 1:
                call()  # the call before it has left other data in the caches
            samples[name].append(seconds(call, repeats[name]))
    return {name: Timing(min(s), statistics.median(s), len(s)) for name, s in samples.items()}


def peak_memory(call: Callable[[], object], device: str = "cpu") -> int | None:
    """Bytes by which the process's resident memory rises at most while `call` runs, what it returns included.

    On a GPU: bytes that torch has allocated there.

    Meanwhile every larger block comes from the system and goes back to it at once, so that the figure is what is alive,
    not what the allocator keeps in fragments (for a loop over tokens that can be several times as much). None where
    there is no glibc or the system does not tell.
    """
    call()  # what stays allocated after a first call, such as a thread's scratch, belongs to no single call
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        del kept
        return torch.cuda.max_memory_allocated() - before
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident now
        before = _resident("VmRSS")
        kept = call()
        peak = _resident("VmHWM")
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # where glibc's own adaptation ends
    except (AttributeError, OSError):
        return None
    del kept
    return max(0, peak - before)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")
