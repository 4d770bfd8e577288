"""FBGEMM's table-batched embedding on a CPU: rows that all begin with, exact Adagrad fused."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.ctr.shape import ACCUMULATOR, DIM, EACH, EPSILON, LEARNING_RATE, first_rows


def table(slots: int) -> Any:
    """Tables of so many slots, EACH rows each; what they hold is to be begun."""
    import_module("fbgemm_gpu")
    training: Any = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common: Any = import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(EACH, DIM, *place)] * slots, pooling_mode=common.PoolingMode.SUM, **fused()
    )


def fused() -> dict[str, Any]:
    """The optimizer, as FBGEMM is told of it."""
    configs: Any = import_module("fbgemm_gpu.split_embedding_configs")
    return {
        "optimizer": configs.EmbOptimType.EXACT_ADAGRAD,
        "learning_rate": LEARNING_RATE,
        "eps": EPSILON,
    }


def begin(made: Any, slots: Iterable[int]) -> None:
    """Give the tables of these slots their first rows and sums of squares."""
    for slot, weights in zip(slots, made.split_embedding_weights(), strict=True):
        weights.copy_(torch.from_numpy(first_rows(slot)))
    for states in made.split_optimizer_states():
        states[0].fill_(ACCUMULATOR)


def rows_of(numbers: NDArray[np.int64], tables: Mapping[int, Tensor]) -> NDArray[np.float32]:
    """Rows of numbers, [n, DIM]; zeros of slots that are not among these tables."""
    found = np.zeros((len(numbers), DIM), np.float32)
    for slot, weights in tables.items():
        own = numbers // EACH == slot
        found[own] = weights.detach()[torch.from_numpy(numbers[own] % EACH)].numpy()
    return found
