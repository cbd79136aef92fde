# SPDX-License-Identifier: Apache-2.0
"""Problems nobody thought of: any sizes, dtypes, layouts, decays and options together, forward and backward."""

from cases import LAYOUTS, Case, make
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import answer, assert_forward, assert_gradients, true_answer

import rwkv6_ops
from rwkv6_ops import _native

DECAYS = ["normal", "weak", "zero", "strong", "spikes", "forget", "mixed"]


@st.composite
def problems(draw) -> Case:
    varlen = draw(st.booleans())
    T = draw(st.integers(0, 40) | st.integers(60, 140))
    cuts = sorted(draw(st.lists(st.integers(0, T), max_size=5)))
    short = st.sampled_from(["f32", "bf16", "f16"])
    dtypes = draw(st.just(["f64"] * 5) | st.lists(short, min_size=5, max_size=5))
    return Case(
        name=f"random {draw(st.integers(0, 99))}",
        B=1 if varlen else draw(st.integers(0, 3)),
        T=T,
        H=draw(st.integers(1, 4)),
        K=draw(st.integers(1, 40)),
        V=draw(st.integers(1, 70)),
        decays=draw(st.sampled_from(DECAYS)),
        raw=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, -0.25])),
        initial_state=draw(st.booleans()),
        reverse=draw(st.booleans()),
        cu_seqlens=(0, *cuts, T) if varlen else None,
        dtypes=" ".join(dtypes),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(case=problems(), isa=st.sampled_from(_native.isas()))
def test_random_problems_equal_the_reference_loop(case: Case, isa: str):
    previous = _native.use_isa(isa)
    try:
        problem = make(case)
        got, want = answer(rwkv6_ops.wkv6, problem), true_answer(problem)
        assert_forward(got.o, got.final_state, want)
        assert_gradients(got.gradients, want)
    finally:
        _native.use_isa(previous)
