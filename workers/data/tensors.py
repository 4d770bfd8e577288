"""Batches as models take them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.data.columns.arrays import Batch, concatenate
from workers.data.reader import Dataset


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """A batch by the names that models use, and `label.NAME` of what losses read."""
    return {name: wide(array) for name, array in batch.arrays.items()}


def first_samples(dataset: Dataset, count: int) -> Batch:
    """The first `count` samples of a split, or all where it has fewer."""
    found = [dataset.nothing]
    for index in range(len(dataset.units)):
        for block in dataset.read(index):
            missing = count - sum(map(len, found))
            found.append(block.slice(0, missing))
            if len(block) >= missing:
                return concatenate(found)
    return concatenate(found)


def wide(array: npt.NDArray[Any]) -> Tensor:
    """An array as models and losses take it: what is kept at half the size, or a quarter.

    Tokens and classes are int64; pictures float32, from 0 to 1.
    """
    if array.dtype == np.uint8:
        return torch.from_numpy(array).to(torch.float32).div_(255)
    if array.dtype == np.int32 or not array.flags.writeable:  # a model may change what it is given
        array = array.astype(np.int64 if array.dtype == np.int32 else array.dtype)
    return torch.from_numpy(array)
