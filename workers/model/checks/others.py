"""Whether a forward heeds what others there are: found by some that have values in common, or none.

One may take the mean of a group, or count how often a key comes, in a whole micro-batch; of rare
groups a few samples of the data are in one each. Or one does something to all samples where any has
a value that most batches have.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from workers.model.chain.trace import TracedModel
from workers.model.checks.outliers import alike, close
from workers.model.checks.trial import joined, run

_TRIALS = 2
_SHARE = 0.5  # of the values in common
_SEED = 2
_ALONE = 4  # samples


def heeds_others(
    traced: TracedModel, first: Mapping[str, Tensor], second: Mapping[str, Tensor], usual: Any
) -> bool:
    """Whether what is given for samples is something else where others are like them, or not there.

    Args:
        second: as many others.
        usual: what the model gives for both.
    """
    samples = len(next(iter(first.values())))
    generator = torch.Generator().manual_seed(_SEED)
    for _ in range(_TRIALS):
        others = {name: _some_of(value, second[name], generator) for name, value in first.items()}
        found = _tried(traced, joined(first, others))
        if found is not None and not alike(usual, found, samples):
            return True
    for place in range(min(_ALONE, samples)):
        found = _tried(traced, _rows(first, place, samples))
        if found is not None and _unlike(_rows(usual, place, 2 * samples), found):
            return True
    return False


def _tried(traced: TracedModel, batch: Mapping[str, Tensor]) -> Any:
    """What a model gives for a batch; None where it may be none that it takes."""
    try:
        return run(traced, batch)
    except Exception:
        return None


def _unlike(one: Any, other: Any) -> bool:
    """Whether tensors differ; a sample by itself may have lost its dimension."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return any(isinstance(a, Tensor) and a.shape == b.shape and not close(a, b) for a, b in pairs)


def _some_of(first: Tensor, second: Tensor, generator: torch.Generator) -> Tensor:
    """Values of the first, and for the rest those of the second; of pictures and the like whole."""
    shape = first.shape if first.ndim <= 2 else (len(first), *[1] * (first.ndim - 1))
    return torch.where(torch.rand(shape, generator=generator) < _SHARE, first, second)


def _rows(values: Any, place: int, samples: int) -> Any:
    """One sample of each tensor that has rows of samples."""

    def row(value: Any) -> Any:
        rows = isinstance(value, Tensor) and value.ndim and len(value) == samples
        return value[place : place + 1] if rows else value

    return tree_map(row, values)
