"""Reads a file of experts: past the page cache where the file system allows that."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from chassis.closing import Closing
from workers.offload.engine import _reads
from workers.offload.experts.layout import (
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
        begin, size, view = self.layers[layer].at(expert), into.nbytes, view_of(into)
        at = begin
        while view:
            done = os.preadv(self._file, [view], at)
            if done == 0:
                raise self.damage(layer, expert)
            at, view = at + done, view[done:]
        if not self.direct:
            os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_DONTNEED)
        expected = self.to_compare(layer, expert)
        if expected is not None and (found := _reads.checksum(view_of(into))) != expected:
            raise self.damage(layer, expert, found)
        self.compared(layer, expert)

    def native_read(
        self,
        layer: int,
        first: int,
        into: list[memoryview],
        expected: Sequence[int | None],
        before: Callable[[int, int], None] | None = None,
    ) -> _reads.Transfer:
        """A read of experts that follow one another, for threads that need no interpreter.

        Args:
            layer, first: of the file, and of the layer.
            into: page-aligned, as long as an extent each.
            expected: their checksums, None of those that are not to be compared.
            before: called by whoever reads before each part, with which of them and from which byte
                on; so a disk can be as slow as wanted.
        """
        at = self.layers[layer].at(first)
        return _reads.Transfer(self._file, self.direct, False, at, into, expected, before)

    def to_compare(self, layer: int, expert: int) -> int | None:
        """The checksum that a read of an extent is to be compared with, if it is."""
        if self._always or not self._checked[layer][expert]:
            return self.expected(layer, expert)
        return None

    def compared(self, layer: int, first: int, count: int = 1) -> None:
        """Extents were read, and had the checksums that they should have."""
        self._checked[layer][first : first + count] = b"\1" * count

    def damage(self, layer: int, expert: int, found: int | None = None) -> ExpertFileError:
        """What is wrong with an extent: its checksum, or without one that the file ends early."""
        if found is None:
            return ExpertFileError(f"{self._told(layer, expert)}: the file is cut short")
        return ExpertFileError(
            f"{self._told(layer, expert)}: expected checksum {self.expected(layer, expert):08x}, "
            f"got {found:08x}: it was damaged"
        )

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
