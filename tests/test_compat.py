# SPDX-License-Identifier: Apache-2.0
"""The calls of other projects against plain loops over one head's state, written in each project's own layout."""

import pytest
import torch
from cases import FORWARD_TOLERANCE, GRADIENT_TOLERANCE
from oracle import assert_close
from torch import Tensor

import rwkv6_ops
from rwkv6_ops import compat

B, T, H, N = 2, 19, 3, 8
C = H * N
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def loop(r: Tensor, k: Tensor, v: Tensor, x: Tensor, u: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """BlinkDL's convention: tokens [B, T, C], raw decay x, and state rows that belong to values: s [B, H, V, K]."""
    batch, time, heads = r.shape[0], r.shape[1], u.shape[0]
    r, k, v, x = (a.reshape(batch, time, heads, -1) for a in (r, k, v, x))
    y = []
    for t in range(time):
        kv = torch.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        y.append(torch.einsum("bhvk,bhk->bhv", s + u[:, None, :] * kv, r[:, t]).flatten(1))
        s = torch.exp(-torch.exp(x[:, t]))[:, :, None, :] * s + kv
    return torch.stack(y, 1), s


def tokens(dtype: torch.dtype = F32, batch: int = B, time: int = T, seed: int = 0) -> list[Tensor]:
    """r, k, v, w, u."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, time, C, generator=g).to(dtype) for _ in range(4)] + [
        torch.randn(H, N, generator=g).to(dtype)
    ]


def states(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def exact_leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def weights(*tensors: Tensor) -> list[Tensor]:
    """Where the backward pass starts: the same for a result and for the loop's."""
    g = torch.Generator().manual_seed(2)
    return [torch.randn(x.shape, generator=g).to(x.dtype) for x in tensors]


def assert_like_the_loop(got: list[Tensor], inputs: list[Tensor], want: list[Tensor], exact: list[Tensor]) -> None:
    """Outputs and the gradients of all inputs through all of them."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close(f"output {i}", a.detach(), b.detach(), FORWARD_TOLERANCE[a.dtype])
    start = weights(*got)
    gradients = torch.autograd.grad(got, inputs, start)
    truth = torch.autograd.grad(want, exact, [x.double() for x in start])
    for i, (a, b) in enumerate(zip(gradients, truth, strict=True)):
        assert a.dtype == inputs[i].dtype
        assert_close(f"gradient {i}", a, b, GRADIENT_TOLERANCE[a.dtype])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("call", ["five", "nine", "nine, u by name"])
def test_rwkv_lm_and_vision_rwkv(call: str, dtype: torch.dtype):
    data = tokens(dtype)
    inputs, exact = leaves(*data), exact_leaves(*data)
    if call == "five":
        y = compat.RUN_CUDA_RWKV6(*inputs)
    elif call == "nine":
        y = compat.RUN_CUDA_RWKV6(B, T, C, H, *inputs)
    else:
        y = compat.RUN_CUDA_RWKV6(B, T, C, H, *inputs[:4], u=inputs[4])
    assert y.dtype == dtype
    want, _ = loop(*exact, torch.zeros(B, H, N, N, dtype=torch.float64))
    assert_like_the_loop([y], inputs, [want], exact)


def test_the_form_with_six_arguments_changes_a_state_in_place():
    data = [*tokens(), states(B, H, N, N)]
    inputs, exact = leaves(*data), exact_leaves(*data)
    s = inputs[5].clone()
    y = compat.RUN_CUDA_RWKV6(*inputs[:5], s)
    assert_like_the_loop([y, s], inputs, list(loop(*exact)), exact)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rwkv_lm_state_tuning_shares_one_state(dtype: torch.dtype):
    """CASES 2, RWKV-LM #241: the kernel had no batch offset; here a state without batch serves every row."""
    data = [*tokens(dtype), states(H, N, N, dtype=dtype)]
    inputs, exact = leaves(*data), exact_leaves(*data)
    y = compat.RUN_CUDA_RWKV6_STATE(B, T, C, H, *inputs)
    want, _ = loop(*exact[:5], exact[5].expand(B, H, N, N))
    assert_like_the_loop([y], inputs, [want], exact)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rwkv_peft_infctx_returns_the_new_state(dtype: torch.dtype):
    data = [*tokens(dtype), states(B, H, N, N, dtype=dtype)]
    inputs, exact = leaves(*data), exact_leaves(*data)
    y, s = compat.RUN_CUDA_RWKV6_STATE(B, T, C, H, *inputs)
    assert torch.equal(inputs[5], data[5])
    assert (y.dtype, s.dtype) == (dtype, dtype)
    assert_like_the_loop([y, s], inputs, list(loop(*exact)), exact)


def test_rwkv_peft_keeps_a_float32_state_in_float32():
    y, s = compat.RUN_CUDA_RWKV6_STATE(B, T, C, H, *tokens(BF16), states(B, H, N, N))
    assert (y.dtype, s.dtype) == (BF16, F32)


@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("time", [T, 1])
def test_infctx_trainer_changes_the_state_in_place(time: int, dtype: torch.dtype, state_dtype: torch.dtype):
    """CASES 17: with a state of another dtype than r's, a copy was updated and the caller's state silently was not."""
    data, s = tokens(dtype, time=time), states(B, H, N, N, dtype=state_dtype)
    want_y, want_s = loop(*(x.double() for x in (*data, s)))
    version = s._version
    y = compat.RUN_WKV6STATE_CUDA(B, time, C, H, *data, s)
    assert s._version > version
    assert_close("y", y, want_y, FORWARD_TOLERANCE[dtype])
    assert_close("s", s, want_s, FORWARD_TOLERANCE[state_dtype])


def test_infctx_trainer_has_the_gradients_of_the_operator():
    """Through y and through what follows from the changed state, for a state that is a clone, as in that project."""
    data = [*tokens(), states(B, H, N, N)]
    inputs, exact = leaves(*data), exact_leaves(*data)
    s = inputs[5].clone()
    first = compat.RUN_WKV6STATE_CUDA(B, T, C, H, *inputs[:5], s)
    second = compat.RUN_WKV6STATE_CUDA(B, T, C, H, *inputs[:5], s)
    want_first, want_s = loop(*exact)
    want_second, want_s = loop(*exact[:5], want_s)
    assert_like_the_loop([first, second, s], inputs, [want_first, want_second, want_s], exact)


def test_infctx_trainer_refuses_a_leaf_state_to_train():
    s = states(B, H, N, N).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        compat.RUN_WKV6STATE_CUDA(B, T, C, H, *tokens(), s)


@pytest.mark.parametrize("time", [T, 1])
def test_rwkv_package_and_chatrwkv(time: int):
    """State first and [H, V, K]; tokens [T, C], w [T, H, N, 1], u [H, N, 1] as that package's model makes them."""
    r, k, v, w, u = tokens(batch=1, time=time)
    state = states(H, N, N)
    want_y, want_s = loop(*(x.double() for x in (r, k, v, w, u)), state.double()[None])
    shaped = (r[0], k[0], v[0], w.view(time, H, N, 1), u[..., None])
    y, returned = compat.RUN_RWKV_6(1, time, C, H, state, *shaped)
    assert returned is state
    assert y.shape == (1, time, C)
    assert_close("y", y, want_y, FORWARD_TOLERANCE[F32])
    assert_close("state", state, want_s[0], FORWARD_TOLERANCE[F32])


def test_rwkv_package_call_by_keyword_and_with_half_tokens():
    r, k, v, w, u = tokens(F16, batch=1)
    state = states(H, N, N)
    want_y, want_s = loop(*(x.double() for x in (r, k, v, w, u)), state.double()[None])
    y, state = compat.RUN_RWKV_6(1, T, C, H, state, r, k, v, w=w.float(), u=u)
    assert (y.dtype, state.dtype) == (F16, F32)
    assert_close("y", y, want_y, FORWARD_TOLERANCE[F16])
    assert_close("state", state, want_s[0], FORWARD_TOLERANCE[F32])


def test_flash_rwkv():
    data = [*tokens(), states(B, H, N, N)]
    inputs, exact = leaves(*data), exact_leaves(*data)
    out, s = compat.rwkv6_cuda_linear_attention(*inputs)
    assert torch.equal(inputs[5], data[5])
    want, want_s = loop(*exact)
    assert_like_the_loop([out, s], inputs, [want.unflatten(2, (H, N)), want_s], exact)


def test_states_are_read_through_strides():
    """A transposed state is the operator's own layout: nothing but the view changes hands."""
    data, s = tokens(), states(B, H, N, N)
    y, final = compat.RUN_CUDA_RWKV6_STATE(B, T, C, H, *data, s)
    r, k, v, w = (x.view(B, T, H, N) for x in data[:4])
    o, direct = rwkv6_ops.wkv6(
        r, k, v, w, data[4], initial_state=s.mT.contiguous(), output_final_state=True, decay="raw"
    )
    assert torch.equal(y, o.flatten(2))
    assert torch.equal(final, direct.mT)
    assert final.mT.is_contiguous()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d, s: compat.RUN_CUDA_RWKV6(*d[:4]), TypeError, r"4 arguments, expected \(r, k, v, w, u\), \(r"),
        (lambda d, s: compat.RUN_CUDA_RWKV6(B, T, C, H, *d[:4], v=d[2]), TypeError, "9 arguments"),
        (lambda d, s: compat.RUN_CUDA_RWKV6(B, T, C + 1, H, *d), ValueError, "C: 25, expected a positive multiple"),
        (lambda d, s: compat.RUN_CUDA_RWKV6(B, T + 1, C, H, *d), ValueError, r"r: shape \(2, 19, 24\)"),
        (lambda d, s: compat.RUN_CUDA_RWKV6(B, T, C, H, *d[:4], d[4].T), ValueError, r"u: shape \(8, 3\)"),
        (lambda d, s: compat.RUN_CUDA_RWKV6_STATE(B, T, C, H, *d, s[:1]), ValueError, r"s: shape .* \[B, H, V, K\] ="),
        (lambda d, s: compat.RUN_CUDA_RWKV6_STATE(B, T, C, H, *d, s[0, :1]), ValueError, r"s: shape .* \[H, V, K\] ="),
        (lambda d, s: compat.RUN_WKV6STATE_CUDA(B, T, C, H, *d, s[0]), ValueError, "s: shape"),
        (lambda d, s: compat.RUN_WKV6STATE_CUDA(B, T, C, H, *d, None), TypeError, "s: NoneType, expected a torch"),
        (lambda d, s: compat.RUN_RWKV_6(B, T, C, H, s[0], *d), ValueError, r"state: shape \(3, 8, 8\) with B = 2"),
        (lambda d, s: compat.rwkv6_cuda_linear_attention(d[0][0], *d[1:], s), ValueError, "receptance: shape"),
        (lambda d, s: compat.rwkv6_cuda_linear_attention(*d, s.double()), TypeError, "initial_state: dtype"),
    ],
)
def test_wrong_arguments_are_named(call, error: type, message: str):
    with pytest.raises(error, match=message):
        call(tokens(), states(B, H, N, N))


