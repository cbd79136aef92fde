# SPDX-License-Identifier: Apache-2.0
"""examples/train_text.py: it learns, and neither a break nor running blocks twice changes anything."""
# ruff: noqa: E402 (the examples are imported from the checkout, where there is one)

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
if not (ROOT / "examples").is_dir():
    pytest.skip("not tested: the examples, which are in the checkout only", allow_module_level=True)
sys.path.append(str(ROOT / "examples"))

import train_text
from corpus import Corpus
from rwkv6_lm import Config
from train_text import TextSettings, TextTrainer

MODEL = Config(channels=32, heads=2, mix_rank=8, decay_rank=8)
SETTINGS = TextSettings(model=MODEL, batch=4, length=48, steps=12, validate_every=4, validation_batches=1)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return Corpus(tokens[:-2000], tokens[-2000:])


def train(trainer: TextTrainer, until: int) -> TextTrainer:
    while trainer.steps < until:
        trainer.step()
    return trainer


def assert_same(a: TextTrainer, b: TextTrainer) -> None:
    assert a.curves.train == b.curves.train
    for (name, p), (_, q) in zip(a.model.named_parameters(), b.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("bf16", [False, True])
def test_a_resumed_training_is_the_unbroken_one(bf16: bool, corpus: Corpus, tmp_path: Path):
    settings = replace(SETTINGS, bf16=bf16)
    unbroken = train(TextTrainer(corpus, settings), 12)
    train(TextTrainer(corpus, settings), 5).save(tmp_path / "a.pt")
    resumed = TextTrainer(corpus, settings)
    resumed.resume(tmp_path / "a.pt")
    assert resumed.steps == 5
    assert_same(train(resumed, 12), unbroken)


def test_another_models_file_is_refused(corpus: Corpus, tmp_path: Path):
    TextTrainer(corpus, SETTINGS).save(tmp_path / "a.pt")
    other = TextTrainer(corpus, replace(SETTINGS, batch=2))
    with pytest.raises(ValueError, match="trained with batch 4, not 2"):
        other.resume(tmp_path / "a.pt")


def test_checkpointed_blocks_change_nothing(corpus: Corpus):
    plain, again = (TextTrainer(corpus, replace(SETTINGS, checkpoint_blocks=c)) for c in (False, True))
    assert_same(train(plain, 4), train(again, 4))


def test_it_learns_and_leaves_its_files(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """From the command line, in two runs: 30 steps take it below the entropy of byte frequencies."""
    monkeypatch.setattr(train_text, "load_corpus", lambda path: corpus)
    arguments = "train_text.py --channels 32 --batch 8 --length 64 --save-every 10 --learning-rate 0.01 --out"
    for more in (["--steps", "5"], ["--steps", "60", "--resume"]):
        monkeypatch.setattr(sys, "argv", [*arguments.split(), str(tmp_path), *more])
        assert train_text.main() == 0
    assert "going on after 5 steps" in capsys.readouterr().out
    curves = torch.load(tmp_path / "train_text.pt", weights_only=True)["curves"]
    assert curves["train"][-1][0] == 60
    assert curves["validation"][-1][1] < 0.95 * corpus.byte_entropy
