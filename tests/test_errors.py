# SPDX-License-Identifier: Apache-2.0
"""Every wrong argument is a TypeError or ValueError that names it and says what came and what was wanted."""

import pytest
import torch

import rwkv6_ops

R, U, STATE = torch.zeros(2, 8, 4, 16), torch.zeros(4, 16), torch.zeros(2, 4, 16, 24)
V = torch.zeros(2, 8, 4, 24)
GOOD = {"r": R, "k": R, "v": V, "w": R, "u": U}
FLOATS = "float32, bfloat16, float16 (or float64 for all of them)"
SHORTER = "float32, bfloat16 or float16 like the others"


def refused(function, arguments: dict, kind: type, message: str) -> None:
    with pytest.raises(kind) as error:
        function(**arguments)
    assert str(error.value) == message


WRONG = [
    ({"r": [1.0]}, TypeError, "r: list, expected a torch.Tensor"),
    ({"k": None}, TypeError, "k: NoneType, expected a torch.Tensor"),
    ({"v": 3.0}, TypeError, "v: float, expected a torch.Tensor"),
    ({"w": "w"}, TypeError, "w: str, expected a torch.Tensor"),
    ({"u": (1, 2)}, TypeError, "u: tuple, expected a torch.Tensor"),
    ({"initial_state": 0}, TypeError, "initial_state: int, expected a torch.Tensor"),
    ({"r": R[0]}, ValueError, "r: shape (8, 4, 16), expected [B, T, H, K]"),
    ({"r": R[..., None]}, ValueError, "r: shape (2, 8, 4, 16, 1), expected [B, T, H, K]"),
    ({"k": V}, ValueError, "k: shape (2, 8, 4, 24), expected r's (2, 8, 4, 16)"),
    ({"k": R[:1]}, ValueError, "k: shape (1, 8, 4, 16), expected r's (2, 8, 4, 16)"),
    ({"v": V[:, :7]}, ValueError, "v: shape (2, 7, 4, 24), expected r's (2, 8, 4, V)"),
    ({"v": V[0]}, ValueError, "v: shape (8, 4, 24), expected r's (2, 8, 4, V)"),
    ({"w": R[:, :, :3]}, ValueError, "w: shape (2, 8, 3, 16), expected r's (2, 8, 4, 16)"),
    ({"u": U[0]}, ValueError, "u: shape (16,), expected r's [H, K] = (4, 16)"),
    ({"u": U[:, :8]}, ValueError, "u: shape (4, 8), expected r's [H, K] = (4, 16)"),
    (
        {"u": torch.zeros(8, 16)},
        ValueError,
        "u: shape (8, 16), expected r's [H, K] = (4, 16)"
        " (are r, k, v, w [B, H, T, K]? The layout here is [B, T, H, K])",
    ),
    ({"v": V[..., :0]}, ValueError, "v: shape (2, 8, 4, 0), expected at least one channel"),
    (
        {"r": R[..., :0], "k": R[..., :0], "w": R[..., :0], "u": U[..., :0]},
        ValueError,
        "r: shape (2, 8, 4, 0), expected at least one channel",
    ),
    (
        {"initial_state": STATE[:1]},
        ValueError,
        "initial_state: shape (1, 4, 16, 24), expected [N, H, K, V] = (2, 4, 16, 24)",
    ),
    (
        {"initial_state": STATE.transpose(2, 3)},
        ValueError,
        "initial_state: shape (2, 4, 24, 16), expected [N, H, K, V] = (2, 4, 16, 24)",
    ),
    (
        {"initial_state": STATE[0]},
        ValueError,
        "initial_state: shape (4, 16, 24), expected [N, H, K, V] = (2, 4, 16, 24)",
    ),
    ({"r": R.long()}, TypeError, f"r: dtype torch.int64, expected {FLOATS}"),
    ({"k": R.bool()}, TypeError, f"k: dtype torch.bool, expected {FLOATS}"),
    ({"v": V.cfloat()}, TypeError, f"v: dtype torch.complex64, expected {FLOATS}"),
    ({"w": R.double()}, TypeError, f"w: dtype torch.float64, expected {SHORTER}"),
    ({"u": U.to(torch.float8_e4m3fn)}, TypeError, f"u: dtype torch.float8_e4m3fn, expected {FLOATS}"),
    ({"initial_state": STATE.int()}, TypeError, f"initial_state: dtype torch.int32, expected {FLOATS}"),
    ({"r": R.double()}, TypeError, "k: dtype torch.float32, expected r's torch.float64"),
    ({"k": R.to("meta")}, ValueError, "k: on meta, expected r's cpu"),
    ({"u": U.to("meta")}, ValueError, "u: on meta, expected r's cpu"),
    ({"initial_state": STATE.to("meta")}, ValueError, "initial_state: on meta, expected r's cpu"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG, ids=[message.split(",")[0] for *_, message in WRONG])
@pytest.mark.parametrize("function", [rwkv6_ops.wkv6, rwkv6_ops.fused_recurrent_rwkv6, rwkv6_ops.chunk_rwkv6])
def test_a_wrong_tensor_is_named(function, wrong: dict, kind: type, message: str):
    refused(function, GOOD | wrong, kind, message)


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG, ids=[message.split(",")[0] for *_, message in WRONG])
def test_a_wrong_tensor_is_named_when_gradients_are_recorded(wrong: dict, kind: type, message: str):
    refused(rwkv6_ops.wkv6, GOOD | {"u": U.clone().requires_grad_()} | wrong, kind, message)


