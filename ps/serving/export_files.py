"""The bytes of exported files, made as they are written: Parquet, safetensors, dense weights."""

import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.errors import CheckpointError
from ps.serving.weights import Block

_GROUP_BYTES = 32 << 20
_CHUNK = 1 << 20
Rows = tuple[NDArray[np.uint64], NDArray[Any]]


@dataclass(slots=True)
class Table:
    """A table to be written; `rows` is right once all bytes have been taken.

    Attributes:
        name: of the table.
        dim: floats a row.
        dtype: of the values in the file.
        metadata: kept in the file.
        spool: directory for what must be kept aside meanwhile.
    """

    name: str
    dim: int
    dtype: str
    metadata: Mapping[str, str]
    spool: str | None = None
    rows: int = field(default=0)


def parquet(table: Table, blocks: Iterable[Block]) -> Iterator[bytes]:
    """A Parquet file; its row groups take about 32 MiB."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.list_(pa.float16() if table.dtype == "float16" else pa.float32(), table.dim)
    schema = pa.schema(
        [pa.field("key", pa.uint64(), nullable=False), pa.field("values", values, nullable=False)],
        metadata=dict(table.metadata),
    )
    sink = _Sink()
    # Every key is another and most floats too: dictionaries would only cost time.
    with pq.ParquetWriter(sink, schema, use_dictionary=False) as writer:
        for keys, rows in _groups(table, blocks):
            lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), table.dim)
            batch = pa.table([pa.array(keys), lists], schema=schema)
            writer.write_table(batch, row_group_size=len(keys))
            yield sink.take()
    yield sink.take()


def safetensors(table: Table, blocks: Iterable[Block]) -> Iterator[bytes]:
    """A safetensors file. Its head needs the number of rows, so they wait in files meanwhile."""
    with (
        tempfile.TemporaryFile(dir=table.spool) as key_file,
        tempfile.TemporaryFile(dir=table.spool) as row_file,
    ):
        for keys, rows in _groups(table, blocks):
            key_file.write(keys.astype("<u8", copy=False).data)
            row_file.write(rows.data)
        split, end = key_file.tell(), key_file.tell() + row_file.tell()
        head = {
            "__metadata__": dict(table.metadata),
            f"{table.name}.keys": {
                "dtype": "I64",
                "shape": [table.rows],
                "data_offsets": [0, split],
            },
            f"{table.name}.values": {
                "dtype": "F16" if table.dtype == "float16" else "F32",
                "shape": [table.rows, table.dim],
                "data_offsets": [split, end],
            },
        }
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for file in (key_file, row_file):
            file.seek(0)
            while chunk := file.read(_CHUNK):
                yield chunk


FORMATS: dict[str, Callable[[Table, Iterable[Block]], Iterator[bytes]]] = {
    "parquet": parquet,
    "safetensors": safetensors,
}


def dense_bytes(dense: Mapping[str, Any] | str | Path) -> Iterator[bytes]:
    """A safetensors file with tensors of torch or NumPy, or the bytes of one that is there.

    Raises:
        CheckpointError: the file is none, or the tensors cannot be written.
    """
    from safetensors import SafetensorError, safe_open

    if isinstance(dense, Mapping):
        wrong = (TypeError, ValueError, RuntimeError, KeyError, AttributeError, SafetensorError)
        try:
            yield _dense_of(dense)
        except wrong as error:
            raise CheckpointError(f"dense: {error}; expected tensors by name") from None
        return
    try:
        with safe_open(dense, "np") as found:
            found.keys()
        with Path(dense).open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{dense}: {error}; expected a safetensors file") from None


def _dense_of(tensors: Mapping[str, Any]) -> bytes:
    if any(hasattr(tensor, "detach") for tensor in tensors.values()):
        from safetensors.torch import save as save_torch

        whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        return bytes(save_torch(whole))
    from safetensors.numpy import save as save_numpy

    return bytes(save_numpy({name: np.ascontiguousarray(t) for name, t in tensors.items()}))


def _groups(table: Table, blocks: Iterable[Block]) -> Iterator[Rows]:
    """Keys with rows of the file's dtype, about 32 MiB at a time."""
    size = max(1, _GROUP_BYTES // (8 + 4 * table.dim))
    waiting: list[Rows] = []
    count = 0
    for block in blocks:
        waiting.append((block.keys, _converted(table, block)))
        count += len(block.keys)
        table.rows += len(block.keys)
        if count >= size:
            yield _together(waiting)
            waiting, count = [], 0
    if waiting:
        yield _together(waiting)


def _together(parts: list[Rows]) -> Rows:
    return np.concatenate([k for k, _ in parts]), np.concatenate([r for _, r in parts])


def _converted(table: Table, block: Block) -> NDArray[Any]:
    if table.dtype == "float32":
        return block.rows.astype("<f4", copy=False)
    with np.errstate(over="ignore"):
        halves = block.rows.astype("<f2")
    bad = np.isinf(halves) & np.isfinite(block.rows)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise CheckpointError(
            f"table {table.name!r}: key {block.keys[row]} has {block.rows[row, column]:g} at "
            f"element {column}, beyond float16; expected dtype float32"
        )
    return halves


class _Sink(io.RawIOBase):
    """A file whose bytes are taken away as they come."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        self._at += len(self._parts[-1])
        return len(self._parts[-1])

    def tell(self) -> int:
        return self._at

    def take(self) -> bytes:
        taken = b"".join(self._parts)
        self._parts.clear()
        return taken
