# SPDX-License-Identifier: Apache-2.0
"""`wkv6_state`: the state of the whole operator without its outputs, and the sum of the log decays, on every case."""

import pytest
import torch
from cases import BY_NAME, CASES, GRADIENT_TOLERANCE, Case, make
from oracle import assert_close, in_float64, relative_error, true_answer, true_answer_of
from torch import Tensor

import rwkv6_ops
from rwkv6_ops import _native, reference

OP = torch.ops.rwkv6_ops.wkv6_state.default
SOME = ["K8V8T130", "varlen-empty", "varlen-many", "mixed-raw", "f64-f64-f64-f64-f64-K3V5"]

# There is one algorithm for the state alone.
_kernels = [*(f"{name}-recurrent" for name in _native.isas()), "cuda-emulated", *["cuda"] * torch.cuda.is_available()]
every_kernel = pytest.mark.parametrize("isa", _kernels, indirect=True)

# A float32 sum of T numbers from their compensated sum of chunks: a few roundings. -2.4e38 stands for -inf (docs).
W_SUM_TOLERANCE = {torch.float32: 3e-7, torch.float64: 1e-14}
FORGOTTEN = -1e30


def state_of(p) -> tuple[Tensor, Tensor]:
    options = {name: x for name, x in p.options.items() if name != "scale"}
    return rwkv6_ops.wkv6_state(p.k, p.v, p.w, initial_state=p.initial_state, **options)


def log_decays_of(p) -> Tensor:
    return p.w.double() if p.decay == "log" else -torch.exp(p.w.double().clamp(max=88))


def sums_of(p) -> Tensor:
    """The float64 sum of the log decays of each sequence."""
    w = log_decays_of(p)
    if p.cu_seqlens is None:
        return w.sum(1)
    return torch.stack([x.sum(1)[0] for x in w.split(p.cu_seqlens.diff().tolist(), dim=1)])


@every_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_and_sum_equal_the_reference_loop(case: Case, isa: str):
    p = make(case)
    state, w_sum = state_of(p)
    want = true_answer_of(case).final_state
    assert_close("state", state, want, GRADIENT_TOLERANCE[state.dtype])
    got, want = w_sum.double(), sums_of(p)
    assert got.shape == want.shape
    assert torch.equal(got < FORGOTTEN, want < FORGOTTEN)
    kept = want >= FORGOTTEN
    assert ((got - want).abs()[kept] <= W_SUM_TOLERANCE[w_sum.dtype] * (1e-6 - want[kept])).all()


@every_kernel
@pytest.mark.parametrize("name", SOME)
def test_gradients_equal_the_reference_loop(name: str, isa: str):
    p = make(BY_NAME[name])
    grad_w_sum = torch.randn(p.grad_final_state.shape[:3], dtype=p.grad_final_state.dtype)

    def gradients(p, state_and_sum) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (p.k, p.v, p.w, p.initial_state)]
        p.k, p.v, p.w, p.initial_state = leaves
        outputs = state_and_sum(p)
        starts = [p.grad_final_state, grad_w_sum.to(p.grad_final_state)]
        return torch.autograd.grad(outputs, leaves, starts)

    def loop(p):
        _, state = reference.wkv6(
            p.k,
            p.k,
            p.v,
            p.w,
            p.k.new_zeros(p.k.shape[2:]),
            output_final_state=True,
            initial_state=p.initial_state,
            **p.options,
        )
        return state, sums_of(p)

    got, want = gradients(p, state_of), gradients(in_float64(make(BY_NAME[name])), loop)
    for which, x, y in zip(("k", "v", "w", "initial_state"), got, want, strict=True):
        assert_close(f"gradient of {which}", x, y, GRADIENT_TOLERANCE[x.dtype])


@pytest.mark.parametrize("output", [0, 1])
def test_gradients_through_one_output_alone(output: int):
    p = make(BY_NAME["K3V5T65"])
    leaves = [x.requires_grad_() for x in (p.k, p.v, p.w)]
    got = torch.autograd.grad(state_of(p)[output].sum(), leaves, materialize_grads=True)
    if output == 1:
        assert not got[0].any()
        assert not got[1].any()
        want = log_decays_of(p)  # d(-exp x)/dx
    else:
        q = make(BY_NAME["K3V5T65"])
        q.grad_final_state = torch.ones_like(q.grad_final_state)
        want = true_answer(q, "final_state").gradients["w"]
    assert relative_error(got[2], want) < GRADIENT_TOLERANCE[torch.float32]


