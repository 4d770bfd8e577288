"""What a client says of its pushes in a file, so that its own death takes none of it away."""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

KEYS = 4000  # of the counted tables
PUSHED = 200  # keys a push, all different
_RECORD = struct.Struct("<q?")  # number of the push, whether it was acknowledged


def keys_of(seed: int, number: int) -> NDArray[np.int64]:
    """The keys of a push of a client: they follow from its seed, so nobody keeps them."""
    return np.random.default_rng((seed, number)).choice(KEYS, PUSHED, replace=False)


class Ledger:
    """Written by a client: a record before each push and one once it is acknowledged."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def begin(self, number: int) -> None:
        """About to send it."""
        os.write(self._file, _RECORD.pack(number, False))

    def acknowledge(self, number: int) -> None:
        """It was told that all is kept."""
        os.write(self._file, _RECORD.pack(number, True))


def read(path: Path) -> Iterator[tuple[int, bool]]:
    """Each push that was begun, once, and whether it was acknowledged."""
    raw = path.read_bytes() if path.exists() else b""
    whole = raw[: len(raw) // _RECORD.size * _RECORD.size]
    begun = dict[int, bool]()
    for number, acknowledged in _RECORD.iter_unpack(whole):
        begun[number] = begun.get(number, False) or acknowledged
    yield from begun.items()


@dataclass
class Account:
    """How often each key of a table was counted up, by what its clients were told.

    Attributes:
        least: [KEYS], of acknowledged pushes, and of what was found at the last look.
        open: [KEYS], of pushes whose clients never heard: each may be there, once.
    """

    least: NDArray[np.int64] = field(default_factory=lambda: np.zeros(KEYS, np.int64))
    open: NDArray[np.int64] = field(default_factory=lambda: np.zeros(KEYS, np.int64))
    acknowledged: int = 0
    unknown: int = 0

    def add(self, path: Path, seed: int) -> None:
        """Take in the ledger of a client that has ended."""
        for number, acknowledged in read(path):
            keys = keys_of(seed, number)
            if acknowledged:
                self.least[keys] += 1
                self.acknowledged += 1
            else:
                self.open[keys] += 1
                self.unknown += 1

    def settle(self, rows: NDArray[np.float32]) -> str:
        """Compare with the table, [KEYS, dim]; what is wrong, or nothing.

        What was open is then known: it is there, or it never comes.
        """
        counts = rows[:, 0].astype(np.int64)
        if (rows != rows[:, :1]).any() or (counts != rows[:, 0]).any():
            return "a row is half applied"
        if lost := int((counts < self.least).sum()):
            worst = int((self.least - counts).max())
            return f"{lost} keys lack acknowledged pushes, the worst {worst}"
        if twice := int((counts > self.least + self.open).sum()):
            worst = int((counts - self.least - self.open).max())
            return f"{twice} keys have pushes twice, the worst {worst}"
        self.least, self.open = counts, np.zeros(KEYS, np.int64)
        return ""
