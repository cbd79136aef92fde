# SPDX-License-Identifier: Apache-2.0
"""What nvcc makes of the CUDA kernels: no warning, nothing spilled, no local memory, registers within their budget.

The budgets are what the kernels take plus a little; with the threads of a block they say how many blocks a
multiprocessor holds. Needs nvcc, no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rwkv6_ops

ROOT = Path(__file__).parent.parent
NVCC = shutil.which("nvcc", path=os.path.join(os.environ["CUDA_HOME"], "bin") if "CUDA_HOME" in os.environ else None)
ARCHITECTURE = os.environ.get("RWKV6_OPS_TEST_ARCH", "80")

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
    "wkv6_state_chunkILi32EL7operand1ELi1EE": (104, 64, 9),
    "wkv6_state_chunkILi32EL7operand2ELi1EE": (104, 64, 9),
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


def nvcc_flags() -> list[str]:
    """Those of setup.py, so that this compiles what is shipped."""
    text = (ROOT / "setup.py").read_text()
    namespace: dict[str, list[str]] = {}
    exec(re.search(r"^NVCC_FLAGS = \[.*?^\]", text, re.S | re.M).group(), namespace)
    return namespace["NVCC_FLAGS"]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library for one architecture, and what ptxas says of it. Warnings and spills are errors by the flags."""
    if NVCC is None:
        pytest.skip("no nvcc: the CUDA library was not compiled")
    output = tmp_path_factory.mktemp("nvcc") / "librwkv6_cuda.so"
    code = f"-gencode=arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}"
    host = ["-shared", "-cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    sources = sorted((ROOT / "cuda").glob("*.cu"))
    command = [NVCC, *nvcc_flags(), *host, "-Xptxas=-v", code, "-o", output, *sources]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return output, run.stderr


@pytest.fixture(scope="module")
def resources(library: tuple[Path, str]) -> dict[str, int]:
    """Registers of each kernel."""
    entry = r"entry function '_Z\d+(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    report = re.findall(entry, library[1], re.S)
    assert all(int(spilled) == 0 for _, spilled, _ in report)
    return {name: int(registers) for name, _, registers in report}


def blocks_a_multiprocessor(registers: int, threads: int) -> int:
    """As the CUDA occupancy calculator has it from compute capability 8.0 on: 65536 registers, 8 a thread at a time."""
    of_warp = -(-registers // 8) * 8 * 32
    return 65536 // of_warp // (threads // 32)


def test_every_kernel_has_a_budget(resources: dict[str, int]):
    assert {name for name in BUDGETS if not any(kernel.startswith(name) for kernel in resources)} == set()
    assert {kernel for kernel in resources if not any(kernel.startswith(name) for name in BUDGETS)} == set()


@pytest.mark.parametrize("name", BUDGETS)
def test_registers_and_occupancy_are_within_budget(name: str, resources: dict[str, int]):
    most, threads, blocks = BUDGETS[name]
    (registers,) = (count for kernel, count in resources.items() if kernel.startswith(name))
    assert registers <= most
    assert blocks_a_multiprocessor(registers, threads) >= blocks


def test_budgets_agree_with_themselves():
    assert {name: blocks_a_multiprocessor(most, threads) for name, (most, threads, _) in BUDGETS.items()} == {
        name: blocks for name, (_, _, blocks) in BUDGETS.items()
    }


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
    wanted = rf"CUDA library +librwkv6_cuda.so, \d+\.\d MB, for sm_{ARCHITECTURE}; CUDA \d+\.\d, {driver}\n"
    assert re.search(wanted, run.stdout), run.stdout