@every_kernel
@pytest.mark.parametrize("reverse", [False, True])
def test_summaries_of_pieces_compose(reverse: bool, isa: str):
    """Equation (12): what rwkv6_ops.distributed is made of."""
    p = in_float64(make(BY_NAME["forget-log"]))
    pieces = [
        rwkv6_ops.wkv6_state(*(x[:, a:b] for x in (p.k, p.v, p.w)), reverse=reverse)
        for a, b in ((0, 50), (50, 50), (50, 130))
    ]
    state = p.initial_state
    for piece, w_sum in reversed(pieces) if reverse else pieces:
        state = torch.exp(w_sum)[..., None] * state + piece
    want, _ = rwkv6_ops.wkv6_state(p.k, p.v, p.w, initial_state=p.initial_state, reverse=reverse)
    torch.testing.assert_close(state, want, rtol=1e-12, atol=1e-12)


@every_kernel
def test_many_equal_weak_decays_are_summed_to_the_last_digits(isa: str):
    """A plain float32 sum of 8192 times -1e-4 rounds the same way at each step: 1e-5 off, and so is exp of it."""
    w = torch.full((1, 8192, 1, 4), -1e-4)
    _, w_sum = rwkv6_ops.wkv6_state(w, w, w)
    assert ((w_sum.double() / w.double().sum(1) - 1).abs() < 1e-7).all()


@every_kernel
def test_what_forgets_everything_sums_to_minus_infinity_and_harms_no_other_channel(isa: str):
    w = torch.full((1, 40, 2, 8), -0.5)
    w[0, 9, 1, 3] = -float("inf")
    _, w_sum = rwkv6_ops.wkv6_state(w, w, w)
    want = torch.full((1, 2, 8), -20.0)
    want[0, 1, 3] = -float("inf")
    assert torch.equal(w_sum, want)


@every_kernel
def test_infinities_and_nans_stay_in_their_head_and_sequence(isa: str):
    k, v, w = torch.randn(3, 2, 20, 2, 8, generator=torch.Generator().manual_seed(0))
    clean, _ = rwkv6_ops.wkv6_state(k, v, -w.exp())
    k[0, 3, 1], v[0, 7, 1] = float("nan"), float("inf")
    state, _ = rwkv6_ops.wkv6_state(k, v, -w.exp())
    assert torch.equal(state[1], clean[1])
    assert torch.equal(state[0, 0], clean[0, 0])
    assert not state[0, 1].isfinite().any()


def test_the_sum_does_not_depend_on_the_number_of_threads():
    k, v, w = torch.randn(3, 1, 300, 1, 64)
    want = rwkv6_ops.wkv6_state(k, v, -w.exp())
    torch.set_num_threads(3)
    got = rwkv6_ops.wkv6_state(k, v, -w.exp())
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


# ---- The rest of PyTorch ----


@pytest.mark.parametrize("name", ["K3V5T65", "varlen-empty", "B0"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_opcheck(name: str, scale: float):
    p = make(BY_NAME[name])
    k, v, w = (x.requires_grad_() for x in (p.k, p.v, p.w))
    torch.library.opcheck(OP, (k, v, w, p.initial_state, p.cu_seqlens, scale, p.reverse, p.decay == "raw"))


def test_the_scale_of_the_operator_is_one_on_k():
    """Distributed's backward pass takes scale * r in k's place, without rounding it to r's dtype."""
    p = in_float64(make(BY_NAME["T65"]))
    k, v, w, state = (x.requires_grad_() for x in (p.k, p.v, p.w, p.initial_state))
    outputs = [OP(x, v, w, state, None, scale, False, False)[0] for x, scale in ((k, 0.3), (0.3 * k, 1.0))]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x, (k, v, w, state), p.grad_final_state) for x in outputs]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    p = in_float64(make(Case("gradcheck", T=5, K=2, V=3, cu_seqlens=(0, 2, 5))))
    leaves = [x.requires_grad_() for x in (p.k, p.v, p.w, p.initial_state)]
    call = lambda k, v, w, s: rwkv6_ops.wkv6_state(k, v, w, initial_state=s, cu_seqlens=p.cu_seqlens)  # noqa: E731
    assert torch.autograd.gradcheck(call, leaves)


