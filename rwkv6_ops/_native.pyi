# The C core (csrc/module.c). Not a public interface.
from os import PathLike

from torch import Tensor

REVERSE: int
RAW_DECAY: int
RECURRENT: int
CHUNK: int
FAST: int
EXACT: int
WHOLE: int
SPANS: int
CHUNK_FROM_TOKENS: int
CUDA_CHUNK_FROM_TOKENS: int
uses_torch_threads: int

def forward(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor | None,
    o: Tensor,
    final_state: Tensor | None,
    checkpoints: Tensor | None,
    span_decays: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    flags: int,
    segment: int,
    /,
) -> None: ...
def backward(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    initial_state: Tensor | None,
    checkpoints: Tensor,
    grad_o: Tensor | None,
    grad_final_state: Tensor | None,
    grad_r: Tensor | None,
    grad_k: Tensor | None,
    grad_v: Tensor | None,
    grad_w: Tensor | None,
    grad_u: Tensor | None,
    grad_initial_state: Tensor | None,
    grad_u_parts: Tensor | None,
    span_decays: Tensor | None,
    span_adjoints: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    flags: int,
    segment: int,
    /,
) -> None: ...
def step(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    state: Tensor,
    o: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    flags: int,
    segment: int,
    /,
) -> None: ...
def state(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    initial_state: Tensor | None,
    state: Tensor,
    w_sum: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    flags: int,
    segment: int,
    /,
) -> None: ...
def is_plain(*tensors: object) -> bool: ...
def isas() -> tuple[str, ...]: ...
def isas_built() -> tuple[str, ...]: ...
def isa() -> str: ...
def use_isa(name: str, /) -> str: ...
def cuda_library() -> tuple[str, int, int]: ...
def use_cuda_emulation(path: str | PathLike[str] | None, /) -> None: ...
