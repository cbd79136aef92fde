# SPDX-License-Identifier: Apache-2.0
"""Fixtures: every instruction set of this machine; NaN in unwritten memory; one thread unless asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch

from rwkv6_ops import _native, _ops

# torch.compile keeps graphs on disk and does not notice when a custom operator behind them has changed.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"


@pytest.fixture(params=product(_native.isas(), ("recurrent", "chunk")), ids="-".join)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test with each algorithm, where it asks for none, on each instruction set that this machine has."""
    name, algorithm = request.param
    monkeypatch.setitem(_ops._ALGORITHMS, "auto", _ops._ALGORITHMS[algorithm])
    previous = _native.use_isa(name)
    yield name
    _native.use_isa(previous)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """torch.empty and its kin give NaN, so an output that a kernel leaves unwritten turns the test red."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run code in a new interpreter that finds what this one finds, in an empty folder."""

    def run(code: str, *args: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", code, *args],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
