"""The order of rows in an epoch: it follows from seed and epoch alone."""

import threading
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from chassis import scratch
from workers.data.columns.arrays import Batch
from workers.data.reader import Dataset

Order = npt.NDArray[np.int64]


class Epochs(Protocol):
    """The rows of a split in the order of each epoch."""

    def read(self, epoch: int, first: int, last: int, *, labels: bool = False) -> Batch:
        """Rows `first` to `last` of an epoch, fewer at its end, in memory of their own.

        Args:
            labels: nothing but what losses read.
        """

    def close(self) -> None:
        """Hold nothing any more."""


class KeptEpochs:
    """Of a split that stays in memory: an epoch is a permutation of it.

    Args:
        seed: of the permutations; None for the order of the files.
    """

    def __init__(self, dataset: Dataset, seed: int | None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._lock = threading.Lock()
        self._orders: dict[int, Order] = {}  # of the last two epochs that were read

    def read(self, epoch: int, first: int, last: int, *, labels: bool = False) -> Batch:
        """Rows `first` to `last` of an epoch."""
        rows = self._dataset.encoded()
        rows = rows.labels if labels else rows
        if self._seed is None:
            return rows.slice(first, last).copy()
        return rows.take(self._order(epoch, self._seed)[first:last])

    def close(self) -> None:
        """Nothing: what is mapped goes with this object."""

    def _order(self, epoch: int, seed: int) -> Order:
        with self._lock:
            if epoch not in self._orders:
                self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) == 1}
                self._orders[epoch] = self._shared(epoch, seed)
            return self._orders[epoch]

    def _shared(self, epoch: int, seed: int) -> Order:
        """The order of an epoch, which one process of those that share makes."""

        def order() -> Order:
            return np.random.default_rng([seed, epoch]).permutation(self._dataset.rows)

        folder = self._dataset.folder
        if folder is None or not self._dataset.rows:
            return order()
        path = folder / f"order-{seed}-{epoch}"
        try:
            scratch.once(path, lambda to: order().tofile(to))
            found: Order = np.asarray(np.memmap(path, np.int64, "r"))
        except OSError:
            return order()
        _forget(folder / f"order-{seed}-{epoch - 2}")
        return found


def _forget(path: Path) -> None:
    path.unlink(missing_ok=True)
