# SPDX-License-Identifier: Apache-2.0
"""The equations of docs/wkv6.md as they stand there, in float64, against the reference loop and autograd."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rwkv6_ops import reference

T, K, V, SCALE = 9, 4, 3, 0.7


@pytest.fixture
def x() -> SimpleNamespace:
    """One head: inputs, what autograd says of them, every state S_0 .. S_T and every adjoint G_0 .. G_T."""
    g = torch.Generator().manual_seed(0)
    r, k, w = (torch.randn(T, K, dtype=torch.float64, generator=g) for _ in range(3))
    v, do = (torch.randn(T, V, dtype=torch.float64, generator=g) for _ in range(2))
    S0, G_T = (torch.randn(K, V, dtype=torch.float64, generator=g) for _ in range(2))
    u = torch.randn(K, dtype=torch.float64, generator=g)
    w = -torch.exp(w)
    w[2, 0], w[4, 1], w[6, 2] = -float("inf"), 0.0, -40.0

    leaves = [y.clone().requires_grad_() for y in (r, k, v, w, u, S0)]
    tokens = [y[None, :, None] for y in leaves[:4]]
    options = {"scale": SCALE, "initial_state": leaves[5][None, None], "output_final_state": True}
    o, S_T = reference.wkv6(*tokens, leaves[4][None], **options)
    grads = torch.autograd.grad((o, S_T), leaves, (do[None, :, None], G_T[None, None]))
    dr, dk, dv, dw, du, dS0 = grads

    S, G = [S0], [G_T]
    for t in range(T):
        S.append(torch.exp(w[t])[:, None] * S[-1] + torch.outer(k[t], v[t]))  # (2)
    for t in reversed(range(T)):
        G.insert(0, torch.exp(w[t])[:, None] * G[0] + SCALE * torch.outer(r[t], do[t]))  # (7)
    tensors = {name: y for name, y in locals().items() if isinstance(y, (Tensor, list))}
    return SimpleNamespace(**tensors | {"o": o.detach()[0, :, 0], "S_T": S_T.detach()[0, 0]})


def equal(got: list[Tensor] | Tensor, want: Tensor) -> None:
    got = torch.stack(got) if isinstance(got, list) else got
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def P(w: Tensor, first: int, last: int) -> Tensor:
    """exp(w_first + ... + w_last), tokens counted from 1 as in the text; 1 where there are none."""
    return torch.exp(w[first - 1 : max(last, first - 1)].sum(0))


def test_adjoint_equations_3_to_8_are_the_gradients(x: SimpleNamespace) -> None:
    a = (x.v * x.do).sum(1)
    tokens = range(T)  # S[t] is the state before token t, G[t + 1] the adjoint after it
    equal([SCALE * (x.S[t] @ x.do[t] + a[t] * x.u * x.k[t]) for t in tokens], x.dr)  # (3)
    equal([x.G[t + 1] @ x.v[t] + SCALE * a[t] * x.u * x.r[t] for t in tokens], x.dk)  # (4)
    equal([x.G[t + 1].T @ x.k[t] + SCALE * (x.r[t] @ (x.u * x.k[t])) * x.do[t] for t in tokens], x.dv)  # (5)
    equal([torch.exp(x.w[t]) * (x.G[t + 1] * x.S[t]).sum(1) for t in tokens], x.dw)  # (6)
    equal(x.G[0], x.dS0)  # (7)
    equal(SCALE * (a[:, None] * x.r * x.k).sum(0), x.du)  # (8)


def test_chunk_equations_9_and_10_are_the_recurrence(x: SimpleNamespace) -> None:
    r, k, v = ([None, *y] for y in (x.r, x.k, x.v))  # tokens 1 .. T: the whole sequence is one chunk
    out = []
    for t in range(1, T + 1):
        seen = (r[t] * P(x.w, 1, t - 1)) @ x.S0
        for s in range(1, t):
            seen = seen + (r[t] * k[s] * P(x.w, s + 1, t - 1)).sum() * v[s]
        out.append(SCALE * (seen + (r[t] @ (x.u * k[t])) * v[t]))
    equal(out, x.o)
    own = sum(torch.outer(k[s] * P(x.w, s + 1, T), v[s]) for s in range(1, T + 1))
    equal(P(x.w, 1, T)[:, None] * x.S0 + own, x.S_T)


def test_chunk_equation_11_is_the_gradient_of_the_decay(x: SimpleNamespace) -> None:
    r, k, v, do = ([None, *y] for y in (x.r, x.k, x.v, x.do))
    tokens = range(1, T + 1)
    dk_inter = {s: P(x.w, s + 1, T) * (x.G_T @ v[s]) for s in tokens}
    dr_inter = {q: SCALE * P(x.w, 1, q - 1) * (x.S0 @ do[q]) for q in tokens}
    dw = []
    for t in tokens:
        through = P(x.w, 1, T) * (x.G_T * x.S0).sum(1)
        through = through + sum(k[s] * dk_inter[s] for s in range(1, t))
        through = through + sum(r[q] * dr_inter[q] for q in range(t + 1, T + 1))
        for s in range(1, t):
            for q in range(t + 1, T + 1):
                through = through + SCALE * r[q] * k[s] * P(x.w, s + 1, q - 1) * (do[q] @ v[s])
        dw.append(through)
    equal(dw, x.dw)
