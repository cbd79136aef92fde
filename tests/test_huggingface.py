# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's two calls: their shapes, their forward values, and the gradients that their own loop does not give."""

import pytest
import torch
from cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE
from oracle import assert_close
from torch import Tensor

import rwkv6_ops

NAMES = ("receptance", "key", "value", "time_decay", "time_first", "state")
B, T, H, D = 2, 21, 3, 16


def cpu_call(*args):
    return rwkv6_ops.rwkv6_linear_attention_cpu(*args)


def training_call(*args):
    return rwkv6_ops.rwkv6_linear_attention(True, *args)


def inference_call(*args):
    return rwkv6_ops.rwkv6_linear_attention(False, *args)


CALLS = [cpu_call, training_call, inference_call]


def loop(r: Tensor, k: Tensor, v: Tensor, raw: Tensor, u: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The recurrence in this convention: r, k, v, raw [B, T, H*D], u [H, D], state [B, H, D, D] by key and value."""
    H, D = u.shape
    r, k, v, raw = (x.unflatten(-1, (H, D)) for x in (r, k, v, raw))
    state = r.new_zeros(r.shape[0], H, D, D) if state is None else state
    outputs = []
    for t in range(r.shape[1]):
        product = k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((r[:, t, :, :, None] * (state + u[:, :, None] * product)).sum(-2))
        state = torch.exp(-torch.exp(raw[:, t]))[..., None] * state + product
    return torch.stack(outputs, 1), state


def arguments(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(6)
    wide = [torch.randn(B, T, H * D, generator=g).to(dtype) for _ in range(4)]
    return [*wide, torch.randn(H, D, generator=g).to(dtype), torch.randn(B, H, D, D, generator=g)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", CALLS)
def test_forward_equals_the_loop_and_is_float32(op, dtype: torch.dtype, isa: str):
    args = arguments(dtype)
    out, state = op(*args)
    want_out, want_state = loop(*(x.double() for x in args))
    assert out.dtype == state.dtype == torch.float32
    assert out.shape == (B, T, H, D)
    assert_close("out", out, want_out, FORWARD_TOLERANCE[torch.float32])
    assert_close("state", state, want_state, FORWARD_TOLERANCE[torch.float32])


@pytest.mark.parametrize("op", CALLS)
def test_no_state_means_zeros(op, isa: str):
    args = arguments()[:5]
    want = loop(*(x.double() for x in args), None)
    for name, got, expected in zip(("out", "state"), op(*args, None), want, strict=True):
        assert_close(name, got, expected, FORWARD_TOLERANCE[torch.float32])


@pytest.mark.parametrize("op", CALLS)
def test_gradients_are_the_true_ones(op, isa: str):
    args = [x.requires_grad_() for x in arguments()]
    exact = [x.detach().double().requires_grad_() for x in args]
    ones = torch.Generator().manual_seed(7)
    starts = [torch.randn(B, T, H, D, generator=ones), torch.randn(B, H, D, D, generator=ones)]
    got = torch.autograd.grad(op(*args), args, starts)
    want = torch.autograd.grad(loop(*exact), exact, [x.double() for x in starts])
    for name, x, y in zip(NAMES, got, want, strict=True):
        assert_close(f"gradient of {name}", x, y, GRADIENT_TOLERANCE[torch.float32])


@pytest.mark.parametrize("op", CALLS)
def test_the_state_may_be_one_layer_of_the_cache_and_is_not_modified(op, isa: str):
    args = arguments()
    cache = torch.full((B, H, D, D, 4), 3.0)
    cache[..., 1] = args[5]
    before = cache.clone()
    out, state = op(*args[:5], cache[..., 1])
    want_out, want_state = op(*args)
    assert torch.equal(out, want_out)
    assert torch.equal(state, want_state)
    assert torch.equal(cache, before)
    cache[..., 1] = state  # what the model does next


@pytest.mark.parametrize("op", CALLS)
def test_token_by_token_is_the_whole_sequence(op, isa: str):
    args = arguments()
    state, outputs = args[5], []
    for t in range(T):
        out, state = op(*(x[:, t : t + 1] for x in args[:4]), args[4], state)
        outputs.append(out)
    want_out, want_state = loop(*(x.double() for x in args))
    assert_close("out", torch.cat(outputs, 1), want_out, FORWARD_TOLERANCE[torch.float32])
    assert_close("state", state, want_state, FORWARD_TOLERANCE[torch.float32])


def test_heads_already_split_are_accepted_in_time_first_only():
    """The time-first parameter is [H, D]; a flat one could be any number of heads."""
    args = arguments()
    with pytest.raises((TypeError, ValueError), match="time_first"):
        rwkv6_ops.rwkv6_linear_attention_cpu(*args[:4], args[4].flatten(), args[5])
