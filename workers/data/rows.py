"""Rows that are to be predicted: from files or memory, in their order, encoded batch by batch."""

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from workers.data.columns.arrays import Batch, Encoder, concatenate
from workers.data.errors import DataError, column_hint
from workers.data.files import remote
from workers.data.files import splits as files

_BLOCK_ROWS = 16384


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring rows of a file, or of a table in memory.

    Args:
        path: whose they are, for errors.
        first: how many of its rows come before.
    """

    rows: pa.RecordBatch
    path: Path
    first: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows as models take them, and what is carried over of them."""

    batch: Batch
    kept: pa.Table


def find(data: str) -> list[Path]:
    """The files that a path, a folder, a glob or a URL names, in order of name.

    Raises:
        DataError: there are none, or one has a format that cannot be read.
    """
    if remote.is_url(data):
        folder, _, name = data.rpartition("/")
        return files.find(Path(), folder, name, "DATA")
    path = Path(data)
    if path.is_dir():
        found = files.files_at(path) or sorted(
            file for file in path.iterdir() if file.is_file() and files.is_data(file)
        )
    elif path.is_file():
        found = files.find(path.parent, "", path.name, "DATA")
    else:
        found = sorted(Path(file) for file in glob.glob(data, recursive=True))
        found = [file for file in found if file.is_file()]
        for file in found:
            files.find(file.parent, "", file.name, "DATA")
    if not found:
        expected = "a .parquet, .csv or .tsv file, a folder of such, a glob or a URL"
        raise DataError(data, "DATA", data, expected)
    return found


def check(paths: Sequence[Path], encoder: Encoder, keep: Sequence[str]) -> pa.Schema:
    """Look at the columns of all files; what is kept of them, with types.

    Raises:
        DataError: a column is missing, or of a type that does not fit or that differs.
    """
    kept: pa.Schema | None = None
    for path in paths:
        encoder.check(path)
        found = kept_schema(path, files.schema(path), keep)
        if kept is not None and found != kept:
            name = next(n for n in keep if found.field(n).type != kept.field(n).type)
            expected = f"{kept.field(name).type}, as in {paths[0]}"
            raise DataError(str(path), f"--keep {name}", str(found.field(name).type), expected)
        kept = found
    assert kept is not None
    return kept


def kept_schema(path: Path, schema: pa.Schema, keep: Sequence[str]) -> pa.Schema:
    """The columns that are carried over: dictionaries written out, and one type of strings."""
    for name in keep:
        if name not in schema.names:
            hint = column_hint(name, schema.names)
            raise DataError(str(path), "--keep", name, f"a column of the file; {hint}")
    return pa.schema([(name, _plain_type(schema.field(name).type)) for name in keep])


def known_rows(paths: Sequence[Path]) -> int | None:
    """Rows of all files; None where text would have to be read."""
    found = [unit.rows for path in paths for unit in files.units(path)]
    rows = [one for one in found if one is not None]
    return sum(rows) if len(rows) == len(found) else None


def blocks_of_files(
    paths: Iterable[Path], columns: Sequence[str], encoder: Encoder
) -> Iterator[Block]:
    """The rows of files, one file after the other, as many at a time as the encoder takes.

    Raises:
        DataError: a file cannot be read, or changes meanwhile.
    """
    for path in paths:
        for unit in files.units(path):
            first = unit.first
            for block in files.read(unit, columns, encoder.block_rows(_BLOCK_ROWS)):
                yield Block(block, path, first)
                first += block.num_rows
            if unit.rows is not None and first - unit.first != unit.rows:
                got, expected = f"{first - unit.first} rows", f"{unit.rows}, as before"
                raise DataError(str(path), "contents", got, expected)


def blocks_of_table(table: pa.Table, path: Path, encoder: Encoder) -> Iterator[Block]:
    """The rows of a table in memory."""
    first = 0
    for block in table.to_batches(max_chunksize=encoder.block_rows(_BLOCK_ROWS)):
        yield Block(block, path, first)
        first += block.num_rows


def in_batches(
    blocks: Iterable[Block], encoder: Encoder, kept: pa.Schema, size: int
) -> Iterator[Rows]:
    """Rows encoded in batches of `size`, over the ends of files; the last one may be short.

    Raises:
        DataError: a value does not fit.
    """
    waiting: list[Rows] = []
    count, schema = 0, None
    for block in blocks:
        if block.rows.schema != schema:  # each of a tar has types of its own
            schema = block.rows.schema
            typed = not files.is_text(block.path)
            encoder.check_schema(block.path, schema, typed=typed)
        encoded = encoder.encode(block.rows, block.path, block.first)
        columns = [_plain(block.rows.column(field.name), field.type) for field in kept]
        carried = pa.table(columns, schema=kept)
        start = 0
        while start < len(encoded):
            taken = min(size - count, len(encoded) - start)
            part = encoded.slice(start, start + taken)
            waiting.append(Rows(part, carried.slice(start, taken)))
            start, count = start + taken, count + taken
            if count == size:
                yield _joined(waiting)
                waiting, count = [], 0
    if count:
        yield _joined(waiting)


def _joined(parts: Sequence[Rows]) -> Rows:
    kept = pa.concat_tables([part.kept for part in parts])
    return Rows(concatenate([part.batch for part in parts]), kept)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    return pa.string() if pa.types.is_large_string(kind) else kind


def _plain(column: pa.Array, kind: pa.DataType) -> Any:
    decoded = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return decoded if decoded.type == kind else decoded.cast(kind)
