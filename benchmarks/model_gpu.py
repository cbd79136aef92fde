# SPDX-License-Identifier: Apache-2.0
"""A model of the CUDA chunk kernels' time that needs no GPU: what the compiled kernels issue, and what they move.

    python benchmarks/model_gpu.py [--library librwkv6_cuda.so | --cubin a.cubin ...] [--measured times.json]

For each kernel instance found it counts, from the machine code, the instructions that a warp issues for a chunk of 16
tokens: those of the innermost loop that has the kernel's two barriers, without the paths that a chunk of finite
16-bit values on aligned rows does not take. From these, the kernel's occupancy and the bytes that equations need it
prints the time that each limit alone allows, for a few devices and shapes. It is a model: nothing in it was measured
on a GPU, waiting for memory and for each other is only in the share of issue slots that it takes for filled.

Needs cuobjdump (the CUDA toolkit's, or PyPI's nvidia-cuda-cuobjdump) on PATH. Time is the largest of

    issue    instructions a warp and chunk * warps / (4 schedulers * --issue-rate)
    shared   128-byte wavefronts of shared memory a chunk / (1 a cycle * --issue-rate)
    tensor   products a warp and chunk * warps * cycles of one / 4
    DRAM     bytes of inputs, outputs and (--training) checkpoints / bandwidth
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """Multiprocessors, clock in GHz (boost), bytes a second, KB of shared memory a multiprocessor."""

    name: str
    architecture: int
    multiprocessors: int
    clock: float
    bandwidth: float
    shared: int
    mma_cycles: float  # of one m16n8k16 of bfloat16 on one of the four tensor cores; a tf32 m16n8k8 takes as long


DEVICES = (
    Device("A100", 80, 108, 1.41, 1.75e12, 164, 8.0),
    Device("H100", 90, 132, 1.755, 3.0e12, 228, 8.0),
    Device("H200", 90, 132, 1.755, 4.3e12, 228, 8.0),
)
# B, T, H, D: a 7B model's layer, a 1.6B model's, a small batch, one long sequence
SHAPES = ((8, 4096, 64, 64), (8, 4096, 32, 64), (1, 4096, 32, 64), (1, 65536, 12, 64))
OPERANDS = ("fast", "default", "exact")

# What an instruction is, by the start of its mnemonic; the rest is "other".
CLASSES = {
    "mma": ("HMMA",),
    "LDSM": ("LDSM",),
    "LDS": ("LDS",),
    "STS": ("STS",),
    "global": ("LDG", "STG", "LDGSTS"),
    "shuffle": ("SHFL", "MOVM", "VOTE"),
    "float": ("FADD", "FMUL", "FFMA", "FSEL", "FSETP", "HADD", "MUFU"),
    "convert": ("F2FP", "F2F", "I2F"),
    "integer": ("IMAD", "IADD", "LEA", "LOP3", "SHF", "PRMT", "ISETP", "SEL", "MOV", "VIADD", "CS2R", "UIADD", "ULEA"),
    "wait": ("BAR", "DEPBAR", "BRA", "BSSY", "BSYNC", "WARPSYNC", "LDGDEPBAR", "NOP"),
}


@dataclass
class Kernel:
    """What one instance's loop over chunks holds."""

    name: str
    K: int
    operands: str
    tiles: int
    counts: Counter = field(default_factory=Counter)
    wavefronts: float = 0

    @property
    def warps(self) -> int:
        return self.K // 16 // self.tiles

    @property
    def issued(self) -> float:
        return sum(self.counts.values())


def class_of(mnemonic: str) -> str:
    base = mnemonic.split(".")[0]
    for name, starts in CLASSES.items():
        if any(base.startswith(start) for start in starts):
            return name
    return "other"


def wavefronts_of(mnemonic: str) -> int:
    """Passes over shared memory of one instruction without bank conflicts."""
    if mnemonic.startswith("LDSM"):
        return 4 if ".4" in mnemonic else 2 if ".2" in mnemonic else 1
    if mnemonic.startswith(("LDS", "STS")):
        return 4 if ".128" in mnemonic else 2 if ".64" in mnemonic else 1
    return 4 if mnemonic.startswith("LDGSTS") else 0