def test_scripted_modules_call_it():
    """RWKV_JIT_ON: the model's modules are scripted; a call into this package is one that TorchScript leaves alone."""

    class TimeMix(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = torch.nn.Linear(C, C, bias=False)
            self.u = torch.nn.Parameter(torch.zeros(3, 8))

        @torch.jit.ignore
        def wkv(self, x: Tensor) -> Tensor:
            return compat.RUN_CUDA_RWKV6(x, x, x, x, self.u)

        def forward(self, x: Tensor) -> Tensor:
            return self.wkv(self.key(x)) + 1

    module = TimeMix()
    x = tokens()[0]
    want = module(x)
    scripted = torch.jit.script(module)
    got = scripted(x)
    assert torch.equal(got, want)
    got.sum().backward()
    assert module.key.weight.grad.any()


def test_a_scripted_function_calls_the_infctx_operator_itself():
    """That project marks its own definition with torch.jit.ignore; so is this one."""
    operator = compat.RUN_WKV6STATE_CUDA

    class Mix(torch.nn.Module):
        def forward(self, x: Tensor, u: Tensor, s: Tensor) -> Tensor:
            return operator(2, 19, 24, 3, x, x, x, x, u, s) * 2

    data, s = tokens(), states(B, H, N, N)
    again = s.clone()
    got = torch.jit.script(Mix())(data[0], data[4], s)
    assert torch.equal(got, 2 * compat.RUN_WKV6STATE_CUDA(B, T, C, H, *[data[0]] * 4, data[4], again))
    assert torch.equal(s, again)
