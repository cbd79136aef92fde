# SPDX-License-Identifier: Apache-2.0
"""CUDA's chunk kernels, on the emulated device and on a GPU where there is one: every case that they take."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cases import BY_NAME, CASES, NAMES, Case, make
from oracle import (
    answer,
    assert_forward,
    assert_gradients,
    call,
    in_float64,
    inputs,
    relative_error,
    true_answer,
    true_answer_of,
)

import rwkv6_ops
from rwkv6_ops import _native, _ops, reference

SIZES = (32, 64, 128)
NATIVE = [case for case in CASES if case.K in SIZES and case.V in SIZES and "f64" not in case.dtypes]
# Largest error of o and final_state by precision: operands of 8, 11 and 16 bits.
PRECISION = {"fast": 4e-3, "default": 4e-4, "exact": 1e-5}


@pytest.mark.parametrize("case", NATIVE, ids=str)
def test_results_and_gradients_equal_the_reference_loop(case: Case, cuda_chunk: str):
    got, want = answer(rwkv6_ops.wkv6, make(case)), true_answer_of(case)
    assert_forward(got.o, got.final_state, want)
    assert_gradients(got.gradients, want)


@pytest.mark.parametrize("precision", PRECISION)
@pytest.mark.parametrize("decays", ["normal", "weak", "strong", "spikes", "forget", "mixed"])
def test_errors_before_rounding_are_those_of_the_precision(decays: str, precision: str, cuda_chunk: str):
    """float32 outputs of inputs that bfloat16 holds exactly: v as well, so o comes back in float32 by its dtype."""
    p = make(Case(f"precision-{decays}", T=130, H=1, K=64, V=64, decays=decays, dtypes="bf16 bf16 bf16 f32 f32"))
    want = call(reference.wkv6, in_float64(p), inputs(in_float64(p)))
    _, state = call(lambda *x, **how: rwkv6_ops.wkv6(*x, precision=precision, **how), p, inputs(p))
    assert relative_error(state, want[1]) <= PRECISION[precision]
    if precision != "default":  # which float32 inputs make "exact"
        p.v = p.v.float()
        o, _ = call(lambda *x, **how: rwkv6_ops.wkv6(*x, precision=precision, **how), p, inputs(p))
        assert relative_error(o, want[0]) <= PRECISION[precision]


@pytest.mark.parametrize("precision", ["fast", "exact"])
@pytest.mark.parametrize("decays", ["normal", "weak", "strong", "spikes", "forget", "mixed"])
def test_errors_of_gradients_before_rounding_are_those_of_the_precision(decays: str, precision: str, cuda_chunk: str):
    """float32 tensors. The default is "exact" with them, and has the same operands where inputs are bfloat16."""
    case = Case(f"precision-{decays}", T=100, H=1, K=64, V=64, decays=decays)
    got = answer(lambda *x, **how: rwkv6_ops.wkv6(*x, precision=precision, **how), make(case))
    want = true_answer_of(case)
    errors = {name: relative_error(got.gradients[name], want.gradients[name]) for name in want.gradients}
    assert max(errors.values()) <= PRECISION[precision], errors


@pytest.mark.parametrize(
    "case",
    [
        Case("spans", B=2, T=300, H=1, K=64, V=64),
        Case("spans-reverse", T=333, H=2, K=32, V=64, reverse=True, raw=True),
        Case("spans-varlen", T=400, H=1, K=64, V=64, cu_seqlens=(0, 0, 130, 131, 400), decays="mixed"),
        Case("spans-bf16", T=200, H=1, K=128, V=128, dtypes="bf16 bf16 bf16 bf16 bf16", initial_state=False),
    ],
    ids=str,
)
def test_a_sequence_cut_into_spans_gives_the_same(case: Case, cuda_chunk: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_ops, "SPAN_DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(_ops, "_SPAN_TOKENS", 0)
    monkeypatch.setitem(_ops._PRECISIONS, "default", _native.SPANS)
    p = make(case)
    without = call(rwkv6_ops.wkv6, p, inputs(p))
    assert_forward(*without, true_answer_of(case))
    got = answer(rwkv6_ops.wkv6, p)
    assert torch.equal(got.o, without[0])
    assert_gradients(got.gradients, true_answer_of(case))


def test_sizes_without_an_instance_run_token_by_token(cuda_chunk: str, monkeypatch: pytest.MonkeyPatch):
    p = make(BY_NAME["K100V100T33"])
    got = call(rwkv6_ops.wkv6, p, inputs(p))
    monkeypatch.setitem(_ops._ALGORITHMS, "auto", _native.RECURRENT)
    want = call(rwkv6_ops.wkv6, p, inputs(p))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["r", "k", "v", "w", "grad_o"])
@pytest.mark.parametrize("precision", PRECISION)
def test_what_is_not_finite_stays_where_the_recurrence_puts_it(precision: str, name: str, bad: float, cuda_chunk: str):
    """In another head, sequence or earlier token there is none (I4)."""
    p = make(Case("not finite", B=2, T=50, H=2, K=32, V=32, dtypes="bf16 bf16 bf16 bf16 f32"))
    getattr(p, name)[1, 21, 1, 5] = bad
    got = answer(lambda *x, **how: rwkv6_ops.wkv6(*x, precision=precision, **how), p)
    want = true_answer(p)
    assert torch.equal(got.o.isfinite(), want.o.isfinite())
    assert torch.equal(got.final_state.isfinite(), want.final_state.isfinite())
    for x, gradient in want.gradients.items():
        assert torch.equal(got.gradients[x].isfinite(), gradient.isfinite()), x


@pytest.mark.parametrize("wanted", [["r"], ["k", "u"], ["v"], ["w", "initial_state"], ["initial_state"]], ids="-".join)
def test_some_gradients_alone_are_those_of_all(wanted: list[str], cuda_chunk: str):
    p = make(Case("some", T=40, H=1, K=32, V=32))
    want = answer(rwkv6_ops.wkv6, p).gradients
    leaves = [x.requires_grad_(name in wanted) for name, x in zip(NAMES, inputs(p), strict=False)]
    o, final_state = call(rwkv6_ops.wkv6, p, leaves)
    gradients = torch.autograd.grad(
        [o, final_state], [x for x in leaves if x.requires_grad], [p.grad_o, p.grad_final_state]
    )
    for name, gradient in zip(wanted, gradients, strict=True):
        tolerance = 1e-5  # dv and the initial state's alone are the recurrent kernel's
        assert relative_error(gradient, want[name].double()) <= tolerance, name


# ---- What the emulated device counts ----

SHORT, FLOAT = "bf16 bf16 bf16 bf16 f32", "f32 f32 f32 f32 f32"
INSTANCES = [
    (K, dtypes, precision)
    for K in SIZES
    for dtypes, precision in ((SHORT, "fast"), (SHORT, "default"), (FLOAT, "exact"))
]


@pytest.fixture
def forward(emulated_cuda: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Runs one forward pass with checkpoints and returns the problem, its final state and the kernel's counters."""
    library = ctypes.CDLL(str(emulated_cuda))
    library.wkv6_emulation_counter.restype = library.wkv6_emulation_set.restype = ctypes.c_int64
    library.wkv6_emulation_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    monkeypatch.setitem(_ops.CHUNK_CHECKPOINT, "cpu", 128)
    monkeypatch.setitem(_ops._ALGORITHMS, "auto", _native.CHUNK)
    before = {}

    def run(K: int, dtypes: str, precision: str, **settings: int):
        for name, value in settings.items():
            before.setdefault(name, library.wkv6_emulation_set(name.encode(), value))
        p = make(Case("counted", T=256, H=2, K=K, V=K, dtypes=dtypes, initial_state=False))
        library.wkv6_emulation_reset()
        leaves = [x.requires_grad_() for x in inputs(p)]
        _, state = call(lambda *x, **how: rwkv6_ops.wkv6(*x, precision=precision, **how), p, leaves)
        return p, state, lambda name: library.wkv6_emulation_counter(b"wkv6_forward_chunk", name.encode())

    _native.use_cuda_emulation(emulated_cuda)
    yield run
    _native.use_cuda_emulation(None)
    for name, value in before.items():
        library.wkv6_emulation_set(name.encode(), value)


