"""Columns of other files, joined to a split's rows by key, and by time as it was then.

A row gets the columns of the one row of the other file that has its key; with times those of the
latest that is not later than itself, of several at one time the last in the order of the files. So
nothing of a later time is ever read. Where there is none the columns are missing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from protos.job_pb2 import DataSpec
from workers.data.columns import times
from workers.data.columns.arrays import TEXT
from workers.data.errors import DataError, column_hint
from workers.data.files import splits as files
from workers.data.keys import Hashes, has_text, hash_column, mix

_BLOCK_ROWS = 65536
_HASHED: Final = "a column of numbers, strings, dates or booleans, as the other file has it"
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Pair:
    """A column of the split's rows, and that of the other file which is held against it."""

    own: str
    other: str

    @staticmethod
    def parse(written: str) -> "_Pair":
        """`viewer=user`, or `user` of both."""
        own, _, other = (part.strip() for part in written.partition("="))
        return _Pair(own, other or own)


@dataclass(frozen=True, slots=True)
class Join:
    """One of `data.join`.

    Args:
        name: what its columns are called by: `NAME.COLUMN`.
        paths: of the other files, in order.
    """

    name: str
    paths: tuple[Path, ...]
    by: tuple[_Pair, ...]
    time: _Pair | None

    @property
    def key(self) -> str:
        """Of the job file."""
        return f"data.join.{self.name}"

    @property
    def pairs(self) -> tuple[_Pair, ...]:
        """All columns that are held against each other."""
        return self.by if self.time is None else (*self.by, self.time)


def joins_of(spec: DataSpec, directory: Path) -> list[Join]:
    """The joins of a job, in the order of their names.

    Raises:
        DataError: a file is not there.
    """
    found = []
    for name in sorted(spec.join):
        one = spec.join[name]
        paths = files.find(directory, spec.path, one.file, f"data.join.{name}.file")
        by = tuple(map(_Pair.parse, one.by))
        time = _Pair.parse(one.time) if one.time else None
        found.append(Join(name, tuple(paths), by, time))
    return found


class Joined:
    """The rows of a split with the columns of joins."""

    def __init__(self, joins: Sequence[Join]) -> None:
        self._joins = joins
        self._paths = [path for join in joins for path in join.paths]
        self._began = files.identity(self._paths)
        self._fields = {join.name: _fields(join) for join in joins}
        self._sides: dict[tuple[str, tuple[str, ...]], _Side] = {}

    @property
    def identity(self) -> list[object]:
        """Differs where other rows would be joined."""
        return [repr(self._joins), *self._began]

    @property
    def contents(self) -> str:
        """As of `Blocks`."""
        return files.contents(self._paths)

    def extended(self, path: Path, schema: pa.Schema) -> pa.Schema:
        """The columns of a file of the split, and those that are joined to it.

        Raises:
            DataError: it has no column to join by, one of another type, or one of a join's name.
        """
        found = list(schema)
        for join in self._joins:
            others = {field.name: field for field in self._fields[join.name]}
            if join.name in schema.names:
                expected = "another name of the join: the file has such a column"
                raise DataError(str(path), "data.join", join.name, expected)
            for pair in join.pairs:
                if pair.own not in schema.names:
                    hint = column_hint(pair.own, schema.names)
                    expected = f"a column of the file; {hint}"
                    raise DataError(str(path), join.key, pair.own, expected)
            for pair in join.by:
                kind, other = schema.field(pair.own).type, others[pair.other].type
                if not has_text(kind) or _class(kind) != _class(other):
                    got = f"{kind}, and {other} in {join.paths[0]}"
                    raise DataError(str(path), f"{join.key}: {pair.own}", got, _HASHED)
            found += [field.with_name(f"{join.name}.{field.name}") for field in others.values()]
        return pa.schema(found)

    def own(self, columns: Sequence[str]) -> list[str]:
        """What of the split itself has to be read for these columns."""
        read = [name for name in columns if self._of(name) is None]
        read += [pair.own for join in self._joins for pair in join.pairs]
        return list(dict.fromkeys(read))

    def extend(
        self, block: pa.RecordBatch, columns: Sequence[str], path: Path, first: int
    ) -> pa.RecordBatch:
        """Rows with all of these columns.

        Args:
            path, first: where they are from, and rows before them, for errors.

        Raises:
            DataError: the other file cannot be read, has a key twice, or a time is missing.
        """
        found = {field.name: (field, block.column(field.name)) for field in block.schema}
        for join in self._joins:
            wanted = tuple(c.removeprefix(f"{join.name}.") for c in columns if self._of(c) == join)
            side = self._sides.get((join.name, wanted))
            if side is None:
                side = self._sides[join.name, wanted] = _Side(join, wanted)
                files.check_same(self._paths, self._began)
            rows = side.find(block, path, first)
            taken = pa.array(rows, mask=rows < 0)
            for field in self._fields[join.name]:
                if field.name in wanted:
                    name = f"{join.name}.{field.name}"
                    column = side.table.column(field.name).take(taken).combine_chunks()
                    found[name] = field.with_name(name).with_type(column.type), column
        fields, arrays = zip(*(found[name] for name in columns), strict=True)
        return pa.RecordBatch.from_arrays(list(arrays), schema=pa.schema(fields))

    def check_keys(self, blocks: Iterable[tuple[Path, pa.RecordBatch]]) -> None:
        """Check that some of these rows have a key that the other files have, at any time.

        Raises:
            DataError: none has: all that is joined would be missing.
        """
        left = {join.name: _Side(join, ()) for join in self._joins}
        rows, first = 0, None
        for path, block in blocks:
            if block.num_rows:
                rows, first = rows + block.num_rows, first or (path, block)
            left = {name: s for name, s in left.items() if not s.known(block, path)[1].any()}
            if not left:
                return
        if first is not None and left:
            join = next(join for join in self._joins if join.name in left)
            got = ", ".join(str(first[1].column(pair.own)[0].as_py()) for pair in join.by)
            expected = f"keys that {join.paths[0]} has; of {rows:,} rows none has one"
            raise DataError(str(first[0]), join.key, got, expected)

    def _of(self, column: str) -> Join | None:
        """The join that a column is of."""
        name = column.partition(".")[0]
        found = next((join for join in self._joins if join.name == name), None)
        return found if found is not None and column != name else None


