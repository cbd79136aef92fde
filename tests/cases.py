# SPDX-License-Identifier: Apache-2.0
"""One table of WKV-6 problems, run by every test on every instruction set and device, and by the benchmarks.

`CASES` covers lengths, head sizes, decays, dtypes, layouts and options one axis at a time, not their product. `make`
builds the tensors of a case from its name alone, so a case is the same problem wherever it runs.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("r", "k", "v", "w", "u", "initial_state")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
LAYOUTS = ("contiguous", "split", "transposed", "strided", "expanded")

# Largest relative L2 error against the float64 loop on the same inputs, by the dtype of the result.
# float32: some ten roundings of 6e-8 that add up at random. The backward pass reads states that carry such an error.
# float64: the same in units of 1.1e-16, with room for long sums.
# bfloat16, float16: half a unit in the last place of the result, which is the worst that rounding alone can do.
FORWARD_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
GRADIENT_TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

# CUDA's chunk kernels, precision="default". Where r, k or v is float32, operands of 16 significant bits: 5e-6 of a
# product. Where all three have 16 bits, operands of 11: 3e-4, in float32 results of theirs as well (WITH_SHORT_INPUTS),
# and the rounding of the result, 1.7e-3 to bfloat16.
WITH_SHORT_INPUTS = "all of r, k, v have 16 bits"
CUDA_CHUNK_TOLERANCE = {
    torch.float32: 1e-5,
    torch.float64: 1e-12,
    torch.bfloat16: 2e-3,
    torch.float16: 5e-4,
    WITH_SHORT_INPUTS: 4e-4,
}


@dataclass(frozen=True)
class Case:
    """One problem; `dtypes` are those of r, k, v, w and u, `decays` a name that `log_decays` knows."""

    name: str
    B: int = 1
    T: int = 17
    H: int = 2
    K: int = 8
    V: int = 8
    decays: str = "normal"
    raw: bool = False
    scale: float = 1.0
    initial_state: bool = True
    reverse: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    dtypes: str = "f32 f32 f32 f32 f32"
    layout: str = "contiguous"

    def __str__(self) -> str:
        return self.name

    @property
    def N(self) -> int:
        return self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1


@dataclass
class Problem:
    """The tensors of a case, and the gradients with which its backward pass starts."""

    r: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    u: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    grad_o: Tensor
    grad_final_state: Tensor
    scale: float = 1.0
    reverse: bool = False
    decay: str = "log"

    @property
    def options(self) -> dict[str, object]:
        """The keyword arguments of `wkv6` besides the tensors."""
        return {"scale": self.scale, "reverse": self.reverse, "cu_seqlens": self.cu_seqlens, "decay": self.decay}


def log_decays(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Log decays [B, T, H, K] of the named kind."""
    w = -torch.exp(torch.randn(shape, generator=generator))
    chance = torch.rand(shape, generator=generator)
    if kind == "weak":
        return torch.full(shape, -1e-4)
    if kind == "zero":
        return torch.zeros(shape)
    if kind == "forget":
        return w.masked_fill(chance < 0.1, float("-inf"))
    if kind == "strong":  # a third of the channels
        w[..., ::3] = -20 - 40 * chance[..., ::3]
    elif kind == "spikes":  # -e^10 every 8th token
        w[:, 7::8] = -22026.4658
    elif kind == "mixed":
        w = w * 10 ** torch.randint(-5, 4, shape, generator=generator)
        w = w.masked_fill(chance < 0.05, float("-inf")).masked_fill(chance > 0.9, 0.0)
    elif kind != "normal":
        raise ValueError(f"decays: {kind!r} is not a kind of decay")
    return w


def lay_out(x: Tensor, layout: str) -> Tensor:
    """The values of x in the named layout; what lies between them is NaN. "expanded" repeats the first batch row."""
    nan = torch.full_like(x, float("nan"))
    middle = x.dim() // 2
    if layout == "split":  # one part of a tensor that holds four
        return torch.stack((nan, x, nan, nan), dim=middle).select(middle, 1)
    if layout == "strided":  # the last dimension too
        return torch.stack((nan, x, nan), dim=-1)[..., 1]
    if layout == "transposed":
        return x.transpose(middle - 1, middle).contiguous().transpose(middle - 1, middle)
    if layout == "expanded":
        return x[:1].expand_as(x)
    return x.contiguous()


def make(case: Case, device: str | torch.device | None = None) -> Problem:
    """The tensors of `case`, the same in every run and on every device; by default on torch's default device."""
    device = torch.get_default_device() if device is None else device
    g = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    r_type, k_type, v_type, w_type, u_type = (DTYPES[name] for name in case.dtypes.split())
    state_type = torch.float64 if r_type == torch.float64 else torch.float32
    keys, values, states = (
        (case.B, case.T, case.H, case.K),
        (case.B, case.T, case.H, case.V),
        (case.N, case.H, case.K, case.V),
    )

    def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.randn(shape, generator=g, device="cpu")
        return lay_out(x.to(device, dtype), case.layout)

    r, k, v, u = normal(keys, r_type), normal(keys, k_type), normal(values, v_type), normal(keys[2:], u_type)
    with torch.device("cpu"):
        w = log_decays(case.decays, keys, g)
    w = lay_out((torch.log(-w) if case.raw else w).to(device, w_type), case.layout)
    return Problem(
        *(r, k, v, w, u),
        initial_state=normal(states, state_type) if case.initial_state else None,
        cu_seqlens=None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens, device=device),
        grad_o=normal(values, v_type),
        grad_final_state=normal(states, state_type),
        scale=case.scale,
        reverse=case.reverse,
        decay="raw" if case.raw else "log",
    )


