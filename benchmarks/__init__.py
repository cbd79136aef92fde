# SPDX-License-Identifier: Apache-2.0
"""How right and how fast the operator is on a machine, beside every other that runs there.

    python -m benchmarks run      # measure, into benchmarks/results/
    python -m benchmarks report   # docs/benchmarks.md with its plots, from what is there

points.py says what is measured, peers.py beside what, jobs.py how; tests/cases.py holds the problems that must come
out right before anything is timed.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
# Last, so that an installed rwkv6_ops comes before the source folder beside benchmarks/.
sys.path += [str(_ROOT), str(_ROOT / "tests"), str(_ROOT / "examples")]