OPTIONS = [
    ({"scale": "1"}, TypeError, "scale: str, expected a number"),
    ({"scale": None}, TypeError, "scale: NoneType, expected a number"),
    ({"decay": "exp"}, ValueError, "decay: 'exp', expected one of 'log', 'raw'"),
    ({"decay": True}, ValueError, "decay: True, expected one of 'log', 'raw'"),
    ({"algorithm": "fast"}, ValueError, "algorithm: 'fast', expected one of 'auto', 'recurrent', 'chunk'"),
    ({"precision": "tf32"}, ValueError, "precision: 'tf32', expected one of 'default', 'fast', 'exact'"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), OPTIONS, ids=[message.split(",")[0] for *_, message in OPTIONS])
def test_a_wrong_option_is_named(wrong: dict, kind: type, message: str):
    refused(rwkv6_ops.wkv6, GOOD | wrong, kind, message)


def test_the_chunk_size_is_a_positive_integer():
    refused(
        rwkv6_ops.chunk_rwkv6,
        GOOD | {"chunk_size": 0},
        ValueError,
        "chunk_size: 0, expected a positive integer or None",
    )
    refused(
        rwkv6_ops.chunk_rwkv6,
        GOOD | {"chunk_size": "a"},
        ValueError,
        "chunk_size: 'a', expected a positive integer or None",
    )


def test_options_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        rwkv6_ops.wkv6(R, R, V, R, U, 1.0)


ONE_ROW = {name: x[:1] if name != "u" else x for name, x in GOOD.items()}
ENDS = "expected to start at 0, never decrease and end at T = 8"
OFFSETS = [
    ([0, 8], TypeError, "cu_seqlens: list, expected a torch.Tensor"),
    (torch.tensor([0.0, 8.0]), TypeError, "cu_seqlens: dtype torch.float32, expected torch.int32 or torch.int64"),
    (
        torch.tensor([0, 8], dtype=torch.int16),
        TypeError,
        "cu_seqlens: dtype torch.int16, expected torch.int32 or torch.int64",
    ),
    (torch.tensor([[0, 8]]), ValueError, "cu_seqlens: shape (1, 2), expected [N + 1]"),
    (torch.tensor(8), ValueError, "cu_seqlens: shape (), expected [N + 1]"),
    (torch.empty(0, dtype=torch.int64), ValueError, "cu_seqlens: shape (0,), expected [N + 1]"),
    (torch.tensor([1, 8]), ValueError, f"cu_seqlens: (1, 8), {ENDS}"),
    (torch.tensor([0, 7]), ValueError, f"cu_seqlens: (0, 7), {ENDS}"),
    (torch.tensor([0, 9]), ValueError, f"cu_seqlens: (0, 9), {ENDS}"),
    (torch.tensor([0, 5, 3, 8]), ValueError, f"cu_seqlens: (0, 5, 3, 8), {ENDS}"),
    (torch.tensor([0, -1, 8]), ValueError, f"cu_seqlens: (0, -1, 8), {ENDS}"),
    (torch.tensor([0, 2**40, 8]), ValueError, f"cu_seqlens: (0, {2**40}, 8), {ENDS}"),
]


