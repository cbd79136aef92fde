# SPDX-License-Identifier: Apache-2.0
"""ggml's RWKV-6 operator, the real one, through ctypes on the shared libraries that a wheel on PyPI ships."""

from __future__ import annotations

import ctypes
import importlib.util
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

GGML_PACKAGE = "pywhispercpp==1.5.1"  # a wheel that ships ggml's shared libraries, the RWKV-6 operator among them


class GgmlWKV6:
    """ggml's WKV6 on one problem size: fill once with `set`, then `run` recomputes it in place.

    float32, forward only, N sequences of equal length, head size D for keys and values alike.

    Raises
    ------
    ModuleNotFoundError
        Without the package named in `GGML_PACKAGE`.
    """

    class _InitParams(ctypes.Structure):
        _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

    def __init__(self, N: int, T: int, H: int, D: int) -> None:
        self._base, self._cpu = _load_ggml()
        self.shape = N, T, H, D
        floats = 6 * N * T * H * D + 3 * N * H * D * D + H * D
        room = 4 * floats + (16 << 20)  # tensor headers, the graph and its work buffer
        self._context = ctypes.c_void_p(self._base.ggml_init(self._InitParams(room, None, False)))
        weakref.finalize(self, self._base.ggml_free, self._context)
        names = ("k", "v", "r", "u", "decay", "state")  # in the order of ggml's arguments
        sizes = [(D, H, N * T)] * 3 + [(D, H, 1), (D, H, N * T), (D * D * H, N, 1)]
        self._inputs = {name: self._new(*size) for name, size in zip(names, sizes, strict=True)}
        self._output = ctypes.c_void_p(self._base.ggml_rwkv_wkv6(self._context, *self._inputs.values()))
        self._graph = ctypes.c_void_p(self._base.ggml_new_graph(self._context))
        self._base.ggml_build_forward_expand(self._graph, self._output)

    def _new(self, *size: int) -> ctypes.c_void_p:
        float32 = 0
        tensor = self._base.ggml_new_tensor_3d(self._context, float32, *map(ctypes.c_int64, size))
        return ctypes.c_void_p(tensor)

    def _values(self, tensor: ctypes.c_void_p, count: int) -> np.ndarray:
        data = ctypes.cast(self._base.ggml_get_data(tensor), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(data, (count,))

    def set(self, r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: Tensor) -> None:
        """Copy a problem in, laid out as for `rwkv6_ops.wkv6` with decay="log"."""
        for name, x in {"r": r, "k": k, "v": v, "decay": w.exp(), "u": u, "state": state}.items():
            self._values(self._inputs[name], x.numel())[:] = x.detach().float().flatten().numpy()

    def run(self, threads: int) -> None:
        status = self._cpu.ggml_graph_compute_with_ctx(self._context, self._graph, threads)
        if status:
            raise RuntimeError(f"ggml returned status {status}")

    def result(self) -> tuple[Tensor, Tensor]:
        """Copies of o [N, T, H, D] and the final state [N, H, D, D]."""
        N, T, H, D = self.shape
        both = torch.from_numpy(self._values(self._output, N * T * H * D + N * H * D * D).copy())
        o, state = both.split((N * T * H * D, N * H * D * D))
        return o.view(N, T, H, D), state.view(N, H, D, D)


def _load_ggml() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    spec = importlib.util.find_spec("_pywhispercpp")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"ggml's operator comes with `pip install {GGML_PACKAGE}`")
    folder = Path(spec.origin).parent
    base, cpu = (_open_library(folder, name) for name in ("libggml-base", "libggml-cpu"))
    handle, size = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in {
        "ggml_init": [GgmlWKV6._InitParams],
        "ggml_new_tensor_3d": [handle, ctypes.c_int, size, size, size],
        "ggml_get_data": [handle],
        "ggml_rwkv_wkv6": [handle] * 7,
        "ggml_new_graph": [handle],
        "ggml_build_forward_expand": [handle, handle],
        "ggml_free": [handle],
    }.items():
        function = getattr(base, name)
        function.argtypes, function.restype = arguments, handle
    cpu.ggml_graph_compute_with_ctx.argtypes = [handle, handle, ctypes.c_int]
    return base, cpu


def _open_library(folder: Path, name: str) -> ctypes.CDLL:
    # Wheels rename bundled libraries (name-<hash>.so); global, because libggml-cpu looks up libggml-base's symbols.
    found = [*folder.glob(f"{name}.so*"), *folder.glob(f"pywhispercpp.libs/{name}-*.so*")]
    if not found:
        raise ModuleNotFoundError(f"no {name} beside _pywhispercpp; expected the wheel of {GGML_PACKAGE}")
    return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
