# SPDX-License-Identifier: Apache-2.0
"""The benchmark tool end to end on small problems: what it measures, what it refuses, what it writes."""
# ruff: noqa: E402 (the tool is imported from the checkout, where there is one)

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from oracle import assert_close

import rwkv6_ops

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("not tested: the benchmarks, which are in the checkout only", allow_module_level=True)
sys.path.append(str(ROOT))

from benchmarks import __main__ as tool
from benchmarks.calls import WrongResultError, calls
from benchmarks.memory import formula, operator_memory
from benchmarks.peers import PEERS, hf_loop, load, true_loop
from benchmarks.points import Point, operands


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
    return tool.main()


def test_run_and_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Every job leaves its figures; a second run has nothing to do; the report shows them with three plots."""
    file = tmp_path / "results" / "machine.json"
    assert run(monkeypatch, "run", "--quick", "--out", file) == 0
    stored = json.loads(file.read_text())
    points = {key: job for key, job in stored["jobs"].items() if "seconds" in job}
    assert len(points) == 7
    for job in points.values():
        for timing in job["seconds"].values():
            assert 0 < timing["min"] <= timing["median"]
        assert {"ours", "HF loop"} <= set(job["seconds"])
        assert set(job["left out"]) | set(job["seconds"]) == {"ours", *(peer.name for peer in PEERS)}
    assert set(stored["machine"]) >= {"cpu", "gpu", "isa", "torch", "python", "versions", "build"}
    capsys.readouterr()
    assert run(monkeypatch, "run", "--quick", "--out", file) == 0
    assert "ns a token" not in capsys.readouterr().out

    pytest.importorskip("matplotlib", reason="not tested: the report, which needs matplotlib")
    assert run(monkeypatch, "report", "--results", file.parent, "--docs", tmp_path) == 0
    text = (tmp_path / "benchmarks.md").read_text()
    images = re.findall(r"\]\((.*\.png)\)", text)
    assert len(images) == 3
    for image in images:
        assert (tmp_path / image).read_bytes().startswith(b"\x89PNG")
    ours = points["forward B1 T64 H2 D64 float32 1thr cpu"]["seconds"]["ours"]["min"]
    assert f"| {1e9 * ours / 128:.0f} |" in text


def test_a_run_stops_when_its_time_is_over_and_is_resumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    file = tmp_path / "machine.json"
    assert run(monkeypatch, "run", "--quick", "--out", file, "--seconds", "0") == 0
    assert "10 of 10 left" in capsys.readouterr().out
    assert run(monkeypatch, "run", "--quick", "--out", file, "--seconds", "60") == 0
    assert len(json.loads(file.read_text())["jobs"]) == 10


def wrong_output(*x: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    o, state = right(*x, **options)
    return o * (1 + 1e-5), state


def wrong_gradient(*x: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    return right(*x[:3], x[3].detach() + 0 * x[3], *x[4:], **options)


right = rwkv6_ops.wkv6


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(rwkv6_ops, "wkv6", wrong_output)
    file = tmp_path / "machine.json"
    assert run(monkeypatch, "run", "--quick", "--out", file) == 1
    assert not file.exists()
    assert "WRONG, not timed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "pass_", "what"),
    [(wrong_output, "forward", "o"), (wrong_output, "decode", "o"), (wrong_gradient, "both", "dw")],
)
def test_a_point_with_a_wrong_result_is_refused(wrong, pass_: str, what: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rwkv6_ops, "wkv6", wrong)
    with pytest.raises(WrongResultError, match=rf"^{pass_} .*: {what}: relative error .*: not timed$"):
        calls(Point(pass_, 1, 1 if pass_ == "decode" else 24, 2))


@pytest.mark.parametrize("peer", [p for p in PEERS if not p.name.startswith("loop")], ids=lambda p: p.name)
def test_a_peer_computes_the_operator(peer):
    """`calls` compares each peer that is here with ours, and would raise."""
    point = Point("forward", 1, 24, 2)
    reason = peer.unfit(point) or load(peer)[1]
    if reason:
        pytest.skip(f"not tested: {peer.name}: {reason}")
    assert peer.name in calls(point, without=("loop, compiled",))[0]


def test_the_loop_gives_the_gradients_it_is_said_to_give():
    """Without `no_grad` all are true; with it r and u alone, and w gets none."""
    inputs = [x.requires_grad_() for x in operands(Point("both", 2, 20, 3, D=8))]
    do = torch.randn(2, 20, 3, 8, generator=torch.Generator().manual_seed(1))
    want = torch.autograd.grad(rwkv6_ops.wkv6(*inputs)[0], inputs, do)
    got = torch.autograd.grad(true_loop(*inputs)[0], inputs, do)
    for name, a, b in zip("rkvwu", got, want, strict=True):
        assert_close(f"d{name}", a, b, 1e-5)
    r, k, v, w, u = torch.autograd.grad(hf_loop(*inputs)[0], inputs, do, allow_unused=True)
    assert_close("dr", r, want[0], 1e-5)
    assert_close("du", u, want[4], 1e-5)
    assert w is None
    for gradient, true in ((k, want[1]), (v, want[2])):
        assert (gradient - true).norm() > 0.3 * true.norm()


def test_training_memory_is_what_the_formula_says():
    point = Point("both", 1, 1024, 8)
    measured = operator_memory(point, loops=False)["ours"]
    if measured is None:
        pytest.skip("not tested: peak memory, which this system does not tell")
    assert measured <= 1.1 * formula(point)


def test_the_profile_of_a_model_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """With the loop most calls are the operator's, forward and backward; with ours a few of equally many others."""
    pytest.importorskip("numpy", reason="not tested: the model, which needs numpy")
    from benchmarks import profile_model

    file = tmp_path / "machine.json"
    arguments = "profile_model --layers 2 --channels 32 --heads 2 --tokens 24"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), "--out", str(file), "--traces", str(tmp_path)])
    profile_model.main()
    steps = json.loads(file.read_text())["jobs"]["profile cpu"]["steps"]
    calls_of = {}
    for name, step in steps.items():
        ours = [row for row in step["operations"] if row["group"] == "WKV operator"]
        calls_of[name] = sum(row["calls"] for row in ours), sum(row["calls"] for row in step["operations"])
        names = {row["name"] for row in ours}
        assert (
            {"BmmBackward0", "torch::autograd::CopySlices"} <= names
            if name == "HF loop"
            else "_EagerWKV6Backward" in names
        )
    (loop, loop_all), (recurrent, recurrent_all), (chunk, _) = calls_of.values()
    assert loop > 0.6 * loop_all
    assert recurrent == chunk < 100
    assert abs((loop_all - loop) - (recurrent_all - recurrent)) < 0.3 * recurrent_all
    assert len(list(tmp_path.glob("profile-*.json.gz"))) == 3
