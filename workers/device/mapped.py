"""Tensors that lie in files without a name: memory that the kernel takes back when it is needed.

What is larger than memory, and still a tensor to all who read and write it: experts of a model that
is being built, of a cut that is read, of a state that is kept. The files go with the tensors,
however the process ends.
"""

import json
import math
import mmap
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_PIECE = 4 << 20  # bytes
_LENGTH = struct.Struct("<Q")
# Of safetensors, whose files are 8 bytes of length, as long a header in JSON, and the values.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_folders: dict[int, Path] = {}  # by where the tensors' memory begins


def mapped(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in a file of its own.

    Args:
        folder: on the disk that has it.

    Raises:
        OSError: there is no room, which is asked for before the first value is written.
    """
    size = max(1, math.prod(shape) * dtype.itemsize)
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            told = f"{error.strerror}: {size:,} bytes of experts are to be written there"
            raise OSError(error.errno, told, str(folder)) from None
        memory = mmap.mmap(file.fileno(), size)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    _folders[whole.data_ptr()] = folder
    weakref.finalize(memory, _folders.pop, whole.data_ptr(), None)
    return whole[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def lies_in(tensor: Tensor) -> Path | None:
    """The folder in whose files a tensor, or what it is a part of, lies; None: in memory."""
    return _folders.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None


def empty_like(tensor: Tensor) -> Tensor:
    """As `torch.empty_like`, in a file where the tensor lies in one."""
    folder = lies_in(tensor)
    if folder is None:
        return torch.empty_like(tensor)
    return mapped(folder, tensor.shape, tensor.dtype)


def packed(tensors: Mapping[str, Tensor], save: Any) -> bytes | memoryview:
    """Tensors on the host as a safetensors file, which lies in one where any of them does.

    Args:
        save: makes such a file in memory.
    """
    folder = next((found for one in tensors.values() if (found := lies_in(one))), None)
    if folder is None:
        made: bytes = save(dict(tensors))
        return made
    data = mapped(folder, [sum(map(len, pieces(tensors)))], torch.uint8)
    view, at = memoryview(_array(data)), 0
    for piece in pieces(tensors):
        view[at : at + len(piece)] = piece
        at += len(piece)
    return view


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """A safetensors file of tensors on the host, piece by piece."""
    # Larger items first, so that all lie as their dtypes ask for.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header, at = dict[str, Any](), 0
    for name, one in ordered:
        end = at + one.nbytes
        shape = list(one.shape)
        header[name] = {"dtype": _NAMES[one.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH.size)
    yield memoryview(_LENGTH.pack(len(text)) + text)
    for _, one in ordered:
        if one.numel():
            values = memoryview(_array(one.detach().contiguous().view(-1).view(torch.uint8)))
            yield from (values[i : i + _PIECE] for i in range(0, len(values), _PIECE))


def read_into(stream: BinaryIO, size: int, folder: Path) -> memoryview:
    """The bytes of a stream, in a file of their own; fewer than `size` where it ends before."""
    view = memoryview(_array(mapped(folder, [size], torch.uint8)))
    at = 0
    while at < size and (piece := stream.read(min(_PIECE, size - at))):
        view[at : at + len(piece)] = piece
        at += len(piece)
    return view[:at]


def unpacked(data: memoryview) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which are parts of it.

    Raises:
        ValueError: it is none.
    """
    (length,) = _LENGTH.unpack_from(data)
    header = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
    values = torch.frombuffer(data, dtype=torch.uint8)[_LENGTH.size + length :]
    found = {}
    for name, one in header.items():
        if name == "__metadata__":
            continue
        (begin, end), dtype = one["data_offsets"], _DTYPES[one["dtype"]]
        part = values[begin:end]
        if (part.storage_offset() * part.itemsize) % dtype.itemsize:
            part = part.clone()
        found[name] = part.view(dtype).view(one["shape"])
    return found


def _array(tensor: Tensor) -> Any:
    return tensor.numpy()
