"""Types of the native module built from `cuda/`; all arrays contiguous, outputs written in place."""

from torch import Tensor

has_cuda: bool

def route_workspace(pairs: int, experts: int) -> int: ...
def route(
    logits: Tensor,
    k: int,
    chosen: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    workspace: Tensor | None = None,
    stream: int = 0,
) -> None: ...
def gather_rows(
    x: Tensor, weights: Tensor | None, order: Tensor, k: int, rows: Tensor, stream: int = 0
) -> None: ...
def gather_sum(
    rows: Tensor, weights: Tensor | None, inverse: Tensor, k: int, x: Tensor, stream: int = 0
) -> None: ...
def gather_dot(
    x: Tensor, rows: Tensor, inverse: Tensor, k: int, weights: Tensor, stream: int = 0
) -> None: ...
