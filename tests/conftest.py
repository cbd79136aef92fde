# SPDX-License-Identifier: Apache-2.0
"""Fixtures: every instruction set of this machine; NaN in unwritten memory; one thread unless asked for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cases
import pytest
import torch
from hypothesis import settings

from rwkv6_ops import _native, _ops

# torch.compile keeps graphs on disk and does not notice when a custom operator behind them has changed.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

# How many problems the property tests draw: the same ones every time, or new ones for `make fuzz`.
settings.register_profile("default", max_examples=300, deadline=None, derandomize=True, database=None)
settings.register_profile("fuzz", max_examples=10_000, deadline=None, derandomize=False, print_blob=True)
settings.load_profile("default")

_DEVICES = ("cuda-emulated", "cuda") if torch.cuda.is_available() else ("cuda-emulated",)

_KERNELS = tuple(f"{name}-{algorithm}" for name in _native.isas() for algorithm in ("recurrent", "chunk"))


@contextlib.contextmanager
def _on_cuda(name: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """CPU tensors go to the CUDA kernels on an emulated device, or torch's default device is a GPU, on which the test
    makes its tensors."""
    if name == "cuda":
        torch.set_default_device("cuda")
        yield
        torch.set_default_device(None)
    else:
        _native.use_cuda_emulation(request.getfixturevalue("emulated_cuda"))
        yield
        _native.use_cuda_emulation(None)


@pytest.fixture(params=(*_KERNELS, *_DEVICES))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test with each algorithm, where it asks for none, on each instruction set of this machine; and with
    CUDA's recurrent kernels, on an emulated device and on a GPU where there is one."""
    if request.param in _DEVICES:
        monkeypatch.setitem(_ops._ALGORITHMS, "auto", _native.RECURRENT)
        with _on_cuda(request.param, request):
            yield request.param
    else:
        name, algorithm = request.param.rsplit("-", 1)
        monkeypatch.setitem(_ops._ALGORITHMS, "auto", _ops._ALGORITHMS[algorithm])
        previous = _native.use_isa(name)
        yield name
        _native.use_isa(previous)


def _take_chunks_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_ops._ALGORITHMS, "auto", _native.CHUNK)
    for tolerances in (cases.FORWARD_TOLERANCE, cases.GRADIENT_TOLERANCE):
        for what, tolerance in cases.CUDA_CHUNK_TOLERANCE.items():
            monkeypatch.setitem(tolerances, what, tolerance)


@pytest.fixture(params=_DEVICES)
def cuda_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test with CUDA's chunk kernels where it asks for no algorithm, and with their tolerances."""
    _take_chunks_on_cuda(monkeypatch)
    with _on_cuda(request.param, request):
        yield request.param


@pytest.fixture(params=["recurrent", "chunk"])
def cuda_algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test of CUDA alone with both algorithms, where it asks for none."""
    if request.param == "chunk":
        _take_chunks_on_cuda(monkeypatch)
    else:
        monkeypatch.setitem(_ops._ALGORITHMS, "auto", _native.RECURRENT)
    return request.param


@pytest.fixture(scope="session")
def emulated_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA kernels, compiled as C++ for the device of cuda/host_emulation."""
    if not (os.environ.get("CXX") or shutil.which("c++")):
        pytest.skip("no C++ compiler: the CUDA kernels were not run")
    library = tmp_path_factory.mktemp("cuda") / "librwkv6_cuda_emulated.so"
    build = Path(__file__).parent / "native" / "cuda_build.sh"
    subprocess.run(["bash", build, "library", library], check=True)
    return library


@pytest.fixture
def emulation(emulated_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The emulated device in the CPU's place, with the recurrent kernels and the checkpoints that they have on a CUDA
    device, and its settings put back."""
    library = ctypes.CDLL(str(emulated_cuda))
    library.wkv6_emulation_set.restype = library.wkv6_emulation_counter.restype = ctypes.c_int64
    library.wkv6_emulation_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    monkeypatch.setitem(_ops._ALGORITHMS, "auto", _native.RECURRENT)
    for distances in (_ops.CHECKPOINT, _ops.CHUNK_CHECKPOINT):
        monkeypatch.setitem(distances, "cpu", _ops.CHECKPOINT["cuda"])
    settings = ("order", "multiprocessors", "shared_bytes", "count_banks")
    before = {name: library.wkv6_emulation_set(name.encode(), 0) for name in settings}
    for name, value in before.items():
        library.wkv6_emulation_set(name.encode(), value)
    library.wkv6_emulation_reset()
    _native.use_cuda_emulation(emulated_cuda)
    yield library
    _native.use_cuda_emulation(None)
    for name, value in before.items():
        library.wkv6_emulation_set(name.encode(), value)


@pytest.fixture
def counter(emulation: ctypes.CDLL) -> Callable[[str, str], int]:
    return lambda kernel, name: emulation.wkv6_emulation_counter(kernel.encode(), name.encode())


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


@pytest.fixture(scope="session")
def pools() -> Iterator[list]:
    """The pools of ranks that this session has started."""
    started: list = []
    yield started
    for pool in started:
        pool.close()


@pytest.fixture
def ranks(pools: list):
    """Four processes that are the ranks of gloo groups: those of the tests before, if they are in good health."""
    from ranks import Ranks

    if not pools or not pools[-1].alive:
        pools.append(Ranks())
    return pools[-1]
