# SPDX-License-Identifier: Apache-2.0
"""The kernels without Python, in guarded memory: builds tests/native/guard_pages.c with the sources of csrc/cpu."""

import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = ["-std=gnu17", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-D_GNU_SOURCE"]


@pytest.mark.skipif(
    not (ROOT / "csrc").is_dir(), reason="not tested: guard pages, which need the C sources of a checkout"
)
def test_kernels_stay_within_their_buffers_and_equal_a_plain_loop(tmp_path: Path):
    compiler = os.environ.get("CC", "").split() or [shutil.which("cc") or sysconfig.get_config_var("CC").split()[0]]
    sources = [*(ROOT / "csrc/cpu").glob("*.c"), ROOT / "csrc/wkv6_problem.c", ROOT / "tests/native/guard_pages.c"]
    sources = [source for source in sources if source.name != "parallel.c"]  # the program brings its own

    def build(source: Path) -> str:
        target = tmp_path / f"{source.stem}.o"
        command = [*compiler, *FLAGS, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=300)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(build, sources))
    program = str(tmp_path / "guard_pages")
    subprocess.run([*compiler, *objects, "-lm", "-o", program], check=True, timeout=60)
    run = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, f"exit status {run.returncode}\n{run.stdout}{run.stderr}"
