# SPDX-License-Identifier: Apache-2.0
"""Training runs that can only come out right with right gradients, each beside a float64 loop or a known answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from corpus import draw_batch
from rwkv6_lm import RWKV6, Config, State
from torch import Tensor, nn

import rwkv6_ops
from rwkv6_ops import reference

SMALL = Config(channels=64, heads=2, mix_rank=16, decay_rank=16)


def algorithm(name: str, dtype: torch.dtype = torch.float32) -> Callable:
    """`wkv6` by one of its algorithms, its operands and output in `dtype`, whatever the model's is."""

    def wkv(r: Tensor, *others: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
        o, state = rwkv6_ops.wkv6(*(x.to(dtype) for x in (r, *others)), algorithm=name, **options)
        return o.to(r.dtype), state

    return wkv


def detached(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
    """The values of `wkv6`, and the gradients that the Hugging Face loop gives, at the speed of the operator.

    That loop moves its state on without gradients: k and v get theirs from the present token alone, w gets none, and
    so does an initial state but for the first token (here: none, which is the same where it is a constant).
    """
    before = {name: x.detach() if isinstance(x, Tensor) else x for name, x in options.items()}
    o, state = rwkv6_ops.wkv6(r, k.detach(), v.detach(), w.detach(), torch.zeros_like(u), **before)
    return o + (r * u * k).sum(-1, keepdim=True) * v, None if state is None else state.detach()


def small_model(wkv: Callable, dtype: torch.dtype = torch.float32, config: Config = SMALL) -> RWKV6:
    """A model that starts in the middle of things: RWKV's own output matrices of zeros would let no gradient reach
    r, k, v and w at first, and its embeddings of 1e-4 make the first steps too violent to follow to many digits."""
    torch.manual_seed(0)
    model = RWKV6(config, wkv=wkv)
    nn.init.uniform_(model.emb.weight, -0.02, 0.02)
    for block in model.blocks:
        for linear in (block.att.output, block.ffn.value, block.ffn.receptance):
            nn.init.orthogonal_(linear.weight, 0.5)
    return model.to(dtype)


@dataclass
class ParityRun:
    """Loss and gradient norm, before clipping, of each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def off(self, exact: ParityRun) -> tuple[float, float]:
        """The largest difference of a loss, and of a norm in relation to the exact one."""
        losses = max(abs(a - b) for a, b in zip(self.losses, exact.losses, strict=True))
        norms = max(abs(a / b - 1) for a, b in zip(self.norms, exact.norms, strict=True))
        return losses, norms


# Largest difference from the float64 loop over 50 steps: of a loss in nats, of a gradient norm in relation to itself.
PARITY_TOLERANCE = {torch.float32: (2e-5, 5e-6), torch.bfloat16: (5e-4, 2e-3)}


def parity_run(data: Tensor, wkv: Callable, dtype: torch.dtype = torch.float32, steps: int = 50) -> ParityRun:
    """Train a small model on stretches of `data`. At this learning rate training is not chaotic: what is exact stays
    together; at 1e-3 and above any two roundings drift apart."""
    model, run, draw = small_model(wkv, dtype), ParityRun(), torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99))
    for _ in range(steps):
        x, y = draw_batch(data, 4, 64, draw)
        logits, _ = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        run.losses.append(loss.item())
    return run


def exact_parity_run(data: Tensor, steps: int = 50) -> ParityRun:
    return parity_run(data, reference.wkv6, torch.float64, steps)


class TunedState(nn.Module):
    """A model that stays as it is, and the state it starts from, which is all that is trained."""

    def __init__(self, model: RWKV6) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.wkv = nn.ParameterList(x[0].clone() for x in model.initial_state(1).wkv)

    def forward(self, tokens: Tensor) -> Tensor:
        B = tokens.shape[0]
        blank = self.model.initial_state(B)
        state = State(blank.att_shift, blank.ffn_shift, [x.expand(B, *x.shape) for x in self.wkv])
        return self.model(tokens, state)[0]


def tune_state(
    model: RWKV6, data: Tensor, steps: int, learning_rate: float = 1.0, batch: int = 4, length: int = 64
) -> tuple[TunedState, list[float]]:
    """Train the initial state of `model` on `data`; the losses by step."""
    tuned, losses, draw = TunedState(model), [], torch.Generator().manual_seed(5)
    optimizer = torch.optim.Adam(tuned.wkv.parameters(), betas=(0.9, 0.99))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        x, y = draw_batch(data, batch, length, draw)
        loss = F.cross_entropy(tuned(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return tuned, losses


def segment_gradients(model: RWKV6, x: Tensor, y: Tensor, segment: int, truncated: bool) -> dict[str, Tensor]:
    """Gradients of the mean loss over [B, T], computed `segment` tokens at a time; `truncated`: each segment's loss
    reaches back to the segment's start only, else to the start of the text."""
    model.zero_grad()
    state, total = model.initial_state(x.shape[0]), 0
    for a, b in zip(x.split(segment, 1), y.split(segment, 1), strict=True):
        logits, state = model(a, state)
        loss = F.cross_entropy(logits.flatten(0, 1), b.flatten(), reduction="sum") / y.numel()
        if truncated:
            loss.backward()
            state = state.detach()
        else:
            total = total + loss
    if not truncated:
        total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Of any parameter's gradient, relative L2."""
    assert got.keys() == want.keys()
    return max(((got[n].double() - want[n].double()).norm() / want[n].double().norm()).item() for n in want)
