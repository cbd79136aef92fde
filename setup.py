# SPDX-License-Identifier: Apache-2.0
"""Builds rwkv6_ops._native: plain C17 on CPython's limited API, nothing of torch. The rest is in pyproject.toml."""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

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

setup(ext_modules=[native])
