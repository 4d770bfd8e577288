"""Tars of samples, as WebDataset has them: members that differ in their ending alone are one.

What is before the first dot of a member's name is the sample's key, what follows the column:
`0001.jpg` and `0001.cls` are columns `jpg` and `cls` of one row. The fields of `0001.json` are
columns `json.FIELD`. Samples are in the order in which each first appears. Compressed tars are read
from plain copies.
"""

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from workers.data.errors import DataError
from workers.data.files.unit import Unit
from workers.data.files.unpacked import COMPRESSIONS, CutShortError, plain
from workers.data.files.values import UNFIT, column_of

ENDINGS: Final = (".tar", *COMPRESSIONS)
KEY: Final = "__key__"  # the column of the samples' keys
_TEXTS: Final = ("txt", "text")
_NUMBERS: Final = ("cls", "cls2", "index", "inx", "id", "count")
_JSON: Final = "json"
_BYTES: Final = pa.struct([("bytes", pa.large_binary()), ("path", pa.string())])
_UNIT_ROWS = 256
_LOOKED = 64  # members of JSON
_STEP = 1 << 20  # bytes
_BLOCK = 512  # bytes, of which a tar is made; two of zeros end it


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class _Sample:
    key: str
    members: dict[str, _Member] = field(default_factory=dict)  # by column


def schema(path: Path) -> pa.Schema:
    """Columns of all samples, each of the type that it has in the first that has it.

    What fields there are in JSON the first samples say.
    """
    columns: dict[str, pa.DataType] = {KEY: pa.string()}
    left: dict[str, int] = {}  # samples of an ending that are still to be looked at
    with _plain(path).open("rb") as file:
        for row, sample in enumerate(_samples(path)):
            for ending in sample.members:
                looked = _LOOKED if ending.rpartition(".")[2] == _JSON else 1
                if (more := left.get(ending, looked)) > 0:
                    left[ending] = more - 1
                    for name, value in _values(file, path, sample, [ending], row).items():
                        if pa.types.is_null(columns.get(name, pa.null())):
                            columns[name] = _type_of(value)
    return pa.schema(sorted(columns.items()))


def units(path: Path) -> list[Unit]:
    """Some neighbouring samples each."""
    rows = len(_samples(path))
    firsts = range(0, rows, _UNIT_ROWS)
    return [Unit(path, first, min(_UNIT_ROWS, rows - first), first) for first in firsts]


def read(unit: Unit, columns: Sequence[str], block_rows: int) -> Iterator[pa.RecordBatch]:
    """The samples of a unit with these columns; what one has not is missing."""
    endings = list(dict.fromkeys(_ending(name) for name in columns if name != KEY))
    assert unit.rows is not None
    last = unit.first + unit.rows
    with _plain(unit.path).open("rb") as file:
        for first in range(unit.first, last, block_rows):
            samples = _samples(unit.path)[first : min(first + block_rows, last)]
            rows = [
                {KEY: one.key, **_values(file, unit.path, one, endings, first + at)}
                for at, one in enumerate(samples)
            ]
            arrays = []
            for name in columns:
                try:
                    arrays.append(_typed([row.get(name) for row in rows]))
                except UNFIT as error:
                    expected = f"values of one type in rows {first + 1} to {first + len(rows)}"
                    raise DataError(str(unit.path), name, str(error), expected) from error
            yield pa.record_batch(arrays, list(columns))


def _samples(path: Path) -> tuple[_Sample, ...]:
    status = path.stat()
    return _index(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _index(path: Path, _size: int, _changed_at: int) -> tuple[_Sample, ...]:
    """The samples of a tar, by its headers.

    Raises:
        DataError: it is damaged; it holds other things than files; or a member comes twice.
    """
    found: dict[str, _Sample] = {}
    copy = _plain(path)
    try:
        with tarfile.open(copy, "r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise DataError(str(path), "contents", member.name, "files and folders alone")
                key, ending = _split(member.name)
                if not ending:
                    continue
                sample = found.setdefault(key, _Sample(key))
                if ending in sample.members:
                    raise DataError(str(path), "contents", member.name, "each member once")
                sample.members[ending] = _Member(member.name, member.offset_data, member.size)
            end = archive.offset
    except (tarfile.TarError, EOFError) as error:
        raise DataError(str(path), "contents", str(error), "a whole .tar file") from error
    size = copy.stat().st_size
    with copy.open("rb") as file:
        file.seek(end)
        if file.read(2 * _BLOCK) != bytes(2 * _BLOCK):
            # Python's reader takes a damaged header, and the end of the file, for the tar's end.
            got = f"no member and no end of the tar at byte {end} of {size}"
            raise DataError(str(path), "contents", got, "a whole .tar file")
        while content := file.read(_STEP):
            if content.count(0) < len(content):
                got = f"more behind the end of the tar, of {size - end} bytes from byte {end}"
                raise DataError(str(path), "contents", got, "one tar: nothing but zeros behind it")
    return tuple(found.values())


def _plain(path: Path) -> Path:
    """A tar that is not compressed.

    Raises:
        DataError: it is damaged; says in which member.
    """
    try:
        return plain(path)
    except CutShortError as error:
        last = "its first member"
        try:
            with tarfile.open(error.copy, "r:") as archive:
                for member in archive:
                    last = member.name
        except (tarfile.TarError, EOFError):
            pass  # where it is cut short
        finally:
            error.copy.unlink(missing_ok=True)
        got = f"{error} in or behind {last}"
        raise DataError(str(path), "contents", got, f"a whole {path.name} file") from error


def _split(name: str) -> tuple[str, str]:
    """Key and column of a member; no column of one that is hidden or has no ending."""
    folder, _, base = name.removeprefix("./").rpartition("/")
    stem, _, ending = base.partition(".")
    if not stem:
        return name, ""
    return f"{folder}/{stem}" if folder else stem, ending.lower()


def _ending(column: str) -> str:
    """The members that a column is read from."""
    before, dot, _ = column.partition(f"{_JSON}.")
    found = before.endswith(".") or not before
    return f"{before}{_JSON}" if dot and found else column


def _values(
    file: io.BufferedReader, path: Path, sample: _Sample, endings: Sequence[str], row: int
) -> dict[str, Any]:
    """The values of a sample by column."""
    found: dict[str, Any] = {}
    for ending in endings:
        member = sample.members.get(ending)
        if member is None:
            continue
        file.seek(member.start)
        content = file.read(member.size)
        kind = ending.rpartition(".")[2]
        try:
            if kind in _TEXTS:
                found[ending] = content.decode()
            elif kind in _NUMBERS:
                found[ending] = int(content)
            elif kind == _JSON:
                found |= _fields(ending, json.loads(content))
            elif kind == "npy":
                found[ending] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
            else:
                found[ending] = {"bytes": content, "path": member.name}
        except (ValueError, EOFError, OSError, RecursionError) as error:
            expected = f"what a .{kind} file has"
            raise DataError(str(path), member.name, str(error)[:200], expected, row) from error
    return found


def _fields(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {f"{name}.{key}": one for key, one in value.items()}


def _type_of(value: Any) -> pa.DataType:
    try:
        return _typed([value]).type
    except UNFIT:
        return pa.null()  # seen when it is read, if it is


def _typed(values: Sequence[Any]) -> pa.Array:
    if any(isinstance(value, dict) and value.keys() == {"bytes", "path"} for value in values):
        return pa.array(values, _BYTES)
    return column_of(values)
