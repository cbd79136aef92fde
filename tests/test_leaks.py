# SPDX-License-Identifier: Apache-2.0
"""Nothing is kept: after many calls, right ones and wrong ones, no object and no memory is left over."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native import fuzz_objects

import rwkv6_ops
from rwkv6_ops import _native

B, H, D = 1, 1, 4
CALLS = 20_000  # of each kind: in all more than 100,000
ROUNDS = 10
R, U = torch.randn(B, 3, H, D), torch.randn(H, D)
W, STATE = -R.exp(), torch.zeros(B, H, D, D)
LEAF, CUTS = R.clone().requires_grad_(), torch.tensor([0, 1, 3])
TOKEN, OUT = R[:, 0].contiguous(), torch.empty(B, 3, H, D)
GRADS = [torch.empty_like(x) for x in (R, R, R, R, U, STATE)]
CHECKPOINTS, PARTS = torch.empty(3, H, D, D), torch.empty(B, H, D)


def train() -> None:
    o, state = rwkv6_ops.wkv6(LEAF, R, R, W, U, initial_state=STATE, output_final_state=True)
    torch.autograd.grad([o, state], LEAF, [R, STATE])


RIGHT = {
    "forward": lambda: rwkv6_ops.wkv6(R, R, R, W, U, output_final_state=True),
    "sequences": lambda: rwkv6_ops.wkv6(R, R, R, W, U, cu_seqlens=CUTS),
    "step": lambda: rwkv6_ops.wkv6_step_(TOKEN, TOKEN, TOKEN, TOKEN, U, STATE),
    "native forward": lambda: _native.forward(R, R, R, W, U, STATE, OUT, None, CHECKPOINTS, None, None, 1.0, 0, 1),
    "native backward": lambda: _native.backward(
        *(R, R, R, W, U, STATE, CHECKPOINTS, R, None, *GRADS, PARTS, None, None, None, 1.0, 0, 1)
    ),
    "names": lambda: (_native.isas(), _native.isas_built(), _native.isa(), _native.use_isa(_native.isa())),
}

# One for every place in module.c where a call is refused. The first thing wrong is what is named.
_GOOD = [R, R, R, W, U, None, OUT, None, None, None, None, 1.0, 0, 1]
_STEP = [R[:, :1], R[:, :1], R[:, :1], W[:, :1], U, STATE, OUT[:, :1], None, 1.0, 0, 1]


def _with(good: list, place: int, wrong: object) -> list:
    return [*good[:place], wrong, *good[place + 1 :]]


CROOKED = torch.frombuffer(bytearray(4 * R.numel() + 1), dtype=torch.float32, offset=1).view(R.shape)
WRONG = {
    "no tensor": (_native.forward, _with(_GOOD, 0, 1.5)),
    "too few": (_native.forward, _GOOD[:5]),
    "scale": (_native.forward, _with(_GOOD, 11, "1")),
    "large scale": (_native.forward, _with(_GOOD, 11, 10**400)),
    "flags": (_native.forward, _with(_GOOD, 12, "1")),
    "segment": (_native.forward, _with(_GOOD, 13, 0)),
    "large segment": (_native.forward, _with(_GOOD, 13, 2**31)),
    "dimensions": (_native.forward, _with(_GOOD, 0, R[0])),
    "shape": (_native.forward, _with(_GOOD, 2, R[:, :2])),
    "dtype": (_native.forward, _with(_GOOD, 1, R.long())),
    "mixed dtype": (_native.forward, _with(_GOOD, 1, R.double())),
    "device": (_native.forward, _with(_GOOD, 1, R.to("meta"))),
    "alignment": (_native.forward, _with(_GOOD, 1, CROOKED)),
    "no channels": (_native.forward, [x[..., :0] if i in (0, 1, 3, 4) else x for i, x in enumerate(_GOOD)]),
    "sizes": (
        _native.forward,
        [U.new_zeros(()).expand(*x.shape[:-1], 2**60) if i in (0, 1, 3, 4) else x for i, x in enumerate(_GOOD)],
    ),
    "expanded output": (_native.forward, _with(_GOOD, 6, OUT[:, :1].expand(1, 3, H, D))),
    "checkpoints": (_native.forward, _with(_GOOD, 8, CHECKPOINTS.transpose(2, 3))),
    "offsets": (_native.forward, _with(_GOOD, 10, torch.tensor([0, 2]))),
    "offsets' dtype": (_native.forward, _with(_GOOD, 10, CUTS.int())),
    "tokens": (_native.step, [R, R, R, W, *_STEP[4:6], OUT, *_STEP[7:]]),
    "state's dtype": (_native.step, _with(_STEP, 5, STATE.bfloat16())),
    "out's dtype": (_native.step, _with(_STEP, 6, OUT[:, :1].bfloat16())),
    "overlap": (_native.step, _with(_STEP, 6, STATE[:, :, :1])),
    "instruction set": (_native.use_isa, ["sse9"]),
    "instruction set's type": (_native.use_isa, [1]),
    "library": (_native.use_cuda_emulation, ["/nowhere/none.so"]),
    "library's type": (_native.use_cuda_emulation, [1]),
    "public": (rwkv6_ops.wkv6, [R, R, R[:, :2], W, U]),
    "public step": (rwkv6_ops.wkv6_step_, [TOKEN, TOKEN, TOKEN, TOKEN, U, STATE[0]]),
}


def refused(name: str) -> Callable[[], None]:
    function, arguments = WRONG[name]

    def call() -> None:
        try:
            function(*arguments)
        except (TypeError, ValueError, RuntimeError, OverflowError, OSError):
            return
        raise AssertionError(f"{name}: not refused")

    return call


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def counts() -> list[int]:
    """References to all that the calls are given, and to what they give back."""
    mine = [x for x in globals().values() if isinstance(x, torch.Tensor)] + [*GRADS, None, torch.Tensor, torch.float32]
    return [sys.getrefcount(x) for x in mine if x is not None]


def growth(call: Callable[[], object], calls: int) -> int:
    """Bytes that Python holds more after the calls than before."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(calls):
        call()
    gc.collect()
    return tracemalloc.get_traced_memory()[0] - before


