# SPDX-License-Identifier: Apache-2.0
"""Mixed calls from several Python threads for a long time, with forks, exceptions and interrupts in between.

    python tests/soak.py SECONDS

Every answer is compared, bit for bit, with the one from before the storm. A watchdog ends a run that stands still.
Memory may not have grown in the second half by more than the allocator's ups and downs. Prints one line; exit status 0
if all held.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from cases import NAMES, Case, Problem, make
from oracle import Answer, answer, assert_forward, assert_gradients, true_answer

import rwkv6_ops
from rwkv6_ops import _native

THREADS = 4
STANDSTILL = 120.0  # seconds without a single call done
GROWTH = 64 << 20  # bytes; the allocator's own ups and downs with four threads

PROBLEMS = [
    make(Case("soak", B=2, T=130, H=4, K=64, V=64, raw=True)),
    make(Case("soak strided", B=3, T=70, H=2, K=24, V=40, layout="strided", decays="mixed", reverse=True)),
    make(Case("soak sequences", T=200, H=3, K=32, V=32, cu_seqlens=(0, 0, 60, 61, 200))),
    make(Case("soak bf16", B=2, T=65, H=4, K=64, V=64, dtypes="bf16 bf16 bf16 f32 f32")),
    make(Case("soak f64", B=1, T=33, H=2, K=16, V=16, dtypes="f64 f64 f64 f64 f64")),
]
SPLIT = make(Case("soak split", B=1, T=400, H=1, K=64, V=256))  # fewer heads than threads: V is cut


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def same(a: Answer, b: Answer) -> bool:
    equal = torch.equal(a.o, b.o) and torch.equal(a.final_state, b.final_state)
    return equal and all(torch.equal(a.gradients[n], b.gradients[n]) for n in NAMES if b.gradients.get(n) is not None)


class Storm:
    """The calls, what they should give, and what has happened so far."""

    def __init__(self) -> None:
        self.want = [self.train(p) for p in PROBLEMS]
        for problem, want in zip(PROBLEMS, self.want, strict=True):
            truth = true_answer(problem)
            assert_forward(want.o, want.final_state, truth)
            assert_gradients(want.gradients, truth)
        self.want_split = rwkv6_ops.wkv6(*self.tensors(SPLIT))[0]
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stop = threading.Event()

    @staticmethod
    def tensors(p: Problem) -> tuple[torch.Tensor, ...]:
        return p.r, p.k, p.v, p.w, p.u

    @staticmethod
    def train(problem: Problem) -> Answer:
        return answer(rwkv6_ops.wkv6, problem)

    def training(self, chance: random.Random) -> bool:
        i = chance.randrange(len(PROBLEMS))
        return same(self.train(PROBLEMS[i]), self.want[i])

    def inference(self, chance: random.Random) -> bool:
        with torch.inference_mode():
            return torch.equal(rwkv6_ops.wkv6(*self.tensors(SPLIT))[0], self.want_split)

    def decoding(self, chance: random.Random) -> bool:
        """Token by token is the sequence, to rounding."""
        p = PROBLEMS[0]
        state, outputs = p.initial_state.clone(), []
        for t in range(20):
            r, k, v, w = (x[:, t] for x in (p.r, p.k, p.v, p.w))
            outputs.append(rwkv6_ops.wkv6_step_(r, k, v, w, p.u, state, decay="raw"))
        return torch.allclose(torch.stack(outputs, 1), self.want[0].o[:, :20], rtol=1e-4, atol=1e-4)

    def mistakes(self, chance: random.Random) -> bool:
        """Wrong calls raise, whatever else goes on."""
        p = PROBLEMS[chance.randrange(2)]
        good = dict(zip("rkvwu", self.tensors(p), strict=True))
        name = chance.choice("rkvwu")
        wrong = chance.choice([None, 1.5, good[name][:1], good[name].long(), good[name].double(), good["u"][0]])
        try:
            rwkv6_ops.wkv6(**good | {name: wrong})
        except (TypeError, ValueError):
            return True
        return False

    def operators(self, chance: random.Random) -> bool:
        """By way of the dispatcher, and with checkpoints of another length."""
        p = PROBLEMS[0]
        leaf = p.r.detach().requires_grad_()
        options = (1.0, False, False, True, "auto", "default", chance.choice([1, 7, 64, 1000]))
        o = torch.ops.rwkv6_ops.wkv6_forward(leaf, p.k, p.v, p.w, p.u, None, None, *options)[0]
        return bool(torch.autograd.grad(o.sum(), leaf)[0].isfinite().all())

    def fork(self, chance: random.Random) -> bool:
        """A child computes the same; nothing but the operator may run on the pool there. Errors need no words."""
        child = os.fork()
        if child == 0:
            faulthandler.cancel_dump_traceback_later()
            torch.set_num_threads(1)
            with torch.inference_mode():
                equal = torch.equal(rwkv6_ops.wkv6(*self.tensors(SPLIT))[0], self.want_split)
            os._exit(0 if equal else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def work(self, seed: int, kinds: list[Callable[[random.Random], bool]]) -> None:
        """One thread: calls until told to stop."""
        chance = random.Random(seed)
        torch.set_num_threads(chance.choice([1, 2]))
        while not self.stop.is_set():
            kind = chance.choice(kinds)
            try:
                right = kind(chance)
            except Exception as error:
                right = False
                self.wrong.append(repr(error))
            self.done[kind.__name__] += 1
            if not right:
                self.wrong.append(kind.__name__)
                self.stop.set()


def interrupted_training(storm: Storm) -> None:
    """In the main thread, which SIGINT reaches: a call that it breaks off leaves nothing behind."""
    try:
        if not storm.training(random):
            storm.wrong.append("training in the main thread")
            storm.stop.set()
        storm.done["training"] += 1
    except KeyboardInterrupt:
        storm.done["interrupt"] += 1


def interrupts(storm: Storm) -> None:
    chance = random.Random(0)
    while not storm.stop.wait(chance.uniform(0.005, 0.08)):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def watch(storm: Storm) -> None:
    before = -1
    while not storm.stop.wait(STANDSTILL):
        now = sum(storm.done.values())
        if now == before:
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)
        before = now


def run(seconds: float) -> tuple[Storm, int]:
    """The storm after so many seconds, and by how many bytes the process grew in the second half."""
    torch.set_num_threads(2)
    storm = Storm()
    calls = [storm.training, storm.inference, storm.decoding, storm.mistakes, storm.operators]
    workers = [threading.Thread(target=storm.work, args=(i, calls)) for i in range(THREADS - 1)]
    workers.append(threading.Thread(target=storm.work, args=(THREADS, [*calls, storm.fork])))
    helpers = [threading.Thread(target=f, args=(storm,), daemon=True) for f in (interrupts, watch)]
    begin, early = time.monotonic(), 0
    for thread in (*workers, helpers[1]):
        thread.start()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    helpers[0].start()
    while True:
        try:
            while (now := time.monotonic() - begin) < seconds and not storm.stop.is_set():
                if not early and now > seconds / 2:
                    gc.collect()
                    early = resident()
                interrupted_training(storm)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            break
        except KeyboardInterrupt:  # between two calls
            continue
    storm.stop.set()
    for thread in workers:
        thread.join(STANDSTILL)
        if thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            os._exit(3)
    signal.signal(signal.SIGINT, handler)
    if not all(same(storm.train(p), want) for p, want in zip(PROBLEMS, storm.want, strict=True)):
        storm.wrong.append("values at the end")
    gc.collect()
    return storm, resident() - early


def main() -> int:
    storm, growth = run(float(sys.argv[1]))
    done = ", ".join(f"{count} {name}" for name, count in sorted(storm.done.items()))
    print(f"{done}; grown by {growth / 2**20:.1f} MB; wrong: {storm.wrong[:5] or 'nothing'}; {_native.isa()}")
    return bool(storm.wrong) or growth > GROWTH


if __name__ == "__main__":
    sys.exit(main())
