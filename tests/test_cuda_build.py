# SPDX-License-Identifier: Apache-2.0
"""What nvcc makes of the CUDA kernels: no warning, nothing spilled, no local memory, registers within their budget.

The budgets are what the kernels take plus a little; with the threads of a block they say how many blocks a
multiprocessor holds. Needs nvcc, no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import Case, make
from oracle import answer

import rwkv6_ops

ROOT = Path(__file__).parent.parent
NVCC = shutil.which("nvcc", path=os.path.join(os.environ["CUDA_HOME"], "bin") if "CUDA_HOME" in os.environ else None)
ARCHITECTURES = ("80", "90")

# Kernel and template arguments, mangled: (registers, threads of a usual block, blocks that a multiprocessor holds)
BUDGETS = {
    "wkv6_forward_recurrentIfLi8ELi4ELb1EE": (128, 64, 8),  # K = 32
    "wkv6_forward_recurrentIfLi8ELi8ELb1EE": (128, 128, 4),  # K = 64
    "wkv6_forward_recurrentIfLi8ELi16ELb1EE": (128, 256, 2),  # K = 128
    "wkv6_forward_recurrentIfLi8ELi8ELb0EE": (128, 128, 4),  # any other K
    "wkv6_forward_recurrentIdLi4ELi16ELb0EE": (192, 256, 1),  # float64
    "wkv6_backward_recurrentIfLi8ELi4ELi8ELi2ELb1ELi0EE": (248, 64, 4),  # V = 32
    "wkv6_backward_recurrentIfLi8ELi4ELi8ELi2ELb1ELi4EE": (255, 64, 4),  # K = V = 32, dv too
    "wkv6_backward_recurrentIfLi8ELi8ELi8ELi2ELb1ELi0EE": (248, 256, 1),  # V = 64
    "wkv6_backward_recurrentIfLi8ELi8ELi8ELi2ELb1ELi8EE": (255, 256, 1),  # K = V = 64, dv too
    "wkv6_backward_recurrentIfLi8ELi16ELi8ELi2ELb1ELi0EE": (248, 256, 1),  # V = 128
    "wkv6_backward_recurrentIfLi8ELi8ELi2ELi2ELb0ELi0EE": (168, 256, 1),  # any other V
    "wkv6_backward_recurrentIdLi4ELi16ELi2ELi2ELb0ELi0EE": (168, 256, 1),  # float64
    "wkv6_step_recurrentIfE": (48, 256, 5),
    "wkv6_step_recurrentIdE": (56, 256, 4),
    "wkv6_state_recurrentIfE": (80, 128, 6),
    "wkv6_state_recurrentIdE": (128, 128, 4),
    "wkv6_sum_partsIfE": (40, 256, 6),
    "wkv6_sum_partsIdE": (40, 256, 6),
    "wkv6_grad_uIfE": (40, 256, 6),
    "wkv6_grad_uIdE": (40, 256, 6),
    # Chunk kernels: K, operands (0 bf16, 1 tf32, 2 split), tiles a warp.
    "wkv6_forward_chunkILi32EL7operand0ELi1EE": (120, 64, 8),
    "wkv6_forward_chunkILi32EL7operand1ELi1EE": (120, 64, 8),
    "wkv6_forward_chunkILi32EL7operand2ELi1EE": (120, 64, 8),
    "wkv6_forward_chunkILi64EL7operand0ELi2EE": (248, 64, 4),
    "wkv6_forward_chunkILi64EL7operand1ELi2EE": (248, 64, 4),
    "wkv6_forward_chunkILi64EL7operand2ELi2EE": (248, 64, 4),
    "wkv6_forward_chunkILi128EL7operand0ELi1EE": (255, 256, 1),
    "wkv6_forward_chunkILi128EL7operand1ELi1EE": (255, 256, 1),
    "wkv6_forward_chunkILi128EL7operand2ELi1EE": (255, 256, 1),
    "wkv6_state_chunkILi32EL7operand1ELi1EE": (104, 64, 8),
    "wkv6_state_chunkILi32EL7operand2ELi1EE": (104, 64, 8),
    "wkv6_state_chunkILi64EL7operand1ELi1EE": (128, 128, 4),
    "wkv6_state_chunkILi64EL7operand2ELi1EE": (128, 128, 4),
    "wkv6_state_chunkILi128EL7operand1ELi1EE": (224, 256, 1),
    "wkv6_state_chunkILi128EL7operand2ELi1EE": (224, 256, 1),
    "wkv6_scan_spans": (56, 256, 4),
    # Key channels of a block, V, operands and those of the inputs, whether dv is made too.
    "wkv6_backward_chunkILi64ELi64EL7operand0ELS0_0ELb1EE": (255, 128, 2),
    "wkv6_backward_chunkILi64ELi64EL7operand2ELS0_0ELb1EE": (255, 128, 2),
    "wkv6_backward_chunkILi64ELi64EL7operand2ELS0_2ELb1EE": (255, 128, 2),
    "wkv6_backward_chunkILi32ELi32EL7operand2ELS0_2ELb1EE": (255, 64, 4),
    "wkv6_backward_chunkILi32ELi64EL7operand2ELS0_2ELb0EE": (255, 64, 4),
    "wkv6_backward_chunkILi64ELi32EL7operand2ELS0_2ELb1EE": (255, 128, 2),
    "wkv6_backward_chunkILi64ELi32EL7operand2ELS0_2ELb0EE": (255, 128, 2),
    "wkv6_backward_chunkILi64ELi64EL7operand2ELS0_2ELb0EE": (255, 128, 2),
    "wkv6_adjoint_chunkILi32ELi32EL7operand2EE": (128, 64, 8),
    "wkv6_adjoint_chunkILi32ELi64EL7operand2EE": (128, 64, 8),
    "wkv6_adjoint_chunkILi64ELi32EL7operand2EE": (128, 128, 4),
    "wkv6_adjoint_chunkILi64ELi64EL7operand2EE": (128, 128, 4),
    "wkv6_scan_adjoints": (48, 256, 5),
    "wkv6_fold_grad_u": (48, 256, 5),
}
BUDGETS_ON_90 = {
    "wkv6_state_chunkILi64EL7operand1ELi1EE": (144, 128, 3),
    "wkv6_state_chunkILi64EL7operand2ELi1EE": (144, 128, 3),
}

# Bytes that a block may have at most; and by pass, algorithm, D and precision: (instance, blocks of a multiprocessor
# on sm_80, and on sm_90). "exact" has float32 inputs, the others bfloat16.
SHARED_BYTES = {"80": 163 << 10, "90": 227 << 10}
OCCUPANCY = {
    ("forward", "recurrent", 64, "default"): ("IfLi8ELi8ELb1EE", 4, 4),
    ("forward", "recurrent", 64, "exact"): ("IfLi8ELi8ELb1EE", 4, 4),
    ("backward", "recurrent", 64, "default"): ("IfLi8ELi8ELi8ELi2ELb1ELi8EE", 1, 1),
    ("backward", "recurrent", 64, "exact"): ("IfLi8ELi8ELi8ELi2ELb1ELi8EE", 1, 1),
    ("forward", "chunk", 32, "default"): ("ILi32EL7operand1ELi1EE", 6, 9),
    ("forward", "chunk", 64, "fast"): ("ILi64EL7operand0ELi2EE", 4, 4),
    ("forward", "chunk", 64, "default"): ("ILi64EL7operand1ELi2EE", 4, 4),
    ("forward", "chunk", 64, "exact"): ("ILi64EL7operand2ELi2EE", 3, 4),
    ("forward", "chunk", 128, "default"): ("ILi128EL7operand1ELi1EE", 1, 1),
    ("backward", "chunk", 32, "default"): ("ILi32ELi32EL7operand2ELS0_2ELb1EE", 4, 4),
    ("backward", "chunk", 64, "fast"): ("ILi64ELi64EL7operand0ELS0_0ELb1EE", 2, 2),
    ("backward", "chunk", 64, "default"): ("ILi64ELi64EL7operand2ELS0_0ELb1EE", 2, 2),
    ("backward", "chunk", 64, "exact"): ("ILi64ELi64EL7operand2ELS0_2ELb1EE", 1, 2),
}


def nvcc_flags() -> list[str]:
    """Those of setup.py, so that this compiles what is shipped."""
    text = (ROOT / "setup.py").read_text()
    namespace: dict[str, list[str]] = {}
    exec(re.search(r"^NVCC_FLAGS = \[.*?^\]", text, re.S | re.M).group(), namespace)
    return namespace["NVCC_FLAGS"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library, and what ptxas says of it. Warnings and spills are errors by the flags."""
    if NVCC is None:
        pytest.skip("no nvcc: the CUDA library was not compiled")
    output = tmp_path_factory.mktemp("nvcc") / "librwkv6_cuda.so"
    code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    host = ["-shared", "-cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    sources = sorted((ROOT / "cuda").glob("*.cu"))
    command = [NVCC, *nvcc_flags(), *host, "-Xptxas=-v", "--threads=2", *code, "-o", output, *sources]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return output, run.stderr


@pytest.fixture(scope="module")
def resources(library: tuple[Path, str]) -> dict[str, dict[str, int]]:
    """Registers of each kernel, by architecture."""
    entry = r"entry function '_Z\d+(\w+)' for 'sm_(\d+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    found: dict[str, dict[str, int]] = {arch: {} for arch in ARCHITECTURES}
    for name, arch, spilled, registers in re.findall(entry, library[1], re.S):
        assert int(spilled) == 0
        found[arch][name] = int(registers)
    return found


def budgets(architecture: str) -> dict[str, tuple[int, int, int]]:
    return BUDGETS | (BUDGETS_ON_90 if architecture == "90" else {})


Blocks = Callable[[str, int, int, int], int]


@pytest.fixture(scope="module")
def blocks_a_multiprocessor(tmp_path_factory: pytest.TempPathFactory) -> Blocks:
    """By architecture, registers of a thread, threads of a block and bytes of its shared memory, from the toolkit's own
    calculator."""
    if NVCC is None:
        pytest.skip("no nvcc: occupancy was not checked")
    tool = tmp_path_factory.mktemp("occupancy") / "occupancy"
    subprocess.run([NVCC, "-std=c++17", ROOT / "tests" / "native" / "occupancy.cpp", "-o", tool], check=True)

    @functools.cache
    def blocks(architecture: str, registers: int, threads: int, shared_bytes: int = 0) -> int:
        line = f"{registers} {threads} {shared_bytes}"
        run = subprocess.run([tool, architecture], input=line, capture_output=True, text=True, check=True)
        return int(run.stdout)

    return blocks


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_has_a_budget_and_keeps_to_it(architecture: str, resources: dict[str, dict[str, int]]):
    known = budgets(architecture)
    found = {
        name: [count for kernel, count in resources[architecture].items() if kernel.startswith(name)] for name in known
    }
    assert {name: counts for name, counts in found.items() if len(counts) != 1} == {}
    assert {kernel for kernel in resources[architecture] if not any(map(kernel.startswith, known))} == set()
    assert {name: count for name, (count,) in found.items() if count > known[name][0]} == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_leave_room_for_the_blocks_of_the_budgets(architecture: str, blocks_a_multiprocessor: Blocks):
    known = budgets(architecture)
    found = {name: blocks_a_multiprocessor(architecture, most, threads) for name, (most, threads, _) in known.items()}
    assert found == {name: blocks for name, (_, _, blocks) in known.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("pass_", "algorithm", "D", "precision"), OCCUPANCY)
def test_blocks_of_a_multiprocessor_with_the_shared_memory_of_a_launch(
    pass_: str,
    algorithm: str,
    D: int,
    precision: str,
    architecture: str,
    resources: dict[str, dict[str, int]],
    blocks_a_multiprocessor: Blocks,
    emulation: ctypes.CDLL,
):
    """Registers as compiled; threads and shared memory as the launch has them, on an emulated device of that size."""
    instance, *wanted = OCCUPANCY[pass_, algorithm, D, precision]
    kernel = f"wkv6_{pass_}_{algorithm}"
    compiled = resources[architecture].items()
    (registers,) = (count for name, count in compiled if name.startswith(kernel + instance))
    emulation.wkv6_emulation_set(b"shared_bytes", SHARED_BYTES[architecture])
    dtypes = "f32 f32 f32 f32 f32" if precision == "exact" else "bf16 bf16 bf16 bf16 f32"
    problem = make(Case("occupancy", T=64, H=8, K=D, V=D, dtypes=dtypes))
    answer(lambda *x, **how: rwkv6_ops.wkv6(*x, algorithm=algorithm, precision=precision, **how), problem)
    threads, shared = (
        emulation.wkv6_emulation_counter(kernel.encode(), name) for name in (b"threads", b"shared_bytes")
    )
    blocks = blocks_a_multiprocessor(architecture, registers, threads, shared)
    assert blocks == wanted[ARCHITECTURES.index(architecture)], (
        f"{registers} registers, {threads} threads, {shared} bytes"
    )


def test_architecture_list_is_read_as_pytorch_writes_it():
    text = (ROOT / "setup.py").read_text()
    namespace: dict[str, object] = {}
    exec(re.search(r"^def code_flags.*?^    return flags$", text, re.S | re.M).group(), namespace)
    sm80, sm90 = "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"
    assert namespace["code_flags"]("8.0;9.0+PTX") == [sm80, sm90, "-gencode=arch=compute_90,code=compute_90"]
    assert namespace["code_flags"]("8.0 9.0") == [sm80, sm90]


def test_library_exports_its_c_api_and_nothing_else(library: tuple[Path, str]):
    if not shutil.which("nm"):
        pytest.skip("no nm: the library's symbols were not looked at")
    symbols = subprocess.run(["nm", "-D", "--defined-only", library[0]], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in symbols.stdout.splitlines()}
    api = {"forward", "backward", "step", "state", "scratch_bytes", "error", "archs", "versions", "problem_bytes"}
    assert {name for name in names if "wkv6" in name} == {f"wkv6_cuda_{name}" for name in api}


WITHOUT_A_DRIVER = """
import sys, torch, rwkv6_ops
from rwkv6_ops import _native
_native.use_cuda_emulation(sys.argv[1])  # tensors of the CPU will do: nothing gets as far as to read them
x, u = torch.zeros(1, 3, 1, 4, requires_grad=True), torch.zeros(1, 4)
calls = (
    lambda: rwkv6_ops.wkv6(x, x, x, x, u),
    lambda: rwkv6_ops.wkv6_step_(*(x.detach()[:, 0],) * 4, u, torch.zeros(1, 1, 4, 4)),
    lambda: rwkv6_ops.wkv6(*(x.detach().expand(1, 3, 1, 4),) * 4, u),
)
for call in calls:
    try:
        call()
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA driver: its absence was not tried")
def test_without_a_driver_a_call_is_an_error_not_a_crash(library: tuple[Path, str], python: Callable):
    run = python(WITHOUT_A_DRIVER, str(library[0]))
    assert run.returncode == 0, run.stderr
    message = r"rwkv6_ops on CUDA: cudaGetDevice: no CUDA driver; needed is one for CUDA \d+\.\d\n"
    assert re.fullmatch(f"({message}){{3}}", run.stdout), run.stdout


def test_the_report_tells_what_the_library_was_built_for(library: tuple[Path, str], python: Callable, tmp_path: Path):
    """In a copy of the package with the library beside the extension, where the extension looks for it."""
    shutil.copytree(Path(rwkv6_ops.__file__).parent, tmp_path / "copy" / "rwkv6_ops")
    shutil.copy(library[0], tmp_path / "copy" / "rwkv6_ops" / "librwkv6_cuda.so")
    start = "import runpy, sys; sys.path.insert(0, 'copy'); sys.argv = ['rwkv6_ops']"
    code = f"{start}; runpy.run_module('rwkv6_ops', run_name='__main__')"
    run = python(code)
    assert run.returncode == 0, run.stderr
    driver = r"driver for CUDA \d+\.\d" if torch.cuda.is_available() else "no driver"
    devices = " ".join(f"sm_{arch}" for arch in ARCHITECTURES)
    wanted = rf"CUDA library +librwkv6_cuda.so, \d+\.\d MB, for {devices}; CUDA \d+\.\d, {driver}\n"
    assert re.search(wanted, run.stdout), run.stdout
