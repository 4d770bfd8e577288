"""Finding the files of a split and reading them as Arrow record batches."""

import glob
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from workers.data.errors import DataError
from workers.data.files import arrow as arrow_files
from workers.data.files import remote
from workers.data.files import tar as tar_files
from workers.data.files.unit import Unit

_SAMPLED_BYTES = 4096  # of a file, at each of three places
_HEAD_BYTES = 10  # where gzip says when a file was packed
_BLOCK_BYTES = 4 << 20  # of text, a step of the CSV reader
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_COMPRESSED = 4  # bytes of text for one of a compressed file, about
_COMPRESSIONS = {".gz", ".bz2", ".zst", ".lz4"}
_FORMATS = (
    "a .parquet, .csv or .tsv file (.csv and .tsv also with .gz), an .arrow, .feather or .tar "
    "file (.tar also as .tar.gz, .tgz, .tar.zst or .tar.bz2), or a folder that datasets has saved"
)


def find(directory: Path, path: str, pattern: str, key: str) -> list[Path]:
    """The files that `pattern` names under `directory / path`, in order of name.

    Of a path that is a URL these are copies on this machine.

    Raises:
        DataError: there are none, or one has a format that cannot be read.
    """
    if not pattern:
        raise DataError("job", key, pattern, "a file name or glob under data.path")
    if remote.is_url(path):
        return _readable(remote.copies(path, pattern, key), key)
    folder = directory / path.removeprefix("file://")
    if not folder.is_dir():
        raise DataError("job", "data.path", path, f"a folder, but {folder} is none")
    exact = folder / pattern
    found = [exact] if exact.exists() else sorted(map(Path, glob.glob(str(exact), recursive=True)))
    found = [file for path in found for file in files_at(path)]
    if not found:
        names = sorted(entry.name for entry in folder.iterdir())
        there = ", ".join(names[:8]) + (", …" if len(names) > 8 else "") or "nothing"
        raise DataError("job", key, pattern, f"a file or glob in {folder}, which holds {there}")
    return _readable(found, key)


def files_at(path: Path) -> list[Path]:
    """A file, or those of a folder that `datasets` has saved; of another folder none.

    Raises:
        DataError: such a folder is damaged.
    """
    return arrow_files.saved_files(path) if path.is_dir() else [path] if path.is_file() else []


def _readable(found: list[Path], key: str) -> list[Path]:
    for file in found:
        if not is_data(file):
            raise DataError(str(file), key, file.name, _FORMATS)
    return found


def identity(paths: Iterable[Path]) -> list[object]:
    """Names, sizes and times of files: differs where other rows may be in them."""
    found = ((path, path.stat()) for path in paths)
    return [(str(p.resolve()), status.st_size, status.st_mtime_ns) for p, status in found]


def check_same(paths: Sequence[Path], began: Sequence[object]) -> None:
    """Refuse files that are others than when reading began.

    Args:
        began: their `identity` then.

    Raises:
        DataError: the first of them, or it is gone.
    """
    for path, then in zip(paths, began, strict=True):
        try:
            now = identity([path])
        except OSError as error:
            raise _unreadable(path, error) from error
        if now != [then]:
            expected = "a file that stays as it was when reading began"
            raise DataError(str(path), "contents", "others", expected)


