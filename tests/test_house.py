# SPDX-License-Identifier: Apache-2.0
"""The rules of the house, read off the sources: who may include whom, what C may not do, what documents must say."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import rwkv6_ops
from rwkv6_ops import _native

ROOT = Path(__file__).parents[1]
PACKAGE = Path(rwkv6_ops.__file__).parent
C_FILES = sorted(p for p in (ROOT / "csrc").rglob("*.[ch]"))
CUDA_FILES = sorted(p for p in (ROOT / "cuda").glob("*.*") if p.suffix in (".h", ".cu", ".cuh"))

pytestmark = pytest.mark.skipif(not C_FILES, reason="not tested: the rules for the sources, which need a checkout")


def code_of(path: Path) -> str:
    """The text without comments, and with empty strings: lines stay where they are."""

    def blank(match: re.Match) -> str:
        return '""' if match[0].startswith('"') else "\n" * match[0].count("\n")

    return re.sub(r'"(?:\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*', blank, path.read_text(), flags=re.DOTALL)


def functions(path: Path) -> list[tuple[str, str]]:
    """Name and body of each C function: from a line that starts in column 0 and ends in `{` to the next `}` there."""
    pattern = r"^(?!struct|typedef|enum|union|extern|namespace)[\w*][^;{}\n]*?\b(\w+)\([^;{}]*?\)[^;{}=\n]*\{\n(.*?)^\}"
    return re.findall(pattern, code_of(path), flags=re.MULTILINE | re.DOTALL)


# ---- Layers: arrows never go back ----


def includes(path: Path) -> list[Path]:
    """The files of ours that the file includes."""
    return [(path.parent / name).resolve() for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("path", C_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_c_includes_go_one_way(path: Path):
    """module.c includes the rest, csrc/cpu the problem and itself, cuda_library and wkv6_problem the problem alone."""
    problem, cpu = ROOT / "csrc/wkv6_problem.h", ROOT / "csrc/cpu"
    for included in includes(path):
        if path.name == "module.c":
            assert included.suffix == ".h", included
        elif path.parent == cpu:
            assert included == problem or included.parent == cpu, included
        else:
            assert included in (problem, path.with_suffix(".h")), included


@pytest.mark.parametrize("path", CUDA_FILES, ids=lambda p: p.name)
def test_cuda_includes_itself_and_the_problem(path: Path):
    for included in includes(path):
        emulation = ROOT / "cuda/host_emulation"
        assert included.parent in (ROOT / "cuda", emulation) or included == ROOT / "csrc/wkv6_problem.h", included


def test_headers_of_kernels_are_included_by_kernels_only():
    """*.inc.h are templates: kernels.inc.h and the instances know them, nobody else."""
    for path in C_FILES:
        templates = [i.name for i in includes(path) if i.name.endswith(".inc.h")]
        assert not templates or path.name.startswith("kernels"), (path.name, templates)


# From the bottom: a module imports from those below it. What is not listed is a public module like compat.
LEVELS = {
    "_native": 0,
    "_check": 0,
    "reference": 0,
    "_ops": 1,
    "_state": 1.5,
    "functional": 2,
    "__init__": 9,
    "__main__": 10,
}


def imported(path: Path) -> set[str]:
    """Modules of this package that a module of it imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.level == 1 or node.module == "rwkv6_ops"):
            names |= {node.module} if node.level == 1 and node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {"__init__" for alias in node.names if alias.name.split(".")[0] == "rwkv6_ops"}
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_python_imports_go_one_way(path: Path):
    level = LEVELS.get(path.stem, 3)
    for name in imported(path):
        if name == "__init__" or (PACKAGE / f"{name}.py").exists() or name == "_native":
            assert LEVELS.get(name, 3) <= level if level == 3 else LEVELS.get(name, 3) < level, name


# ---- C ----


