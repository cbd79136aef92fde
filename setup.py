# SPDX-License-Identifier: Apache-2.0
"""Builds rwkv6_ops._native: plain C17 on CPython's limited API, nothing of torch. The rest is in pyproject.toml.

With nvcc at hand it also builds librwkv6_cuda.so, which the extension opens on first use. Environment variables:
RWKV6_OPS_CUDA: "auto" (the default: where there is an nvcc), "1" (an error without) or "0" (never); CUDA_HOME: where to
look for nvcc before PATH; TORCH_CUDA_ARCH_LIST: for which devices, as PyTorch writes it.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "rwkv6_ops: free-threaded Python has no limited API yet, which the extension is built on; use a usual build"
    )

SOURCES = sorted(str(path) for path in (*Path("csrc").glob("*.c"), *Path("csrc/cpu").glob("*.c")))
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))

native = Extension(
    "rwkv6_ops._native",
    sources=SOURCES,
    depends=HEADERS,
    define_macros=[("Py_LIMITED_API", "0x030A0000"), ("_GNU_SOURCE", None)],
    extra_compile_args=[
        "-std=gnu17",
        "-O3",
        "-fvisibility=hidden",
        "-ffp-contract=off",  # the kernels say where they fuse
        "-fno-math-errno",
        "-fno-trapping-math",
        "-pthread",
        "-Wall",
        "-Wextra",
    ],
    extra_link_args=["-pthread"],
    libraries=["m", "dl"],
    py_limited_api=True,
)

CUDA_SOURCES = sorted((*Path("cuda").glob("*.cu*"), *Path("cuda").glob("*.h"), Path("csrc/wkv6_problem.h")))
CUDA_ARCHITECTURES = "8.0;8.6;8.9;9.0+PTX"  # the backward chunk kernels spill on 12.0, which takes the PTX
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "--fmad=false",  # the kernels say where they fuse
    "-Werror=all-warnings",  # a kernel that spills, or has anything in local memory, is no kernel to ship
    "-Xptxas=-warn-spills,-warn-lmem-usage",
]


def code_flags(architectures: str) -> list[str]:
    """nvcc's flags for a list like "8.0;9.0+PTX"."""
    flags = []
    for item in architectures.replace(" ", ";").split(";"):
        number = item.removesuffix("+PTX").replace(".", "")
        flags += [f"-gencode=arch=compute_{number},code=sm_{number}"] if number else []
        if item.endswith("+PTX"):
            flags += [f"-gencode=arch=compute_{number},code=compute_{number}"]
    return flags


def find_nvcc() -> str | None:
    """nvcc of CUDA_HOME, or of PATH."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


class BuildWithCuda(build_ext):
    """The extension, and the library of CUDA kernels beside it."""

    def run(self) -> None:
        super().run()
        wanted = os.environ.get("RWKV6_OPS_CUDA") or "auto"
        if wanted not in ("auto", "0", "1"):
            raise ValueError(f"RWKV6_OPS_CUDA: {wanted!r}, expected 'auto', '0' or '1'")
        nvcc = None if wanted == "0" else find_nvcc()
        library = Path(self.get_ext_fullpath(native.name)).parent / "librwkv6_cuda.so"
        if nvcc:
            try:
                self.build_cuda(nvcc, library)
            except subprocess.CalledProcessError as error:  # an nvcc too old, or not all there
                if wanted == "1":
                    raise
                self.leave_cuda_out(f"{nvcc} gave exit status {error.returncode}")
        elif wanted == "1":
            raise RuntimeError("RWKV6_OPS_CUDA is 1, but there is no nvcc in CUDA_HOME/bin or PATH")
        else:
            self.leave_cuda_out("RWKV6_OPS_CUDA is 0" if wanted == "0" else "no nvcc in CUDA_HOME/bin or PATH")

    def leave_cuda_out(self, why: str) -> None:
        """Says so."""
        self.announce(f"without CUDA kernels: {why}", level=logging.WARNING)

    def build_cuda(self, nvcc: str, library: Path) -> None:
        """Compiles `library`, unless the same command made it from the same sources."""
        architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or CUDA_ARCHITECTURES
        host = ["-shared", "-cudart=static", "-Xcompiler=-fPIC,-fvisibility=hidden", f"--threads={os.cpu_count()}"]
        sources = [str(path) for path in CUDA_SOURCES if path.suffix == ".cu"]
        command = [nvcc, *NVCC_FLAGS, *code_flags(architectures), *host, "-o", str(library), *sources]
        made_from = hashlib.sha256("\n".join(command).encode())
        for source in CUDA_SOURCES:
            made_from.update(source.read_bytes())
        stamp = Path(self.build_temp) / "librwkv6_cuda.stamp"
        if library.exists() and stamp.exists() and stamp.read_text() == made_from.hexdigest():
            return
        self.announce(" ".join(command), level=logging.INFO)
        subprocess.run(command, check=True)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(made_from.hexdigest())


setup(ext_modules=[native], cmdclass={"build_ext": BuildWithCuda})
