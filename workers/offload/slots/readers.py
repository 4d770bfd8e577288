"""Threads that read experts, and write them, and how long the disk has had work.

The threads are those of the native module, which need no interpreter: threads of Python would each
wait for its lock behind the one that computes, and hold that up when they got it.
"""

import os
from collections.abc import Sequence

from chassis.closing import Closing
from workers.offload.engine import _reads
from workers.offload.experts.packed import PackedExperts
from workers.offload.slots.writes import Write

_PART = 2 << 20  # bytes that are moved by one call: fewer cost more, in threads that wake
_PART_AHEAD = 512 << 10  # and ahead: so much of a wrong guess is in the way of others at most


class DroppedError(Exception):
    """The rest of a read is not needed any more."""


class Read:
    """Experts of a layer that follow one another, to memory as large; what came of it.

    Args:
        packed: the file.
        key: by which the caller knows it.
        layer, first: of the file, and of the layer.
        into: page-aligned, as long as an extent, one an expert.
        compared: with checksums, where they are to be.
    """

    __slots__ = ("_outcome", "first", "into", "key", "layer", "native", "packed")

    def __init__(
        self,
        packed: PackedExperts,
        key: int,
        layer: int,
        first: int,
        into: Sequence[memoryview],
        compared: bool = True,
    ) -> None:
        self.packed, self.key, self.layer, self.first, self.into = packed, key, layer, first, into
        expected = [
            packed.to_compare(layer, first + i) if compared else None for i in range(len(into))
        ]
        self.native = packed.native_read(layer, first, list(into), expected)

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.native.done

    @property
    def error(self) -> BaseException | None:
        """What it ended with, once it is done."""
        kind, number, extent, found = self.native.outcome
        if kind is _reads.Kind.FINE:
            return None
        if kind is _reads.Kind.ERRNO:
            return OSError(number, os.strerror(number), self.packed.path)
        if kind is _reads.Kind.DROPPED:
            return DroppedError()
        if kind is _reads.Kind.THROWN:
            return RuntimeError(f"{self.packed.path}: what is called before reads has failed")
        sum_found = found if kind is _reads.Kind.DAMAGED else None
        return self.packed.damage(self.layer, self.first + extent, sum_found)


class Readers(Closing):
    """Reads and writes of files by several threads, for one caller; they end in any order.

    Reads ahead are made by one thread of their own, part by part and while no others are made, so
    that of one that turns out to be of no use a single part is in the way of others.

    Args:
        threads: that read and write.
        ahead: whether reads ahead are made.
    """

    def __init__(self, threads: int, ahead: bool = False) -> None:
        self._native = _reads.Readers(threads, ahead)

    @property
    def busy(self) -> float:
        """Seconds in which reads or writes were under way."""
        return self._native.busy

    @property
    def waited(self) -> float:
        """Seconds in which the caller could only wait."""
        return self._native.waited

    @property
    def flying(self) -> int:
        """Parts of reads that were begun and have not ended."""
        return self._native.flying

    def begin(self, transfer: Read | Write, then: Read | None = None) -> None:
        """Have it made; it is `done` when it has ended.

        Args:
            then: is made when that is done, to the same memory, and fails of what that fails of.
        """
        self._native.begin(transfer.native, _PART, None if then is None else then.native)

    def begin_ahead(self, read: Read) -> None:
        """Have it read while nothing is that was begun otherwise, and behind others ahead.

        Until it is hurried or dropped.
        """
        self._native.begin_ahead(read.native, _PART_AHEAD)

    def hurry(self, read: Read) -> None:
        """Have all threads read what has not begun of it."""
        self._native.hurry(read.native)

    def drop(self, read: Read) -> int:
        """Read nothing more of it, and forget it when it is `done`; bytes that are not read."""
        return self._native.drop(read.native)

    def wait(self, *reads: Read) -> None:
        """Wait until one of these is `done`, well or not.

        Raises:
            KeyboardInterrupt, or what another handler of a signal raises: so a disk that hangs
                holds nobody up who has enough of it. The reads go on, and keep their memory.
        """
        self._native.wait([read.native for read in reads])
        for read in reads:
            if read.done and read.error is None:
                read.packed.compared(read.layer, read.first, len(read.into))

    def finish(self, write: Write) -> None:
        """Wait until one is done, and see that it went well.

        Raises:
            OSError: the disk fails, or is full.
            KeyboardInterrupt, or as `wait`.
        """
        self._native.wait([write.native])
        write.end()

    def close(self) -> None:
        """Wait for what is under way.

        Raises:
            KeyboardInterrupt, or what another handler of a signal raises; to be repeated then, or
                the threads that hang are left behind.
        """
        self._native.close()
