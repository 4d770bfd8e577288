"""Where the experts of a model that is being built are to lie: in memory, or in files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_make: ContextVar[Callable[..., Tensor]] = ContextVar("make", default=torch.empty)


def empty_experts(*shape: int) -> Tensor:
    """A tensor of this shape for weights of experts, whose values are to follow."""
    return _make.get()(*shape)


@contextmanager
def experts_made_by(make: Callable[..., Tensor]) -> Iterator[None]:
    """Meanwhile stacked experts of mixtures that are built lie where `make` says.

    Args:
        make: given a shape, a tensor of the default dtype.
    """
    token = _make.set(make)
    try:
        yield
    finally:
        _make.reset(token)
