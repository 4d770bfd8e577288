"""What a shard of the PyTorch RPC peer does; imported by both sides, which name its functions."""

import torch
from torch import Tensor

from bench.ps.peers.peer import EPSILON, INITIAL_ACCUMULATOR, LEARNING_RATE


class Rows:
    """The rows of this process."""

    weights: Tensor
    squares: Tensor


def make(rows: int, dim: int) -> None:
    """Allocate and touch the arrays."""
    Rows.weights = torch.zeros(rows, dim)
    Rows.weights += 0.0
    Rows.squares = torch.full((rows, dim), INITIAL_ACCUMULATOR)


def pull(numbers: Tensor) -> Tensor:
    """Rows [n, dim] of numbers [n]."""
    return Rows.weights.index_select(0, numbers)


def push(numbers: Tensor, grads: Tensor) -> None:
    """One step of Adagrad on distinct rows."""
    squares = Rows.squares.index_select(0, numbers).addcmul_(grads, grads)
    Rows.squares.index_copy_(0, numbers, squares)
    step = grads / squares.sqrt_().add_(EPSILON)
    weights = Rows.weights.index_select(0, numbers).sub_(step, alpha=LEARNING_RATE)
    Rows.weights.index_copy_(0, numbers, weights)  # faster than index_add_
