"""A split of a job's data: its files, how many rows they have, and these encoded."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from chassis import scratch
from protos.job_pb2 import DataSpec, JobSpec
from workers.data import counts, files
from workers.data.columns import Batch, Encoder, concatenate
from workers.data.errors import DataError
from workers.data.labels import Label, labels_of
from workers.data.stored import mapped, store

Split = Literal["train", "valid", "test"]

_LEAST_WINDOW = 4096  # rows
_ORDER_BYTES = 8  # of a row in an epoch's order
_VERSION = 2  # of what encoded rows are
_log = logging.getLogger("heterps.data")


class Dataset:
    """The rows of one split, encoded.

    All of them stay in memory when they fit `cache_bytes`; a larger split is streamed from its
    files, every epoch anew, as is text that is too large to count. Processes that share a scratch
    folder (`chassis/scratch.py`) map what one of them has parsed.

    Args:
        spec: the `data` part of a job.
        split: which of its files to read.
        directory: the folder `spec.path` is relative to, that of the job file.
        labels: what losses read; None: one, or the tokens that follow.
        cache_bytes: how much memory, of all processes that share, encoded rows may take.
        block_rows: rows decoded at a time.
        window_rows: rows shuffled together when streaming, at most.

    Raises:
        DataError: a file or column is missing or has a type that does not fit.
    """

    def __init__(
        self,
        spec: DataSpec,
        split: Split,
        directory: str | Path = ".",
        *,
        labels: Sequence[Label] | None = None,
        cache_bytes: int = 512 << 20,
        block_rows: int = 16384,
        window_rows: int = 131072,
    ) -> None:
        pattern = {"train": spec.train, "valid": spec.valid, "test": spec.test}[split]
        paths = files.find(Path(directory), spec.path, pattern, f"data.{split}")
        if labels is None:
            labels = labels_of(JobSpec(data=spec))
        self._encoder = Encoder(spec, labels)
        for path in paths:
            self._encoder.check(path)
        self.where = str(paths[0].parent / pattern)
        self._paths = paths
        self._block_rows = block_rows
        self._cache_bytes = cache_bytes
        self._most_window_rows = window_rows
        self._encoded: Batch | None = None
        self.units = [unit for path in paths for unit in files.units(path)]
        self._unit_rows: list[int] | None = None
        self._text = [path for path in paths if not files.is_parquet(path)]
        self.is_countable = sum(map(files.text_bytes, self._text)) <= counts.COUNTED_AT_ONCE

    @staticmethod
    def of(job: JobSpec, split: Split) -> "Dataset":
        """A split of a job, with labels as its losses take them."""
        return Dataset(job.data, split, job.directory, labels=labels_of(job))

    @property
    def rows(self) -> int:
        """Rows of the split.

        Raises:
            DataError: it is more text than can be counted at once (`is_countable`), and has not
                been read to its end on this host.
        """
        return sum(self.unit_rows)

    @property
    def unit_rows(self) -> list[int]:
        """Rows of each unit; `rows` says more."""
        if self._unit_rows is None:
            found = [self.known_rows(index) for index in range(len(self.units))]
            rows = [count for count in found if count is not None]
            if len(rows) < len(found):
                size = sum(path.stat().st_size for path in self._text)
                raise DataError(
                    self.where,
                    "train.max_steps",
                    0,
                    f"a number of steps: {size / 1e9:.1f} GB of text say not how many rows they "
                    "have until they have been read once; Parquet files say so",
                )
            self._unit_rows = rows
        return self._unit_rows

    def known_rows(self, index: int) -> int | None:
        """Rows of a unit; None for those of text that is too large to count and was never read."""
        unit = self.units[index]
        if unit.rows is not None:
            return unit.rows
        if self._unit_rows is not None:
            return self._unit_rows[index]
        return counts.counted(unit.path) if self.is_countable else counts.known(unit.path)

    @property
    def row_bytes(self) -> int:
        """Memory of one encoded row."""
        return self._encoder.row_bytes

    @property
    def nothing(self) -> Batch:
        """A batch of no rows."""
        return self._encoder.nothing

    @property
    def is_kept(self) -> bool:
        """Whether all rows stay in memory, with an order of them."""
        return self.is_countable and self.fits(self.rows)

    def fits(self, rows: int) -> bool:
        """Whether so many rows and an order of them may stay in memory."""
        return rows * (self.row_bytes + _ORDER_BYTES) <= self._cache_bytes

    @property
    def window_rows(self) -> int:
        """Rows of a window when streaming."""
        share = self._cache_bytes // (8 * self.row_bytes)
        return min(self._most_window_rows, max(share, _LEAST_WINDOW))

    @property
    def windows(self) -> int:
        """Windows that all processes together may keep."""
        return max(3, self._cache_bytes // (self.window_rows * self.row_bytes) - 3)

    @property
    def folder(self) -> Path | None:
        """Where processes that read the same find what others have parsed; None: nowhere."""
        shared = scratch.own()
        if shared is None:
            return None
        read: list[object] = [_VERSION, self._encoder.meaning]
        read += [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in self._paths]
        return shared / hashlib.sha256(repr(read).encode()).hexdigest()[:32]

    def check_statistics(self) -> None:
        """Raises `DataError` where what Parquet files say of their values does not fit."""
        for path in self._paths:
            self._encoder.check_statistics(path)

    def encoded(self) -> Batch:
        """All rows, in the order of the files; they are not to be written to.

        Raises:
            DataError: they do not match the job.
        """
        if self._encoded is None:
            self._encoded = self._mapped()
        if self._encoded is None:
            self._encoded = concatenate([self.nothing, *self._all()])
        return self._encoded

    def read(self, index: int, start: int = 0) -> Iterator[Batch]:
        """The rows of a unit from `start` on, block by block; those before are not encoded.

        Raises:
            DataError: they do not match the job; or they are not as many as they were.
        """
        unit, position = self.units[index], 0
        status = unit.path.stat()
        for block in files.read(unit, self._encoder.columns, self._block_rows):
            skipped = min(max(start - position, 0), block.num_rows)
            if skipped < block.num_rows:
                first = unit.first + position + skipped
                yield self._encoder.encode(block.slice(skipped), unit.path, first)
            position += block.num_rows
        expected = unit.rows if self._unit_rows is None else self._unit_rows[index]
        if expected is not None and position != expected:
            raise DataError(
                str(unit.path), "contents", f"{position} rows", f"{expected}, as before"
            )
        if unit.rows is None:
            counts.keep(unit.path, status, position)

    def _all(self) -> Iterator[Batch]:
        for index in range(len(self.units)):
            yield from self.read(index)

    def _store(self, path: Path) -> None:
        store(path, self._all(), self.rows, self.nothing)

    def _mapped(self) -> Batch | None:
        """What one of the processes that share has parsed; None where none may."""
        folder = self.folder
        if folder is None:
            return None
        path = folder / "rows"
        try:
            scratch.once(path, self._store)
            return mapped(path, self.nothing)
        except OSError as error:
            _log.warning("%s: kept by each process of its own: %s", self.where, error)
            return None
