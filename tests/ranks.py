# SPDX-License-Identifier: Apache-2.0
"""Processes that are the ranks of gloo groups, started once and given many checks.

A check is a function of a module in tests/, called as check(rank, group, *args) on every rank of a group of 1, 2, 3 or
4. Whatever it raises on any rank is raised here. Nothing hangs: groups have a timeout, and ranks that do not answer
are killed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

WORLD = 4
GROUP_SECONDS = 120  # a rank that waits longer than this for another raises
ANSWER_SECONDS = 300


def _answer(pipe, groups: dict[int, dist.ProcessGroup], rank: int) -> None:
    """One check: its result, or the text of what it raised."""
    module, name, size, args = pipe.recv()
    try:
        pipe.send((True, getattr(importlib.import_module(module), name)(rank, groups[size], *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _rank(rank: int, world: int, store: str, seconds: float, pipe) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in range(1, world)}
    groups[world] = dist.group.WORLD
    pipe.send((True, None))
    while True:
        _answer(pipe, groups, rank)


class Ranks:
    """`world` processes; `seconds` is their groups' timeout."""

    def __init__(self, world: int = WORLD, seconds: float = GROUP_SECONDS) -> None:
        context = multiprocessing.get_context("spawn")
        self.store = tempfile.mkdtemp()
        self.processes, self.pipes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (rank, world, f"{self.store}/store", seconds, theirs)
            process = context.Process(target=_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self._collect(range(world))

    def _collect(self, ranks: range, seconds: float = ANSWER_SECONDS) -> list[tuple[bool, object]]:
        """(whether it went well, result or text) of each rank; a rank that has died or does not answer has a text."""
        answers = []
        for rank in ranks:
            try:
                ready = self.pipes[rank].poll(seconds)
                answers.append(self.pipes[rank].recv() if ready else (False, f"no answer within {seconds} s"))
            except (EOFError, ConnectionError):
                answers.append((False, "died"))
        return answers

    def answers(self, size: int, check: Callable, *args: object) -> list[tuple[bool, object]]:
        """What each rank of the group of that size has to say."""
        for rank in range(size):
            self.pipes[rank].send((check.__module__, check.__name__, size, args))
        return self._collect(range(size))

    def run(self, size: int, check: Callable, *args: object) -> list[object]:
        """The results of all ranks; AssertionError with the first failure."""
        answers = self.answers(size, check, *args)
        for rank, (well, what) in enumerate(answers):
            if not well:
                self.close()
                raise AssertionError(f"rank {rank} of {size}: {what}")
        return [what for _, what in answers]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
