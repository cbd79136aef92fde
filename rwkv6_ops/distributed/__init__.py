# SPDX-License-Identifier: Apache-2.0
"""Sequences longer than one device holds: `wkv6` with its tokens cut over the ranks of a process group.

`wkv6` is the operator, `plan` says which rank holds which tokens where it is not simply one stretch each, and
`token_shift` is the models' other contact between tokens. docs/scaling.md has the costs. Batch and heads need nothing
from here: shard them with DTensor, DDP or FSDP and call `rwkv6_ops.wkv6`.
"""

from . import _dtensor  # noqa: F401  sharding rules, for compiled code too
from ._operator import token_shift, wkv6
from ._plan import Plan, plan

__all__ = ["Plan", "plan", "token_shift", "wkv6"]
