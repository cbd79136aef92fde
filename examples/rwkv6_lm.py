# SPDX-License-Identifier: Apache-2.0
"""A complete RWKV-6 language model around the WKV operator.

Parameters carry the names and shapes of RWKV "world" checkpoints, so `RWKV6.from_state_dict(torch.load(path))` runs
one of those; `rwkv_cpp.load` reads the float files of rwkv.cpp. Whole sequences go through `rwkv6_ops.wkv6`, single
tokens through `rwkv6_ops.wkv6_step_`; both start from a `State` and leave one, so they can be mixed freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rwkv6_ops

MIXED = ("w", "k", "v", "r", "g")  # the order in which checkpoints stack the five token-shift adapters


@dataclass(frozen=True)
class Config:
    """Sizes of a model; the ranks are those of the two low-rank adapters."""

    vocab: int = 256
    channels: int = 128
    heads: int = 2
    layers: int = 2
    hidden: int | None = None  # of the channel mix; None: 3.5 * channels, rounded down to a multiple of 32
    mix_rank: int = 32
    decay_rank: int = 64
    # Of the raw decay at the start, from the slowest channel to the fastest.
    decay_range: tuple[float, float] = (-6.0, -1.0)


@dataclass
class State:
    """What a model remembers of a batch of sequences, one tensor a layer. `RWKV6.step` changes it in place."""

    att_shift: list[Tensor]  # [B, C], the last token's input of the time mix
    ffn_shift: list[Tensor]  # [B, C], the last token's input of the channel mix
    wkv: list[Tensor]  # [B, H, D, D], float32

    def detach(self) -> State:
        """The same values, cut off from the graph: what truncated backpropagation carries on."""
        return State(*([t.detach() for t in part] for part in (self.att_shift, self.ffn_shift, self.wkv)))


def _channel_ramp(channels: int) -> Tensor:
    return (torch.arange(channels) / channels).view(1, 1, -1)


def _shifted(x: Tensor, last: Tensor) -> Tensor:
    """x [B, T, C] one token later, beginning with `last` [B, C]."""
    return torch.cat((last.unsqueeze(1), x[:, :-1]), dim=1)


class TimeMix(nn.Module):
    """Attention's place in the block: data-dependent token shift and decay, the WKV operator, group norm and gate."""

    shift = staticmethod(_shifted)  # examples/parallel.py has another one

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        C, self.heads = config.channels, config.heads
        depth, rest = layer / max(1, config.layers - 1), 1 - layer / config.layers
        ramp = _channel_ramp(C)
        mix = {"x": ramp**rest, "w": ramp**rest, "k": ramp**rest, "v": ramp**rest + 0.3 * depth}
        mix |= {"r": ramp ** (0.5 * rest), "g": ramp ** (0.5 * rest)}
        for name, share in mix.items():
            self.register_parameter(f"time_maa_{name}", nn.Parameter(1 - share))
        self.time_maa_w1 = nn.Parameter(torch.zeros(C, 5 * config.mix_rank))
        self.time_maa_w2 = nn.Parameter(torch.empty(5, config.mix_rank, C).uniform_(-0.01, 0.01))

        position = (torch.arange(C) / max(1, C - 1)).view(1, 1, -1)
        slow, fast = config.decay_range
        self.time_decay = nn.Parameter(slow + (fast - slow) * position ** (0.7 + 1.3 * depth))
        self.time_decay_w1 = nn.Parameter(torch.zeros(C, config.decay_rank))
        self.time_decay_w2 = nn.Parameter(torch.empty(config.decay_rank, C).uniform_(-0.01, 0.01))
        zigzag = 0.1 * ((torch.arange(C) + 1) % 3 - 1)
        self.time_faaaa = nn.Parameter((depth * (1 - position.flatten()) + zigzag).view(self.heads, -1))

        self.receptance, self.key, self.value, self.gate, self.output = (nn.Linear(C, C, bias=False) for _ in range(5))
        # 64e-5: the usual 1e-5 for activations that RWKV divides by 8 before it normalises them.
        self.ln_x = nn.GroupNorm(self.heads, C, eps=64e-5)
        nn.init.constant_(self.ln_x.weight, ((1 + layer) / config.layers) ** 0.7)
        for linear, gain in ((self.receptance, 1.0), (self.key, 0.1), (self.value, 1.0), (self.gate, 0.1)):
            nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(self.output.weight)

    def operands(self, x: Tensor, last: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """(r, k, v, raw w), each [B, T, H, D], and the gate [B, T, C] for x [B, T, C] that follows `last` [B, C]."""
        B, T, C = x.shape
        dx = self.shift(x, last) - x
        adapt = torch.tanh((x + dx * self.time_maa_x) @ self.time_maa_w1).view(B * T, 5, -1).transpose(0, 1)
        adapt = torch.bmm(adapt, self.time_maa_w2).view(5, B, T, C).unbind()
        mixed = {n: x + dx * (getattr(self, f"time_maa_{n}") + m) for n, m in zip(MIXED, adapt, strict=True)}
        w = self.time_decay + torch.tanh(mixed["w"] @ self.time_decay_w1) @ self.time_decay_w2
        rkvw = (self.receptance(mixed["r"]), self.key(mixed["k"]), self.value(mixed["v"]), w)
        return tuple(y.view(B, T, self.heads, -1) for y in rkvw), F.silu(self.gate(mixed["g"]))

    def combine(self, o: Tensor, gate: Tensor) -> Tensor:
        """The time mix's output [B, T, C] from the operator's o [B, T, H, D]."""
        return self.output(self.ln_x(o.reshape(-1, gate.shape[-1])).view_as(gate) * gate)


class ChannelMix(nn.Module):
    """The feed-forward part: squared ReLU between two linear maps, under a sigmoid gate, with token shift."""

    shift = staticmethod(_shifted)

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        C, hidden = config.channels, config.hidden or int(config.channels * 3.5) // 32 * 32
        share = _channel_ramp(C) ** (1 - layer / config.layers)
        self.time_maa_k, self.time_maa_r = nn.Parameter(1 - share), nn.Parameter(1 - share)
        self.key, self.value = nn.Linear(C, hidden, bias=False), nn.Linear(hidden, C, bias=False)
        self.receptance = nn.Linear(C, C, bias=False)
        nn.init.orthogonal_(self.key.weight)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.receptance.weight)

    def forward(self, x: Tensor, last: Tensor) -> Tensor:
        dx = self.shift(x, last) - x
        hidden = torch.relu(self.key(x + dx * self.time_maa_k)) ** 2
        return torch.sigmoid(self.receptance(x + dx * self.time_maa_r)) * self.value(hidden)