@pytest.mark.parametrize(("K", "dtypes", "precision"), INSTANCES)
def test_forward_moves_each_input_output_and_checkpoint_once(K: int, dtypes: str, precision: str, forward: Callable):
    p, state, counter = forward(K, dtypes, precision)
    checkpoints = 2 * (256 // 128 - 1) * K * K * 4
    tensors = (p.r, p.k, p.v, p.w, p.v, state)
    least = sum(x.numel() * x.element_size() for x in tensors) + checkpoints
    moved = counter("global_read") + counter("global_written")
    assert moved <= 1.01 * least, f"{moved / least:.3f} times the least"


@pytest.mark.parametrize(("K", "dtypes", "precision"), INSTANCES)
def test_shared_memory_has_one_bank_conflict_a_chunk(K: int, dtypes: str, precision: str, forward: Callable):
    """Two rows of eight meet where the diagonal of A is written, once for each part of an operand."""
    *_, counter = forward(K, dtypes, precision, count_banks=1)
    parts = 2 if precision == "exact" else 1
    assert counter("shared_reads") > 0
    assert counter("bank_conflicts") <= counter("blocks") * (256 // 16) * parts


@pytest.mark.parametrize(("dtypes", "precision"), [(SHORT, "fast"), (SHORT, "default"), (FLOAT, "exact")])
def test_four_blocks_share_a_multiprocessor_and_fetch_ahead(dtypes: str, precision: str, forward: Callable):
    """In a quarter of the 227 KB of sm_90: two barriers a chunk, where a block that cannot fetch ahead needs three."""
    *_, counter = forward(64, dtypes, precision, shared_bytes=227 * 1024 // 4 - 1024)
    assert counter("barriers") == counter("blocks") * (2 * 256 // 16 + 1)


@pytest.mark.parametrize("order", [1, 2])
def test_results_do_not_depend_on_the_order_of_threads(order: int, forward: Callable):
    _, want, _ = forward(64, SHORT, "default")
    _, got, _ = forward(64, SHORT, "default", order=order)
    assert torch.equal(got, want)