def assert_nothing_is_kept(call: Callable[[], object], calls: int) -> None:
    """A leak grows in every round. What Python and autograd keep for later use, some 60 KB, is full after a few."""
    for _ in range(20):  # what is looked up or allocated once
        call()
    gc.collect()
    before, memory = counts(), resident()
    tracemalloc.start()
    for _ in range(ROUNDS):
        grown = growth(call, calls)
        if grown < calls * 4:
            break
    tracemalloc.stop()
    assert counts() == before
    assert grown < calls * 4, f"Python holds {grown} bytes more after {calls} calls, in each of {ROUNDS} rounds"
    assert resident() - memory < 8 << 20, f"the process has {resident() - memory} bytes more than before"


@pytest.mark.parametrize("name", RIGHT)
def test_calls_leave_nothing_behind(name: str):
    with torch.no_grad():
        assert_nothing_is_kept(RIGHT[name], CALLS)


def test_training_leaves_nothing_behind():
    assert_nothing_is_kept(train, CALLS // 5)


@pytest.mark.parametrize("name", WRONG)
def test_refused_calls_leave_nothing_behind(name: str):
    assert_nothing_is_kept(refused(name), CALLS // 20)


def test_any_objects_are_refused_or_computed():
    """Random objects, tensors of all kinds and liars: an exception of a known kind or an answer, never a crash."""
    outcomes = fuzz_objects.run(seconds=3.0)
    assert outcomes["returned"] > 0
    assert outcomes["TypeError"] > 0
    assert outcomes["ValueError"] > 0
