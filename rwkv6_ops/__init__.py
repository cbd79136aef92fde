# SPDX-License-Identifier: Apache-2.0
"""The WKV operator of RWKV-6 ("Finch") for PyTorch: exact gradients, any shape, fast on the CPU.

`wkv6` is the operator, `wkv6_step_` its decoding step, `wkv6_state` its state without the outputs. The other functions
are the calls that existing models make: flash-linear-attention's `fused_recurrent_rwkv6` and `chunk_rwkv6`, Hugging
Face's `rwkv6_linear_attention` and `rwkv6_linear_attention_cpu`; those of BlinkDL's and related trainers are in
`compat`. `wkv6_bidirectional` looks both ways in time. `distributed` cuts sequences over devices. `reference.wkv6` is
the operator in plain PyTorch.
"""

from importlib import import_module

from . import compat, reference
from .functional import (
    chunk_rwkv6,
    fused_recurrent_rwkv6,
    rwkv6_linear_attention,
    rwkv6_linear_attention_cpu,
    wkv6,
    wkv6_bidirectional,
    wkv6_state,
    wkv6_step_,
)

__version__ = "0.1.0"

__all__ = [
    "chunk_rwkv6",
    "compat",
    "distributed",
    "fused_recurrent_rwkv6",
    "reference",
    "rwkv6_linear_attention",
    "rwkv6_linear_attention_cpu",
    "wkv6",
    "wkv6_bidirectional",
    "wkv6_state",
    "wkv6_step_",
]


def __getattr__(name: str) -> object:
    """`distributed`, when it is asked for: torch.distributed takes its time to import."""
    if name == "distributed":
        return import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
