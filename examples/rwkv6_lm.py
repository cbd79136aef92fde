# SPDX-License-Identifier: Apache-2.0
"""A complete RWKV-6 language model around the WKV operator.

Parameters carry the names and shapes of RWKV "world" checkpoints, so `RWKV6.from_state_dict(torch.load(path))` runs
one of those; `load_rwkv_cpp` reads the float files of rwkv.cpp. Whole sequences go through `rwkv6_ops.wkv6`, single
tokens through `rwkv6_ops.wkv6_step_`; both start from a `State` and leave one, so they can be mixed freely.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    decay_range: tuple[float, float] = (
        -6.0,
        -1.0,
    )  # of the raw decay at the start, from the slowest channel to the fastest


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
        dx = _shifted(x, last) - x
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
        dx = _shifted(x, last) - x
        hidden = torch.relu(self.key(x + dx * self.time_maa_k)) ** 2
        return torch.sigmoid(self.receptance(x + dx * self.time_maa_r)) * self.value(hidden)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        if layer == 0:
            self.ln0 = nn.LayerNorm(config.channels)  # checkpoints keep the embedding's norm in the first block
        self.ln1, self.ln2 = nn.LayerNorm(config.channels), nn.LayerNorm(config.channels)
        self.att, self.ffn = TimeMix(config, layer), ChannelMix(config, layer)


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

    Initial values come from torch's global generator: `torch.manual_seed` before the constructor makes them repeatable.
    """

    def __init__(self, config: Config, wkv: Callable | None = None, wkv_step: Callable | None = None) -> None:
        super().__init__()
        self.config = config
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
        state = state or self.initial_state(tokens.shape[0])
        after = State([], [], [])

        def time_mix(att: TimeMix, layer: int, x: Tensor) -> Tensor:
            rkvw, gate = att.operands(x, state.att_shift[layer])
            # Zeros rather than None at the start of a text: one path, with or without a past.
            o, final = self.wkv(
                *rkvw, att.time_faaaa, initial_state=state.wkv[layer], output_final_state=True, decay="raw"
            )
            after.att_shift.append(x[:, -1])
            after.wkv.append(final)
            return att.combine(o, gate)

        def channel_mix(ffn: ChannelMix, layer: int, x: Tensor) -> Tensor:
            after.ffn_shift.append(x[:, -1])
            return ffn(x, state.ffn_shift[layer])

        return self._stack(tokens, time_mix, channel_mix), after

    @torch.inference_mode()
    def step(self, token: Tensor, state: State) -> Tensor:
        """Logits [B, vocab] after one more token [B] of each sequence; `state` moves on in place."""

        def time_mix(att: TimeMix, layer: int, x: Tensor) -> Tensor:
            rkvw, gate = att.operands(x, state.att_shift[layer])
            o = self.wkv_step(*rkvw, att.time_faaaa, state.wkv[layer], decay="raw")
            state.att_shift[layer] = x[:, -1]
            return att.combine(o, gate)

        def channel_mix(ffn: ChannelMix, layer: int, x: Tensor) -> Tensor:
            last, state.ffn_shift[layer] = state.ffn_shift[layer], x[:, -1]
            return ffn(x, last)

        return self._stack(token.unsqueeze(1), time_mix, channel_mix)[:, 0]

    def _stack(self, tokens: Tensor, time_mix: Callable, channel_mix: Callable) -> Tensor:
        x = self.blocks[0].ln0(self.emb(tokens))
        for layer, block in enumerate(self.blocks):
            x = x + time_mix(block.att, layer, block.ln1(x))
            x = x + channel_mix(block.ffn, layer, block.ln2(x))
        return self.head(self.ln_out(x))

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


def load_rwkv_cpp(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read an RWKV-6 file of rwkv.cpp (float32 or float16) as a state dict in the shapes of RWKV's own checkpoints.

    Raises
    ------
    ValueError
        If the file is not of that format, or its weights are quantised.
    """
    with open(path, "rb") as file:
        data = file.read()
    magic, version, *_ = struct.unpack_from("<6I", data)
    if magic != 0x67676D66 or version not in (100, 101):
        raise ValueError(f"{path}: magic {magic:#x}, version {version}, expected 0x67676d66 and 100 or 101")
    weights, at = {}, 24
    while at < len(data):
        dims, name_length, dtype = struct.unpack_from("<3I", data, at)
        if dtype > 1:
            raise ValueError(f"{path}: element type {dtype}, expected 0 (float32) or 1 (float16)")
        shape = struct.unpack_from(f"<{dims}I", data, at + 12)[::-1]
        at += 12 + 4 * dims
        name = data[at : at + name_length].decode()
        values = np.frombuffer(data, np.float16 if dtype else np.float32, int(np.prod(shape)), at + name_length)
        at += name_length + values.nbytes
        tensor = torch.from_numpy(values.reshape(shape).astype(np.float32))
        if name.endswith(("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2")):
            tensor = tensor.transpose(-1, -2).contiguous()  # rwkv.cpp multiplies from the other side
        elif name.endswith("time_faaaa"):
            tensor = tensor.flatten(1)
        weights[name] = tensor
    return weights
