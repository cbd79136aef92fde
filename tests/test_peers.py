# SPDX-License-Identifier: Apache-2.0
"""Model code of other packages with this operator in the place of theirs, as docs/migration.md says.

The packages are optional: a test is skipped where its one is absent. To have them all:

    pip install --no-deps rwkv-simple rwkv flash-linear-attention einops
"""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from oracle import assert_close
from torch import Tensor

import rwkv6_ops
from rwkv6_ops import reference


def needs(package: str) -> types.ModuleType:
    return pytest.importorskip(package, reason=f"not tested: the model of {package}, which is not installed")


def forward_and_gradients(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters that take part."""
    x = x.detach().requires_grad_()
    y = module(x)
    y = y[0] if isinstance(y, tuple) else y
    gradients = torch.autograd.grad(y.square().sum(), [x, *module.parameters()], allow_unused=True)
    return [y.detach(), *(g for g in gradients if g is not None)]


def randomise(module: torch.nn.Module) -> torch.nn.Module:
    """Published initialisations have output matrices and low-rank parts of zeros: nothing would pass through them."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.2)
    return module


def assert_all_close(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close(f"result {i}", a, b, tolerance)


# ---- rwkv-simple ----


def with_state(operator, **options):
    """rwkv-simple's own signature, tokens [B, H, T, K], around `operator`."""

    def wkv6_torch(r, k, v, w, u, kv_state=None, chunk_len=128, dtype=None):
        return operator(r, k, v, w, u, initial_state=kv_state, output_final_state=True, **options)

    return wkv6_torch


def rwkv_simple_model(simple: types.ModuleType) -> torch.nn.Module:
    backend = {"wkv_backend": simple.WKVBackend.PYTORCH_OPTIMIZED}
    return randomise(simple.RWKV(32, d_head=8, n_layer=2, tmix_kwargs=backend))


def reference_head_first(r, k, v, w, u, **options) -> tuple[Tensor, Tensor]:
    o, state = reference.wkv6(*(x.transpose(1, 2) for x in (r, k, v, w)), u, **options)
    return o.transpose(1, 2), state


@pytest.mark.parametrize("call", [rwkv6_ops.chunk_rwkv6, rwkv6_ops.fused_recurrent_rwkv6])
def test_rwkv_simple(call, monkeypatch: pytest.MonkeyPatch):
    """Its whole model, forward and backward; what is right is the float64 model around the reference."""
    simple = needs("rwkv_simple.rwkv")
    model = rwkv_simple_model(simple)
    x = torch.randn(2, 23, 32, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(simple, "wkv6_torch", with_state(call, scale=1.0, head_first=True))
    got = forward_and_gradients(model, x)
    monkeypatch.setattr(simple, "wkv6_torch", with_state(reference_head_first))
    assert_all_close(got, forward_and_gradients(model.double(), x.double()), 1e-4)


def test_rwkv_simple_generates_with_states(monkeypatch: pytest.MonkeyPatch):
    """Token by token from its state is the whole sequence at once."""
    simple = needs("rwkv_simple.rwkv")
    model = rwkv_simple_model(simple)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(simple, "wkv6_torch", with_state(rwkv6_ops.fused_recurrent_rwkv6, scale=1.0, head_first=True))
    with torch.no_grad():
        want, _ = model(x)
        state, steps = None, []
        for t in range(6):
            y, state = model(x[:, t : t + 1], state)
            steps.append(y)
    assert_close("y", torch.cat(steps, 1), want, 1e-5)


# ---- flash-linear-attention ----


class Rows(torch.nn.GroupNorm):
    """A group norm over [B, T, C], each token by itself."""

    def __init__(self, groups: int, channels: int, elementwise_affine: bool, bias: bool, eps: float) -> None:
        super().__init__(groups, channels, eps, affine=elementwise_affine)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


def shift_by_one(x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """What its Triton kernel of that name computes: the token before, less the present one."""
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1) - x


# What the layer imports of its own package: all of it Triton, or in need of transformers. Here in torch.
FLA_SIBLINGS = {
    "fla.layers.utils": {"get_layer_cache": lambda *_: None, "update_layer_cache": lambda *_, **__: None},
    "fla.modules": {"GroupNorm": Rows},
    "fla.modules.activations": {"ACT2FN": {"swish": torch.nn.functional.silu}},
    "fla.modules.token_shift": {"token_shift": shift_by_one},
    "fla.ops": {},
    "fla.ops.rwkv6": {"chunk_rwkv6": rwkv6_ops.chunk_rwkv6, "fused_recurrent_rwkv6": rwkv6_ops.fused_recurrent_rwkv6},
}


def fla_layer_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """fla.layers.rwkv6 as it is in its file, without the packages around it."""
    spec = importlib.util.find_spec("fla")
    if spec is None:
        pytest.skip("not tested: the layer of flash-linear-attention, which is not installed")
    folder = Path(spec.submodule_search_locations[0])
    packages = {"fla": {"__path__": [str(folder)]}, "fla.layers": {"__path__": [str(folder / "layers")]}}
    for name, contents in (packages | FLA_SIBLINGS).items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "fla.layers.rwkv6", raising=False)
    return importlib.import_module("fla.layers.rwkv6")


@pytest.mark.filterwarnings("ignore:According to Bo")
@pytest.mark.parametrize(("T", "called"), [(80, "chunk_rwkv6"), (20, "fused_recurrent_rwkv6")])
def test_flash_linear_attention(T: int, called: str, monkeypatch: pytest.MonkeyPatch):
    """Its RWKV-6 layer on a CPU: chunks beyond 64 tokens. What is right is the float64 layer around the reference."""
    layers = fla_layer_module(monkeypatch)
    layer = randomise(layers.RWKV6Attention(hidden_size=32, num_heads=2, expand_k=0.5))
    x = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(1))
    got = forward_and_gradients(layer, x)
    monkeypatch.setattr(layers, called, reference.wkv6)
    assert_all_close(got, forward_and_gradients(layer.double(), x.double()), 1e-4)


# ---- The rwkv package ----

# The package fixes its options when it is imported, and with CUDA on compiles extensions: a process of its own, where
# the compiler is out of reach. Its CUDA path then runs on the CPU with this operator; its own CPU path is the oracle.
RWKV_PACKAGE = """
import os, sys, torch, torch.utils.cpp_extension
os.environ |= {"RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "1"}
torch.utils.cpp_extension.load = lambda *args, **kwargs: None
import rwkv.model, rwkv6_ops.compat
rwkv.model.RWKV.RUN_RWKV_6 = staticmethod(rwkv6_ops.compat.RUN_RWKV_6)
from pathlib import Path

V, C, L, H, N = 16, 128, 2, 2, 64
g = torch.Generator().manual_seed(0)
r = lambda *shape: torch.randn(shape, generator=g) * 0.3
w = {"emb.weight": r(V, C), "head.weight": r(V, C)}
norms = ["ln_out"]
for i in range(L):
    b = f"blocks.{i}."
    norms += [b + n for n in (["ln0"] if i == 0 else []) + ["ln1", "ln2", "att.ln_x"]]
    for n in "xwkvrg":
        w[b + f"att.time_maa_{n}"] = r(1, 1, C)
    for n in ("receptance", "key", "value", "gate", "output"):
        w[b + f"att.{n}.weight"] = r(C, C) * 0.3
    w |= {b + "att.time_maa_w1": r(C, 160), b + "att.time_maa_w2": r(5, 32, C), b + "att.time_decay_w1": r(C, 64)}
    w |= {b + "att.time_decay_w2": r(64, C), b + "att.time_decay": r(1, 1, C) - 1, b + "att.time_faaaa": r(H, N)}
    w |= {b + "ffn.time_maa_k": r(1, 1, C), b + "ffn.time_maa_r": r(1, 1, C), b + "ffn.receptance.weight": r(C, C)}
    w |= {b + "ffn.key.weight": r(448, C), b + "ffn.value.weight": r(C, 448)}
for n in norms:
    w |= {n + ".weight": 1 + r(C), n + ".bias": r(C)}
path = Path(sys.argv[1]) / "tiny.pth"
torch.save(w, path)
model = rwkv.model.RWKV(str(path)[:-4], strategy="cpu fp32", verbose=False)
tokens = torch.randint(V, (37,), generator=g).tolist()

def run():
    out, state = model.forward(tokens, None, full_output=True)
    more, state = model.forward(tokens[:5], state, full_output=True)
    return [out, more, *state]

want = run()
calls = []
def swapped(*args):
    calls.append(1)
    return model.cuda_att_seq_v6_0(*args)
model.att_seq_v6_0 = swapped
got = run()
assert len(calls) == 2 * L, calls
for a, b in zip(got, want, strict=True):
    assert (a - b).norm() <= 1e-5 * b.norm(), (a - b).norm() / b.norm()
"""


def test_the_rwkv_package(tmp_path):
    needs("rwkv")
    root = str(Path(rwkv6_ops.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RWKV_PACKAGE, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
