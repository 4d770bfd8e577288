"""Norms of gradients, of each stacked expert for itself: the same wherever the experts lie."""

from collections.abc import Sequence

import torch
from torch import Tensor


def norms(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of each gradient, float64 [n]; infinite or NaN where a value of it is."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    found = torch.stack(torch._foreach_norm(list(gradients))).double()
    for number, gradient in enumerate(gradients):
        if not found[number].isfinite():  # beyond float32 perhaps, and no more than that
            found[number] = torch.linalg.vector_norm(gradient.double())
    return found


def squared(stack: Tensor) -> float:
    """Squared norm of a gradient of stacked experts [E, …], by those of each of them."""
    return squared_of(norms(stack.unbind()))


def squared_of(found: Tensor) -> float:
    """The same of the experts' norms, float64 [E]; of one without a gradient 0."""
    return found.square().sum().item()