class _Side:
    """The rows of the other files, in memory, to be found by key and time."""

    def __init__(self, join: Join, wanted: Sequence[str]) -> None:
        self._join = join
        columns = dict.fromkeys([*(pair.other for pair in join.pairs), *wanted])
        self.table = _read(join.paths, list(columns), join.key)
        hashes, missing = _hashed(join, self.table, [pair.other for pair in join.by])
        present = np.flatnonzero(~missing)
        self._groups = np.unique(hashes[present])
        ranks: Rows = np.ones(len(hashes), np.int64)
        self._times: times.Times | None = None
        if join.time is not None:
            column = self.table.column(join.time.other).combine_chunks()
            found = times.read(column, None, f"{join.key}: {join.time.other}", self._error)
            self._times = found.distinct()
            ranks = self._times.not_later(found)
        self._width = 2 if self._times is None else len(self._times) + 1
        if len(self._groups) * self._width >= 2**63:
            raise DataError(str(join.paths[0]), join.key, len(hashes), "fewer keys and times")
        codes = np.searchsorted(self._groups, hashes[present]) * self._width + ranks[present]
        order = np.argsort(codes, kind="stable")
        self._codes, self._rows = codes[order], present[order]
        if join.time is None:
            twice = np.flatnonzero(self._codes[1:] == self._codes[:-1])
            if len(twice):
                row = int(self._rows[twice + 1].min())
                by = ", ".join(pair.other for pair in join.by)
                got = [self.table.column(pair.other)[row].as_py() for pair in join.by]
                raise self._error(f"{join.key}: {by}", f"{got} a second time", "each key once", row)

    def known(self, block: pa.RecordBatch, path: Path) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """[n] each: the number of a row's key here, and whether there is one."""
        hashes, missing = _hashed(self._join, block, [pair.own for pair in self._join.by], path)
        if not len(self._groups):
            return np.zeros(block.num_rows, np.int64), np.zeros(block.num_rows, np.bool_)
        groups = np.searchsorted(self._groups, hashes)
        groups = np.minimum(groups, len(self._groups) - 1)
        return groups, (self._groups[groups] == hashes) & ~missing

    def find(self, block: pa.RecordBatch, path: Path, first: int) -> Rows:
        """[n], the row of each; -1: none."""
        groups, there = self.known(block, path)
        if not len(self._codes):
            return np.full(block.num_rows, -1)
        ranks: Rows = np.ones(block.num_rows, np.int64)
        if self._times is not None and self._join.time is not None:

            def error(key: str, got: object, expected: str, row: int) -> DataError:
                return DataError(str(path), key, got, expected, first + row)

            key = f"{self._join.key}: {self._join.time.own}"
            column = block.column(self._join.time.own)
            ranks = self._times.not_later(times.read(column, self._times, key, error))
        at = np.searchsorted(self._codes, groups * self._width + ranks, side="right") - 1
        there &= (at >= 0) & (self._codes[at] // self._width == groups)
        return np.where(there, self._rows[at], -1)

    def _error(self, key: str, got: object, expected: str, row: int) -> DataError:
        for path in self._join.paths:
            for unit in files.units(path):
                rows = unit.rows if unit.rows is not None else files.count(path)
                if row < rows:
                    return DataError(str(path), key, got, expected, unit.first + row)
                row -= rows
        return DataError(str(self._join.paths[0]), key, got, expected)


def _fields(join: Join) -> list[pa.Field]:
    """The columns of the other files, which are the same in all.

    Raises:
        DataError: they differ, or one to join by is missing.
    """
    first = files.schema(join.paths[0])
    for path in join.paths:
        found = files.schema(path)
        if not found.equals(first) or files.is_text(path) != files.is_text(join.paths[0]):
            expected = f"the columns and types of {join.paths[0]}"
            raise DataError(str(path), f"{join.key}.file", found.names, expected)
    for pair in join.pairs:
        if pair.other not in first.names:
            hint = column_hint(pair.other, first.names)
            raise DataError(str(join.paths[0]), join.key, pair.other, f"a column of it; {hint}")
    if not files.is_text(join.paths[0]):
        return list(first)
    return [field.with_metadata({TEXT: b""}) for field in first]


def _read(paths: Sequence[Path], columns: Sequence[str], key: str) -> pa.Table:
    def blocks() -> Iterator[pa.RecordBatch]:
        for path in paths:
            kinds = files.schema(path)
            for name in columns:
                if name not in kinds.names:
                    hint = column_hint(name, kinds.names)
                    raise DataError(str(path), key, name, f"a column of it; {hint}")
            wanted = pa.schema([kinds.field(name).remove_metadata() for name in columns])
            for unit in files.units(path):
                for block in files.read(unit, columns, _BLOCK_ROWS):
                    yield pa.record_batch(
                        [_plain(block.column(f.name), f.type) for f in wanted], schema=wanted
                    )

    found = list(blocks())
    if found:
        return pa.Table.from_batches(found).combine_chunks()
    kinds = files.schema(paths[0])
    return pa.schema([kinds.field(name) for name in columns]).empty_table()


def _plain(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Strings as themselves, which Parquet may hand over as a dictionary."""
    return column if column.type == kind else column.cast(kind)


def _hashed(
    join: Join, rows: Any, columns: Sequence[str], path: Path | None = None
) -> tuple[Hashes, npt.NDArray[np.bool_]]:
    """A hash of each row's key, [n]; and whether a part of it is missing.

    A value is known by its text, as everywhere: 5, 5.0, "5" and "5.0" are one.
    """
    hashes = np.zeros(rows.num_rows, np.uint64)
    missing = np.zeros(rows.num_rows, np.bool_)
    for name in columns:
        column = rows.column(name)
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        try:
            found = hash_column(column).rows()
        except TypeError as error:
            where = str(path or join.paths[0])
            raise DataError(where, f"{join.key}: {name}", str(error), _HASHED) from error
        hashes = mix(hashes ^ found)
        missing |= np.asarray(column.is_null(nan_is_null=True))
    return hashes, missing


def _class(kind: pa.DataType) -> str:
    """Types of one class have the same text for the same value."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    types = pa.types
    texts = types.is_string(kind) or types.is_large_string(kind)
    whole = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return "text or number" if texts or whole else str(kind)
