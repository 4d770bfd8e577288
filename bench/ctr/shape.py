"""The network and its data, the same for everybody: 26 slots of keys and 13 numbers a sample.

The ids of a slot follow Zipf's law. The label is drawn: what is measured is how fast it trains.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SLOTS, DENSE, DIM = 26, 13, 16
WIDTHS = (SLOTS * DIM + DENSE, 400, 400, 1)
BATCH = 4096
KEYS = 10_000_000  # over all slots
EXPONENT = 1.05
LEARNING_RATE, ACCUMULATOR, EPSILON, SCALE = 0.05, 0.1, 1e-8, 0.01
DENSE_RATE = 1e-3  # of Adam


@dataclass(frozen=True, slots=True)
class Data:
    """Samples.

    Attributes:
        rows: int64 [n, slots], row numbers below `KEYS`, each slot's own range.
        dense: float32 [n, numbers].
        labels: float32 [n].
    """

    rows: NDArray[np.int64]
    dense: NDArray[np.float32]
    labels: NDArray[np.float32]

    @classmethod
    def drawn(cls, batches: int, seed: int = 1) -> "Data":
        """Some batches of samples."""
        rng = np.random.default_rng(seed)
        n, each = batches * BATCH, KEYS // SLOTS
        cumulative = np.cumsum(np.arange(1, each + 1, dtype=np.float64) ** -EXPONENT)
        ranks = np.searchsorted(cumulative, rng.random((n, SLOTS)) * cumulative[-1])
        ids = (ranks * 7_368_787) % each  # popular rows are not neighbours
        rows = ids.astype(np.int64) + np.arange(SLOTS) * each
        dense = rng.standard_normal((n, DENSE), dtype=np.float32)
        return cls(rows, dense, rng.integers(0, 2, n).astype(np.float32))

    def save(self, path: Path) -> None:
        """Into one file."""
        np.savez(path, rows=self.rows, dense=self.dense, labels=self.labels)

    @classmethod
    def load(cls, path: Path) -> "Data":
        """What was saved."""
        with np.load(path) as found:
            return cls(found["rows"], found["dense"], found["labels"])