@pytest.mark.parametrize(("offsets", "kind", "message"), OFFSETS, ids=[str(offsets) for offsets, *_ in OFFSETS])
@pytest.mark.parametrize("training", [False, True])
def test_wrong_offsets_are_refused(offsets: object, kind: type, message: str, training: bool):
    u = U.clone().requires_grad_(training)
    refused(rwkv6_ops.wkv6, ONE_ROW | {"cu_seqlens": offsets, "u": u}, kind, message)


def test_offsets_want_one_batch_row():
    message = "cu_seqlens: given with batch size 2, expected 1: the sequences lie end to end"
    refused(rwkv6_ops.wkv6, GOOD | {"cu_seqlens": torch.tensor([0, 8])}, ValueError, message)


def test_there_is_one_initial_state_a_sequence():
    wrong = {"cu_seqlens": torch.tensor([0, 3, 5, 8]), "initial_state": STATE}
    message = "initial_state: shape (2, 4, 16, 24), expected [N, H, K, V] = (3, 4, 16, 24)"
    refused(rwkv6_ops.wkv6, ONE_ROW | wrong, ValueError, message)


def test_head_first_wants_four_dimensions():
    refused(
        rwkv6_ops.fused_recurrent_rwkv6,
        GOOD | {"v": V[0], "head_first": True},
        ValueError,
        "v: shape (8, 4, 24), expected [B, H, T, V]",
    )


# ---- The step ----