_LENGTHS = [
    Case(f"T{T}", B=2, T=T, K=64, V=64, raw=raw, reverse=reverse)
    for T, raw, reverse in (
        *((0, False, False), (1, True, False), (2, False, True), (3, True, True), (15, False, False), (16, True, True)),
        *(
            (17, False, True),
            (63, True, False),
            (64, False, False),
            (65, False, True),
            (128, True, True),
            (130, True, False),
        ),
        (500, False, False),
    )
]
_HEAD_SIZES = [
    Case(f"K{K}V{V}T{T}", B=1 + (T < 100), T=T, H=H, K=K, V=V, raw=raw, initial_state=state, scale=K**-0.5)
    for K, V, T, H, raw, state in (
        *(
            (1, 1, 130, 3, False, True),
            (3, 5, 65, 2, True, False),
            (8, 8, 130, 5, True, True),
            (16, 7, 33, 1, False, False),
        ),
        *((32, 32, 130, 2, False, True), (60, 60, 17, 2, True, False), (64, 16, 130, 2, False, True)),
        *((64, 64, 1, 1, False, False), (100, 100, 33, 2, True, True), (128, 128, 65, 2, False, False)),
        *((256, 256, 17, 2, False, True), (256, 256, 500, 1, True, False), (288, 16, 500, 1, False, True)),
        *((5, 288, 31, 1, False, True), (64, 1, 31, 2, True, True), (1, 64, 31, 2, False, True)),
        # more channels than a block of the CUDA kernels holds
        *((520, 8, 17, 2, False, True), (8, 800, 17, 1, True, True), (600, 600, 5, 1, False, False)),
    )
]
_DECAYS = [
    Case(f"{kind}-{'raw' if raw else 'log'}", B=2, T=130, K=K, V=V, decays=kind, raw=raw, reverse=reverse)
    for kind, K, V, reverse in (
        *(("normal", 64, 64, True), ("weak", 64, 64, False), ("zero", 32, 32, False), ("strong", 64, 64, False)),
        *(("spikes", 64, 64, False), ("forget", 32, 32, True), ("mixed", 64, 64, False)),
    )
    for raw in (False, True)
] + [
    Case("weak-T500", T=500, K=64, V=64, decays="weak"),
    Case("zero-T500", T=500, K=32, V=64, decays="zero"),
    Case("strong-T500", T=500, K=64, V=64, decays="strong"),
    Case("mixed-T500", T=500, K=64, V=64, decays="mixed", raw=True, reverse=True),
]
_DTYPES = [
    Case(f"{'-'.join(dtypes.split())}-K{K}V{V}", B=2, T=65, K=K, V=V, dtypes=dtypes, raw=raw)
    for dtypes, K, V, raw in (
        *(("bf16 bf16 bf16 bf16 bf16", 64, 64, False), ("f16 f16 f16 f16 f16", 64, 64, True)),
        *(("bf16 bf16 bf16 f32 f32", 32, 32, True), ("f32 bf16 f16 bf16 f16", 16, 7, False)),
        *(("f16 f32 bf16 f16 bf16", 8, 8, True), ("bf16 f16 f32 bf16 f32", 60, 60, False)),
        *(("f64 f64 f64 f64 f64", 64, 64, False), ("f64 f64 f64 f64 f64", 3, 5, True)),
        *(("bf16 f16 bf16 f32 bf16", 530, 3, True), ("f64 f64 f64 f64 f64", 3, 400, False)),
    )
]
_LAYOUTS = [
    Case(
        f"{layout}-{dtypes[:4].strip()}-K{K}V{V}",
        B=2,
        T=T,
        H=3,
        K=K,
        V=V,
        layout=layout,
        dtypes=dtypes,
        reverse=reverse,
    )
    for layout in LAYOUTS[1:]
    for dtypes, T, K, V, reverse in (
        ("f32 f32 f32 f32 f32", 33, 64, 64, False),
        ("bf16 f16 f32 bf16 f16", 17, 32, 32, True),
        ("f64 f64 f64 f64 f64", 17, 8, 5, False),
    )
]
_SEQUENCES = [
    Case("varlen-empty", T=9, H=3, K=64, V=64, cu_seqlens=(0, 5, 5, 9)),
    Case("varlen-many", T=65, K=32, V=32, cu_seqlens=(0, 0, 1, 2, 17, 17, 64, 65, 65), reverse=True, raw=True),
    Case("varlen-long", T=500, H=1, K=64, V=64, cu_seqlens=(0, 130, 500), initial_state=False),
    Case("varlen-one", T=33, K=16, V=7, cu_seqlens=(0, 33), decays="mixed", dtypes="bf16 bf16 bf16 f32 f32"),
]
_BATCHES = [
    Case("B0", B=0, T=5),
    Case("B17", B=17, T=5, H=3, K=8, V=8, raw=True),
    Case("scale", B=2, T=33, K=32, V=32, scale=-0.37),
    Case("scale0", B=1, T=5, scale=0.0),
]

CASES = _LENGTHS + _HEAD_SIZES + _DECAYS + _DTYPES + _LAYOUTS + _SEQUENCES + _BATCHES
BY_NAME = {case.name: case for case in CASES}
