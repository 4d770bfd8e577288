"""Reading a split of a job's data in batches, shared out over workers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from protos.job_pb2 import DataSpec
from workers.data import files
from workers.data.columns import Batch, Encoder, concatenate
from workers.data.errors import DataError

Split = Literal["train", "valid", "test"]


class Dataset:
    """The rows of one split.

    Encoded rows stay in memory when all of them fit `cache_bytes`; rows are then shuffled over the
    whole split. A larger split is streamed from its files every epoch: row groups (or text files)
    are visited in a random order and rows shuffled inside a window of `window_rows`.

    Either way an epoch has one order of rows, fixed by (seed, epoch), and shard `i` of `n` takes
    the i-th n-th of it: shards never overlap, cover every row, and differ by at most one row.

    Args:
        spec: the `data` part of a job.
        split: which of its files to read.
        directory: the folder `spec.path` is relative to, that of the job file.
        cache_bytes: how much memory encoded rows may take.
        block_rows: rows decoded at a time.
        window_rows: rows shuffled together when streaming.

    Raises:
        DataError: a file or column is missing or has a type that does not fit.
    """

    def __init__(
        self,
        spec: DataSpec,
        split: Split,
        directory: str | Path = ".",
        *,
        cache_bytes: int = 512 << 20,
        block_rows: int = 16384,
        window_rows: int = 131072,
    ) -> None:
        pattern = {"train": spec.train, "valid": spec.valid, "test": spec.test}[split]
        paths = files.find(Path(directory), spec.path, pattern, f"data.{split}")
        self._encoder = Encoder(spec)
        for path in paths:
            self._encoder.check(path)
        self._where = str(paths[0].parent / pattern)
        self._cache_bytes = cache_bytes
        self._block_rows = block_rows
        self._window_rows = window_rows
        self._cached: Batch | None = None
        self._units = [unit for path in paths for unit in files.units(path)]
        self._unit_rows: list[int] | None = None
        if all(unit.rows is not None for unit in self._units):
            self._unit_rows = [unit.rows or 0 for unit in self._units]

    @property
    def rows(self) -> int:
        """Rows of the split; text files are read once to count them."""
        return sum(self._counts())

    def batches_per_epoch(
        self, batch_size: int, num_shards: int = 1, drop_last: bool = True
    ) -> int:
        """Batches each shard yields in an epoch.

        With `drop_last` exactly that many, the same for all shards; without, shards that hold a
        row less may yield one fewer.
        """
        if drop_last:
            return self.rows // num_shards // batch_size
        return math.ceil(math.ceil(self.rows / num_shards) / batch_size)

    def batches(
        self,
        batch_size: int,
        shard: int = 0,
        num_shards: int = 1,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> Iterator[Batch]:
        """One shard of one epoch in batches of `batch_size` rows, the same for the same arguments.

        Without `drop_last` the last batch may be shorter and every row comes once.
        """
        if batch_size < 1 or num_shards < 1 or not 0 <= shard < num_shards:
            raise ValueError(
                f"batch_size {batch_size} and num_shards {num_shards} must be 1 or more, "
                f"and shard {shard} from 0 to num_shards - 1"
            )
        rows = self.rows
        start, stop = shard * rows // num_shards, (shard + 1) * rows // num_shards
        if drop_last:
            limit = self.batches_per_epoch(batch_size, num_shards) * batch_size
            if limit == 0:
                raise DataError(
                    self._where,
                    "train.batch_size",
                    batch_size,
                    f"at most the {rows // num_shards} rows of each of {num_shards} shard(s)",
                )
        else:
            limit = stop - start
        if rows * self._encoder.row_bytes <= self._cache_bytes:
            return self._in_memory(start, start + limit, seed, epoch, shuffle, batch_size)
        blocks = self._stream(start, stop, seed, epoch, shuffle)
        if shuffle:
            rng = np.random.default_rng([seed, epoch, num_shards, shard])
            blocks = _shuffled(blocks, rng, max(self._window_rows, 4 * batch_size))
        return _rebatched(blocks, batch_size, limit)

    def _in_memory(
        self, start: int, stop: int, seed: int, epoch: int, shuffle: bool, batch_size: int
    ) -> Iterator[Batch]:
        if self._cached is None:
            blocks = list(self._stream(0, self.rows, 0, 0, shuffle=False))
            self._cached = concatenate(blocks) if blocks else None
        if self._cached is None:
            return
        order = None
        if shuffle:
            order = np.random.default_rng([seed, epoch]).permutation(self.rows)
        for first in range(start, stop, batch_size):
            last = min(first + batch_size, stop)
            if order is None:
                yield self._cached.slice(first, last)
            else:
                yield self._cached.take(order[first:last])

    def _stream(
        self, start: int, stop: int, seed: int, epoch: int, shuffle: bool
    ) -> Iterator[Batch]:
        """Rows `start` to `stop` of the epoch's order of units, encoded block by block."""
        counts = self._counts()
        order: Sequence[int] = range(len(counts))
        if shuffle:
            order = np.random.default_rng([seed, epoch]).permutation(len(counts)).tolist()
        position = 0
        for index in order:
            if position >= stop:
                return
            if position + counts[index] > start:
                yield from self._read(index, max(start - position, 0), stop - position)
            position += counts[index]

    def _read(self, index: int, start: int, stop: int) -> Iterator[Batch]:
        """Rows `start` to `stop` of one unit; what lies outside is skipped without hashing."""
        unit = self._units[index]
        position = 0
        for block in files.read(unit, self._encoder.columns, self._block_rows):
            first, last = max(start - position, 0), min(stop - position, block.num_rows)
            if first < last:
                yield self._encoder.encode(block.slice(first, last - first), unit.path)
            position += block.num_rows
            if position >= stop:
                return

    def _counts(self) -> list[int]:
        """Rows of every unit; the pass that counts text files keeps what it reads if it fits."""
        if self._unit_rows is not None:
            return self._unit_rows
        kept: list[Batch] | None = []
        held = 0
        counts = []
        for unit in self._units:
            count = 0
            for block in files.read(unit, self._encoder.columns, self._block_rows):
                count += block.num_rows
                held += block.num_rows * self._encoder.row_bytes
                if held > self._cache_bytes:
                    kept = None
                if kept is not None:
                    kept.append(self._encoder.encode(block, unit.path))
            counts.append(count)
        if kept:
            self._cached = concatenate(kept)
        self._unit_rows = counts
        return counts


def _shuffled(
    blocks: Iterable[Batch], rng: np.random.Generator, window_rows: int
) -> Iterator[Batch]:
    """Shuffles a stream: half of a full window leaves, so that rows meet those of later blocks."""
    held: list[Batch] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += len(block)
        if count >= window_rows:
            mixed = concatenate(held).take(rng.permutation(count))
            yield mixed.slice(0, count // 2)
            held = [mixed.slice(count // 2, count)]
            count -= count // 2
    if held:
        yield concatenate(held).take(rng.permutation(count))


def _rebatched(blocks: Iterable[Batch], batch_size: int, limit: int) -> Iterator[Batch]:
    """Cuts a stream into batches of `batch_size`, the last one shorter; at most `limit` rows."""
    held: list[Batch] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += len(block)
        if count < batch_size:
            continue
        whole = concatenate(held)
        full = min(count, limit) // batch_size * batch_size
        for first in range(0, full, batch_size):
            yield whole.slice(first, first + batch_size)
        limit -= full
        held, count = [whole.slice(full, count)], count - full
        if limit < batch_size and count >= limit:
            break
    last = min(count, limit)
    if last:
        yield concatenate(held).slice(0, last)
