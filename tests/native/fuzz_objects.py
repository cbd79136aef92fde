# SPDX-License-Identifier: Apache-2.0
"""The entry points with random objects in place of tensors: python tests/native/fuzz_objects.py SECONDS [SEED]

Each call starts from a good one and replaces some arguments: by tensors of other shapes, strides, dtypes, devices and
alignments, by other Python objects, by objects that lie about themselves. It may raise an exception or return; what
it may not is crash, hang or keep memory. Under AddressSanitizer (make sanitize) reads out of bounds are crashes too.
Prints what came of the calls; the last line before a crash, with --verbose, is the call.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path

import torch

import rwkv6_ops
from rwkv6_ops import _native, _ops

DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
ALLOWED = (TypeError, ValueError, RuntimeError, NotImplementedError, IndexError, AttributeError, OverflowError)
ALLOWED += (MemoryError, KeyError, ZeroDivisionError, OSError, UnicodeError)


class Liar:
    """No tensor, whatever it says."""

    __dlpack_c_exchange_api__ = 42
    shape = (1, 2, 3, 4)
    dtype = torch.float32
    device = torch.device("cpu")

    @classmethod
    def __torch_function__(cls, *_):
        raise ValueError("no")

    def __getattr__(self, name):
        raise AttributeError(name)


class Hostile(type):
    def __getattribute__(cls, name):
        if "dlpack" in name:
            raise RuntimeError("hostile")
        return type.__getattribute__(cls, name)


class Subclass(torch.Tensor):
    pass


def tensor(chance: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of about that shape, laid out anyhow."""
    shape = list(shape)
    if shape and chance.random() < 0.15:
        shape[chance.randrange(len(shape))] = chance.choice([0, 1, 2, 3, 7, 65])
    if chance.random() < 0.05:
        shape = shape[: chance.randrange(len(shape) + 1)] + [1] * chance.randrange(3)
    dtype = chance.choice(DTYPES) if chance.random() < 0.3 else torch.float32
    kind = chance.random()
    if kind < 0.6:
        return torch.randn(shape).to(dtype)
    if kind < 0.7:
        return torch.zeros((), dtype=dtype).expand(shape)
    if kind < 0.75:
        large = [chance.choice([n, n, 2**10, 2**18]) if n > 1 else n for n in shape[:3]]
        return torch.zeros((), dtype=dtype).expand(large + shape[3:])
    if kind < 0.8:
        return torch.randn(shape).to(dtype).to("meta")
    if kind < 0.84:
        numel = torch.Size(shape).numel()
        buffer, offset = bytearray((numel + 1) * dtype.itemsize + 8), chance.randrange(9)
        return torch.frombuffer(buffer, dtype=dtype, offset=offset, count=max(numel, 1))[:numel].view(shape)
    if kind < 0.87:
        return torch.randn(shape).to(dtype).as_subclass(Subclass)
    if kind < 0.9 and not dtype.is_floating_point:
        return torch.randn(shape).to_sparse()
    x = torch.randn([n + 2 for n in shape]).to(dtype)
    for d in range(x.dim()):
        x = x.narrow(d, 1, shape[d])
    if x.dim() > 1 and chance.random() < 0.5:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return x


def anything(chance: random.Random) -> object:
    """No tensor of the right kind."""
    return chance.choice(
        [None, 1, -1, 2**70, 1.5, float("nan"), "r", b"r", "\ud800", (), [1, 2], {}, object(), len,
         Liar(), Liar, Hostile("H", (), {})(),
         torch.float32, torch.nn.Parameter(torch.zeros(2, 3)), torch.tensor(1.0), torch.zeros(0),
         torch.zeros(2, 3, dtype=torch.complex64).conj().imag, torch.zeros(3, requires_grad=True) * 2]
    )  # fmt: skip


def problem(chance: random.Random) -> dict[str, object]:
    B, T, H, K, V = (chance.choice(c) for c in ((0, 1, 1, 2), (0, 1, 5, 70), (1, 2), (1, 3, 16), (1, 5, 32)))
    keys, values = (B, T, H, K), (B, T, H, V)
    varlen = B == 1 and chance.random() < 0.4
    N = chance.randrange(4) if varlen else B
    cuts = torch.tensor([0, *sorted(chance.randrange(T + 1) for _ in range(N - 1)), T][: N + 1])
    if chance.random() < 0.2 and cuts.numel():
        cuts[chance.randrange(cuts.numel())] = chance.choice([-1, T + 1, 2**62, -(2**63)])
    good = {name: tensor(chance, keys) for name in "rkw"}
    good |= {"v": tensor(chance, values), "u": tensor(chance, (H, K)), "state": tensor(chance, (N, H, K, V))}
    good |= {"cu_seqlens": cuts if varlen else None, "keys": keys, "values": values, "N": N}
    return good


