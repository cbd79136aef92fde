# SPDX-License-Identifier: Apache-2.0
"""Python threads, forked processes and torch's own pool."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch
from cases import NAMES, Case, make
from oracle import answer, assert_close, call, inputs

import rwkv6_ops
from rwkv6_ops import _native

LARGE = Case("threads", B=2, T=2000, H=8, K=64, V=64)
SMALL = Case("many threads", B=4, T=130, H=8, K=32, V=32)


def same(a, b) -> bool:
    """Two answers are equal bit for bit."""
    gradients = (torch.equal(a.gradients[name], b.gradients[name]) for name in NAMES)
    return torch.equal(a.o, b.o) and torch.equal(a.final_state, b.final_state) and all(gradients)


def test_other_python_threads_run_during_a_call():
    """Nobody is made to give up the lock: the other thread counts during the call only if the call lets go of it."""
    problem = make(LARGE)
    o, counted, stop = torch.empty_like(problem.v), [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)  # gives up the lock

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        sys.setswitchinterval(1000.0)
        before = counted[0]
        _native.forward(*inputs(problem), o, None, None, None, None, 1.0, 0, 64)
        after = counted[0]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert after > before


@pytest.mark.parametrize("threads", [1, 2])
def test_several_python_threads_at_once_get_what_one_gets(threads: int, isa: str):
    torch.set_num_threads(threads)
    want = answer(rwkv6_ops.wkv6, make(SMALL))
    equal = []

    def work() -> None:
        torch.set_num_threads(threads)
        equal.extend(same(answer(rwkv6_ops.wkv6, make(SMALL)), want) for _ in range(4))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert equal == [True] * 16


def _in_child(problem, want, queue) -> None:
    """torch's own parallel loops do hang after a fork, so nothing large but the operator may run on two threads."""
    torch.use_deterministic_algorithms(False)  # fills new tensors with NaN
    got = answer(rwkv6_ops.wkv6, problem)
    torch.set_num_threads(1)
    queue.put(same(got, want))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_the_right_values_and_does_not_hang():
    """The pool's threads do not survive a fork: a child that waited for them would wait forever."""
    torch.set_num_threads(2)
    problem = make(SMALL)
    want = answer(rwkv6_ops.wkv6, problem)  # the pool is running now
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(problem, want, queue))
    child.start()
    child.join(timeout=60)
    hung = child.is_alive()
    if hung:
        child.kill()
        child.join()
    assert not hung
    assert child.exitcode == 0
    assert queue.get() is True


def test_the_parent_goes_on_after_a_fork():
    torch.set_num_threads(2)
    want = answer(rwkv6_ops.wkv6, make(SMALL))
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(timeout=60)
    assert same(answer(rwkv6_ops.wkv6, make(SMALL)), want)


class _Sequences(torch.utils.data.Dataset):
    """Computes its items with the operator, forward and backward, as a reward model or a feature extractor would."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        torch.use_deterministic_algorithms(False)  # in a worker: see _in_child
        got = answer(rwkv6_ops.wkv6, make(SMALL))
        return torch.stack([got.o[0, :, i].flatten(), got.gradients["w"][0, :, i].flatten()])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers_compute():
    """Workers are forked after the operator, and torch's pool, have run in the parent."""
    torch.set_num_threads(2)
    want = torch.stack([_Sequences()[i] for i in range(4)])
    loader = torch.utils.data.DataLoader(_Sequences(), batch_size=1, num_workers=2, timeout=60)
    assert torch.equal(torch.cat(list(loader)), want)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_child():
    """os.fork() in a forked child: the second one's answer comes back through both."""
    torch.set_num_threads(2)
    problem = make(SMALL)
    want = answer(rwkv6_ops.wkv6, problem)
    child = os.fork()
    if child == 0:
        torch.use_deterministic_algorithms(False)
        first = answer(rwkv6_ops.wkv6, problem)
        grandchild = os.fork()
        if grandchild == 0:
            second = answer(rwkv6_ops.wkv6, problem)
            torch.set_num_threads(1)
            os._exit(0 if same(second, want) else 1)
        torch.set_num_threads(1)
        status = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        os._exit(status if same(first, want) else 2)
    assert wait_for(child) == 0


def wait_for(child: int, seconds: float = 60) -> int | None:
    """The exit status of the process, None if it hangs (and is no more)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_replicas_in_threads_share_their_gradients():
    """As DataParallel runs them: a forward pass per thread on the same parameters, then one backward pass over all."""
    torch.set_num_threads(2)
    problem = make(SMALL)
    leaves = [x.requires_grad_() for x in inputs(problem)]
    outputs = [None] * 4

    def replica(i: int) -> None:
        outputs[i] = call(rwkv6_ops.wkv6, problem, leaves)

    workers = [threading.Thread(target=replica, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    want = answer(rwkv6_ops.wkv6, problem)
    flat = [x for pair in outputs for x in pair]
    gradients = torch.autograd.grad(flat, leaves, [problem.grad_o, problem.grad_final_state] * 4)
    for name, gradient in zip(NAMES, gradients, strict=True):
        assert_close(f"gradient of {name}", gradient / 4, want.gradients[name], 2e-7)


def test_switched_modes_belong_to_their_thread():
    """inference_mode in one thread leaves another one's training alone."""
    problem = make(SMALL)
    results = []

    def infer() -> None:
        with torch.inference_mode():
            results.append(call(rwkv6_ops.wkv6, problem, inputs(problem))[0])

    leaves = [x.detach().requires_grad_() for x in inputs(problem)]
    thread = threading.Thread(target=infer)
    thread.start()
    o, _ = call(rwkv6_ops.wkv6, problem, leaves)
    thread.join(timeout=120)
    assert o.requires_grad
    assert not results[0].requires_grad
    assert torch.equal(o, results[0])