def contents(paths: Iterable[Path]) -> str:
    """A digest of the sizes of files, and of what their beginnings, middles and ends hold.

    It is the same on every host, and differs where other rows are in them, as far as that tells.
    """
    found = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found.update(size.to_bytes(8, "little"))
            for start in (0, (size - _SAMPLED_BYTES) // 2, size - _SAMPLED_BYTES):
                found.update(os.pread(file.fileno(), _SAMPLED_BYTES, max(_HEAD_BYTES, start)))
    return found.hexdigest()


def is_parquet(path: Path) -> bool:
    """Whether the name says Parquet."""
    return path.suffix in (".parquet", ".pq")


def is_text(path: Path) -> bool:
    """Whether the name says text: values have no types, and rows are not counted."""
    return _separator(path) is not None


def is_data(path: Path) -> bool:
    """Whether the name says that it can be read."""
    return is_parquet(path) or is_text(path) or _other(path) is not None


class _Format(Protocol):
    """A module that reads one, as the functions here of the same names."""

    def schema(self, path: Path) -> pa.Schema: ...

    def units(self, path: Path) -> list[Unit]: ...

    def read(
        self, unit: Unit, columns: Sequence[str], block_rows: int
    ) -> Iterator[pa.RecordBatch]: ...


def _other(path: Path) -> _Format | None:
    """What reads a file that is neither Parquet nor text."""
    if path.suffix in arrow_files.ENDINGS:
        return arrow_files
    return tar_files if path.name.endswith(tar_files.ENDINGS) else None


def _separator(path: Path) -> str | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes = suffixes[:-1]
    return _SEPARATORS.get(suffixes[-1]) if suffixes else None


def schema(path: Path) -> pa.Schema:
    """Names and types of the columns; text files have strings only."""
    try:
        if is_parquet(path):
            return pa.parquet.read_schema(path)
        if (other := _other(path)) is not None:
            return other.schema(path)
        with _open_text(path, None) as reader:
            return pa.schema([(name, pa.string()) for name in reader.schema.names])
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def units(path: Path) -> list[Unit]:
    """The units of a file, in order.

    Raises:
        DataError: it cannot be read.
    """
    if is_text(path):
        return [Unit(path, None, None)]
    try:
        if (other := _other(path)) is not None:
            return other.units(path)
        metadata = pa.parquet.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    firsts = [0, *accumulate(rows)]
    return [Unit(path, group, rows[group], firsts[group]) for group in range(len(rows))]


def count(path: Path) -> int:
    """Rows of a text file, by reading it."""
    try:
        with _open_text(path, None) as reader:
            columns = reader.schema.names[:1]
        with _open_text(path, columns) as reader:
            return sum(block.num_rows for block in reader)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def text_bytes(path: Path) -> int:
    """Roughly how much text is in a text file."""
    size = path.stat().st_size
    return size * _COMPRESSED if path.suffix in _COMPRESSIONS else size


@dataclass(frozen=True, slots=True)
class Values:
    """What a Parquet file says of a column's values in one row group."""

    missing: int
    least: float
    most: float


def values(path: Path, columns: Collection[str]) -> Iterator[tuple[int, str, Values]]:
    """What a Parquet file says of numeric columns, by row group and column, where it does."""
    metadata = pa.parquet.read_metadata(path)
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            said = chunk.statistics
            if chunk.path_in_schema in columns and said is not None and said.has_null_count:
                ends = (said.min, said.max) if said.has_min_max else (0, 0)
                least, most = map(_number, ends)
                yield group, chunk.path_in_schema, Values(said.null_count, least, most)


def _number(said: float | bytes) -> float:
    """A least or greatest value; of float16 Arrow gives the two bytes."""
    return float(np.frombuffer(said, "<f2")[0] if isinstance(said, bytes) else said)


def read(unit: Unit, columns: Sequence[str], block_rows: int) -> Iterator[pa.RecordBatch]:
    """The record batches of a unit in order, with these columns; holds one at a time."""
    try:
        if is_text(unit.path):
            with _open_text(unit.path, columns) as reader:
                yield from reader
            return
        if (other := _other(unit.path)) is not None:
            yield from other.read(unit, columns, block_rows)
            return
        with pa.parquet.ParquetFile(
            unit.path, read_dictionary=_strings(unit.path, columns), memory_map=True
        ) as file:
            yield from file.iter_batches(
                block_rows, row_groups=[unit.part], columns=list(columns), use_threads=False
            )
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(unit.path, error) from error


def _strings(path: Path, columns: Sequence[str]) -> list[str]:
    """String columns, which Parquet can hand over as it keeps them: dictionary-encoded."""
    types = pa.parquet.read_schema(path)
    return [name for name in columns if pa.types.is_string(types.field(name).type)]


def _open_text(path: Path, columns: Sequence[str] | None) -> pa.csv.CSVStreamingReader:
    # Every column is read as text: types guessed from a block would differ between files.
    return pa.csv.open_csv(
        path,
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        # Else a step ends at a line break inside quotes, and what follows is taken for rows.
        parse_options=pa.csv.ParseOptions(delimiter=_separator(path), newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types={name: pa.string() for name in columns or ()},
            include_columns=list(columns or ()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _unreadable(path: Path, error: Exception) -> DataError:
    text = str(error).splitlines()[0][:300]
    return DataError(str(path), "contents", text, f"a readable {'/'.join(path.suffixes)} file")
