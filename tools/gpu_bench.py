# SPDX-License-Identifier: Apache-2.0
"""Times of the CUDA kernels by CUDA events, beside what the memory traffic alone would take: a part of `make gpu`.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import rwkv6_ops

SHAPES = ((8, 4096, 64, 64), (8, 4096, 32, 64), (1, 8192, 32, 64), (32, 1024, 16, 128), (8, 2048, 32, 32))  # B, T, H, D


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


def bandwidth() -> float:
    """Bytes a microsecond that a copy moves, read and written."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.numel() / microseconds(lambda: y.copy_(x))


def main() -> None:
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies {speed / 1e6:.2f} TB/s")
    print("|  B, T, H, D | forward us | traffic alone | backward us | traffic alone |\n|---|---|---|---|---|")
    for B, T, H, D in SHAPES:
        r, k, v, w = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        w = -torch.exp(w)
        leaves = [x.requires_grad_() for x in (r, k, v, w, torch.zeros(H, D, device="cuda"))]
        with torch.no_grad():
            forward = microseconds(lambda leaves=leaves: rwkv6_ops.wkv6(*leaves))
        o, _ = rwkv6_ops.wkv6(*leaves)
        grad_o = torch.randn_like(o)
        backward = microseconds(lambda o=o, g=grad_o, x=leaves: torch.autograd.grad(o, x, g, retain_graph=True))
        tensor = r.numel() * r.element_size()
        print(
            f"| {B}, {T}, {H}, {D} | {forward:.0f} | {5 * tensor / speed:.0f} "
            f"| {backward:.0f} | {9 * tensor / speed:.0f} |"
        )
    r, k, v, w = (torch.randn(1, 32, 64, device="cuda") for _ in range(4))
    u, state = torch.zeros(32, 64, device="cuda"), torch.zeros(1, 32, 64, 64, device="cuda")
    decode = microseconds(lambda: rwkv6_ops.wkv6_step_(r, k, v, w, u, state, decay="raw"))
    print(f"decode (1, 1, 32, 64): {decode:.1f} us")


if __name__ == "__main__":
    main()
