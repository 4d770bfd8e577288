"""The one tensor codec: bulk bytes behind a protobuf message, never copied twice.

Messages with bulk data keep it in their last field, number 15 (`payload`). `pack` writes
that field by hand after the serialized head and `unpack` finds it without letting protobuf
touch it, so what travels is ordinary protobuf that any language can read.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from protos.tensor_pb2 import TensorSpec

M = TypeVar("M", bound=Message)
Buffer = bytes | bytearray | memoryview

PAYLOAD_TAG = (15 << 3) | 2
ALIGNMENT = 16
_TAG = bytes([PAYLOAD_TAG])
_MAX_VARINT = 10
_MAX_HEAD = 1 << 20  # bytes; each field of it takes time
_DTYPES = {
    dtype.name: dtype for dtype in map(np.dtype, ("?", *np.typecodes["AllInteger"], *"efdFD"))
}

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # NumPy makes them anew each time


def varint(value: int) -> bytes:
    """The protobuf encoding of a non-negative integer."""
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def payload_tag(size: int) -> bytes:
    """What stands between a serialized head and a payload of `size` bytes."""
    return _TAG + varint(size)


def payload_prefix(head: Message, size: int) -> bytes:
    """What precedes a payload of `size` bytes: the head, the field's tag and its length."""
    return head.SerializeToString() + payload_tag(size)


def pack(head: Message, *buffers: Buffer | NDArray[np.generic]) -> bytes:
    """Serialize `head` with `buffers`, one after the other, as its payload (one copy)."""
    views = [_bytes_of(buffer) for buffer in buffers]
    size = sum(len(view) for view in views)
    return b"".join((payload_prefix(head, size), *views))


def unpack(cls: type[M], data: Buffer) -> tuple[M, memoryview]:
    """Split a message into its head and a view of its payload, without copying the payload.

    Raises:
        DecodeError: the bytes are no such message.
    """
    view = memoryview(data)
    position, end = 0, len(data)
    while position < end:
        start = position
        if start > _MAX_HEAD:
            raise DecodeError(f"{cls.__name__}: more than {_MAX_HEAD} bytes before the payload")
        tag, position = _read_varint(data, position)
        kind = tag & 7
        if kind == 0:
            _, position = _read_varint(data, position)
        elif kind == 1:
            position += 8
        elif kind == 5:
            position += 4
        elif kind == 2:
            size, position = _read_varint(data, position)
            if position + size > end:
                raise DecodeError(f"{cls.__name__}: a field of {size} bytes exceeds the message")
            if tag == PAYLOAD_TAG:
                if position + size != end:
                    raise DecodeError(f"{cls.__name__}: the payload must be the last field")
                return _parse(cls, bytes(view[:start])), view[position:]
            position += size
        else:
            raise DecodeError(f"{cls.__name__}: wire type {kind} at byte {start}")
    return _parse(cls, bytes(data)), view[end:]


def pack_arrays(
    arrays: Iterable[tuple[str, NDArray[np.generic]]],
) -> tuple[list[TensorSpec], list[Buffer]]:
    """Describe named arrays and lay them out as a payload, each 16-byte aligned within it."""
    specs: list[TensorSpec] = []
    buffers: list[Buffer] = []
    offset = 0
    for name, given in arrays:
        array = np.ascontiguousarray(given)
        # Not the array's shape: where there was none, NumPy has made it [1].
        dtype = _NAMES.get(array.dtype) or array.dtype.name
        specs.append(TensorSpec(name=name, dtype=dtype, shape=given.shape))
        padding = -offset % ALIGNMENT
        if padding:
            buffers.append(bytes(padding))
        if array.nbytes:
            buffers.append(array.reshape(-1).view(np.uint8).data)
        offset += padding + array.nbytes
    return specs, buffers


def unpack_arrays(
    specs: Sequence[TensorSpec], payload: memoryview
) -> dict[str, NDArray[np.generic]]:
    """Read-only array views into `payload`, by name.

    Raises:
        ValueError: a described array does not lie inside the payload, or is of no numbers.
    """
    arrays: dict[str, NDArray[np.generic]] = {}
    offset = 0
    for spec in specs:
        dtype = _DTYPES.get(spec.dtype)
        if dtype is None:
            raise ValueError(
                f"tensor {spec.name!r}: dtype {spec.dtype[:40]!r}; expected {', '.join(_DTYPES)}"
            )
        shape = tuple(spec.shape)
        count = int(np.prod(shape, dtype=np.int64))
        offset += -offset % ALIGNMENT
        if min(shape, default=0) < 0 or offset + count * dtype.itemsize > len(payload):
            raise ValueError(
                f"tensor {spec.name!r} {spec.dtype}{list(shape)} does not fit in a payload of "
                f"{len(payload)} bytes at offset {offset}"
            )
        flat = np.frombuffer(payload, dtype=dtype, count=count, offset=offset)
        arrays[spec.name] = flat.reshape(shape)
        offset += count * dtype.itemsize
    return arrays


def _bytes_of(buffer: Buffer | NDArray[np.generic]) -> Buffer:
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8).data if buffer.nbytes else b""
    return buffer.cast("B") if isinstance(buffer, memoryview) and buffer.nbytes else buffer


def _parse(cls: type[M], head: bytes) -> M:
    message = cls()
    message.ParseFromString(head)
    return message


def _read_varint(data: Buffer, position: int) -> tuple[int, int]:
    value = shift = 0
    for _ in range(_MAX_VARINT):
        if position >= len(data):
            raise DecodeError("the message ends inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise DecodeError("a number longer than 10 bytes")
