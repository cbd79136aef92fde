# SPDX-License-Identifier: Apache-2.0
"""What a bug report needs: ``python -m rwkv6_ops [B T H K V] [--dtype bfloat16]``.

Versions, instruction sets, threads, the CUDA library and, for a shape, the kernels that a call would run.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

import rwkv6_ops
from rwkv6_ops import _native, _ops

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def versions() -> Iterator[tuple[str, str]]:
    """Names and values: what is installed where."""
    yield "rwkv6_ops", f"{rwkv6_ops.__version__}, {Path(_native.__file__).name} in {Path(_native.__file__).parent}"
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'not in this build'}"
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {cpu_name()}"


def cpu_name() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "processor unknown")


def cpu() -> Iterator[tuple[str, str]]:
    """Names and values: instruction sets and threads."""
    forced = os.environ.get("RWKV6_OPS_ISA")
    yield "ISAs built", ", ".join(_native.isas_built())
    yield "ISAs runnable here", ", ".join(_native.isas())
    yield "ISA in use", _native.isa() + (f" (RWKV6_OPS_ISA={forced})" if forced else "")
    pool = "torch's pool" if _native.uses_torch_threads else "no pool: kernels run on the calling thread"
    yield "threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors, {pool}"


def cuda() -> Iterator[tuple[str, str]]:
    """Names and values: the CUDA library, the driver and the devices."""
    library = Path(_native.__file__).with_name("librwkv6_cuda.so")
    if library.exists():
        yield "CUDA library", f"{library.name}, {library.stat().st_size / 1e6:.1f} MB, {built_for()}"
    else:
        yield "CUDA library", "absent: this build has kernels for the CPU only"
    if not torch.cuda.is_available():
        yield "CUDA devices", "none that torch sees"
        return
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        yield f"cuda:{i}", f"{torch.cuda.get_device_name(i)}, sm_{major}{minor}"


def built_for() -> str:
    """What the CUDA library says of itself and of the driver that it meets."""
    try:
        architectures, runtime, driver = _native.cuda_library()
    except RuntimeError as error:
        return str(error)
    names = " ".join(f"sm_{int(number) // 10}" for number in architectures.split(","))
    runtime, driver = (f"{version // 1000}.{version % 1000 // 10}" for version in (runtime, driver))
    return f"for {names}; CUDA {runtime}, " + ("no driver" if driver == "0.0" else f"driver for CUDA {driver}")


def kernels(B: int, T: int, H: int, K: int, V: int, dtype: str) -> Iterator[tuple[str, str]]:
    """Names and values: what a call with that shape runs."""
    computed = "float64" if dtype == "float64" else "float32"
    chunk_from = _native.CHUNK_FROM_TOKENS
    algorithm = "chunk" if chunk_from <= T else "recurrent"
    yield "shape", f"B {B}, T {T}, H {H}, K {K}, V {V}, {dtype}"
    yield "CPU kernels", f"{algorithm}, {_native.isa()}, computing in {computed}"
    by_chunks = T >= _native.CUDA_CHUNK_FROM_TOKENS and {K, V} <= set(_ops.CUDA_CHUNK_SIZES) and computed == "float32"
    yield "CUDA kernels", "chunk" if by_chunks else "recurrent"
    yield "units of work", f"{B * H} (sequence, head) for {torch.get_num_threads()} threads"
    saved = B * T // _ops.CHECKPOINT["cpu"] * H * K * V * (8 if computed == "float64" else 4)
    yield "saved for backward", f"{saved / 1e6:.1f} MB of states, beyond the inputs"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rwkv6_ops", description=__doc__.splitlines()[0])
    parser.add_argument("shape", type=int, nargs="*", metavar="B T H K V", help="show the kernels for this shape")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of r, k, v and w")
    options = parser.parse_args()
    if len(options.shape) not in (0, 5):
        parser.error(f"{len(options.shape)} sizes, expected five: B T H K V")
    lines = [*versions(), *cpu(), *cuda()]
    if options.shape:
        lines += kernels(*options.shape, options.dtype)
    for name, value in lines:
        print(f"{name:20s}{value}")


if __name__ == "__main__":
    main()
