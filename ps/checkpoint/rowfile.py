"""A file of rows, all integers little-endian: a head, blocks, an end.

The head: the magic "HPSROWS2", the length of the table's spec (uint32), the spec (a serialized
heterps.v1.TableSpec). Then blocks: the length (uint64), and the block as in engine/table/block.h.
The end: a length of zero, and the count of rows (uint64).
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

from google.protobuf.message import DecodeError

from protos.parameter_server_pb2 import TableSpec
from ps.checkpoint.bounds import read_exactly
from ps.checkpoint.store import Store
from ps.engine import _native
from ps.errors import CheckpointError, TableError
from ps.table.checks import check_spec

MAGIC = b"HPSROWS2"
_SPEC_SIZE = struct.Struct("<I")
_SIZE = struct.Struct("<Q")
_BLOCK = struct.Struct("<4sBBHII")  # magic, kind, usage, sub-table, count, bytes a record
_NARROW, _FULL, _VALUES = 1, 2, 4
_MAX_SPEC, _MAX_BLOCK = 1 << 20, 1 << 32


class RowWriter:
    """The bytes of a file, from a snapshot; `rows` is right once they have all been taken."""

    def __init__(self, spec: TableSpec, snapshot: _native.Snapshot) -> None:
        self._spec = spec
        self._snapshot = snapshot
        self.rows = 0

    def __iter__(self) -> Iterator[bytes]:
        head = self._spec.SerializeToString(deterministic=True)
        yield MAGIC + _SPEC_SIZE.pack(len(head)) + head
        while (block := self._snapshot.next()) is not None:
            self.rows += rows_in(block)
            yield _SIZE.pack(len(block))
            yield block
        yield _SIZE.pack(0) + _SIZE.pack(self.rows)


def rows_in(block: bytes) -> int:
    """How many rows a block has; keys that are merely counted, or gone, are none."""
    _, kind, _, _, count, _ = _BLOCK.unpack_from(block)
    return count if kind in (_NARROW, _FULL, _VALUES) else 0


def read_spec(stream: BinaryIO, name: str) -> TableSpec:
    """The spec in the head of a file; the stream then stands at the first block.

    Raises:
        CheckpointError: it is no file of rows.
    """
    head = stream.read(len(MAGIC) + _SPEC_SIZE.size)
    if len(head) < len(MAGIC) + _SPEC_SIZE.size or not head.startswith(MAGIC):
        raise CheckpointError(f"{name}: not a file of rows (wrong magic)")
    size = _SPEC_SIZE.unpack_from(head, len(MAGIC))[0]
    if size > _MAX_SPEC:
        raise CheckpointError(f"{name}: its table spec has {size} bytes; expected at most 1 MiB")
    try:
        spec = TableSpec.FromString(read_exactly(stream, size, name))
        check_spec(spec)
    except (DecodeError, TableError) as error:
        raise CheckpointError(f"{name}: the table spec in its head is damaged: {error}") from None
    return spec


def spec_of(store: Store, name: str) -> TableSpec:
    """The spec in the head of a file of a store; errors as of `read_spec`."""
    with store.open(name) as stream:
        return read_spec(stream, f"{store.url}/{name}")


def read_blocks(stream: BinaryIO, name: str, expected: int) -> Iterator[bytes]:
    """The blocks that follow the spec.

    Args:
        stream: where `read_spec` has left it.
        name: of the file, for errors.
        expected: how many rows the manifest says it has.

    Raises:
        CheckpointError: the file is cut short or its count is not that of its blocks.
    """
    rows = 0
    while size := _SIZE.unpack(read_exactly(stream, _SIZE.size, name))[0]:
        if not _BLOCK.size <= size < _MAX_BLOCK:
            raise CheckpointError(f"{name}: a block of {size} bytes; the file is damaged")
        block = read_exactly(stream, size, name)
        rows += rows_in(block)
        yield block
    count = _SIZE.unpack(read_exactly(stream, _SIZE.size, name))[0]
    if not count == rows == expected:
        raise CheckpointError(
            f"{name}: has {rows} rows; its last field says {count}, the manifest {expected}"
        )
