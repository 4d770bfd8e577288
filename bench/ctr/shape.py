"""The network, what it begins with and its data: 26 slots of keys and 13 numbers a sample.

The ids of a slot follow Zipf's law. The label is drawn: what is measured is how fast it trains.
Peers begin with the same rows and layers, so that they can be held against one reference.
Interpreters of other systems import this: it needs NumPy alone.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SLOTS, DENSE, DIM = 26, 13, 16
WIDTHS = (SLOTS * DIM + DENSE, 400, 400, 1)
BATCH = 4096
KEYS = 10_000_000  # over all slots
EACH = KEYS // SLOTS
EXPONENT = 1.05
# The first sum of squares is about those of gradients of a mean loss, so that it matters to rows
# which Adagrad it was: the check would not see that beside 0.1.
LEARNING_RATE, ACCUMULATOR, EPSILON, SCALE = 0.05, 1e-10, 1e-8, 0.01
DENSE_RATE = 1e-3  # of Adam
CHECKED = 5  # first steps of a peer, that are held against the reference
CHECKED_SAMPLES = 512  # whose rows are, too


def first_rows(slot: int) -> NDArray[np.float32]:
    """Rows of a slot before training, [EACH, DIM]."""
    rows = np.random.default_rng(slot).random((EACH, DIM), dtype=np.float32)
    rows -= 0.5
    rows *= 2 * SCALE
    return rows


def first_layers() -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Weights [outputs, inputs] and biases [outputs] of the dense layers before training."""
    rng = np.random.default_rng(1000)
    layers = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        bound = inputs**-0.5
        weight = rng.uniform(-bound, bound, (outputs, inputs)).astype(np.float32)
        layers.append((weight, rng.uniform(-bound, bound, outputs).astype(np.float32)))
    return layers


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
        n = batches * BATCH
        cumulative = np.cumsum(np.arange(1, EACH + 1, dtype=np.float64) ** -EXPONENT)
        ranks = np.searchsorted(cumulative, rng.random((n, SLOTS)) * cumulative[-1])
        ids = (ranks * 7_368_787) % EACH  # popular rows are not neighbours
        rows = ids.astype(np.int64) + np.arange(SLOTS) * EACH
        dense = rng.standard_normal((n, DENSE), dtype=np.float32)
        return cls(rows, dense, rng.integers(0, 2, n).astype(np.float32))

    def checked(self) -> NDArray[np.int64]:
        """Numbers of rows that are held against the reference, popular and rare ones."""
        return np.unique(self.rows[:CHECKED_SAMPLES])

    def save(self, path: Path) -> None:
        """Into one file."""
        np.savez(path, rows=self.rows, dense=self.dense, labels=self.labels)

    @classmethod
    def load(cls, path: Path) -> "Data":
        """What was saved."""
        with np.load(path) as found:
            return cls(found["rows"], found["dense"], found["labels"])
