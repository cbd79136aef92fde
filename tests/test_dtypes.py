# SPDX-License-Identifier: Apache-2.0
"""Dtypes: every mix is computed in float32, inputs are read exactly and results are rounded once, to nearest even."""

from itertools import product

import pytest
import torch
from cases import NAMES, Case, make
from oracle import answer, assert_forward, assert_gradients, inputs, true_answer

import rwkv6_ops

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtypes", list(product(("f32", "bf16", "f16"), repeat=3)), ids="-".join)
def test_every_mix_of_dtypes_equals_the_reference_loop(dtypes: tuple[str, str, str], isa: str):
    a, b, c = dtypes
    problem = make(Case("mix", B=2, T=9, K=9, V=17, dtypes=f"{a} {b} {c} {b} {a}"))
    got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
    assert_forward(got.o, got.final_state, want)
    assert_gradients(got.gradients, want)


@pytest.mark.parametrize("dtypes", list(product(("f32", "bf16", "f16"), repeat=2)), ids="-".join)
def test_output_has_the_dtype_of_v_and_the_state_is_float32(dtypes: tuple[str, str]):
    problem = make(Case("types", T=3, dtypes=f"{dtypes[0]} f32 {dtypes[1]} f32 bf16"))
    o, final_state = rwkv6_ops.wkv6(*inputs(problem)[:5], output_final_state=True)
    assert o.dtype == problem.v.dtype
    assert final_state.dtype == torch.float32


def test_float64_stays_float64():
    problem = make(Case("double", T=3, dtypes="f64 f64 f64 f64 f64"))
    o, final_state = rwkv6_ops.wkv6(*inputs(problem)[:5], output_final_state=True)
    assert o.dtype == final_state.dtype == torch.float64


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_results_are_the_float32_results_rounded(dtype: torch.dtype, isa: str):
    problem = make(Case("rounded", B=2, T=65, K=64, V=64))
    for name in (*NAMES[:5], "grad_o"):
        setattr(problem, name, getattr(problem, name).to(dtype))
    half = answer(rwkv6_ops.wkv6, problem)
    for name in (*NAMES[:5], "grad_o"):
        setattr(problem, name, getattr(problem, name).float())
    full = answer(rwkv6_ops.wkv6, problem)
    assert torch.equal(half.o, full.o.to(dtype))
    assert torch.equal(half.final_state, full.final_state)
    for name in NAMES[:5]:
        assert torch.equal(half.gradients[name], full.gradients[name].to(dtype)), name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_value_is_read_and_written_exactly(dtype: torch.dtype, isa: str):
    """o = v for all bit patterns but bfloat16's subnormal ones: those are subnormal in float32 too, and flushed."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    if dtype == torch.bfloat16:
        values = values[(values == 0) | ~(values.abs() < torch.finfo(dtype).tiny)]
    one = torch.ones(1, 1, 1, 1)
    o, _ = rwkv6_ops.wkv6(one, one, values.view(1, 1, 1, -1), one, one[0, 0])
    assert torch.equal(o.flatten().isnan(), values.isnan())
    assert torch.equal(o.flatten().nan_to_num(0.0), values.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_results_are_rounded_to_nearest_even(dtype: torch.dtype, isa: str):
    """o = r * v with v = 1: r is a midpoint between two half values, one float32 step above it, or one below."""
    digits = 8 if dtype == torch.bfloat16 else 11
    midpoints = 1 + (2 * torch.arange(2 ** (digits - 1)) + 1) * 2.0**-digits
    r = torch.cat([midpoints, midpoints * (1 + 2.0**-23), midpoints * (1 - 2.0**-23), -midpoints]).view(-1, 1, 1, 1)
    one = torch.ones_like(r)
    o, _ = rwkv6_ops.wkv6(r, one, one.to(dtype), one, one[0, 0])
    assert torch.equal(o, r.to(dtype))


def test_float16_results_beyond_its_range_are_infinite(isa: str):
    one = torch.ones(1, 1, 1, 1)
    o, _ = rwkv6_ops.wkv6(60000 * one, 2 * one, one.half(), one, one[0, 0])
    assert o.item() == float("inf")


def test_the_callers_rounding_mode_for_subnormals_is_kept(isa: str):
    """The kernels flush subnormal numbers to zero; PyTorch's own arithmetic after them does not."""
    problem = make(Case("subnormal", T=17))
    answer(rwkv6_ops.wkv6, problem)
    assert (torch.tensor([1e-39]) * torch.tensor([0.5])).item() > 0
