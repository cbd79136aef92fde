# SPDX-License-Identifier: Apache-2.0
"""Where the time of a model's training step goes: with the loop, and with the operator in its place.

    python -m benchmarks.profile_model [--device cuda] [--layers L] [--channels C] [--tokens T] [--batch B]

A stack of RWKV-6 blocks (examples/rwkv6_lm.py) under torch.profiler, forward and backward, with the HF-style loop, with
`fused_recurrent_rwkv6` and with `chunk_rwkv6`. Adds the shares of the operations (on a GPU: of its kernels) to the
machine's file of results, from which `python -m benchmarks report` makes a table and a bar chart, and leaves a Chrome
trace of each in build/.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import rwkv6_lm
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import rwkv6_ops
from benchmarks import results
from benchmarks.machine import load, machine, machine_line
from benchmarks.peers import hf_loop

OPERATOR = "WKV operator"
# What any other operation is to a reader, by the first of these of which its name has a part.
GROUPS = {
    "matrix products": ("mm", "gemm", "cutlass"),
    "norms": ("norm",),
    "optimizer, loss": ("nll", "softmax", "embedding"),
}
REST = "element by element, copies, autograd"
_MARK = "the operator, forward"


def _as_fla(op: Callable) -> Callable:
    """A call of FLA's form behind the signature that the model asks for."""

    def wkv(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *, decay: str, **options: object) -> tuple:
        return op(r, k, v, -torch.exp(w) if decay == "raw" else w, u, scale=1.0, **options)

    return wkv


WAYS: dict[str, Callable] = {
    "HF loop": hf_loop,
    "fused_recurrent": _as_fla(rwkv6_ops.fused_recurrent_rwkv6),
    "chunk": _as_fla(rwkv6_ops.chunk_rwkv6),
}


def profile_model(wkv: Callable, config: rwkv6_lm.Config, B: int, T: int, device: str, trace: Path | None) -> dict:
    """Seconds of a training step of a new model without the profiler, and what the profiler says of another one: each
    operation's own seconds, calls and group."""
    torch.manual_seed(0)

    def marked(*operands: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
        with record_function(_MARK):
            return wkv(*operands, **options)

    model = rwkv6_lm.RWKV6(config, wkv=marked).to(device)
    tokens = torch.randint(config.vocab, (B, T + 1), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> float:
        begun = time.perf_counter()
        model.zero_grad()
        logits, _ = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    step()
    seconds = min(step() for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]) as profiler:
        step()
    if trace:
        trace.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    return {"seconds": seconds, "operations": _operations(list(profiler.events()), device)}


def _operations(events: list[FunctionEvent], device: str) -> list[dict]:
    """Own seconds and calls of each operation, by name and group, the largest first; on a GPU, of each kernel."""
    found: dict[tuple[str, str], list] = defaultdict(lambda: [0.0, 0])
    for name, group, seconds in _timed(events, device):
        found[group, name][0] += seconds
        found[group, name][1] += 1
    rows = [{"group": g, "name": n, "seconds": s, "calls": calls} for (g, n), (s, calls) in found.items()]
    return sorted(rows, key=lambda row: -row["seconds"])


def _timed(events: list[FunctionEvent], device: str) -> Iterator[tuple[str, str, float]]:
    """Name, group and own seconds of each event, or of each kernel that an event launched."""
    # Autograd numbers what it records; a backward event carries the number of the operation that it belongs to.
    recorded = {e.sequence_nr for e in events if e.sequence_nr >= 0 and _inside(e, _is_mark)}
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue  # kernels are counted where they are launched
        ours = _inside(event, lambda e: _is_mark(e) or _is_backward_of(e, recorded))
        timed = [(k.name, k.duration) for k in event.kernels] if device == "cuda" else []
        if device == "cpu":
            timed = [(event.name.removeprefix("autograd::engine::evaluate_function: "), event.self_cpu_time_total)]
        for name, microseconds in timed:
            yield name, OPERATOR if ours else _group(name), 1e-6 * microseconds


def _is_mark(event: FunctionEvent) -> bool:
    return event.name == _MARK


def _is_backward_of(event: FunctionEvent, recorded: set[int]) -> bool:
    if not event.name.startswith("autograd::engine::evaluate_function"):
        return False
    return event.sequence_nr in recorded or event.name.endswith("CopySlices")  # the loop alone writes into slices


def _inside(event: FunctionEvent | None, where: Callable[[FunctionEvent], bool]) -> bool:
    """Whether the event or one that it is part of is such a one."""
    while event is not None:
        if where(event):
            return True
        event = event.cpu_parent
    return False


def _group(name: str) -> str:
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), REST)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_model", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, default in (("layers", 4), ("channels", 512), ("heads", 8), ("tokens", 256), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="file of results (default: benchmarks/results/, by processor)")
    parser.add_argument("--traces", type=Path, default=Path("build"), help="folder for the Chrome traces")
    options = parser.parse_args()
    torch.set_num_threads(1)
    about = machine()
    print(machine_line(about))
    config = rwkv6_lm.Config(layers=options.layers, channels=options.channels, heads=options.heads)
    steps = {}
    for name, wkv in WAYS.items():
        trace = options.traces / f"profile-{name.replace(' ', '-').lower()}.json.gz"
        steps[name] = profile_model(wkv, config, options.batch, options.tokens, options.device, trace)
        total = sum(row["seconds"] for row in steps[name]["operations"])
        launches = sum(row["calls"] for row in steps[name]["operations"])
        print(f"\n{name}: {1e3 * steps[name]['seconds']:.0f} ms a step, {launches} operations; {trace}")
        for row in steps[name]["operations"][:12]:
            print(f"  {row['seconds'] / total:6.1%} {row['calls']:7d}  {row['group']:20s} {row['name'][:60]}")
    store = results.Results(options.out or results.default_path(about, options.device), about)
    shape = {name: getattr(options, name) for name in ("layers", "channels", "heads", "tokens", "batch")}
    store.add(f"profile {options.device}", {"shape": shape, "steps": steps}, load())
    print(f"\n{store.path}")


if __name__ == "__main__":
    main()
