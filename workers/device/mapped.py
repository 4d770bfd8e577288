"""Tensors that lie in files without a name: memory that the kernel takes back when it is needed.

What is larger than memory, and still a tensor to all who read and write it: experts of a model that
is being built, of a cut that is read, of a state that is kept. The files go with the tensors,
however the process ends.
"""

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_PIECE = 4 << 20  # bytes
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


def bytes_in(folder: Path, size: int) -> memoryview:
    """So many bytes in a file of their own; arguments and errors are those of `mapped`."""
    return memoryview(_array(mapped(folder, [size], torch.uint8)))


def read_into(stream: BinaryIO, size: int, folder: Path) -> memoryview:
    """The bytes of a stream, in a file of their own; fewer than `size` where it ends before."""
    view, at = bytes_in(folder, size), 0
    while at < size and (piece := stream.read(min(_PIECE, size - at))):
        view[at : at + len(piece)] = piece
        at += len(piece)
    return view[:at]


def _array(tensor: Tensor) -> Any:
    return tensor.numpy()
