# SPDX-License-Identifier: Apache-2.0
"""The example's model takes what RWKV's own "world" checkpoints hold, name by name and shape by shape."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from rwkv6_lm import RWKV6

LAYERS, C, H, D, VOCAB, HIDDEN, MIX, DECAY = 2, 128, 2, 64, 96, 448, 32, 64

# As in the files, where vectors are [1, 1, C] and matrices as torch's linear layers have them.
OF_MODEL = {"emb.weight": (VOCAB, C), "ln_out.weight": (C,), "ln_out.bias": (C,), "head.weight": (VOCAB, C)}
OF_FIRST = {"ln0.weight": (C,), "ln0.bias": (C,)}
OF_LAYER = {
    **{f"{norm}.{part}": (C,) for norm in ("ln1", "ln2", "att.ln_x") for part in ("weight", "bias")},
    **{f"att.time_maa_{name}": (1, 1, C) for name in "xwkvrg"},
    "att.time_maa_w1": (C, 5 * MIX),
    "att.time_maa_w2": (5, MIX, C),
    "att.time_decay": (1, 1, C),
    "att.time_decay_w1": (C, DECAY),
    "att.time_decay_w2": (DECAY, C),
    "att.time_faaaa": (H, D),
    **{f"att.{name}.weight": (C, C) for name in ("receptance", "key", "value", "gate", "output")},
    "ffn.time_maa_k": (1, 1, C),
    "ffn.time_maa_r": (1, 1, C),
    "ffn.key.weight": (HIDDEN, C),
    "ffn.receptance.weight": (C, C),
    "ffn.value.weight": (C, HIDDEN),
}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    shapes = OF_MODEL | {f"blocks.0.{name}": shape for name, shape in OF_FIRST.items()}
    for layer in range(LAYERS):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in OF_LAYER.items()}
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) / 8 for name, shape in shapes.items()}


def test_a_world_checkpoint_is_loaded_name_by_name(weights: dict[str, torch.Tensor]):
    model = RWKV6.from_state_dict(weights)
    held = dict(model.named_parameters())
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name].flatten(), x.flatten()) for name, x in weights.items())
    logits, _ = model(torch.arange(9).unsqueeze(0))
    assert logits.shape == (1, 9, VOCAB)
    assert logits.isfinite().all()


def test_a_checkpoint_with_another_name_is_refused(weights: dict[str, torch.Tensor]):
    weights["blocks.1.att.time_mix_k"] = weights.pop("blocks.1.att.time_maa_k")
    with pytest.raises(RuntimeError, match=r"blocks\.1\.att\.time_mix_k"):
        RWKV6.from_state_dict(weights)
