# SPDX-License-Identifier: Apache-2.0
"""`rwkv6_ops.distributed` with NCCL, a GPU a rank: equal to the float64 loop on one of them. tools/gpu.sh runs it:

torchrun --standalone --nproc-per-node N tools/gpu_distributed.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from rwkv6_ops import distributed, reference

TOKENS, H, K, V = 96, 2, 16, 24


def main() -> None:
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    r, k, w = torch.randn(3, 1, TOKENS, H, K, dtype=torch.float64)
    v, grad = torch.randn(2, 1, TOKENS, H, V, dtype=torch.float64)
    u = torch.randn(H, K, dtype=torch.float64)
    cuts = [0, 5, 5, TOKENS]
    leaves = [x.clone().requires_grad_() for x in (r, k, v, w, u)]
    o, _ = reference.wkv6(*leaves, cu_seqlens=cuts, decay="raw")
    want = torch.autograd.grad(o, leaves, grad)
    ends = [TOKENS * i // world for i in range(world + 1)]
    plan = distributed.plan(torch.tensor(cuts), [[(ends[i], ends[i + 1])] for i in range(world)], dist.group.WORLD)
    part = slice(ends[rank], ends[rank + 1])
    for exchange in ("all_gather", "transpose"):
        mine = [x[:, part].clone().requires_grad_() for x in (r, k, v, w)] + [u.clone().requires_grad_()]
        options = {"group": dist.group.WORLD, "plan": plan, "exchange": exchange, "decay": "raw"}
        got, _ = distributed.wkv6(*mine, **options)
        found = list(torch.autograd.grad(got, mine, grad[:, part]))
        dist.all_reduce(found[4])
        torch.testing.assert_close(got, o[:, part], rtol=1e-12, atol=1e-12)
        for x, y in zip(found, [*(x[:, part] for x in want[:4]), want[4]], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
        print(f"rank {rank} of {world}: {exchange} equals one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
