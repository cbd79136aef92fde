# SPDX-License-Identifier: Apache-2.0
"""Time and memory of calls that are compared with each other, and a description of where they ran."""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rwkv6_ops import _native

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

    Returns
    -------
    dict of str to Timing
        Minimum and median of the samples, per call. The minimum is what to compare on a machine with other users.
    """
    repeats, samples = {}, {name: [] for name in calls}
    for name, call in calls.items():
        call()  # caches, page faults and lazy imports
        once = _seconds(call, 1)
        if once < sample_seconds:
            once = min(once, *(_seconds(call, 1) for _ in range(5)))
        repeats[name] = max(1, round(sample_seconds / max(once, 1e-7)))
    end = time.perf_counter() + budget_seconds
    for n in range(rounds):
        if n >= 2 and time.perf_counter() > end:
            break
        for name, call in calls.items():
            samples[name].append(_seconds(call, repeats[name]))
    return {name: Timing(min(s), statistics.median(s), len(s)) for name, s in samples.items()}


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def peak_memory(call: Callable[[], object]) -> int | None:
    """Bytes by which the process's resident memory rises at most while `call` runs, what it returns included.

    Meanwhile every larger block comes from the system and goes back to it at once, so that the figure is what is alive,
    not what the allocator keeps in fragments (for a loop over tokens that can be several times as much). None where
    there is no glibc or the system does not tell.
    """
    call()  # what stays allocated after a first call, such as a thread's scratch, belongs to no single call
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


def machine() -> dict[str, object]:
    """Where the figures come from: processor, instruction set of the kernels, versions, load."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": _native.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_line(about: Mapping[str, object]) -> str:
    """`machine()` as one line of text."""
    return (
        f"{about['cpu']}, {about['cores']} cores ({about['isa']}), {about['threads']} thread(s), "
        f"torch {about['torch']}, load {about['load']}"
    )
