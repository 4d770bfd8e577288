"""What all contestants do: the keys and gradients of each step, and what NumPy makes of them."""

import numpy as np
from numpy.typing import NDArray

TABLE = 384 << 20  # bytes of weights and states
SHARE = 8  # the table is so many times what memory may hold of it
ZIPF, BATCH, RATE = 1.05, 8192, 0.1
Floats = NDArray[np.float32]
Keys = NDArray[np.int64]


def row_bytes(dim: int) -> int:
    """Of a row and its state."""
    return 2 * 4 * dim


def count_of(dim: int) -> int:
    """Rows of a table of so many bytes."""
    return TABLE // row_bytes(dim)


def adagrad(rows: Floats, grads: Floats) -> None:
    """A step of rows [n, 2, dim], in place."""
    rows[:, 1] += grads * grads
    rows[:, 0] -= RATE * grads / (np.sqrt(rows[:, 1]) + 1e-10)


class Steps:
    """Keys and gradients, the same for all: keys in no order, some far oftener than others."""

    def __init__(self, dim: int) -> None:
        self._dim, self._count = dim, count_of(dim)
        shares = 1 / np.arange(1, self._count + 1) ** ZIPF
        self._sum = np.cumsum(shares / shares.sum())
        self._names = np.random.default_rng(1).permutation(self._count).astype(np.int64)

    @property
    def some(self) -> Keys:
        """To be compared: some of all, and those that come oftenest."""
        return np.concatenate([self._names[:4], self._names[4 :: self._count // 16]])

    def after(self, count: int) -> Floats:
        """Rows of `some` after so many steps, and after having been filled."""
        place = {key: i for i, key in enumerate(self.some.tolist())}
        rows = np.zeros((len(place), 2, self._dim), np.float32)
        adagrad(rows, np.ones((len(place), self._dim), np.float32))
        for number in range(count):
            keys, grads = self.step(number)
            for at in np.flatnonzero(np.isin(keys, self.some)):
                i = place[int(keys[at])]
                adagrad(rows[i : i + 1], grads[at : at + 1])
        return rows[:, 0]

    def step(self, number: int) -> tuple[Keys, Floats]:
        draw = np.random.default_rng(number + 2)
        places = np.searchsorted(self._sum, draw.random(BATCH))
        keys = np.unique(self._names[np.minimum(places, self._count - 1)])
        return keys, draw.standard_normal((len(keys), self._dim)).astype(np.float32)
