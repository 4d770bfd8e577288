"""A split of a job's data: its files, how many rows they have, and these encoded."""

import hashlib
import logging
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Literal

from chassis import scratch
from protos.job_pb2 import DataSpec, JobSpec
from workers.data.blocks import Blocks, FileBlocks, JoinedBlocks
from workers.data.columns.arrays import Batch, Encoder, concatenate
from workers.data.columns.labels import Label, labels_of
from workers.data.errors import DataError
from workers.data.files import splits as files
from workers.data.joins import Joined, joins_of
from workers.data.stored import mapped, store

Split = Literal["train", "valid", "test"]

_LEAST_WINDOW = 4096  # rows, unless they are more bytes than
_LEAST_WINDOW_BYTES = 128 << 20
_ORDER_BYTES = 8  # of a row in an epoch's order
_VERSION = 3  # of what encoded rows are
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
        blocks: Blocks
        if spec.source:
            # Brings torch: only where a source needs it.
            from workers.data.own.samples import OwnBlocks

            blocks = OwnBlocks(spec, pattern, Path(directory))
        else:
            paths = files.find(Path(directory), spec.path, pattern, f"data.{split}")
            blocks = FileBlocks(paths, str(paths[0].parent / pattern))
        if joins := joins_of(spec, Path(directory)):
            blocks = JoinedBlocks(blocks, Joined(joins))
        if labels is None:
            labels = labels_of(JobSpec(data=spec))
        self._encoder = Encoder(spec, labels)
        blocks.check(self._encoder)
        self._blocks = blocks
        self.where = blocks.where
        self._block_rows = self._encoder.block_rows(block_rows)
        self._cache_bytes = cache_bytes
        self._most_window_rows = window_rows
        self._encoded: Batch | None = None
        self.units = blocks.units
        self._unit_rows: list[int] | None = None
        self.is_countable = blocks.is_countable

    @staticmethod
    def of(job: JobSpec, split: Split) -> "Dataset":
        """A split of a job, with labels as its losses take them."""
        return Dataset(job.data, split, job.directory, labels=labels_of(job))

    @property
    def rows(self) -> int:
        """Rows of the split.

        Raises:
            DataError: they are not known (`is_countable`): of more text than can be counted at
                once, which was not read to its end on this host, or of a source without a length.
        """
        return sum(self.unit_rows)

    @property
    def unit_rows(self) -> list[int]:
        """Rows of each unit; `rows` says more."""
        if self._unit_rows is None:
            found = [self.known_rows(index) for index in range(len(self.units))]
            rows = [count for count in found if count is not None]
            if len(rows) < len(found):
                expected = f"a number of steps: {self._blocks.uncounted}"
                raise DataError(self.where, "train.max_steps", 0, expected)
            self._unit_rows = rows
        return self._unit_rows

    def known_rows(self, index: int) -> int | None:
        """Rows of a unit; None for those that nobody knows, and that are too many to count."""
        if self._unit_rows is not None:
            return self._unit_rows[index]
        return self._blocks.known_rows(self.units[index])

    @property
    def contents(self) -> str:
        """Differs where its rows are others, as far as that is seen without reading all of them.

        It is the same on every host.

        Raises:
            DataError: they cannot be read.
        """
        return self._blocks.contents(self._encoder.columns)

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
        least = min(_LEAST_WINDOW, max(1, _LEAST_WINDOW_BYTES // self.row_bytes))
        return min(self._most_window_rows, max(share, least))

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
        read = [_VERSION, self._encoder.meaning, *self._blocks.identity]
        return shared / hashlib.sha256(repr(read).encode()).hexdigest()[:32]

    def check_values(self) -> None:
        """Raises `DataError` where values do not fit, as far as can be seen without reading all."""
        self._blocks.check_values(self._encoder, self._encoder.columns)

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

    def read(self, index: int, start: int = 0) -> Generator[Batch, None, int]:
        """The rows of a unit from `start` on, block by block; those before are not encoded.

        Returns:
            Rows of the whole unit.

        Raises:
            DataError: they do not match the job; or they are not as many as they were.
        """
        unit, position, schema = self.units[index], 0, None
        typed = not files.is_text(unit.path)
        columns = self._encoder.columns
        for at, block in self._blocks.read(unit, columns, self._block_rows, start):
            skipped = min(max(start - at, 0), block.num_rows)
            if block.schema != schema:  # each of a source, or of a tar, has types of its own
                schema = block.schema
                self._encoder.check_schema(unit.path, schema, typed=typed)
            if skipped < block.num_rows:
                first = unit.first + at + skipped
                yield self._encoder.encode(block.slice(skipped), unit.path, first)
            position = at + block.num_rows
        expected = unit.rows if self._unit_rows is None else self._unit_rows[index]
        if expected is not None and position != expected:
            raise DataError(
                str(unit.path), "contents", f"{position} rows", f"{expected}, as before"
            )
        return position

    @property
    def pass_rows(self) -> int:
        """Of a split that is read again and again, where that is known; else 0."""
        return self._blocks.pass_rows

    def position(self, row: int) -> str:
        """What `go_on` takes elsewhere to read on from a row; "": nothing is of use there."""
        return "" if self.is_kept else self._blocks.position(row)

    def go_on(self, position: str) -> None:
        """Know what another process knew of where reading can begin."""
        if position:
            self._blocks.go_on(position)

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
