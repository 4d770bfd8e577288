"""Threads that read experts, and how long the disk has had work."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter

from torch import Tensor

from chassis.closing import Closing
from workers.offload.layout import view_of
from workers.offload.packed import PackedExperts

_PART = 2 << 20  # bytes that are read by one call: fewer cost more, in threads that wake
_PART_AHEAD = 512 << 10  # and ahead: so much of a wrong guess is in the way of others at most
Part = tuple[int, int, int]  # of which expert, from which byte on, how many


class DroppedError(Exception):
    """The rest of a read is not needed any more."""


@dataclass(slots=True, eq=False)
class Read:
    """Experts of a layer that follow one another, to memory as large; what came of it."""

    key: int
    layer: int
    first: int
    into: Sequence[Tensor]  # uint8 [extent], one an expert
    compared: bool = True  # with checksums
    parts: deque[Part] = field(default_factory=deque)  # that have not begun
    left: int = 0  # parts that have not ended
    error: BaseException | None = None
    done: bool = False


class Readers(Closing):
    """Reads of a file by several threads, for one caller; they end in any order.

    Reads ahead are made by one thread of their own, part by part, so that of one that turns out to
    be of no use a single part is in the way of others.

    Args:
        packed: the file.
        threads: that read.
        ahead: whether reads ahead are made.
    """

    def __init__(self, packed: PackedExperts, threads: int, ahead: bool = False) -> None:
        self._packed = packed
        self._asked: SimpleQueue[tuple[Read, Part] | None] = SimpleQueue()
        self._later: SimpleQueue[Read | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._flying = 0  # parts under way or asked for
        self._since = self._busy = 0.0
        work = [self._work] * threads + [self._work_ahead] * ahead
        self._threads = [
            threading.Thread(target=target, name=f"experts-{i}", daemon=True)
            for i, target in enumerate(work)
        ]
        self.waited = 0.0  # seconds in which the caller could only wait
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> float:
        """Seconds in which reads were under way."""
        with self._lock:
            return self._busy + (perf_counter() - self._since if self._flying else 0.0)

    def begin(self, read: Read, leave: int = 0) -> None:
        """Have it read; it is `done` when it has ended. Parts that are left are for `work`."""
        self._plan(read, _PART)
        self.hurry(read, leave)

    def begin_ahead(self, read: Read) -> None:
        """Have it read behind others that were begun so, until it is hurried or dropped."""
        self._plan(read, _PART_AHEAD)
        self._later.put(read)

    def hurry(self, read: Read, leave: int = 0) -> None:
        """Have all threads read what has not begun of it, but for so many parts."""
        while len(read.parts) > leave and (part := _next(read)) is not None:
            self._asked.put((read, part))

    def work(self, read: Read) -> None:
        """Read a part that has not begun: who would wait for it anyway need not be woken."""
        begin = perf_counter()
        if (part := _next(read)) is not None:
            self._read(read, part)
        self.waited += perf_counter() - begin

    def drop(self, read: Read) -> int:
        """Read nothing more of it, and forget it when it is `done`; bytes that are not read."""
        count = size = 0
        while (part := _next(read)) is not None:
            count, size = count + 1, size + part[2]
        if count:
            read.error = DroppedError()
            self._end(read, count)
        return size

    def wait(self) -> None:
        """Wait until another one has ended, well or not; it is `done` then."""
        if self._ended.empty():
            begin = perf_counter()
            self._ended.get()
            self.waited += perf_counter() - begin
        else:
            self._ended.get()

    def close(self) -> None:
        """Wait for reads that are under way."""
        for _ in self._threads:
            self._asked.put(None)
        self._later.put(None)
        for thread in self._threads:
            thread.join()

    def _plan(self, read: Read, size: int) -> None:
        """Cut it into parts of so many bytes."""
        read.parts.extend(
            (i, at, min(size, into.nbytes - at))
            for i, into in enumerate(read.into)
            for at in range(0, into.nbytes, size)
        )
        read.left = len(read.parts)
        with self._lock:
            if not self._flying:
                self._since = perf_counter()
            self._flying += read.left

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            self._read(*asked)
            del asked

    def _work_ahead(self) -> None:
        while (read := self._later.get()) is not None:
            while (part := _next(read)) is not None:
                self._read(read, part)
            del read

    def _read(self, read: Read, part: Part) -> None:
        i, at, size = part
        try:
            if read.error is None:
                view = view_of(read.into[i])[at : at + size]
                self._packed.read_part(read.layer, read.first + i, at, view)
        except BaseException as error:  # for the caller, whatever it is
            read.error = error
        self._end(read, 1)

    def _end(self, read: Read, parts: int) -> None:
        """So many parts of it have."""
        with self._lock:
            read.left -= parts
            is_last = read.left == 0
            self._flying -= parts
            if not self._flying:
                self._busy += perf_counter() - self._since
        if is_last:
            self._check(read)
            read.done = True
            self._ended.put(None)

    def _check(self, read: Read) -> None:
        try:
            if read.error is None and read.compared:
                for i, into in enumerate(read.into):
                    self._packed.check(read.layer, read.first + i, into)
        except BaseException as error:
            read.error = error


def _next(read: Read) -> Part | None:
    """A part that has not begun; each is given once, to whichever thread asks."""
    try:
        return read.parts.popleft()
    except IndexError:
        return None
