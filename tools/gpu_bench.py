# SPDX-License-Identifier: Apache-2.0
"""Times of the CUDA kernels by CUDA events, beside what the memory traffic alone would take and beside
flash-linear-attention where that is installed: a part of `make gpu`. A kernel that is wrong is not timed.

Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import rwkv6_ops
from rwkv6_ops import reference

# B, T, H, D of the published models, of published measurements, and of other head sizes.
SHAPES = (
    *((8, 4096, 64, 64), (8, 4096, 32, 64), (8, 2048, 40, 64), (16, 512, 12, 64), (4, 1024, 16, 64)),
    *((8, 1024, 8, 64), (1, 54, 32, 64), (1, 65536, 32, 64), (32, 1024, 16, 128), (8, 2048, 32, 32)),
)
LIMIT = 1e-2  # relative L2 error of bfloat16 results beyond which a kernel is wrong


def calls() -> dict[str, Callable]:
    """What is timed: calls of (r, k, v, w, u) that return (o, final_state)."""
    found = {
        "recurrent": partial(rwkv6_ops.wkv6, algorithm="recurrent"),
        "chunk": partial(rwkv6_ops.wkv6, algorithm="chunk"),
        "chunk, fast": partial(rwkv6_ops.wkv6, algorithm="chunk", precision="fast"),
        "chunk, exact": partial(rwkv6_ops.wkv6, algorithm="chunk", precision="exact"),
    }
    try:
        fla = importlib.import_module("fla.ops.rwkv6")
    except ImportError as error:
        print(f"flash-linear-attention is left out: {error}")
    else:
        found["FLA fused_recurrent"] = partial(fla.fused_recurrent_rwkv6, scale=1.0)
        found["FLA chunk"] = partial(fla.chunk_rwkv6, scale=1.0)
    return found


def tensors(B: int, T: int, H: int, D: int) -> list[Tensor]:
    """r, k, v, w and u that require grad, bfloat16."""
    r, k, v, w, u = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in (*[(B, T, H, D)] * 4, (H, D)))
    return [x.requires_grad_() for x in (r, k, v, -torch.exp(w), u)]


def error_of(call: Callable, leaves: list[Tensor]) -> float:
    """The largest relative L2 error of the output and of the gradients against float64."""
    grad_o = torch.randn_like(leaves[2])
    exact = [x.detach().double().requires_grad_() for x in leaves]
    o, want = call(*leaves)[0], reference.wkv6(*exact)[0]
    got = (o, *torch.autograd.grad(o, leaves, grad_o))
    true = (want, *torch.autograd.grad(want, exact, grad_o.double()))
    with torch.no_grad():
        return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, true, strict=True))


def microseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The least time of a call."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return min(times)


def both(call: Callable, leaves: list[Tensor]) -> tuple[float, float]:
    """Microseconds of the forward pass and of the backward pass."""
    with torch.no_grad():
        forward = microseconds(lambda: call(*leaves))
    o, _ = call(*leaves)
    grad_o = torch.randn_like(o)
    return forward, microseconds(lambda: torch.autograd.grad(o, leaves, grad_o, retain_graph=True))


def decode() -> float:
    """Microseconds of GPU time of one token, (B, H, D) = (1, 32, 64): a graph of a hundred."""
    r, k, v, w = (torch.randn(1, 32, 64, device="cuda") for _ in range(4))
    u, state = torch.zeros(32, 64, device="cuda"), torch.zeros(1, 32, 64, 64, device="cuda")
    rwkv6_ops.wkv6_step_(r, k, v, w, u, state, decay="raw")  # loads the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            rwkv6_ops.wkv6_step_(r, k, v, w, u, state, decay="raw")
    return microseconds(graph.replay) / 100


def bandwidth() -> float:
    """Bytes a microsecond that a copy moves, read and written."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / microseconds(lambda: y.copy_(x))


def main() -> None:
    torch.manual_seed(0)
    speed, timed = bandwidth(), {}
    print(f"{torch.cuda.get_device_name()}: copies {speed / 1e6:.2f} TB/s")
    for name, call in calls().items():
        error = error_of(call, tensors(2, 130, 3, 64))
        print(f"{name}: error {error:.1e}" + ("" if error < LIMIT else ", wrong: not timed"))
        if error < LIMIT:
            timed[name] = call
    print("\n| B, T, H, D | | forward us | backward us |\n|---|---|---|---|")
    for shape in SHAPES:
        leaves = tensors(*shape)
        tensor = leaves[0].numel() * leaves[0].element_size() / speed
        print(f"| {', '.join(map(str, shape))} | traffic alone | {5 * tensor:.0f} | {9 * tensor:.0f} |")
        for name, call in timed.items():
            forward, backward = both(call, leaves)
            print(f"| | {name} | {forward:.0f} | {backward:.0f} |")
    print(f"\ndecode (1, 1, 32, 64): {decode():.1f} us")


if __name__ == "__main__":
    main()
