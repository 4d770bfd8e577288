"""Files of dense weights, safetensors, that never are in memory whole beside the weights."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors.torch import load_file, save
from torch import Tensor

_CHUNK, _READ = 16 << 20, 1 << 20  # bytes
_HEADER_LENGTH = 8  # bytes, little-endian
_HEADER_MULTIPLE = 8  # of its length


def chunks_of(tensors: Mapping[str, Tensor], size: int = _CHUNK) -> Iterator[bytes]:
    """The bytes of a safetensors file, piece by piece.

    Args:
        tensors: on the host, contiguous, none a part of another.
        size: bytes of a piece, at most.
    """
    # Wide elements first, so that each tensor is aligned to its own.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    kinds = {dtype: _name_of(dtype) for dtype in {tensor.dtype for tensor in tensors.values()}}
    header, end = {}, 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": kinds[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_MULTIPLE)
    yield from _pieces(memoryview(len(text).to_bytes(_HEADER_LENGTH, "little") + text), size)
    for name in names:
        if tensors[name].numel():
            data = tensors[name].detach().reshape(-1).view(torch.uint8).numpy().data
            yield from _pieces(data, size)


def _pieces(data: memoryview, size: int) -> Iterator[bytes]:
    for first in range(0, len(data), size):
        yield bytes(data[first : first + size])


def read_from(stream: BinaryIO, accept: Callable[[str], object]) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped: the system takes their memory back as it likes.

    A file that is on no disk here is copied into the temporary folder, where it has no name.

    Args:
        accept: told the file's SHA-256 before anything is read of it; raises if it is another.

    Raises:
        OSError: it cannot be read, or not be kept.
        SafetensorError: it is none.
    """
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix="heterps-weights-") as folder:
        path = Path(folder, "weights")
        with ExitStack() as opened:
            copy = None if _lies_on_disk(stream) else opened.enter_context(path.open("wb"))
            while chunk := stream.read(_READ):
                digest.update(chunk)
                if copy is not None:
                    copy.write(chunk)
        accept(digest.hexdigest())
        weights: dict[str, Tensor] = load_file(path if copy is not None else stream.name)
    return weights


def _lies_on_disk(stream: BinaryIO) -> bool:
    """Whether its name is that of the file that it reads."""
    try:
        there, named = os.fstat(stream.fileno()), Path(stream.name).stat()
    except (AttributeError, OSError, TypeError, ValueError):
        return False
    return (there.st_dev, there.st_ino) == (named.st_dev, named.st_ino)


def _name_of(dtype: torch.dtype) -> str:
    """What the format calls it."""
    file = save({"x": torch.empty(0, dtype=dtype)})
    length = int.from_bytes(file[:_HEADER_LENGTH], "little")
    header = json.loads(file[_HEADER_LENGTH : _HEADER_LENGTH + length])
    return str(header["x"]["dtype"])
