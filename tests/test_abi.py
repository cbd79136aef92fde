# SPDX-License-Identifier: Apache-2.0
"""The C core's view of the world outside: torch's DLPack ABI as torch's own header has it, and nothing else."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from rwkv6_ops import _native

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("csrc", "cuda") for path in (ROOT / folder).rglob("*") if path.is_file())

pytestmark = pytest.mark.skipif(
    not SOURCES, reason="not tested: the C sources, which are not installed with the package"
)

# Our name, torch's name, and the members that must lie where torch has them: ours, theirs.
STRUCTS = [
    ("dl_device", "DLDevice", [("type", "device_type"), ("id", "device_id")]),
    ("dl_dtype", "DLDataType", [("code", "code"), ("bits", "bits"), ("lanes", "lanes")]),
    (
        "dl_tensor",
        "DLTensor",
        [(name, name) for name in ("data", "device", "ndim", "dtype", "shape", "strides", "byte_offset")],
    ),
    (
        "dl_managed",
        "DLManagedTensorVersioned",
        [
            *(("version", "version"), ("owner", "manager_ctx"), ("deleter", "deleter")),
            *(("flags", "flags"), ("tensor", "dl_tensor")),
        ],
    ),
    (
        "dl_header",
        "DLPackExchangeAPIHeader",
        [("major", "version.major"), ("minor", "version.minor"), ("previous", "prev_api")],
    ),
    (
        "dl_exchange",
        "DLPackExchangeAPI",
        [
            ("header", "header"),
            ("allocate", "managed_tensor_allocator"),
            ("from_object", "managed_tensor_from_py_object_no_sync"),
            ("to_object", "managed_tensor_to_py_object_no_sync"),
            ("view", "dltensor_from_py_object_no_sync"),
            ("current_stream", "current_work_stream"),
        ],
    ),
]
CONSTANTS = [
    *(("DL_CPU", "kDLCPU"), ("DL_CUDA", "kDLCUDA"), ("DL_INT", "kDLInt")),
    *(("DL_FLOAT", "kDLFloat"), ("DL_BFLOAT", "kDLBfloat")),
]


def compiler(language: str) -> list[str]:
    variable, names = ("CC", ("cc", "gcc", "clang")) if language == "c" else ("CXX", ("c++", "g++", "clang++"))
    given = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    if not given:
        pytest.skip(f"not tested: what needs a {language} compiler, which this machine lacks")
    return given.split()


def test_the_declarations_are_those_of_torchs_header(tmp_path: Path):
    """Compiled as C++: torch's header gives its enumerations a width, which C17 cannot."""
    checks = []
    for ours, theirs, members in STRUCTS:
        checks.append(f"static_assert(sizeof({ours}) == sizeof({theirs}) && alignof({ours}) == alignof({theirs}));")
        for a, b in members:
            checks.append(f"static_assert(offsetof({ours}, {a}) == offsetof({theirs}, {b}));")
            checks.append(f"static_assert(sizeof((({ours} *)nullptr)->{a}) == sizeof((({theirs} *)nullptr)->{b}));")
    checks += [f"static_assert(int({ours}) == int({theirs}));" for ours, theirs in CONSTANTS]
    program = ["#include <cstddef>", "#include <ATen/dlpack.h>", '#include "tensor_view.h"', *checks]
    source = tmp_path / "abi.cpp"
    source.write_text("\n".join(program) + "\n")
    include = [f"-I{Path(torch.__file__).parent / 'include'}", f"-I{ROOT / 'csrc'}"]
    run = subprocess.run(
        [*compiler("c++"), "-std=c++17", "-Wno-invalid-offsetof", "-fsyntax-only", *include, str(source)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_the_exchange_table_has_the_major_version_that_we_read():
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


@pytest.mark.parametrize("word", ["torch/", "ATen/", "c10/", "pybind11", "numpy/"])
def test_no_header_of_torch_pybind_or_numpy_is_included(word: str):
    pattern = re.compile(rf'^\s*#\s*include\s*[<"]{re.escape(word)}', re.MULTILINE)
    assert [str(path) for path in SOURCES if pattern.search(path.read_text())] == []


def test_no_variable_length_arrays():
    files = [str(path) for path in SOURCES if path.suffix == ".c" and path.parent.name in ("csrc", "cpu")]
    include = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}"]
    flags = ["-std=gnu17", "-fsyntax-only", "-Werror=vla", "-D_GNU_SOURCE", "-DPy_LIMITED_API=0x030A0000"]
    run = subprocess.run(
        [*compiler("c"), *flags, *include, *files], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr


def test_every_c_file_says_its_licence():
    code = [path for path in SOURCES if path.suffix in (".c", ".h", ".cu", ".cuh")]
    assert [str(path) for path in code if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]] == []


def test_the_binary_is_abi3_and_links_no_torch():
    binary = Path(_native.__file__)
    assert ".abi3." in binary.name
    if not shutil.which("readelf"):
        pytest.skip("not tested: which libraries the binary needs, for lack of readelf")
    dynamic = subprocess.run(
        ["readelf", "-d", str(binary)], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert not [name for name in needed if re.search("torch|c10|python|stdc", name)]


def test_the_binary_exports_its_init_function_only():
    if not shutil.which("nm"):
        pytest.skip("not tested: what the binary exports, for lack of nm")
    command = ["nm", "-D", "--defined-only", _native.__file__]
    listing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert [line.split()[-1] for line in listing.splitlines()] == ["PyInit__native"]


def test_the_module_loads_on_a_processor_with_nothing_but_the_baseline(tmp_path: Path):
    """Only the kernels of an instruction set may use it: no ymm, zmm or FMA in the other functions."""
    if not shutil.which("objdump") or os.uname().machine != "x86_64":
        pytest.skip("not tested: instructions by function, which takes objdump on x86-64")
    flags = ["-std=gnu17", "-O1", "-D_GNU_SOURCE", "-DPy_LIMITED_API=0x030A0000"]
    include = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}"]
    common = [path for path in SOURCES if path.suffix == ".c" and not path.stem.startswith("kernels_a")]
    for path in common:
        target = str(tmp_path / f"{path.stem}.o")
        subprocess.run([*compiler("c"), *flags, *include, "-c", str(path), "-o", target], timeout=300, check=True)
        code = subprocess.run(["objdump", "-d", target], capture_output=True, text=True, timeout=60, check=True).stdout
        assert not re.search(r"%[yz]mm|\tv[a-z]", code), path.name


@pytest.mark.parametrize("name", _native.isas())
def test_the_environment_chooses_the_instruction_set(name: str, python):
    run = python("from rwkv6_ops import _native; print(_native.isa())", RWKV6_OPS_ISA=name)
    assert run.stdout.strip() == name, run.stderr


def test_an_unknown_instruction_set_in_the_environment_is_an_import_error(python):
    run = python("import rwkv6_ops", RWKV6_OPS_ISA="sse9")
    assert run.returncode == 1
    assert "ImportError" in run.stderr
    assert "sse9" in run.stderr
