"""Where the rows of a split come from, as Arrow record batches."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from workers.data.columns.arrays import Encoder
from workers.data.files import counts
from workers.data.files import splits as files
from workers.data.files.unit import Unit
from workers.data.joins import Joined

_LOOKED_AT = 65536  # rows


class Blocks(Protocol):
    """The rows of a split, unit by unit."""

    @property
    def where(self) -> str:
        """What they are called in errors."""

    @property
    def units(self) -> Sequence[Unit]:
        """In order."""

    @property
    def identity(self) -> Sequence[object]:
        """Differs where other rows would be read; each has a `repr` that says all of it."""

    def contents(self, columns: Sequence[str]) -> str:
        """Differs where other rows would be read, as far as that is seen without reading all.

        It is the same on every host.

        Args:
            columns: that are read.

        Raises:
            DataError: they cannot be read.
        """

    @property
    def is_countable(self) -> bool:
        """Whether all rows are known, or are few enough to be counted by reading them."""

    @property
    def uncounted(self) -> str:
        """Where they are not: what does not say how many there are, and what would."""

    def known_rows(self, unit: Unit) -> int | None:
        """Rows of a unit; None where that is not known and must not be counted."""

    def check(self, encoder: Encoder, joined: Joined | None = None) -> None:
        """Raises `DataError` unless every column is there in a type that fits."""

    def check_values(self, encoder: Encoder, columns: Sequence[str]) -> None:
        """Raises `DataError` where values do not fit, as far as can be seen without reading all.

        Args:
            columns: that are read of these rows themselves.
        """

    def read(
        self, unit: Unit, columns: Sequence[str], rows: int, start: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of a unit with these columns and perhaps others, at most `rows` at a time.

        Args:
            start: the first that is needed; those before may be left out.

        Yields:
            How many rows of the unit come before, and the rows.

        Raises:
            DataError: they cannot be read.
        """

    def position(self, row: int) -> str:
        """What `go_on` takes elsewhere, of a row of a pass; "": nothing is of use there."""

    def go_on(self, position: str) -> None:
        """Know what another process knew of where reading can begin."""

    @property
    def pass_rows(self) -> int:
        """Of what is read again and again, where nobody has counted them beforehand; 0: unknown."""


class FileBlocks:
    """Of files.

    Args:
        paths: in order, at least one.
        where: what they are called in errors.
    """

    def __init__(self, paths: Sequence[Path], where: str) -> None:
        self.where = where
        self._paths = paths
        self._began = dict(zip(paths, files.identity(paths), strict=True))
        self._text = [path for path in paths if files.is_text(path)]
        self.units = [unit for path in paths for unit in files.units(path)]
        self.is_countable = sum(map(files.text_bytes, self._text)) <= counts.COUNTED_AT_ONCE

    @property
    def identity(self) -> Sequence[object]:
        """As of `Blocks`: of the files as they were when reading began."""
        return list(self._began.values())

    def contents(self, columns: Sequence[str]) -> str:
        """As of `Blocks`."""
        return files.contents(self._paths)

    @property
    def uncounted(self) -> str:
        """As of `Blocks`."""
        size = sum(path.stat().st_size for path in self._text)
        return (
            f"{size / 1e9:.1f} GB of text say not how many rows they have until they have been "
            "read once; Parquet files say so"
        )

    def known_rows(self, unit: Unit) -> int | None:
        """As of `Blocks`."""
        if unit.rows is not None:
            return unit.rows
        return counts.counted(unit.path) if self.is_countable else counts.known(unit.path)

    def check(self, encoder: Encoder, joined: Joined | None = None) -> None:
        """As of `Blocks`."""
        for path in self._paths:
            if joined is None:
                encoder.check(path)
            else:
                encoder.check(path, joined.extended)

    def check_values(self, encoder: Encoder, columns: Sequence[str]) -> None:
        """As of `Blocks`: what Parquet files say of theirs."""
        for path in self._paths:
            encoder.check_statistics(path)

    def read(
        self, unit: Unit, columns: Sequence[str], rows: int, start: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """As of `Blocks`."""
        self._check_same(unit.path)  # what is read before its end is trained on, too
        status, count = unit.path.stat(), 0
        for block in files.read(unit, columns, rows):
            yield count, block
            count += block.num_rows
        self._check_same(unit.path)
        if unit.rows is None:
            counts.keep(unit.path, status, count)

    def _check_same(self, path: Path) -> None:
        files.check_same([path], [self._began[path]])

    pass_rows = 0

    def position(self, row: int) -> str:
        """As of `Blocks`."""
        return ""

    def go_on(self, position: str) -> None:
        """As of `Blocks`."""


class JoinedBlocks:
    """Of others, with columns joined to them."""

    def __init__(self, blocks: Blocks, joined: Joined) -> None:
        self._blocks = blocks
        self._joined = joined
        self.where, self.units = blocks.where, blocks.units
        self.is_countable, self.uncounted = blocks.is_countable, blocks.uncounted

    @property
    def identity(self) -> list[object]:
        """As of `Blocks`."""
        return [*self._blocks.identity, *self._joined.identity]

    def contents(self, columns: Sequence[str]) -> str:
        """As of `Blocks`."""
        return f"{self._blocks.contents(self._joined.own(columns))} {self._joined.contents}"

    def known_rows(self, unit: Unit) -> int | None:
        """As of `Blocks`."""
        return self._blocks.known_rows(unit)

    def check(self, encoder: Encoder, joined: Joined | None = None) -> None:
        """As of `Blocks`."""
        self._blocks.check(encoder, joined or self._joined)

    def check_values(self, encoder: Encoder, columns: Sequence[str]) -> None:
        """As of `Blocks`; and where no row's key is one of the files that are joined."""
        own = self._joined.own(columns)
        self._blocks.check_values(encoder, own)
        self._joined.check_keys(self._some(own, encoder.block_rows(_LOOKED_AT)))

    def _some(self, columns: Sequence[str], most: int) -> Iterator[tuple[Path, pa.RecordBatch]]:
        """Rows of the first, the last and a unit between, then all in order, up to a number.

        Args:
            most: rows of a block.
        """
        if not self.units:
            return
        spread = dict.fromkeys(self.units[at] for at in (0, len(self.units) // 2, -1))
        for unit in spread:
            for _, block in islice(self._blocks.read(unit, columns, most, 0), 1):
                yield unit.path, block
        rows = 0
        for unit in self.units:
            for number, (_, block) in enumerate(self._blocks.read(unit, columns, most, 0)):
                if number or unit not in spread:
                    yield unit.path, block
                rows += block.num_rows
                if rows >= _LOOKED_AT:
                    return

    def read(
        self, unit: Unit, columns: Sequence[str], rows: int, start: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """As of `Blocks`."""
        for at, block in self._blocks.read(unit, self._joined.own(columns), rows, start):
            yield at, self._joined.extend(block, columns, unit.path, unit.first + at)

    @property
    def pass_rows(self) -> int:
        """As of `Blocks`."""
        return self._blocks.pass_rows

    def position(self, row: int) -> str:
        """As of `Blocks`."""
        return self._blocks.position(row)

    def go_on(self, position: str) -> None:
        """As of `Blocks`."""
        self._blocks.go_on(position)