class Block(nn.Module):
    """One layer: time mix, then channel mix, each added to what came in."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        if layer == 0:
            self.ln0 = nn.LayerNorm(config.channels)  # checkpoints keep the embedding's norm in the first block
        self.ln1, self.ln2 = nn.LayerNorm(config.channels), nn.LayerNorm(config.channels)
        self.att, self.ffn = TimeMix(config, layer), ChannelMix(config, layer)

    def forward(self, x: Tensor, wkv: Callable, *past: Tensor) -> tuple[Tensor, ...]:
        """x [B, T, C] after this layer and its three states after x, from x and the three states before it (att_shift,
        ffn_shift, wkv). `wkv` maps the operator's operands and its state to its output and its next state."""
        att_shift, ffn_shift, state = past
        a = self.ln1(x)
        rkvw, gate = self.att.operands(a, att_shift)
        o, state = wkv(*rkvw, self.att.time_faaaa, state)
        x = x + self.att.combine(o, gate)
        f = self.ln2(x)
        return x + self.ffn(f, ffn_shift), a[:, -1], f[:, -1], state


class RWKV6(nn.Module):
    """RWKV-6 ("Finch").

    Parameters
    ----------
    config : Config
        The sizes.
    wkv : callable
        The operator on whole sequences, with the signature of `rwkv6_ops.wkv6`; it gets raw decays (decay="raw").
    wkv_step : callable
        The operator on one token, with the signature of `rwkv6_ops.wkv6_step_`.
    checkpoint : bool
        Keep only the blocks' inputs for the backward pass, and run each block again there: less memory, more time.

    Initial values come from torch's global generator: `torch.manual_seed` before the constructor makes them repeatable.
    """

    def __init__(
        self,
        config: Config,
        wkv: Callable | None = None,
        wkv_step: Callable | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.checkpoint = config, checkpoint
        self.wkv, self.wkv_step = wkv or rwkv6_ops.wkv6, wkv_step or rwkv6_ops.wkv6_step_
        self.emb = nn.Embedding(config.vocab, config.channels)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.ln_out = nn.LayerNorm(config.channels)
        self.head = nn.Linear(config.channels, config.vocab, bias=False)
        nn.init.uniform_(self.emb.weight, -1e-4, 1e-4)
        nn.init.orthogonal_(self.head.weight, 0.5 * max(1.0, config.vocab / config.channels) ** 0.5)

    def initial_state(self, batch: int) -> State:
        """The state before the first token: zeros."""
        c, like = self.config, self.emb.weight
        att_shift, ffn_shift = ([like.new_zeros(batch, c.channels) for _ in range(c.layers)] for _ in range(2))
        wkv_dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        size = c.channels // c.heads
        wkv = [like.new_zeros(batch, c.heads, size, size, dtype=wkv_dtype) for _ in range(c.layers)]
        return State(att_shift, ffn_shift, wkv)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits [B, T, vocab] for tokens [B, T], T >= 1, and the state after them. `state` itself stays as it is."""
        # Zeros rather than None at the start of a text: one path, with or without a past.
        state = state or self.initial_state(tokens.shape[0])
        again = self.checkpoint and torch.is_grad_enabled()

        def wkv(*operands: Tensor) -> tuple[Tensor, Tensor]:
            return self.wkv(*operands[:5], initial_state=operands[5], output_final_state=True, decay="raw")

        def layer(block: Block, x: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
            return checkpoint(block, x, wkv, *past, use_reentrant=False) if again else block(x, wkv, *past)

        return self._stack(tokens, state, layer)

    @torch.inference_mode()
    def step(self, token: Tensor, state: State) -> Tensor:
        """Logits [B, vocab] after one more token [B] of each sequence; `state` moves on in place."""

        def wkv(*operands: Tensor) -> tuple[Tensor, Tensor]:
            return self.wkv_step(*operands, decay="raw"), operands[5]

        def layer(block: Block, x: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
            return block(x, wkv, *past)

        logits, after = self._stack(token.unsqueeze(1), state, layer)
        state.att_shift[:], state.ffn_shift[:] = after.att_shift, after.ffn_shift
        return logits[:, 0]

    def _stack(self, tokens: Tensor, state: State, layer: Callable) -> tuple[Tensor, State]:
        x, after = self.blocks[0].ln0(self.emb(tokens)), State([], [], [])
        for block, *past in zip(self.blocks, state.att_shift, state.ffn_shift, state.wkv, strict=True):
            x, att_shift, ffn_shift, wkv = layer(block, x, *past)
            after.att_shift.append(att_shift)
            after.ffn_shift.append(ffn_shift)
            after.wkv.append(wkv)
        return self.head(self.ln_out(x)), after

    @torch.inference_mode()
    def generate(
        self, prompt: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Iterator[int]:
        """Endless tokens after `prompt` [T]: the prompt in one go, then one `step` a token.

        Temperature 0 takes the likeliest token each time.
        """
        logits, state = self(prompt.unsqueeze(0))
        logits = logits[:, -1]
        while True:
            if temperature > 0:
                token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0]
            else:
                token = logits.argmax(-1)
            yield int(token)
            logits = self.step(token, state)

    @classmethod
    def from_state_dict(cls, weights: Mapping[str, Tensor], **operators: Callable) -> RWKV6:
        """The model a checkpoint describes, with its weights; sizes come from the tensors' shapes."""
        vocab, channels = weights["emb.weight"].shape
        first = "blocks.0.att."
        config = Config(
            vocab=vocab,
            channels=channels,
            heads=weights[first + "time_faaaa"].shape[0],
            layers=1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks.")),
            hidden=weights["blocks.0.ffn.key.weight"].shape[0],
            mix_rank=weights[first + "time_maa_w2"].shape[1],
            decay_rank=weights[first + "time_decay_w2"].shape[0],
        )
        model = cls(config, **operators).to(weights["emb.weight"].dtype)
        # Files differ in the ones around a vector ([C] or [1, 1, C]), never in the order of its values.
        shapes = {name: p.shape for name, p in model.named_parameters()}
        model.load_state_dict({name: t.reshape(shapes.get(name, t.shape)) for name, t in weights.items()})
        return model
