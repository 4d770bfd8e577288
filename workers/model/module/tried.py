"""A model that is run for a look at what it does, so that no mark is left on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from workers.embedding.sparse import SparseEmbedding
from workers.model.module.modes import in_mode

_SEED = 1


class Rows:
    """Rows of any key, for embeddings that nothing is bound to.

    Attributes:
        given: where those that were asked for lie in memory.
    """

    def __init__(self) -> None:
        self.given: set[int] = set()
        self._kept: list[NDArray[np.float32]] = []

    def of(self, dim: int) -> "_RowsOfTable":
        """Those of a table."""
        return _RowsOfTable(self, dim)

    def keep(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The same, noted as given."""
        self.given.add(rows.ctypes.data)
        self._kept.append(rows)  # so that nothing else comes to lie there
        return rows


class _RowsOfTable:
    def __init__(self, rows: Rows, dim: int) -> None:
        self._rows, self._dim = rows, dim

    def pull(self, keys: NDArray[np.uint64], read_only: bool) -> NDArray[np.float32]:
        angles = np.outer(1 + keys % np.uint64(99991), 1 + np.arange(self._dim))
        return self._rows.keep(np.sin(angles).astype(np.float32))

    def push(self, keys: NDArray[np.uint64], grads: NDArray[np.float32]) -> None:
        pass


@contextmanager
def tried(model: nn.Module) -> Iterator[Rows]:
    """Have a model as in training, and all as it was afterwards, generators too."""
    rows = Rows()
    with in_mode(model, training=True), torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(_SEED)
        for module in model.modules():
            if isinstance(module, SparseEmbedding):
                module.store = rows.of(module.spec.dim)
                module.remote = False
                module._bound = None
        yield rows
