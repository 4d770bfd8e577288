"""How experts lie in their file: each in one extent, so that one read brings all of it.

    8 bytes  magic
    8 bytes  length of the header, little-endian, as all numbers here
    4 bytes  CRC-32 of the header
    header   JSON: version, and of each layer its name, tensors and checksums
    extents  one an expert at multiples of 4096, as O_DIRECT asks; in it each tensor at a multiple
             of 64, since off such places torch's products may differ in their last bits

The file ends with the last extent. Checksums are CRC-32 of whole extents, padding included.
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

MAGIC = b"HPSEXPT\x01"
VERSION = 1
PAGE = 4096
LINE = 64
_HEAD = struct.Struct("<8sQI")
_MOST_HEADER = 1 << 30
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


class ExpertFileError(ValueError):
    """A file of experts, or what one is to be made of, that is not what it should be."""


@dataclass(frozen=True, slots=True)
class TensorAt:
    """One tensor of every expert of a layer, `at` so many bytes from the begin of its extent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, extent: Tensor) -> Tensor:
        """The tensor that lies in an extent, uint8 [bytes]; a view."""
        return extent[self.at : self.at + self.size].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class LayerAt:
    """The experts of one layer, one after the other.

    Attributes:
        name: of the MoE in its model.
        experts: how many.
        activation: of stacked experts, "" where it is not known or the experts are modules.
        tensors: of each expert, with their places.
        start: of the first extent, in bytes from the begin of the file.
        checksums: of each extent.
    """

    name: str
    experts: int
    activation: str
    tensors: tuple[TensorAt, ...]
    start: int = 0
    checksums: tuple[int, ...] = ()

    @property
    def extent(self) -> int:
        """Bytes of one expert, a multiple of PAGE."""
        last = self.tensors[-1]
        return _up(max(1, last.at + last.size), PAGE)

    @property
    def end(self) -> int:
        """Where the last extent ends."""
        return self.start + self.experts * self.extent

    def at(self, expert: int) -> int:
        """Where an expert's extent begins."""
        return self.start + expert * self.extent

    def fill(self, extent: Tensor, tensors: Sequence[Tensor]) -> int:
        """Put an expert's tensors into uint8 [extent], zeros between; the checksum."""
        extent.zero_()
        for place, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.dtype != place.dtype or tuple(tensor.shape) != place.shape:
                raise ExpertFileError(
                    f"{self.name}: {place.name}: expected {place.dtype} {list(place.shape)} of "
                    f"every expert, got {tensor.dtype} {list(tensor.shape)}"
                )
            place.of(extent).copy_(tensor.detach())
        return crc32(view_of(extent))


def placed(layers: Iterable[LayerAt]) -> tuple[LayerAt, ...]:
    """The layers with places for tensors and extents; checksums are zeros so far."""
    found = []
    for layer in layers:
        at, tensors = 0, []
        for tensor in layer.tensors:
            tensors.append(replace(tensor, at=at))
            at = _up(at + tensor.size, LINE)
        found.append(replace(layer, tensors=tuple(tensors), checksums=(0,) * layer.experts))
    start = _up(len(pack_header(found)), PAGE)
    for i, layer in enumerate(found):
        found[i] = replace(layer, start=start)
        start = found[i].end
    return tuple(found)


def pack_header(layers: Sequence[LayerAt]) -> bytes:
    """What a file begins with; as long whatever the checksums."""
    tree = {
        "version": VERSION,
        "layers": [
            {
                "name": layer.name,
                "experts": layer.experts,
                "activation": layer.activation,
                "tensors": [
                    [t.name, str(t.dtype).removeprefix("torch."), list(t.shape)]
                    for t in layer.tensors
                ],
                "checksums": "".join(f"{one:08x}" for one in layer.checksums),
            }
            for layer in layers
        ],
    }
    text = json.dumps(tree).encode()
    return _HEAD.pack(MAGIC, len(text), crc32(text)) + text


def header_size(head: bytes, path: str) -> int:
    """Bytes of all that `unpack_header` takes, by the first PAGE of a file.

    Raises:
        ExpertFileError: they are no beginning of a file of experts.
    """
    if len(head) < _HEAD.size or head[: len(MAGIC)] != MAGIC:
        raise ExpertFileError(
            f"{path}: expected a file of experts, which begins with {MAGIC!r}, got "
            f"{head[: len(MAGIC)]!r}"
        )
    size = int(_HEAD.unpack_from(head)[1])
    if size > _MOST_HEADER:
        raise ExpertFileError(f"{path}: header: expected at most {_MOST_HEADER} bytes, got {size}")
    return _HEAD.size + size


def unpack_header(data: bytes, path: str) -> tuple[LayerAt, ...]:
    """The layers of a file, by its first `header_size` bytes.

    Raises:
        ExpertFileError: they are damaged, or of another version.
    """
    size, checksum = _HEAD.unpack_from(data)[1:]
    text = data[_HEAD.size :]
    if len(text) != size or crc32(text) != checksum:
        raise ExpertFileError(
            f"{path}: header: expected {size} bytes with checksum {checksum:08x}, got {len(text)} "
            f"with {crc32(text):08x}: it is cut short or damaged"
        )
    tree: dict[str, Any] = json.loads(text)
    if tree.get("version") != VERSION:
        raise ExpertFileError(f"{path}: version: expected {VERSION}, got {tree.get('version')}")
    bare = [
        LayerAt(
            layer["name"],
            layer["experts"],
            layer["activation"],
            tuple(
                TensorAt(name, _DTYPES[dtype], tuple(shape))
                for name, dtype, shape in layer["tensors"]
            ),
        )
        for layer in tree["layers"]
    ]
    return tuple(
        replace(at, checksums=tuple(_checksums(layer["checksums"])))
        for at, layer in zip(placed(bare), tree["layers"], strict=True)
    )


def _checksums(text: str) -> list[int]:
    """Checksums of eight hexadecimal digits each."""
    return [int(text[a:b], 16) for a, b in pairwise(range(0, len(text) + 1, 8))]


def view_of(extent: Tensor) -> memoryview:
    """The bytes of uint8 [bytes]."""
    array: Any = extent.numpy()
    return memoryview(array)


def check_dtype(dtype: torch.dtype, what: str) -> torch.dtype:
    """A type that experts may have.

    Raises:
        ExpertFileError: it is none.
    """
    if dtype not in _DTYPES.values():
        raise ExpertFileError(f"{what}: expected one of {', '.join(_DTYPES)}, got {dtype}")
    return dtype


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
