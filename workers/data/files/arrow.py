"""Arrow's own files: of random access (Feather version 2) and streams, as `datasets` saves them."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

import pyarrow as pa

from workers.data.errors import DataError
from workers.data.files.unit import Unit

ENDINGS: Final = (".arrow", ".feather", ".ipc")
_MAGIC: Final = b"ARROW1"
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream: a message of no length
# Of a folder that the library `datasets` has saved, and of one that holds several of them.
_STATE, _SPLITS = "state.json", "dataset_dict.json"


def saved_files(folder: Path) -> list[Path]:
    """The files of a folder that `save_to_disk` of `datasets` has written, in their order.

    Others there, such as what the library has cached, are not part of it. Empty: it is none.

    Raises:
        DataError: it is damaged, or holds several splits.
    """
    if (folder / _SPLITS).is_file():
        expected = f"one of the splits in it, such as {folder.name}/train"
        splits = _read_json(folder / _SPLITS).get("splits")
        raise DataError(str(folder), "contents", splits, expected)
    if not (folder / _STATE).is_file():
        return []
    state = _read_json(folder / _STATE)
    named = state.get("_data_files")
    expected = "the names of Arrow files beside it, as save_to_disk writes them"
    if not isinstance(named, list) or state.get("_indices_data_files"):
        raise DataError(str(folder / _STATE), "_data_files", named, expected)
    found = []
    for one in named:
        name = one.get("filename") if isinstance(one, dict) else None
        if not isinstance(name, str) or not (folder / name).is_file():
            raise DataError(str(folder / _STATE), "_data_files", name, expected)
        found.append(folder / name)
    return found


def _read_json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(str(path), "contents", str(error), "JSON") from error
    if not isinstance(found, dict):
        raise DataError(str(path), "contents", type(found).__name__, "a JSON object")
    return found


def schema(path: Path) -> pa.Schema:
    """Names and types of the columns as `read` gives them."""
    with pa.memory_map(str(path)) as file:
        found = _schema_of(file)
    twice = [name for name, count in Counter(found.names).items() if count > 1]
    if twice:
        raise pa.ArrowInvalid(f"two columns are called {twice[0]}")
    return pa.schema([(field.name, _plain(field.type)) for field in found])


def units(path: Path) -> list[Unit]:
    """A record batch each; of a stream with dictionaries, which build on each other, one of all."""
    with pa.memory_map(str(path)) as file:
        if _has_footer(file):
            reader = pa.ipc.open_file(file, options=_narrowest(_schema_of(file)))
            rows = [reader.get_batch(part).num_rows for part in range(reader.num_record_batches)]
            parts = [*range(len(rows))]
        else:
            parts, rows = _messages(file)
            if not parts:
                return [Unit(path, None, sum(rows))]
    firsts = [0, *accumulate(rows)]
    return [Unit(path, *one) for one in zip(parts, rows, firsts, strict=False)]


def read(unit: Unit, columns: Sequence[str], block_rows: int) -> Iterator[pa.RecordBatch]:
    """The rows of a unit, with these columns; what is not compressed is not copied."""
    with pa.memory_map(str(unit.path)) as file:
        stored = _schema_of(file)
        kinds = pa.schema([(field.name, _plain(field.type)) for field in stored])
        wanted = pa.schema([kinds.field(name) for name in columns])
        if unit.part is None:
            batches: Iterator[pa.RecordBatch] = iter(pa.ipc.open_stream(file))
        elif _has_footer(file):
            batches = iter([pa.ipc.open_file(file).get_batch(unit.part)])
        else:
            file.seek(unit.part)
            batches = iter([pa.ipc.read_record_batch(pa.ipc.read_message(file), stored)])
        for batch in batches:
            arrays = [_cast(batch.column(field.name), field.type) for field in wanted]
            block = pa.RecordBatch.from_arrays(arrays, schema=wanted)
            for first in range(0, batch.num_rows, block_rows):
                yield block.slice(first, block_rows)


def _has_footer(file: pa.MemoryMappedFile) -> bool:
    file.seek(0)
    found: bytes = file.read(len(_MAGIC))
    file.seek(0)
    return found == _MAGIC


def _schema_of(file: pa.MemoryMappedFile) -> pa.Schema:
    reader = pa.ipc.open_file(file) if _has_footer(file) else pa.ipc.open_stream(file)
    found = reader.schema
    file.seek(0)
    return found


def _narrowest(kinds: pa.Schema) -> pa.ipc.IpcReadOptions:
    """What to read where only rows are counted: of compressed columns the least."""
    widths = [_width(field.type) for field in kinds]
    fields = [widths.index(min(widths))] if widths else None
    return pa.ipc.IpcReadOptions(included_fields=fields)


def _width(kind: pa.DataType) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:  # of no fixed width
        return 1 << 20


def _messages(file: pa.MemoryMappedFile) -> tuple[list[int], list[int]]:
    """Where the batches of a stream begin, none if there are dictionaries; and the rows of each.

    A stream has no table of contents, so it is gone through from header to header.

    Raises:
        pa.ArrowInvalid: it has no end, as one that was cut short, or goes on behind it.
    """
    size, places, rows, kinds = file.size(), list[int](), list[int](), _schema_of(file)
    file.seek(size - len(_END))
    if file.read(len(_END)) != _END:
        raise pa.ArrowInvalid("the stream was cut short: it has no end mark")
    file.seek(0)
    while True:
        place = file.tell()
        try:
            message = pa.ipc.read_message(file)
        except EOFError:
            break
        if message.type == "dictionary":
            file.seek(0)
            places, rows = [], [batch.num_rows for batch in pa.ipc.open_stream(file)]
            break
        if message.type == "record batch":
            places.append(place)
            rows.append(pa.ipc.read_record_batch(message, kinds).num_rows)
    if file.tell() != size:
        raise pa.ArrowInvalid(f"{size - file.tell()} bytes follow the end of the stream")
    return places, rows


def _plain(kind: pa.DataType) -> pa.DataType:
    """A type that the encoder takes, of the same values."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_dictionary(kind) and _plain(kind.value_type) != kind.value_type:
        return _plain(kind.value_type)
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind])
    return kind


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)