@pytest.mark.parametrize("path", C_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_have_one_exit_label_at_most(path: Path):
    for name, body in functions(path):
        labels = [label for label in re.findall(r"^\s*(\w+):\s*$", body, re.MULTILINE) if label != "default"]
        assert len(labels) <= 1, (name, labels)


def test_functions_are_found():
    """So that the rule above does not hold of nothing."""
    assert {"read_tensor", "launch", "native_step"} <= {name for name, _ in functions(ROOT / "csrc/module.c")}
    assert "wkv6_check" in {name for name, _ in functions(ROOT / "csrc/wkv6_problem.c")}


@pytest.mark.parametrize("path", [*C_FILES, *CUDA_FILES], ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_aborts_prints_or_exits(path: Path):
    """A mistake of the caller's is a status, and a Python exception."""
    assert not re.findall(r"\b(assert|abort|exit|_exit|printf|fprintf|puts|perror)\s*\(", code_of(path))


SIZES = "B|T|H|K|V|N|K_|V_|size|sizes|length|stride\\w*|offset\\w*|elements|bytes|tokens|segment"


@pytest.mark.parametrize("path", C_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes_and_offsets_have_64_bits(path: Path):
    found = re.findall(rf"\b(?:int|unsigned|int32_t|uint32_t|long|short)\s+\**({SIZES})\b(?!\s*\()", code_of(path))
    assert not found


def test_globals_are_constant_but_for_those_that_are_known():
    """The dispatch table's choice, the pool's functions, the opened CUDA libraries."""
    known = {
        "current",
        "torch_parallel_for",
        "torch_get_num_threads",
        "scratch_key",
        "device",
        "emulation",
        "emulating",
    }
    known |= {"definition", "slots", "methods"}  # module.c: Python wants to write to them
    found = set()
    for path in C_FILES:
        for line in code_of(path).splitlines():
            declared = re.match(r"^static (?!const\b|inline\b)[^(]*?(\w+)(?:\[\])?(?:, (\w+))?(?: = .*)?[;{]$", line)
            if declared:
                found |= {name for name in declared.groups() if name}
    assert found <= known


def test_python_asserts_nothing_about_its_arguments():
    """python -O drops assert."""
    for path in PACKAGE.glob("*.py"):
        asserts = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
        assert not asserts, (path.name, asserts)


def test_nothing_is_unpickled_evaluated_or_started():
    """SECURITY.md says so."""
    forbidden = {"pickle", "marshal", "shelve", "subprocess", "ctypes", "socket", "urllib"}
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not {name.split(".")[0] for name in names} & forbidden, path.name
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__", "open"}, (path.name, node.lineno)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                value = node.func.value
                pair = (value.id if isinstance(value, ast.Name) else "", node.func.attr)
                assert pair not in {("torch", "load"), ("os", "system"), ("os", "popen")}, (path.name, node.lineno)


# ---- What is exported, and what is documented ----


def test_the_entry_points_of_c_are_declared_for_type_checkers():
    table = re.findall(r'^    \{"(\w+)", ', (ROOT / "csrc/module.c").read_text(), re.MULTILINE)
    constants = re.findall(r'AddIntConstant\(module, "(\w+)"', (ROOT / "csrc/module.c").read_text())
    declared = ast.parse((PACKAGE / "_native.pyi").read_text()).body
    names = {node.name for node in declared if isinstance(node, ast.FunctionDef)}
    values = {node.target.id for node in declared if isinstance(node, ast.AnnAssign)}
    public = {name for name in dir(_native) if not name.startswith("__")}
    methods = {name for name in table if callable(getattr(_native, name, None))}
    assert methods == names
    assert set(constants) == values
    assert methods | values == public


def test_the_cuda_library_exports_what_the_extension_looks_for(request: pytest.FixtureRequest):
    """Of the emulated build: its functions are those of wkv6_cuda.h, and those of the emulation."""
    if not shutil.which("nm"):
        pytest.skip("not tested: what the CUDA library exports, for lack of nm")
    library = request.getfixturevalue("emulated_cuda")
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines()}
    looked_for = set(re.findall(r'find\(o, "(\w+)"', (ROOT / "csrc/cuda_library.c").read_text()))
    declared = set(re.findall(r"^WKV6_CUDA_API[^(]*?(\w+)\(", (ROOT / "cuda/wkv6_cuda.h").read_text(), re.MULTILINE))
    assert looked_for == declared
    assert declared <= {name for name in exported if not name.startswith("wkv6_emulation")}
    assert {name for name in exported if name.startswith("wkv6_cuda")} == declared


def public_functions() -> list[tuple[str, types.FunctionType]]:
    found = {}
    for path in sorted(PACKAGE.glob("[a-z]*.py")):
        module = importlib.import_module(f"rwkv6_ops.{path.stem}")
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and name[0] != "_":
                found[f"{path.stem}.{name}"] = value
    return list(found.items())


def sections(doc: str) -> dict[str, str]:
    """The numpydoc sections by their headings."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[0::2], strict=True))


@pytest.mark.parametrize(("name", "function"), public_functions(), ids=[name for name, _ in public_functions()])
def test_public_functions_are_documented_to_the_last_parameter(name: str, function: types.FunctionType):
    """numpydoc: every parameter, with a shape where it is a tensor, what is returned, what is raised."""
    doc = sections(function.__doc__ or "")
    parameters = inspect.signature(function).parameters
    assert {"Returns", "Raises"} <= set(doc), f"{name}: sections {list(doc)}"
    headings = re.findall(r"^(\w[\w, ]*?)(?: :(.*))?$", doc.get("Parameters", ""), re.MULTILINE)
    described = {n: kind for names, kind in headings for n in names.split(", ")}
    wanted = {n for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    assert wanted <= set(described), f"{name}: nothing on {sorted(wanted - set(described))}"
    for n, p in parameters.items():
        if "Tensor" in str(p.annotation) and described.get(n):
            assert re.search(r"\[.*\]|like|shaped", described[n]), f"{name}: {n} : {described[n]} says no shape"


def test_the_operator_says_where_it_comes_from():
    assert "https://arxiv.org/abs/2404.05892" in rwkv6_ops.wkv6.__doc__


def test_the_example_of_the_operator_runs():
    import doctest

    test = doctest.DocTestFinder().find(rwkv6_ops.wkv6, globs={"torch": torch, "rwkv6_ops": rwkv6_ops})
    results = [doctest.DocTestRunner().run(t) for t in test]
    assert sum(r.attempted for r in results) > 0
    assert sum(r.failed for r in results) == 0


# ---- Commands and code in the documentation ----

DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_documented_commands_exist(path: Path):
    """make's targets, scripts, modules and the options given to scripts."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = path.read_text()
    code = "\n".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"^    (.*)$", text, re.MULTILINE))
    for target in re.findall(r"^make ([a-z][\w-]*)", code, re.MULTILINE):
        assert target in targets, f"make {target}"
    for script, rest in re.findall(r"python3? ((?:examples|benchmarks|tests|tools)/\S+\.py)([^\n#]*)", code):
        assert (ROOT / script).exists(), script
        for option in re.findall(r"(?<!\S)(--[\w-]+)", rest):
            assert f'"{option}"' in (ROOT / script).read_text(), (script, option)
    for name in re.findall(r"\]\(((?!http)[\w/.-]+\.\w+)\)", text):
        assert (path.parent / name).exists(), name


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readmes_code_runs_as_written():
    """In order, in one namespace, with the names that a reader would have: a model and what its loop starts from."""
    sys.modules["readme_model"] = module = types.ModuleType("readme_model")
    try:
        model = type("Model", (), {"__module__": "readme_model"})()
        namespace = {"sys": sys, "torch": torch, "rwkv6_ops": rwkv6_ops, "model": model}
        for block in blocks(ROOT / "README.md"):
            if "for t in range(T)" in block:
                assert_loop(block)
            else:
                exec(compile(block, "README.md", "exec"), namespace)
        assert module.rwkv6_linear_attention is rwkv6_ops.rwkv6_linear_attention
        assert namespace["x"].grad is not None
    finally:
        del sys.modules["readme_model"]


def assert_loop(block: str) -> None:
    """The loop that explains the operator is the operator."""
    T, K, V, scale = 5, 4, 3, 0.5
    r, k, w = (torch.randn(T, K, dtype=torch.float64) for _ in range(3))
    v, u = torch.randn(T, V, dtype=torch.float64), torch.randn(K, dtype=torch.float64)
    names = {"r": r, "k": k, "v": v, "w": w, "u": u, "scale": scale, "T": T, "exp": torch.exp}
    names |= {"o": torch.empty(T, V, dtype=torch.float64), "S": torch.zeros(K, V, dtype=torch.float64)}
    exec(compile(block, "README.md", "exec"), names)
    tokens = (x[None, :, None] for x in (r, k, v, w))
    o, state = rwkv6_ops.wkv6(*tokens, u[None], scale=scale, output_final_state=True)
    torch.testing.assert_close(names["o"], o[0, :, 0])
    torch.testing.assert_close(names["S"], state[0, 0])


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_code_in_the_documentation_is_python(path: Path):
    for block in blocks(path):
        compile(block, path.name, "exec")