@dataclass
class Line:
    address: int
    predicate: str
    mnemonic: str
    target: int | None


def disassemble(path: Path) -> dict[str, list[Line]]:
    """The instructions of each kernel of a library or cubin."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        sys.exit("model_gpu: no cuobjdump on PATH: install the CUDA toolkit, or pip install nvidia-cuda-cuobjdump")
    text = subprocess.run([tool, "-sass", str(path)], capture_output=True, text=True, check=True).stdout
    kernels: dict[str, list[Line]] = {}
    lines: list[Line] = []
    for row in text.splitlines():
        if found := re.search(r"Function : (\S+)", row):
            lines = kernels.setdefault(found.group(1), [])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);", row):
            target = re.search(r"0x([0-9a-f]+)\s*$", found.group(4)) if found.group(3).startswith("BRA") else None
            lines.append(
                Line(
                    int(found.group(1), 16),
                    (found.group(2) or "").strip(),
                    found.group(3),
                    int(target.group(1), 16) if target else None,
                )
            )
    return kernels


def loop_over_chunks(lines: list[Line]) -> tuple[int, int]:
    """Indices of the smallest loop that holds both barriers of a chunk and its products."""
    at = {line.address: i for i, line in enumerate(lines)}
    loops = [(at[x.target], i) for i, x in enumerate(lines) if x.target in at and at[x.target] <= i]
    whole = [
        (first, last)
        for first, last in loops
        if sum(x.mnemonic.startswith("BAR.SYNC") for x in lines[first : last + 1]) >= 2
    ]
    if not whole:
        sys.exit("model_gpu: no loop with two barriers: this is not one of the chunk kernels")
    return min(whole, key=lambda loop: loop[1] - loop[0])


def weights(lines: list[Line], first: int, last: int, warps: int) -> list[float]:
    """How often a warp issues each instruction of the loop, for a chunk of finite bfloat16 on aligned rows with log
    decays. Such a chunk jumps over what reads float rows (LDS by the dozen), converts float16, fetches element by
    element, makes decays of raw ones, selects products one token at a time or stores checkpoints and unaligned rows.
    Products behind a branch, and the sums beside the diagonal, are one warp's."""
    at = {line.address: i for i, line in enumerate(lines)}
    weight = [1.0] * (last + 1 - first)
    for i in range(first, last + 1):
        target = at.get(lines[i].target) if lines[i].target is not None else None
        if not lines[i].predicate or target is None or not i < target <= last + 1:
            continue
        region = lines[i + 1 : target]
        names = Counter(x.mnemonic.split(".")[0] for x in region)
        inner_loop = any(x.target in at and i < at[x.target] <= at[x.address] for x in region if x.target is not None)
        half = any(x.mnemonic.startswith("HADD2.F32") for x in region)
        raw = names["MUFU"] >= 8 and names["FSEL"] >= 8
        of_one_warp = names["HMMA"] or (names["LDS"] >= 4 and names["FADD"] >= 4)
        floats = names["LDS"] >= 8 and not of_one_warp
        by_elements = inner_loop or names["STG"] >= 16 or names["LDG"]
        by_vectors = any(x.mnemonic.startswith(("LDGSTS", "STG.E.64")) for x in region)
        if half or raw or floats or (by_elements and not by_vectors):
            share = 0.0
        elif of_one_warp:
            share = 1 / warps
        else:
            continue
        for j in range(i + 1, target):
            weight[j - first] = min(weight[j - first], share)
    return weight