STEP = {"r": R[:, 0], "k": R[:, 0], "v": V[:, 0], "w": R[:, 0], "u": U, "state": STATE}
LAYOUT = "[B, H, K] or [B, 1, H, K]"
WRONG_STEP = [
    ({"r": None}, TypeError, "r: NoneType, expected a torch.Tensor"),
    ({"state": None}, TypeError, "state: NoneType, expected a torch.Tensor"),
    ({"out": 1}, TypeError, "out: int, expected a torch.Tensor"),
    ({"r": R[0, 0]}, ValueError, f"r: shape (4, 16), expected {LAYOUT}"),
    (
        {"r": R, "k": R, "v": V, "w": R},
        ValueError,
        f"r: shape (2, 8, 4, 16), expected one token: {LAYOUT}",
    ),
    ({"k": V[:, 0]}, ValueError, "k: shape (2, 4, 24), expected r's (2, 4, 16)"),
    ({"v": V[:1, 0]}, ValueError, "v: shape (1, 4, 24), expected r's (2, 4, V)"),
    ({"w": R[:, :1]}, ValueError, "w: shape (2, 1, 4, 16), expected r's (2, 4, 16)"),
    ({"u": U.t()}, ValueError, "u: shape (16, 4), expected r's [H, K] = (4, 16)"),
    ({"state": STATE[:1]}, ValueError, "state: shape (1, 4, 16, 24), expected [N, H, K, V] = (2, 4, 16, 24)"),
    (
        {"state": STATE.bfloat16()},
        TypeError,
        "state: dtype torch.bfloat16, expected torch.float32: it is updated in place",
    ),
    (
        {"state": STATE.double()},
        TypeError,
        "state: dtype torch.float64, expected torch.float32: it is updated in place",
    ),
    ({"state": STATE.to("meta")}, ValueError, "state: on meta, expected r's cpu"),
    ({"w": R[:, 0].long()}, TypeError, f"w: dtype torch.int64, expected {FLOATS}"),
    ({"out": R[:, 0]}, ValueError, "out: shape (2, 4, 16), expected v's (2, 4, 24)"),
    ({"out": V[:, 0].half()}, TypeError, "out: dtype torch.float16, expected v's torch.float32"),
    ({"decay": "none"}, ValueError, "decay: 'none', expected one of 'log', 'raw'"),
    ({"scale": "1"}, TypeError, "scale: str, expected a number"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG_STEP, ids=[m.split(",")[0] for *_, m in WRONG_STEP])
def test_a_wrong_argument_of_the_step_is_named_and_the_state_untouched(wrong: dict, kind: type, message: str):
    refused(rwkv6_ops.wkv6_step_, STEP | wrong, kind, message)
    assert not STATE.any()


def test_the_step_has_no_gradient_and_says_so():
    message = "wkv6_step_: has no gradient; use wkv6, or call it under torch.no_grad()"
    refused(rwkv6_ops.wkv6_step_, STEP | {"u": U.clone().requires_grad_()}, RuntimeError, message)


def test_a_state_that_overlaps_itself_is_refused():
    """One row expanded: each batch row would overwrite the others' state."""
    with pytest.raises((ValueError, RuntimeError), match="state"):
        rwkv6_ops.wkv6_step_(**STEP | {"state": STATE[:1].expand(2, 4, 16, 24)})


def test_an_expanded_output_is_refused_and_the_state_untouched():
    wrong = {"out": V[:1, 0].expand(2, 4, 24)}
    message = "out: an expanded tensor, expected one with memory for each element"
    refused(rwkv6_ops.wkv6_step_, STEP | wrong | {"r": R[:, 0] + 1, "k": R[:, 0] + 1}, ValueError, message)
    assert not STATE.any()


OWN = "expected memory of its own: the step overwrites the state"


@pytest.mark.parametrize("name", ["r", "k", "v", "w", "u", "out"])
@pytest.mark.parametrize("place", ["first", "last", "every second", "a layer's first"])
def test_an_argument_of_the_step_inside_the_state_is_refused(name: str, place: str):
    """Read or written while the state changes, it would be wrong, and another way round with other kernels."""
    cache = torch.zeros(2, 4, 16, 24, 3)
    state = cache[..., 1] if "layer" in place else torch.zeros(2, 4, 16, 24)
    shape = {"v": (2, 4, 24), "out": (2, 4, 24), "u": (4, 16)}.get(name, (2, 4, 16))
    size = torch.Size(shape).numel()
    flat = cache.flatten()[1:] if "layer" in place else state.flatten()
    x = {
        "first": flat[:size],
        "last": flat[-size:],
        "every second": flat[4 : 4 + 2 * size : 2],
        "a layer's first": flat[:size],
    }[place].view(shape)
    refused(
        rwkv6_ops.wkv6_step_, STEP | {"state": state, name: x}, ValueError, f"{name}: in the memory of state, {OWN}"
    )


def test_the_state_may_lie_beside_the_other_arguments():
    """One buffer a batch row, as a cache has it: the ranges of addresses cross, the elements do not."""
    cache = torch.zeros(2, 4 * 16 * 24 + 4 * 24)
    state, out = cache[:, : 4 * 16 * 24].view(2, 4, 16, 24), cache[:, 4 * 16 * 24 :].view(2, 4, 24)
    ones = {name: torch.ones_like(x) for name, x in STEP.items() if name != "state"}
    rwkv6_ops.wkv6_step_(**ones, state=state, out=out)
    assert (state == 1).all()
    assert (out == 16).all()


def test_the_output_of_a_step_may_take_the_place_of_v():
    ones = {name: torch.ones_like(x) for name, x in STEP.items()}
    assert rwkv6_ops.wkv6_step_(**ones, out=ones["v"]) is ones["v"]
    assert (ones["v"] == 32).all()


# ---- Hugging Face's call ----

WIDE, FIRST, LAYER = torch.zeros(2, 8, 64), torch.zeros(4, 16), torch.zeros(2, 4, 16, 16)
HF = {"receptance": WIDE, "key": WIDE, "value": WIDE, "time_decay": WIDE, "time_first": FIRST, "state": LAYER}
WRONG_HF = [
    *(({name: None}, TypeError, f"{name}: NoneType, expected a torch.Tensor") for name in list(HF)[:5]),
    ({"state": 1}, TypeError, "state: int, expected a torch.Tensor"),
    ({"time_first": FIRST.flatten()}, ValueError, "time_first: shape (64,), expected [H, D]"),
    (
        {"receptance": WIDE[..., :63]},
        ValueError,
        "receptance: shape (2, 8, 63), expected [B, T, H * D] with time_first's H * D = 64",
    ),
    (
        {"receptance": WIDE[0]},
        ValueError,
        "receptance: shape (8, 64), expected [B, T, H * D] with time_first's H * D = 64",
    ),
    *(
        ({name: WIDE[:, :7]}, ValueError, f"{name}: shape (2, 7, 64), expected receptance's (2, 8, 64)")
        for name in ("key", "value", "time_decay")
    ),
    ({"state": LAYER[0]}, ValueError, "state: shape (4, 16, 16), expected [B, H, D, D] = (2, 4, 16, 16)"),
    ({"receptance": WIDE.long()}, TypeError, f"receptance: dtype torch.int64, expected {FLOATS}"),
    ({"key": WIDE.long()}, TypeError, f"key: dtype torch.int64, expected {FLOATS}"),
    ({"value": WIDE.long()}, TypeError, f"value: dtype torch.int64, expected {FLOATS}"),
    ({"time_decay": WIDE.long()}, TypeError, f"time_decay: dtype torch.int64, expected {FLOATS}"),
    ({"state": LAYER.long()}, TypeError, f"state: dtype torch.int64, expected {FLOATS}"),
    ({"state": LAYER.to("meta")}, ValueError, "state: on meta, expected receptance's cpu"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG_HF, ids=[m.split(",")[0] for *_, m in WRONG_HF])
def test_a_wrong_argument_of_hugging_faces_call_is_named_as_there(wrong: dict, kind: type, message: str):
    refused(rwkv6_ops.rwkv6_linear_attention_cpu, HF | wrong, kind, message)
    refused(rwkv6_ops.rwkv6_linear_attention, HF | {"training": True} | wrong, kind, message)


# ---- Tensors that have no memory to read ----


def test_sparse_tensors_are_refused():
    with pytest.raises((TypeError, ValueError, RuntimeError), match="k"):
        rwkv6_ops.wkv6(**GOOD | {"k": R.to_sparse()})


def test_all_on_the_meta_device_gives_shapes():
    o, state = rwkv6_ops.wkv6(**{name: x.to("meta") for name, x in GOOD.items()}, output_final_state=True)
    assert (o.shape, o.device.type) == (V.shape, "meta")
    assert (state.shape, state.device.type) == (STATE.shape, "meta")


def test_a_lazy_minus_sign_is_seen():
    """imag of a conjugate is a view with the negative bit set, which the exchange of tensors does not carry."""
    z = torch.randn(2, 8, 4, 16, dtype=torch.cfloat)
    minus = z.conj().imag
    assert minus.is_neg()
    ones = {name: torch.ones_like(x) for name, x in GOOD.items()}
    got, _ = rwkv6_ops.wkv6(**ones | {"r": minus, "w": -ones["w"]})
    want, _ = rwkv6_ops.wkv6(**ones | {"r": minus.resolve_neg(), "w": -ones["w"]})
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["r", "k", "v", "w", "u", "initial_state"])
def test_a_tensor_that_starts_between_two_elements_is_refused(name: str):
    """From a buffer at any byte: vector instructions, and C itself, want multiples of the element's size."""
    x = {**GOOD, "initial_state": STATE}[name]
    crooked = torch.frombuffer(bytearray(4 * x.numel() + 1), dtype=x.dtype, offset=1).view(x.shape)
    message = f"{name}: at an address that its elements cannot have, expected an aligned one (clone it)"
    refused(rwkv6_ops.wkv6, GOOD | {name: crooked}, ValueError, message)


@pytest.mark.parametrize(("K", "V"), [(2**41, 2**20), (2**44 - 64, 2**18 - 64), (2**55, 1)])
def test_sizes_that_no_memory_holds_are_refused(K: int, V: int):
    """Expanded tensors take no memory however large they are; the kernels' scratch would, and its size has 64 bits."""
    keys, values = torch.zeros(1).expand(1, 2, 1, K), torch.zeros(1).expand(1, 2, 1, V)
    with pytest.raises((ValueError, MemoryError)) as error:
        rwkv6_ops.wkv6(keys, keys, values, keys, torch.zeros(1).expand(1, K))
    if isinstance(error.value, ValueError):
        sizes = f"(1, 2, 1, {K}, {V})"
        assert str(error.value) == f"r: sizes B, T, H, K, V = {sizes}, expected a product below 2^62"
