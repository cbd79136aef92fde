# SPDX-License-Identifier: Apache-2.0
"""`python -m rwkv6_ops`: what a bug report needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rwkv6_ops
from rwkv6_ops import _native


def report(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(rwkv6_ops.__file__).parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "rwkv6_ops", *arguments],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_names_versions_instruction_sets_threads_and_kernels():
    isa = _native.isas()[-1]
    run = report("2", "512", "8", "64", "64", "--dtype", "bfloat16", RWKV6_OPS_ISA=isa)
    assert run.returncode == 0, run.stderr
    lines = {line[:20].strip(): line[20:] for line in run.stdout.splitlines()}
    assert lines["rwkv6_ops"].startswith(rwkv6_ops.__version__)
    assert lines["torch"].startswith(torch.__version__)
    assert lines["ISAs built"] == ", ".join(_native.isas_built())
    assert lines["ISAs runnable here"] == ", ".join(_native.isas())
    assert lines["ISA in use"] == f"{isa} (RWKV6_OPS_ISA={isa})"
    assert "torch's pool" in lines["threads"]
    assert "CUDA library" in lines
    assert f"{isa}, computing in float32" in lines["CPU kernels"]
    assert lines["CUDA kernels"] == "chunk"


@pytest.mark.parametrize("arguments", ["2 31 8 64 64", "2 512 8 64 60", "2 512 8 64 64 --dtype float64"])
def test_it_tells_where_cuda_has_no_chunk_kernels(arguments: str):
    assert "CUDA kernels        recurrent" in report(*arguments.split()).stdout


def test_it_wants_five_sizes():
    run = report("2", "512")
    assert run.returncode == 2
    assert "2 sizes, expected five: B T H K V" in run.stderr