def kernels_of(path: Path) -> list[Kernel]:
    found = []
    for name, lines in disassemble(path).items():
        match = re.search(r"wkv6_(forward|backward)_chunkILi(\d+)E(?:Li\d+E)?L7operand(\d)E(?:Li(\d+)E)?", name)
        if not match:
            continue
        first, last = loop_over_chunks(lines)
        kernel = Kernel(match.group(1), int(match.group(2)), OPERANDS[int(match.group(3))], int(match.group(4) or 1))
        weight = weights(lines, first, last, kernel.warps)
        for line, share in zip(lines[first : last + 1], weight, strict=True):
            kernel.counts[class_of(line.mnemonic)] += share
            kernel.wavefronts += wavefronts_of(line.mnemonic) * kernel.warps * share
        found.append(kernel)
    return sorted(found, key=lambda x: (x.name, x.K, OPERANDS.index(x.operands)))


def bytes_of(kernel: Kernel, B: int, T: int, H: int, D: int) -> tuple[float, float]:
    """Least bytes of a call, and those of the checkpoints on top: 16-bit inputs and outputs, a state a 128 tokens."""
    element = 4 if kernel.operands == "exact" else 2
    rows = 5 if kernel.name == "forward" else 9
    return B * T * H * D * element * rows, B * H * T / 128 * D * D * 4


def times(
    kernel: Kernel, device: Device, shape: tuple[int, int, int, int], rate: float, training: bool
) -> dict[str, float]:
    """Microseconds that each limit alone takes."""
    B, T, H, _ = shape
    chunks = B * H * T / 16
    cycles_a_us = device.multiprocessors * device.clock * 1e3
    least, checkpoints = bytes_of(kernel, *shape)
    busy = min(1.0, B * H / device.multiprocessors)  # one block a sequence and head: fewer leave multiprocessors idle
    return {
        "issue": chunks * kernel.issued * kernel.warps / 4 / rate / cycles_a_us / busy,
        "shared": chunks * kernel.wavefronts / rate / cycles_a_us / busy,
        "tensor": chunks * kernel.counts["mma"] * kernel.warps * device.mma_cycles / 4 / cycles_a_us / busy,
        "DRAM": (least + checkpoints * training) / device.bandwidth * 1e6,
        "bound": least / device.bandwidth * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="librwkv6_cuda.so or cubins")
    parser.add_argument("--issue-rate", type=float, default=0.8, help="share of issue slots that is filled")
    parser.add_argument("--training", action="store_true", help="with the bytes of the checkpoints")
    parser.add_argument("--measured", type=Path, help="JSON of microseconds by 'device kernel operands BxTxHxD'")
    options = parser.parse_args()
    files = options.files or [Path(__file__).parent.parent / "rwkv6_ops" / "librwkv6_cuda.so"]
    measured = json.loads(options.measured.read_text()) if options.measured else {}
    kernels = [kernel for path in files for kernel in kernels_of(path)]
    print("A model, not yet run on a GPU.\n")
    print("| kernel | K | precision | warps | instructions a warp and chunk | products | wavefronts a chunk |")
    print("|---|---|---|---|---|---|---|")
    for x in kernels:
        counts = f"{x.issued:.0f} | {x.counts['mma']:.0f} | {x.wavefronts:.0f}"
        print(f"| {x.name} | {x.K} | {x.operands} | {x.warps} | {counts} |")
    print(f"\nMicroseconds, issue rate {options.issue_rate:.0%}\n")
    print("| device | B T H D | kernel | precision | issue | shared | tensor | DRAM | model | / bound | measured |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for device in DEVICES:
        for shape in SHAPES:
            for x in kernels:
                if shape[3] != x.K:
                    continue
                t = times(x, device, shape, options.issue_rate, options.training)
                model = max(t[name] for name in ("issue", "shared", "tensor", "DRAM"))
                words = " ".join(map(str, shape))
                key = f"{device.name} {x.name} {x.operands} {'x'.join(map(str, shape))}"
                columns = " | ".join(f"{t[name]:.0f}" for name in ("issue", "shared", "tensor", "DRAM"))
                print(
                    f"| {device.name} | {words} | {x.name} | {x.operands} | {columns} | {model:.0f} | "
                    f"{model / t['bound']:.2f} | {measured.get(key, '')} |"
                )


if __name__ == "__main__":
    main()
