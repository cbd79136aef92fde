# SPDX-License-Identifier: Apache-2.0
"""A trained RWKV-6 (12 layers, 64 channels, 8 heads of 8) runs and is fine-tuned with the operator.

Weights and golden logits are those of rwkv.cpp's tests and no part of this project: they lie beside the checkout.
"""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rwkv6_ops
from rwkv6_ops import reference

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "tiny-rwkv6"
sys.path.insert(0, str(ROOT / "examples"))

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="not tested: a trained model, whose weights (../shared/data/tiny-rwkv6) are not here"
)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    import rwkv_cpp

    return rwkv_cpp.load(DATA / "tiny-rwkv-6v0-1m-FP32.bin")


def model_with(weights: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, **operators):
    from rwkv6_lm import RWKV6

    return RWKV6.from_state_dict({name: x.to(dtype) for name, x in weights.items()}, **operators)


def golden() -> tuple[torch.Tensor, torch.Tensor]:
    """The three bytes and the logits after them."""
    logits = np.fromfile(DATA / "expected-logits-6v0-1m.bin", dtype="<f4")
    return torch.tensor([list(b'"in')]), torch.from_numpy(logits)


def test_whole_sequence_gives_the_golden_logits(weights: dict, isa: str):
    tokens, want = golden()
    with torch.no_grad():
        logits, _ = model_with(weights)(tokens)
    assert (logits[0, -1] - want).abs().max() < 1e-4


def test_step_by_step_gives_the_golden_logits(weights: dict, isa: str):
    tokens, want = golden()
    model = model_with(weights)
    state = model.initial_state(1)
    for token in tokens[0]:
        logits = model.step(token[None], state)
    assert (logits[0] - want).abs().max() < 1e-4


def test_the_state_of_a_sequence_carries_on_step_by_step(weights: dict, isa: str):
    text = torch.tensor([list(b"in the beginning was the word" * 3)])
    model = model_with(weights)
    with torch.no_grad():
        want, _ = model(text)
        _, state = model(text[:, :40])
    for t in range(40, text.shape[1]):
        logits = model.step(text[:, t], state)
        assert (logits - want[:, t]).abs().max() < 1e-3


def batches(count: int) -> list[torch.Tensor]:
    """`count` batches of 2 x 17 bytes of UTF-16 text, which the model was trained on."""
    text = np.frombuffer((ROOT / "tests/test_trained_model.py").read_text().encode("utf-16-le"), dtype=np.uint8)
    g = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(text) // 2 - 40, (count, 2), generator=g) * 2
    return [
        torch.stack([torch.from_numpy(text[i : i + 17].astype(np.int64)) for i in pair.tolist()]) for pair in starts
    ]


def loss_of(model, batch: torch.Tensor) -> torch.Tensor:
    logits, _ = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@pytest.fixture(scope="module")
def exact_run(weights: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of 20 steps with the float64 loop, and the gradients of the first step."""
    return fine_tune(model_with(weights, torch.float64, wkv=reference.wkv6))


def fine_tune(model) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, gradients = [], {}
    for batch in batches(20):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


def test_fine_tuning_follows_the_float64_loop(weights: dict, exact_run: tuple, isa: str):
    """Twenty steps of AdamW from the same weights: losses within 1e-4, every first gradient within 1e-4 relative."""
    losses, gradients = fine_tune(model_with(weights))
    want_losses, want_gradients = exact_run
    assert max(abs(a - b) for a, b in zip(losses, want_losses, strict=True)) < 1e-4
    assert sum(losses[10:]) < sum(losses[:10])
    for name, gradient in gradients.items():
        want = want_gradients[name]
        assert (gradient - want).norm() <= 1e-4 * want.norm(), name


def test_fine_tuned_logits_in_float64_are_those_of_the_loop(weights: dict):
    tokens, _ = golden()
    got, _ = model_with(weights, torch.float64)(tokens)
    want, _ = model_with(weights, torch.float64, wkv=reference.wkv6)(tokens)
    assert (got - want).abs().max() < 1e-10


def test_the_package_under_test_is_the_one_the_model_uses(weights: dict):
    assert model_with(weights).wkv is rwkv6_ops.wkv6
