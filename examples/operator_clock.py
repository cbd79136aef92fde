# SPDX-License-Identifier: Apache-2.0
"""How much of a training step the operator takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


class OperatorClock:
    """The WKV operator with a stop-watch: `seconds` grows by the time its forward and backward passes take."""

    def __init__(self, wkv: Callable) -> None:
        self._wkv, self._started, self.seconds = wkv, 0.0, 0.0

    def __call__(self, *operands: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
        # Backward meets the marks in the opposite order: first that of the results, last that of the operands.
        operands = _OnBackward.apply(self._stop, *operands)
        self._start()
        o, final_state = self._wkv(*operands, **options)
        self._stop()
        return _OnBackward.apply(self._start, o, final_state)

    def _start(self) -> None:
        self._started = time.perf_counter()

    def _stop(self) -> None:
        self.seconds += time.perf_counter() - self._started


class _OnBackward(torch.autograd.Function):
    """The identity, which calls `mark` when its gradients come by."""

    @staticmethod
    def forward(ctx, mark: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark = mark
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.mark()
        return None, *grads
