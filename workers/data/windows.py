"""A split that is streamed: windows of its rows, shuffled inside, as seed and epoch say.

Units, row groups or text files, come in an order of each epoch's own; as many rows as are a window
are shuffled among themselves. One process of those that share parses ahead of all that read.
"""

import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from workers.data.columns.arrays import Batch, concatenate
from workers.data.errors import DataError
from workers.data.reader import Dataset

_MAPPED = 2  # windows that a reader holds


class WindowId(NamedTuple):
    """A window of an epoch."""

    epoch: int
    number: int


class Windows(Protocol):
    """Where a reader finds windows."""

    def get(self, name: WindowId) -> Batch:
        """The rows of a window; none behind the end."""

    def close(self) -> None:
        """Hold nothing any more."""


class Stream:
    """All windows of a split, to be made one after the other.

    Args:
        seed: of the orders; None for that of the files.
        epochs: that will be read.
        endless: there is one epoch, in which the files follow each other again and again: of a
            split whose rows nobody has counted.
    """

    def __init__(self, dataset: Dataset, seed: int | None, epochs: int, endless: bool) -> None:
        self.dataset = dataset
        self.window_rows = dataset.window_rows
        self.name = f"windows-{seed}-{endless}-{self.window_rows}"
        self.in_order = seed is None
        self._seed = seed
        self._epochs = epochs
        self._endless = endless

    def windows(self, start: WindowId) -> Iterator[tuple[WindowId, Batch]]:
        """The windows from `start` on; behind an epoch's last one follows the next epoch."""
        index = start.number
        for epoch in range(start.epoch, self._epochs):
            for rows in self._cut(self._epoch(epoch, index * self.window_rows)):
                yield WindowId(epoch, index), self._shuffled(rows, epoch, index)
                index += 1
            index = 0

    def after(self, name: WindowId) -> WindowId:
        """The window that follows."""
        if self._seed is not None and not self._endless:
            last = -(-self.dataset.rows // self.window_rows) - 1
            if name.number >= last:
                return WindowId(name.epoch + 1, 0)
        return WindowId(name.epoch, name.number + 1)

    def _shuffled(self, rows: Batch, epoch: int, index: int) -> Batch:
        if self._seed is None:
            return rows
        return rows.take(np.random.default_rng([self._seed, epoch, index]).permutation(len(rows)))

    def _cut(self, blocks: Iterator[Batch]) -> Iterator[Batch]:
        """Windows of equally many rows; the last one has what is left."""
        held: list[Batch] = []
        rows = 0
        for block in blocks:
            held.append(block)
            rows += len(block)
            while rows >= self.window_rows:
                whole = concatenate(held)
                yield whole.slice(0, self.window_rows)
                held = [whole.slice(self.window_rows, rows)]
                rows -= self.window_rows
        if rows:
            yield concatenate(held)

    def _epoch(self, epoch: int, skipped: int) -> Iterator[Batch]:
        """The rows of an epoch behind the first `skipped`, block by block."""
        if not self._endless:
            yield from self._units(epoch, skipped)
            return
        rows = self.dataset.pass_rows
        begun, skipped = divmod(skipped, rows) if rows else (0, skipped)
        for passed in count(begun):
            read = yield from self._units(passed, skipped)
            skipped = max(0, skipped - read)
            if not read:
                raise DataError(self.dataset.where, "contents", "no rows", "rows to train on")

    def _units(self, epoch: int, skipped: int) -> Generator[Batch, None, int]:
        """The rows of all units behind the first `skipped`; how many there are in all."""
        order, total = list(range(len(self.dataset.units))), 0
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(order)).tolist()
        for index in order:
            rows = self.dataset.known_rows(index) if skipped else None
            if rows is None or rows > skipped:
                rows = yield from self.dataset.read(index, skipped)
            skipped = max(0, skipped - rows)
            total += rows
        return total


class OwnWindows:
    """Windows that this process parses for itself."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._coming: Iterator[tuple[WindowId, Batch]] | None = None
        self._passed: OrderedDict[WindowId, Batch] = OrderedDict()  # the last ones

    def get(self, name: WindowId) -> Batch:
        """The rows of a window, cheap in ascending order."""
        if name not in self._passed:
            latest = next(reversed(self._passed), None)
            if self._coming is None or latest is None or name < latest:
                self._coming = self._stream.windows(name)
                self._passed.clear()
            for found, rows in self._coming:
                self._passed[found] = rows
                while len(self._passed) > _MAPPED:
                    self._passed.popitem(last=False)
                if found >= name:
                    break
        return self._passed.get(name, self._stream.dataset.nothing)

    def close(self) -> None:
        """Forget the windows and what is open."""
        self._coming = None
        self._passed.clear()


class StreamedEpochs:
    """The rows of a split in windows, in the order of each epoch.

    Args:
        windows: where they are found, of `stream`.
    """

    def __init__(self, stream: Stream, windows: Windows) -> None:
        self._stream = stream
        self._windows = windows
        self._lock = threading.Lock()

    def read(self, epoch: int, first: int, last: int, *, labels: bool = False) -> Batch:
        """Rows `first` to `last` of an epoch, fewer at its end."""
        size = self._stream.window_rows
        parts = []
        with self._lock:
            for index in range(first // size, -(-last // size)):
                rows = self._windows.get(WindowId(epoch, index))
                start = index * size
                part = rows.slice(max(0, first - start), max(0, last - start))
                parts.append(part.labels if labels else part)
                if len(rows) < size:
                    break
        if len(parts) == 1:
            return parts[0].copy()
        nothing = self._stream.dataset.nothing
        return concatenate([nothing.labels if labels else nothing, *parts])

    def close(self) -> None:
        """Hold nothing any more."""
        self._windows.close()
