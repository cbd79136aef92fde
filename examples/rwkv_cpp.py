# SPDX-License-Identifier: Apache-2.0
"""Files of rwkv.cpp, another home of trained models."""

from __future__ import annotations

import os
import struct

import numpy as np
import torch
from torch import Tensor


def load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read an RWKV-6 file of rwkv.cpp (float32 or float16) as a state dict in the shapes of RWKV's own checkpoints.

    Raises
    ------
    ValueError
        If the file is not of that format, or its weights are quantised.
    """
    with open(path, "rb") as file:
        data = file.read()
    magic, version, *_ = struct.unpack_from("<6I", data)
    if magic != 0x67676D66 or version not in (100, 101):
        raise ValueError(f"{path}: magic {magic:#x}, version {version}, expected 0x67676d66 and 100 or 101")
    weights, at = {}, 24
    while at < len(data):
        dims, name_length, dtype = struct.unpack_from("<3I", data, at)
        if dtype > 1:
            raise ValueError(f"{path}: element type {dtype}, expected 0 (float32) or 1 (float16)")
        shape = struct.unpack_from(f"<{dims}I", data, at + 12)[::-1]
        at += 12 + 4 * dims
        name = data[at : at + name_length].decode()
        values = np.frombuffer(data, np.float16 if dtype else np.float32, int(np.prod(shape)), at + name_length)
        at += name_length + values.nbytes
        tensor = torch.from_numpy(values.reshape(shape).astype(np.float32))
        if name.endswith(("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2")):
            tensor = tensor.transpose(-1, -2).contiguous()  # rwkv.cpp multiplies from the other side
        elif name.endswith("time_faaaa"):
            tensor = tensor.flatten(1)
        weights[name] = tensor
    return weights
