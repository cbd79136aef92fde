# SPDX-License-Identifier: Apache-2.0
"""Breaks the CUDA kernels one way at a time and sees whether the tests notice: `make mutate`.

Each barrier, wait and commit of each kernel is deleted in turn; EDITS are mistakes that someone could make. (What
passes decays on is not among them: short problems do not show it. tests/test_decay.py does.) A mutant counts as caught
when the native driver fails, by itself in three orders of execution or under a sanitizer. Needs clang++-19.
An argument chooses the mutants whose names match it, a regular expression.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA = HERE.parent.parent / "cuda"
KERNELS = sorted(path.name for path in CUDA.glob("*_*.cuh"))
RUNS = (("plain", "0"), ("plain", "1"), ("plain", "2"), ("tsan", "0"), ("msan", "0"), ("asan", "0"))
RUNS_WITHOUT_BARRIER = (("tsan", "0"), *RUNS)  # what notices most of these, first
FLAGS = {"plain": "-O0"}  # the sanitizers' runs take longer than their builds: those are optimised
DOES_NOT_COMPILE = "does not compile"  # which is for the compiler to catch: the edit is to be written anew
CPU_SECONDS = 120  # far more than a run takes; a mutant may never end

# Which problems of the driver a mutant of a file has to fail; all where a file is not named.
PROBLEMS = {"recurrent_": "-chunk", "chunk_": "chunk"}

# (file, text, what to put in its place, what is wrong with that)
EDITS = (
    ("tokens.cuh", "count * pieces; i +=", "count * pieces - 1; i +=", "the last piece of a tile is not fetched"),
    ("tokens.cuh", "count * width; i +=", "(count + 1) * width; i +=", "a row beyond the tile is fetched"),
    ("tokens.cuh", "c >= width) {", "c > width) {", "a channel beyond the slice is read"),
    ("tokens.cuh", "reverse ? end - 1 : begin", "reverse ? end : begin", "reverse starts one token late"),
    ("tokens.cuh", "s.first / p.segment + c - 1", "s.first / p.segment + c", "checkpoints one place on"),
    ("tokens.cuh", "p.cu_seqlens ? 0 : n,", "n,", "sequence n looked for in batch row n"),
    ("tokens.cuh", "|| c >= width) return;", ") return;", "columns beyond V are stored"),
    ("tokens.cuh", "x.stride[0] + s.h * x.stride[1];", "x.stride[0];", "heads share their checkpoints"),
    ("recurrence.cuh", "t * at.columns + first_column, v", "t * at.columns, v", "v of another column"),
    ("recurrence.cuh", "if (row_lane < COLUMNS)", "if (row_lane < COLUMNS - 1)", "one sum is not written"),
    ("recurrence.cuh", "row(i) < K; }", "row(i) < K + 1; }", "a row beyond K is live"),
    ("recurrence.cuh", "has(group + i) ? next : real(0)", "next", "rows beyond K are not masked"),
    ("recurrence.cuh", "has(0) ? fma(bonus, v[c], sum[c]) : real(0)", "fma(bonus, v[c], sum[c])", "nor is their bonus"),
    ("recurrent_forward.cuh", "= a.p.segment - 1;", "= a.p.segment;", "checkpoints drift"),
    ("recurrent_forward.cuh", "(warp * a.at.tile + i) * a", "(warp * a.at.tile) * a", "token 0's sums"),
    ("recurrent_forward.cuh", "a.scale_enters ? 1 : scale", "scale", "scale twice in dv"),
    ("recurrent_forward.cuh", "thread.store_final();", "if (length > 0) thread.store_final();", "no state at T = 0"),
    ("recurrent_forward.cuh", "= 0; /* read by the same thread */", "+= 0;", "rests start as they happen to be"),
    ("recurrent_backward.cuh", "now.target > 0 ?", "now.target > 1 ?", "a tile is left out"),
    ("recurrent_backward.cuh", "first + t < count) walk_back", "first + t <= count) walk_back", "a token too many"),
    ("recurrent_backward.cuh", "row_warp == 0) to", "row_warp == 1) to", "v . do is not written"),
    ("recurrent_backward.cuh", "b.p.V; }", "b.p.V + 1; }", "a column beyond V is live"),
    ("recurrent_backward.cuh", "has(c) ? next : real(0)", "next", "columns beyond V are not masked"),
    ("recurrent_backward.cuh", "== static_cast<real>(-INFINITY) ? real(0) :", "> 0 ? real(0) :", "-inf in dx"),
    ("recurrent_backward.cuh", "a.adjoint + (a.whole ?", "a.adjoint + (!a.whole ?", "dv and G overlap"),
    ("recurrent_backward.cuh", "count - 1; t >= 0; t--) g", "count - 1; t > 0; t--) g", "dv of a token is left out"),
    ("recurrent_backward.cuh", "if (WHOLE) thread.store_adjoint", "if (!WHOLE) thread.store_adjoint", "no dS_0"),
    ("recurrent_backward.cuh", "if (column_lane >= 8) continue;", "", "lanes write others' sums"),
    ("recurrent_backward.cuh", "n += grad_u_warps", "n += grad_u_warps + 1", "sequences are left out of du"),
    ("recurrent_backward.cuh", "if (row >= width) continue;", "", "rows beyond K are stored"),
    ("recurrent_backward.cuh", "(b.s.n * a.p.H + b.s.h) * a.p.K", "b.s.h * a.p.K", "sequences share their part of du"),
    (
        "recurrent_backward.cuh",
        "a.sums = a.grad_u_low + a.rows;",
        "a.sums = a.grad_u_low;",
        "two shared arrays overlap",
    ),
    ("recurrent_step.cuh", "other < step_warps", "other < step_warps - 1", "the last warp's sum is left out"),
    ("recurrent_step.cuh", "if (column >= p.V) continue;", "", "columns beyond V are updated"),
    ("recurrent_state.cuh", "first_column + c < b.width)", "c < b.width)", "columns beyond V are stored"),
    ("recurrent_state.cuh", "row + i, 0)", "i, 0)", "the sums of every slice go to the first rows"),
    ("recurrent_state.cuh", "scale * x;", "x;", "the scale is left out"),
    ("chunk_common.cuh", "4 * j + at.p, at.g)", "4 * j + at.p, at.g ^ 1)", "tf32 rows of another token"),
    ("chunk_common.cuh", "k8 = at.high ? k4 : k4 * cousin;", "k8 = k4 * cousin;", "a decay too many in level 8"),
    ("chunk_common.cuh", "r4 = at.odd ? sibling : 1.f;", "r4 = at.odd ? 1.f : sibling;", "roles of level 4 exchanged"),
    (
        "chunk_common.cuh",
        "at.p * 2 + j < left ? y : 0.f",
        "at.p * 2 + j < left ? y : y",
        "a tail of raw decays forgets",
    ),
    ("chunk_common.cuh", "t <= row) d", "t < row) d", "the diagonal left out where v is not finite"),
    (
        "chunk_stage.cuh",
        "const bool exists = t < count;",
        "const bool exists = t <= count;",
        "a row beyond the sequence",
    ),
    ("chunk_stage.cuh", "at.odd * 8 + at.high * 4", "at.high * 8 + at.odd * 4", "columns of a row exchanged"),
    (
        "chunk_stage.cuh",
        "exists ? load_global(reinterpret_cast<const float",
        "true ? load_global(reinterpret_cast<const float",
        "floats beyond the sequence",
    ),
    ("chunk_forward.cuh", "at.g < 6);", "at.g < 5);", "r_t . k_{t-1} of the second half is not written"),
    (
        "chunk_forward.cuh",
        "const float other = f[i ^ 2].all;",
        "const float other = f[i].all;",
        "the wrong half's decay",
    ),
    ("chunk_forward.cuh", "g >= 4 && p < 2", "g >= 4", "level 4 writes over others"),
    ("chunk_forward.cuh", "half * 8 < left, out", "half * 8 <= left, out", "a row beyond the sequence is stored"),
    (
        "chunk_forward.cuh",
        "until_checkpoint = p.segment;\n      }",
        "until_checkpoint = p.segment + 16;\n      }",
        "checkpoints drift",
    ),
    ("chunk_forward.cuh", "saved += a.span_segments - 1;", "saved += a.span_segments;", "a span's state one place on"),
    ("chunk_forward.cuh", "slot + 1 == a.slots ? 0", "slot == a.slots ? 0", "a stage too many"),
    ("chunk_scan.cuh", "(s.length - 1) / a.span", "(s.length - 1) / a.span - 1", "the last span's state is not made"),
    ("launch_chunk.cu", "while (a.slots > 1 &&", "a.stage_bytes -= 16;\n  while (a.slots > 1 &&", "stages overlap"),
    ("chunk_backward.cuh", "if (!clean) return;", "return;", "zeros meet what is not finite"),
    ("chunk_backward.cuh", "if (spoilt) spoil(", "if (false) spoil(", "NaN is taken out of dr and dk"),
    ("chunk_backward.cuh", "dw[c][j] += whole + later[c]", "dw[c][j] += whole", "dw without r of the second half"),
    ("chunk_backward.cuh", "if (token >= at.g + 8)", "if (token >= at.g)", "scores of earlier tokens in dv"),
    ("chunk_backward.cuh", "g4 == at.high ? 0 :", "g4 != at.high ? 0 :", "level 4 takes the other pairs"),
    ("chunk_backward.cuh", "if (part == 0) this->store_initial();", "this->store_initial();", "every part stores dS_0"),
    (
        "chunk_backward_stage.cuh",
        "replays = ++chunk < last;",
        "replays = ++chunk < last - 1;",
        "a state is not made again",
    ),
    ("chunk_backward_stage.cuh", "t + row < s.length", "t + row <= s.length", "a row beyond the sequence is read"),
    ("chunk_backward_state.cuh", "at.p * 2 + j < s.length", "at.p * 2 + j < s.length + 16", "missing rows decay"),
    (
        "chunk_backward_spans.cuh",
        "part < parts_of_sequence(a, s)",
        "part + 1 < parts_of_sequence(a, s)",
        "du of a part left out",
    ),
    ("chunk_backward_spans.cuh", "before * d[i].of[0]", "before", "a border without a token's decay"),
    (
        "launch_chunk_backward.cu",
        "a.states + states * state_bytes,",
        "a.states + states * state_bytes - 16,",
        "too little memory",
    ),
    ("recurrent_parts.cuh", "part < a.count", "part < a.count - 1", "the last part is left out"),
    ("recurrent_parts.cuh", "if (i >= a.elements) return;", "", "sums beyond the last"),
    ("launch.cu", "cut(q.u, 1, keys.first(i));", "", "each part has the first one's u"),
    ("launch.cu", "scratch += values.count * bytes;", "scratch += bytes;", "parts overwrite each other"),
    ("launch.cu", "q.N = p.N * values.count;", "", "du of the first part alone"),
    ("launch.cu", "q.flags ^= WKV6_REVERSE;", "", "dv from the wrong end"),
    (
        "launch.cu",
        "int bytes = forward_layout(a, sizeof(real));",
        "int bytes = forward_layout(a, sizeof(real)) - 16;",
        "too little memory",
    ),
)


def mutants() -> list[tuple[str, str, str]]:
    """(what is wrong, file, its text)"""
    found = []
    for name in KERNELS:
        lines = (CUDA / name).read_text().splitlines(keepends=True)
        for i, line in enumerate(lines):
            call = re.search(r"(\w*_barrier|copy_async_wait\w*|copy_async_commit)(<\w+>)?\(\w*\);", line)
            if call:
                text = "".join((*lines[:i], line.replace(call.group(), "(void)0;"), *lines[i + 1 :]))
                found.append((f"{name}:{i + 1}: without {call.group(1)}", name, text))
    for name, old, new, what in EDITS:
        text = (CUDA / name).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"{name}: {old!r} is there {text.count(old)} times, expected once: bring EDITS up to date")
        found.append((f"{name}: {what}", name, text.replace(old, new)))
    return found


def build(kind: str, driver: Path, common: Path, sources: Path = CUDA) -> bool:
    flags = f"{FLAGS.get(kind, '-O1')} -w"  # a mutant may leave something unused
    settings = {"CUDA_SOURCES": str(sources), "CUDA_COMMON": str(common), "CUDA_FLAGS": flags}
    environment = {"CXX": "clang++-19", **os.environ, **settings}
    return subprocess.run([HERE / "cuda_build.sh", kind, driver], env=environment, check=False).returncode == 0


def caught_by(mutant: tuple[str, str, str], common: Path) -> str | None:
    """The run that fails, None if the mutant survives; DOES_NOT_COMPILE if it is no mutant."""
    what, name, text = mutant
    problems = next((some for start, some in PROBLEMS.items() if name.startswith(start)), "")
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "cuda"
        shutil.copytree(CUDA, sources)
        shutil.copytree(CUDA.parent / "csrc", Path(folder) / "csrc")
        (sources / name).write_text(text)
        for kind, order in RUNS_WITHOUT_BARRIER if what.endswith("_barrier") else RUNS:
            driver = Path(folder) / kind
            if not driver.exists() and not build(kind, driver, common, sources):
                return DOES_NOT_COMPILE
            command = [driver, order, "1", problems]
            run = subprocess.run(["prlimit", f"--cpu={CPU_SECONDS}", *command], env=environment, capture_output=True)
            if run.returncode:
                return f"{kind} {order}"
    return None


def main() -> int:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [m for m in mutants() if re.search(part, m[0])]
    found = {"SURVIVES": 0, "BROKEN": 0, "caught": 0}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        common = Path(folder)
        for kind in dict(RUNS):
            build(kind, common / kind, common)
        for mutant, how in zip(chosen, pool.map(lambda m: caught_by(m, common), chosen), strict=True):
            verdict = {None: "SURVIVES", DOES_NOT_COMPILE: "BROKEN"}.get(how, "caught")
            found[verdict] += 1
            print(f"{verdict}  {mutant[0]}  ({how})", flush=True)
    print(f"{found['SURVIVES']} of {len(chosen)} mutants survive, {found['BROKEN']} do not compile")
    return int(found["caught"] < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