def calls(chance: random.Random, p: dict) -> tuple[object, list[object]]:
    """A function and positional arguments for it: of the C module, of the operators, or public."""
    (B, T, H, K), V, N = p["keys"], p["values"][3], p["N"]
    state = chance.choice([None, p["state"]])
    scale, flags = chance.choice([1.0, 1, -0.5, float("inf")]), chance.choice([0, 1, 2, 3, 4, 8, 12, 15, 255])
    segment = chance.choice([1, 3, 16, 64, 2**31 - 1, 2**31, 2**62, 0, -1])
    tensors = [p[name] for name in "rkvwu"]
    rows = B * T // segment if segment > 0 else 0
    new = [tensor(chance, shape) for shape in (p["keys"], p["keys"], p["values"], p["keys"], (H, K), (N, H, K, V))]
    checkpoints = torch.zeros(rows + chance.choice([0, 0, 2]), H, K, V)
    kind = chance.randrange(6)
    if kind == 0:
        outputs = [tensor(chance, p["values"]), chance.choice([None, new[5]]), chance.choice([None, checkpoints])]
        return _native.forward, [*tensors, state, *outputs, None, p["cu_seqlens"], scale, flags, segment]
    if kind == 1:
        grads = [chance.choice([None, x]) for x in (tensor(chance, p["values"]), p["state"], *new)]
        parts = None if grads[6] is None else torch.zeros(N, H, K)
        return _native.backward, [
            *tensors,
            state,
            checkpoints,
            *grads,
            parts,
            None,
            None,
            p["cu_seqlens"],
            scale,
            flags,
            segment,
        ]
    if kind == 2:
        token = [x[:, 0] if x.dim() == 4 and x.shape[1] else x for x in tensors[:4]]
        out = torch.empty(B, H, V)
        return _native.step, [*token, p["u"], p["state"], out, None, scale, flags & 2, 1]
    if kind == 3:
        options = (chance.random() < 0.5, False, chance.random() < 0.5, chance.choice(["auto", "chunk", "none"]))
        return _ops._forward_op, [*tensors, state, p["cu_seqlens"], scale, *options, "default", segment]
    if kind == 4:
        wanted = [chance.random() < 0.5 for _ in range(6)]
        grads = [chance.choice([None, tensor(chance, p["values"])]), chance.choice([None, p["state"]])]
        options = (scale, False, chance.random() < 0.5, "auto", "default", segment, wanted)
        return _ops._backward_op, [*tensors, state, p["cu_seqlens"], checkpoints, *grads, *options]
    return lambda *x: rwkv6_ops.wkv6(*x[:5], initial_state=x[5], cu_seqlens=x[6], output_final_state=True), [
        *tensors, state, p["cu_seqlens"]
    ]  # fmt: skip


def too_large(function: object, arguments: list[object]) -> bool:
    """Expanded to where an honest answer takes terabytes: only the C module, which allocates nothing, is asked."""
    allocates = function not in (_native.forward, _native.backward, _native.step)
    return allocates and any(isinstance(x, torch.Tensor) and x.numel() > 2**22 for x in arguments)


def run(seconds: float, seed: int = 0, verbose: bool = False) -> Counter[str]:
    """Calls for so many seconds; what came of them."""
    chance, outcomes, end = random.Random(seed), Counter(), time.monotonic() + seconds
    torch.manual_seed(seed)
    isas = _native.isas()
    while time.monotonic() < end:
        function, arguments = calls(chance, problem(chance))
        if chance.random() < 0.3:
            arguments[chance.randrange(len(arguments))] = anything(chance)
        if chance.random() < 0.02:
            arguments = arguments[: chance.randrange(len(arguments) + 1)]
        if too_large(function, arguments):
            outcomes["skipped: too large"] += 1
            continue
        _native.use_isa(chance.choice(isas))
        if verbose:
            shapes = [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in arguments]
            print(getattr(function, "__name__", function), shapes, flush=True)
        try:
            function(*arguments)
            outcomes["returned"] += 1
        except ALLOWED as error:
            outcomes[type(error).__name__] += 1
    for name in (b"\xff", "\ud800", 3, None, "avx9", "a" * 500):
        try:
            _native.use_isa(name)
        except ALLOWED as error:
            outcomes[type(error).__name__] += 1
    _native.use_isa(isas[0])
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--verbose", action="store_true", help="print each call before it is made")
    options = parser.parse_args()

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    run(options.seconds / 10, options.seed + 1)
    before = resident()
    outcomes = run(options.seconds, options.seed, options.verbose)
    print(f"{outcomes.total()} calls, grown by {resident() - before:.1f} MB:", dict(outcomes))


if __name__ == "__main__":
    main()