def test_compiles_whole_with_gradients():
    p = make(BY_NAME["varlen-empty"])
    leaves = [x.requires_grad_() for x in (p.k, p.v, p.w)]
    f = lambda k, v, w: rwkv6_ops.wkv6_state(k, v, w, cu_seqlens=p.cu_seqlens)[0].square().sum()  # noqa: E731
    want = torch.autograd.grad(f(*leaves), leaves)
    got = torch.autograd.grad(torch.compile(f, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    torch.testing.assert_close(got, want)


def test_vmap_and_func_grad():
    k, v, w = torch.randn(3, 3, 2, 9, 2, 4)
    w = -w.exp()
    state, w_sum = torch.func.vmap(rwkv6_ops.wkv6_state)(k, v, w)
    rows = [rwkv6_ops.wkv6_state(k[i], v[i], w[i]) for i in range(3)]
    torch.testing.assert_close(state, torch.stack([s for s, _ in rows]))
    torch.testing.assert_close(w_sum, torch.stack([s for _, s in rows]))
    loss = lambda k, v, w: rwkv6_ops.wkv6_state(k, v, w)[0].square().sum()  # noqa: E731
    each = torch.func.vmap(torch.func.grad(loss))(k, v, w)
    k.requires_grad_()
    (want,) = torch.autograd.grad(loss(*(x.flatten(0, 1) for x in (k, v, w))), k)
    torch.testing.assert_close(each, want)
    one = lambda cuts: rwkv6_ops.wkv6_state(k[0, :1], v[0, :1], w[0, :1], cu_seqlens=cuts)  # noqa: E731
    with pytest.raises(NotImplementedError, match="no vmap over cu_seqlens"):
        torch.func.vmap(one)(torch.tensor([[0, 9], [0, 9]]))


def test_a_second_derivative_is_refused():
    k, v, w = (x.requires_grad_() for x in torch.randn(3, 1, 5, 1, 2))
    (gradient,) = torch.autograd.grad(rwkv6_ops.wkv6_state(k, v, w)[0].square().sum(), k, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        gradient.sum().backward()


# ---- Errors ----

K, V, S = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 4, 24), torch.zeros(2, 4, 16, 24)
WRONG = [
    ({"k": None}, TypeError, "k: NoneType, expected a torch.Tensor"),
    ({"w": 1.0}, TypeError, "w: float, expected a torch.Tensor"),
    ({"k": K[0]}, ValueError, "k: shape (8, 4, 16), expected [B, T, H, K]"),
    ({"v": V[:, :7]}, ValueError, "v: shape (2, 7, 4, 24), expected k's (2, 8, 4, V)"),
    ({"w": K[:, :, :3]}, ValueError, "w: shape (2, 8, 3, 16), expected k's (2, 8, 4, 16)"),
    ({"v": V[..., :0]}, ValueError, "v: shape (2, 8, 4, 0), expected at least one channel"),
    (
        {"initial_state": S[:1]},
        ValueError,
        "initial_state: shape (1, 4, 16, 24), expected [N, H, K, V] = (2, 4, 16, 24)",
    ),
    ({"v": V.double()}, TypeError, "v: dtype torch.float64, expected float32, bfloat16 or float16 like the others"),
    ({"w": K.to("meta")}, ValueError, "w: on meta, expected k's cpu"),
    ({"decay": "exp"}, ValueError, "decay: 'exp', expected one of 'log', 'raw'"),
    (
        {"cu_seqlens": torch.tensor([0, 8])},
        ValueError,
        "cu_seqlens: given with batch size 2, expected 1: the sequences lie end to end",
    ),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG, ids=[message.split(",")[0] for *_, message in WRONG])
def test_a_wrong_argument_is_named(wrong: dict, kind: type, message: str):
    with pytest.raises(kind) as error:
        rwkv6_ops.wkv6_state(**{"k": K, "v": V, "w": K, "initial_state": S} | wrong)
    assert str(error.value) == message


def test_wrong_offsets_are_refused():
    with pytest.raises(
        ValueError, match=r"^cu_seqlens: \(0, 9\), expected to start at 0, never decrease and end at T = 8$"
    ):
        rwkv6_ops.wkv6_state(K[:1], V[:1], K[:1], cu_seqlens=torch.tensor([0, 9]))


def test_the_meta_device_gives_shapes():
    state, w_sum = rwkv6_ops.wkv6_state(K.to("meta"), V.to("meta"), K.to("meta"))
    assert (state.shape, w_sum.shape, state.device.type) == (S.shape, S.shape[:3], "meta")
