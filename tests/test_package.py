# SPDX-License-Identifier: Apache-2.0
"""What is built and installed: no torch to build with, the right files in the source archive and in the wheel."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import rwkv6_ops

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="not tested: packaging, which needs a checkout"
)


def project() -> dict:
    try:
        import tomllib
    except ImportError:
        pytest.skip("not tested: pyproject.toml, which takes the tomllib of Python 3.11 to read")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_building_needs_setuptools_alone():
    assert [name.split(">")[0] for name in project()["build-system"]["requires"]] == ["setuptools"]


def test_running_needs_torch_alone():
    assert project()["project"]["dependencies"] == ["torch>=2.10"]


def test_the_version_is_the_same_everywhere():
    assert project()["project"]["version"] == rwkv6_ops.__version__
    assert rwkv6_ops.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_setup_imports_no_torch():
    lines = (ROOT / "setup.py").read_text().splitlines()
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= set(sys.stdlib_module_names) | {"setuptools"}


def test_every_public_name_exists_and_is_documented():
    for name in rwkv6_ops.__all__:
        assert getattr(rwkv6_ops, name).__doc__, name


def test_the_source_archive_holds_every_source_and_no_binary(tmp_path: Path):
    """Made without isolation, so nothing is fetched; setuptools is that of this environment."""
    pytest.importorskip("setuptools", reason="not tested: the source archive, for lack of setuptools")
    code = f"import os; from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    copy = tmp_path / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    if listed.returncode:
        pytest.skip("not tested: the source archive, which needs a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, timeout=120, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        names = {name.split("/", 1)[1] for name in members.getnames() if "/" in name}
    wanted = [
        p for p in copy.rglob("*") if p.is_file() and p.relative_to(copy).parts[0] in ("csrc", "cuda", "rwkv6_ops")
    ]
    missing = {str(p.relative_to(copy)) for p in wanted if "egg-info" not in str(p)} - names
    assert not missing
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_a_wheel_would_hold_the_package_and_no_sources():
    """Read from a wheel in dist/, if one was built: building one takes a minute."""
    wheels = sorted((ROOT / "dist").glob(f"rwkv6_ops-{rwkv6_ops.__version__}-*.whl"))
    if not wheels:
        pytest.skip("not tested: the wheel's contents, as there is none in dist/ (make build)")
    assert "-cp310-abi3-" in wheels[-1].name
    names = zipfile.ZipFile(wheels[-1]).namelist()
    assert {"rwkv6_ops/__init__.py", "rwkv6_ops/py.typed", "rwkv6_ops/_native.pyi", "rwkv6_ops/_native.abi3.so"} <= set(
        names
    )
    assert not [name for name in names if not name.startswith(("rwkv6_ops/", "rwkv6_ops-"))]
    assert not [name for name in names if name.endswith((".c", ".h"))]
