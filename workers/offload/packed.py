"""Reads a file of experts: past the page cache where the file system allows that."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from chassis.closing import Closing
from workers.offload.layout import (
    PAGE,
    ExpertFileError,
    LayerAt,
    header_size,
    unpack_header,
    view_of,
)

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class PackedExperts(Closing):
    """A file that `pack_experts` has written.

    Reads are made by any number of threads at once. An extent is checked when it is first read,
    again where `check="always"`.

    Args:
        path: the file.
        direct: read past the page cache. Where it cannot be, or is not wanted, pages are given back
            after each read, so that they do not come on top of the memory that was allowed.
        check: first | always.

    Raises:
        ExpertFileError: it is no such file, cut short or damaged.
        OSError: it cannot be read.
    """

    access = os.O_RDONLY

    def __init__(self, path: str | Path, *, direct: bool = True, check: str = "first") -> None:
        self.path = str(path)
        if check not in ("first", "always"):
            raise ValueError(f"check: expected first or always, got {check!r}")
        self._always = check == "always"
        self._file = os.open(self.path, self.access | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            head = os.pread(self._file, PAGE, 0)
            data = os.pread(self._file, header_size(head, self.path), 0)
            self.layers = unpack_header(data, self.path)
            self._check_size()
            self._checked = [bytearray(layer.experts) for layer in self.layers]
            self.direct = direct and self._reopen()
        except BaseException:
            self.close()
            raise

    def read(self, layer: int, expert: int, into: Tensor) -> None:
        """Read an expert into page-aligned uint8 [extent].

        Raises:
            ExpertFileError: what was read is not what was written.
            OSError: the disk fails.
        """
        self.read_part(layer, expert, 0, view_of(into))
        self.check(layer, expert, into)

    def read_part(self, layer: int, expert: int, at: int, into: memoryview) -> None:
        """Read what follows `at` in an expert's extent, a multiple of PAGE as the size is.

        Raises:
            ExpertFileError: the file is cut short.
            OSError: the disk fails.
        """
        begin, size = self.layers[layer].at(expert) + at, len(into)
        while into:
            done = os.preadv(self._file, [into], begin)
            if done == 0:
                raise ExpertFileError(f"{self._told(layer, expert)}: the file is cut short")
            begin, into = begin + done, into[done:]
        if not self.direct:
            os.posix_fadvise(self._file, begin - size, size, os.POSIX_FADV_DONTNEED)

    def check(self, layer: int, expert: int, into: Tensor) -> None:
        """Compare the checksum of an extent that was read, if it is to be.

        Raises:
            ExpertFileError: what was read is not what was written.
        """
        if self._always or not self._checked[layer][expert]:
            found, expected = crc32(view_of(into)), self.expected(layer, expert)
            if found != expected:
                raise ExpertFileError(
                    f"{self._told(layer, expert)}: expected checksum {expected:08x}, got "
                    f"{found:08x}: it was damaged"
                )
            self._checked[layer][expert] = 1

    def expected(self, layer: int, expert: int) -> int:
        """The checksum of an extent."""
        return self.layers[layer].checksums[expert]

    def expert(self, name: str, expert: int) -> dict[str, Tensor]:
        """An expert's tensors, in memory of their own; errors are those of `read`."""
        layer = next((i for i, one in enumerate(self.layers) if one.name == name), None)
        if layer is None or not 0 <= expert < self.layers[layer].experts:
            raise ExpertFileError(f"{self.path}: layer {name!r}: it has no expert {expert}")
        at = self.layers[layer]
        extent = aligned(at.extent)
        self.read(layer, expert, extent)
        return {tensor.name: tensor.of(extent) for tensor in at.tensors}

    def require(self, expected: Sequence[LayerAt]) -> None:
        """See that the file has the experts of these layers, by names, shapes and types.

        Raises:
            ExpertFileError: it has not; names the layer.
        """
        mine, theirs = {one.name: one for one in self.layers}, {one.name: one for one in expected}
        if mine.keys() != theirs.keys():
            raise ExpertFileError(
                f"{self.path}: expected the layers {', '.join(theirs)}, got {', '.join(mine)}"
            )
        for name, want in theirs.items():
            got = mine[name]
            wanted = want.experts, [(t.name, t.dtype, t.shape) for t in want.tensors]
            found = got.experts, [(t.name, t.dtype, t.shape) for t in got.tensors]
            acts = {want.activation, got.activation} - {""}
            if wanted != found or len(acts) > 1:
                raise ExpertFileError(
                    f"{self.path}: {name}: expected {want.activation} experts {wanted}, got "
                    f"{got.activation} {found}"
                )

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _check_size(self) -> None:
        size, end = os.fstat(self._file).st_size, self.layers[-1].end
        if size == end:
            return
        for i, layer in enumerate(self.layers):
            if size < layer.end:
                cut = max(0, size - layer.start) // layer.extent
                raise ExpertFileError(
                    f"{self._told(i, cut)}: the file is cut short: expected {end} bytes, got {size}"
                )
        raise ExpertFileError(f"{self.path}: expected {end} bytes, got {size}")

    def _reopen(self) -> bool:
        """Open the file for direct reads; whether it could be done."""
        flags = self.access | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
        try:
            file = os.open(f"/proc/self/fd/{self._file}", flags)
        except OSError as error:
            if error.errno in (*_REFUSALS, errno.ENOENT):
                return False
            raise
        try:
            os.preadv(file, [view_of(aligned(PAGE))], 0)
        except OSError as error:
            os.close(file)
            if error.errno in _REFUSALS:
                return False
            raise
        os.close(self._file)
        self._file = file
        return True

    def _told(self, layer: int, expert: int) -> str:
        return f"{self.path}: layer {self.layers[layer].name!r}: expert {expert}"


def aligned(size: int) -> Tensor:
    """Memory for direct reads: uint8 [size], anonymous, at a multiple of PAGE."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    offset = -memory.data_ptr() % PAGE
    return memory[offset : offset + size]
