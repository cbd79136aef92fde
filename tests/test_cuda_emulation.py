# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on the emulated device: what they move, where they wait, what they refuse; and the sanitizers.

That they compute the right thing is for the tests that take the `isa` fixture. Counters stand in for the timings that a
machine without a GPU cannot have.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import NAMES, Case, Problem, make
from oracle import answer, call, inputs

import rwkv6_ops
from rwkv6_ops import _native, _ops

FORWARD, BACKWARD = "wkv6_forward_recurrent", "wkv6_backward_recurrent"
CHUNK_BACKWARD = "wkv6_backward_chunk"
SEGMENT = _ops.CHECKPOINT["cuda"]
BUILD = Path(__file__).parent / "native" / "cuda_build.sh"


def large() -> Problem:
    """The problem that the traffic figures are for, in bfloat16."""
    return make(Case("traffic", B=2, T=512, H=4, K=64, V=64, dtypes="bf16 bf16 bf16 bf16 f32", initial_state=False))


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def checkpoint_bytes(p: Problem) -> int:
    """A state of float32 before every SEGMENT-th token but the first."""
    B, T, H, K = p.r.shape
    return B * (T // SEGMENT - 1) * H * K * p.v.shape[3] * 4


def test_forward_moves_each_input_and_output_once(counter: Callable[[str, str], int]):
    p = large()
    _, final_state = call(rwkv6_ops.wkv6, p, [x.requires_grad_() for x in inputs(p)])
    least = bytes_of(p.r, p.k, p.v, p.w, p.v, final_state) + checkpoint_bytes(p)
    moved = counter(FORWARD, "global_read") + counter(FORWARD, "global_written")
    assert moved <= 1.1 * least, f"{moved / least:.3f} times the least"


@pytest.mark.parametrize(("multiprocessors", "most"), [(4, 1.01), (132, 2.65)])
def test_backward_moves_little_more_than_once(
    multiprocessors: int, most: float, counter: Callable[[str, str], int], emulation: ctypes.CDLL
):
    """Where a block has all of a head. Of these 8 heads 132 multiprocessors get parts, and all columns of each part."""
    emulation.wkv6_emulation_set(b"multiprocessors", multiprocessors)
    p = large()
    leaves = [x.requires_grad_() for x in inputs(p)]
    o, final_state = call(rwkv6_ops.wkv6, p, leaves)
    emulation.wkv6_emulation_reset()
    torch.autograd.grad([o, final_state], leaves, [p.grad_o, p.grad_final_state])
    least = 2 * bytes_of(p.r, p.k, p.v, p.w) + bytes_of(p.grad_o, p.grad_final_state) + checkpoint_bytes(p)
    kernels = (BACKWARD, FORWARD, "wkv6_grad_u")
    moved = sum(counter(kernel, f"global_{way}") for kernel in kernels for way in ("read", "written"))
    assert moved <= most * least, f"{moved / least:.3f} times the least"


@pytest.mark.parametrize("precision", ["fast", "default"])
def test_the_chunk_kernels_move_little_more_than_each_tensor_once_backwards(
    precision: str, counter: Callable[[str, str], int], emulation: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
):
    """k, v and w are read again for three chunks in four, and a segment's state twice: when the states after it are
    made, and when the walk comes back to it. The device has the shared memory of sm_90."""
    p = make(Case("chunk traffic", T=256, H=2, K=64, V=64, dtypes="bf16 bf16 bf16 bf16 f32", initial_state=False))
    distance = 64
    monkeypatch.setitem(_ops.CHUNK_CHECKPOINT, "cpu", distance)
    emulation.wkv6_emulation_set(b"shared_bytes", 227 << 10)
    leaves = [x.requires_grad_() for x in inputs(p)]
    how = {"algorithm": "chunk", "precision": precision}
    o, final_state = call(lambda *x, **options: rwkv6_ops.wkv6(*x, **how, **options), p, leaves)
    emulation.wkv6_emulation_reset()
    torch.autograd.grad([o, final_state], leaves, [p.grad_o, p.grad_final_state])
    states = (256 // distance - 1) * bytes_of(p.grad_final_state)
    least = 2 * bytes_of(p.r, p.k, p.v, p.w) + bytes_of(p.grad_o, p.grad_final_state)
    moved = counter(CHUNK_BACKWARD, "global_read") + counter(CHUNK_BACKWARD, "global_written")
    assert moved <= 1.3 * least + 2 * states, f"{moved / least:.3f} times the least, {states / least:.3f} of it states"
    assert counter(CHUNK_BACKWARD, "barriers") <= counter(CHUNK_BACKWARD, "blocks") * (2 * 16 + 12 + 1)


@pytest.mark.parametrize("sizes", [(64, 64), (32, 32)])
def test_the_chunk_kernels_reach_shared_memory_with_few_bank_conflicts_backwards(
    sizes: tuple[int, int], counter: Callable[[str, str], int], emulation: ctypes.CDLL
):
    emulation.wkv6_emulation_set(b"count_banks", 1)
    p = make(Case("chunk banks", T=48, H=1, K=sizes[0], V=sizes[1], dtypes="bf16 bf16 bf16 bf16 f32"))
    answer(lambda *x, **options: rwkv6_ops.wkv6(*x, algorithm="chunk", **options), p)
    conflicts, accesses = (counter(CHUNK_BACKWARD, name) for name in ("bank_conflicts", "shared_reads"))
    assert accesses > 0
    assert conflicts == 0, f"{conflicts} in {accesses}"


def test_kernels_wait_for_each_other_a_few_times_a_tile(counter: Callable[[str, str], int]):
    """In 16 tokens a block meets at most three times, so five times in six a token passes without a barrier."""
    p = make(Case("barriers", B=1, T=128, H=1, K=64, V=64))
    answer(rwkv6_ops.wkv6, p)
    tiles = 128 // 16
    assert counter(FORWARD, "barriers") <= counter(FORWARD, "blocks") * (2 * tiles + 1)
    assert counter(BACKWARD, "barriers") <= counter(BACKWARD, "blocks") * (3 * tiles + 1)


@pytest.mark.parametrize(("K", "V"), [(64, 64), (32, 32), (128, 128), (60, 60)])
def test_shared_memory_is_read_without_bank_conflicts(
    K: int, V: int, counter: Callable[[str, str], int], emulation: ctypes.CDLL
):
    emulation.wkv6_emulation_set(b"count_banks", 1)
    answer(rwkv6_ops.wkv6, make(Case("banks", B=1, T=17, H=1, K=K, V=V)))
    for kernel in (FORWARD, BACKWARD):
        assert counter(kernel, "shared_reads") > 0
        assert counter(kernel, "bank_conflicts") == 0, kernel


@pytest.mark.parametrize("setting", [(b"multiprocessors", 1), (b"multiprocessors", 200), (b"shared_bytes", 48 << 10)])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (100, 70)])
def test_results_do_not_depend_on_the_device(
    setting: tuple[bytes, int], sizes: tuple[int, int], emulation: ctypes.CDLL
):
    """However many blocks share a head, and however many tokens a block has room for."""
    p = make(Case("device", B=1, T=40, H=1, K=sizes[0], V=sizes[1], dtypes="bf16 bf16 bf16 bf16 f32"))
    want = answer(rwkv6_ops.wkv6, p)
    emulation.wkv6_emulation_set(*setting)
    got = answer(rwkv6_ops.wkv6, p)
    assert torch.equal(got.o, want.o)
    assert torch.equal(got.final_state, want.final_state)
    assert all(torch.equal(got.gradients[name], want.gradients[name]) for name in NAMES)


