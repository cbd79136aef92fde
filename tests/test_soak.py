# SPDX-License-Identifier: Apache-2.0
"""Twenty seconds of tests/soak.py; `make soak` takes half an hour."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="not tested: the soak, which reads /proc")
def test_threads_forks_mistakes_and_interrupts_leave_values_right_and_nothing_behind():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, str(Path(__file__).with_name("soak.py")), "20"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert "wrong: nothing" in run.stdout
    assert all(word in run.stdout for word in ("fork", "interrupt", "mistakes", "training")), run.stdout
