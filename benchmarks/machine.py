# SPDX-License-Identifier: Apache-2.0
"""Where figures come from: processor, versions, the kernels' build, and what the machine can do at most."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

import rwkv6_ops
from benchmarks.timing import interleaved
from rwkv6_ops import _native

_PEER_PACKAGES = ("pywhispercpp", "flash-linear-attention", "triton", "flash-rwkv", "rwkv-ops", "keras")


def machine() -> dict[str, object]:
    """Processor, GPU, instruction set of the kernels, versions, load."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "isa": _native.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": load(),
        "versions": {name: version for name in _PEER_PACKAGES if (version := _version(name))},
        "build": build(),
    }


def load() -> float | None:
    """Processes that wanted a processor over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def build() -> str:
    """Which kernels these are: a digest of the compiled modules."""
    digest = hashlib.sha256()
    for file in sorted(Path(rwkv6_ops.__file__).parent.glob("*.so")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def peaks(device: str = "cpu") -> dict[str, float]:
    """What the machine reaches at most: float32 operations a second of torch's matrix product, on a CPU with one
    thread, and bytes a second of a triad that reads two arrays and writes a third, far larger than the caches."""
    size, count = (768, 1 << 24) if device == "cpu" else (8192, 1 << 28)
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    x, y, z = (torch.ones(count, device=device) for _ in range(3))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = interleaved(
            {"mm": lambda: torch.mm(a, b), "triad": lambda: torch.add(x, y, alpha=3.0, out=z)}, rounds=9, device=device
        )
    finally:
        torch.set_num_threads(before)
    return {"flops": 2 * size**3 / found["mm"].min, "bandwidth": 3 * x.nbytes / found["triad"].min}