@pytest.mark.parametrize("order", [1, 2])
def test_results_do_not_depend_on_the_order_of_threads(order: int, emulation: ctypes.CDLL):
    p = make(Case("order", B=2, T=40, H=1, K=64, V=40, raw=True))
    want = answer(rwkv6_ops.wkv6, p)
    emulation.wkv6_emulation_set(b"order", order)
    got = answer(rwkv6_ops.wkv6, p)
    assert torch.equal(got.o, want.o)
    assert all(torch.equal(got.gradients[name], want.gradients[name]) for name in NAMES)


def test_scratch_that_is_not_to_be_had_is_a_memory_error(emulation: ctypes.CDLL):
    """Each 512 keys have an o of their own there; all these keys are views of one."""
    B, K, zero = 1 << 20, 1 << 37, torch.zeros(())
    r, u, v = zero.expand(B, 2, 1, K), zero.expand(1, K), zero.expand(B, 2, 1, 1)
    o = torch.empty(B, 2, 1, 1)
    with pytest.raises(MemoryError, match=f"^rwkv6_ops on CUDA: {K // 512 * o.numel() * 4} bytes of scratch: "):
        _native.forward(r, r, v, r, u, None, o, None, None, None, None, 1.0, 0, SEGMENT)


def test_a_device_with_too_little_shared_memory_is_an_error_not_a_crash(emulation: ctypes.CDLL):
    emulation.wkv6_emulation_set(b"shared_bytes", 100)
    p = make(Case("small device", T=2))
    with pytest.raises(RuntimeError, match=r"^rwkv6_ops on CUDA: wkv6_forward_recurrent: \d+ bytes of shared memory"):
        call(rwkv6_ops.wkv6, p, inputs(p))


def test_a_library_that_is_not_there_is_an_error(tmp_path: Path, python: Callable):
    code = "import sys; from rwkv6_ops import _native; _native.use_cuda_emulation(sys.argv[1])"
    run = python(code, str(tmp_path / "none.so"))
    assert run.returncode == 1
    assert "OSError" in run.stderr
    assert "none.so" in run.stderr


def test_emulated_matrix_instructions_have_the_layouts_of_the_ptx_isa(tmp_path: Path):
    """Without a kernel between: fragments filled by the tables, and by ldmatrix, give the product of plain loops."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler: the layouts of ldmatrix and mma were not tried")
    sources = [BUILD.parent / "cuda_fragments.cpp", BUILD.parents[2] / "cuda" / "host_emulation" / "emulator.cpp"]
    flags = ["-std=c++17", "-O1", "-Wno-unknown-pragmas", "-fno-strict-aliasing", "-DWKV6_EMULATE"]
    subprocess.run([compiler, *flags, *sources, "-o", tmp_path / "fragments"], check=True)
    run = subprocess.run([tmp_path / "fragments"], capture_output=True, text=True)
    assert run.stdout == "0 of 128 elements wrong, 2 products\n"


@pytest.mark.parametrize("kind", ["asan", "tsan", "msan"])
def test_kernels_are_clean_under_a_sanitizer(kind: str, tmp_path: Path):
    """Bounds and undefined behaviour; missing barriers; memory that nobody has written."""
    if not shutil.which("clang++-19"):
        pytest.skip(f"no clang++-19: the CUDA kernels were not run under {kind}")
    environment = {**os.environ, "CXX": "clang++-19", "ASAN_OPTIONS": "detect_leaks=0"}
    subprocess.run(["bash", BUILD, kind, tmp_path / "driver"], env=environment, check=True)
    run = subprocess.run([tmp_path / "driver"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
