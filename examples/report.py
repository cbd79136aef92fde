# SPDX-License-Identifier: Apache-2.0
"""Show that training with the operator is right: run everything, and write docs/training.md with its plots.

    python examples/report.py [PART ...] [--again] [--write-only]

Parts that have results in examples/results/training.json are not run again unless asked for; all of them take about
half an hour on one core, most of it in the loop that ours is compared with.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

# Last, so that an installed rwkv6_ops comes before the source folder beside this one.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from corpus import load_corpus
from report_parts import PARTS, Store
from report_text import write

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Show that training with the operator is right.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--again", action="store_true", help="run parts that have results, too")
    parser.add_argument("--write-only", action="store_true", help="run nothing, write docs/training.md")
    parser.add_argument("--results", type=Path, default=ROOT / "examples" / "results" / "training.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: no such part, expected some of {', '.join(PARTS)}")
    torch.set_num_threads(1)
    store = Store(options.results)
    if not options.write_only:
        corpus = load_corpus(None)
        for name in options.parts or PARTS:
            if name in store.parts and not options.again:
                continue
            print(f"== {name}", flush=True)
            begun = time.perf_counter()
            store.add(name, PARTS[name](corpus), machine())
            print(f"   {time.perf_counter() - begun:.0f} s", flush=True)
    write(store, options.docs)
    print(options.docs / "training.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
