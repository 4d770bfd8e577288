"""Threads that read experts, and how long the disk has had work."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter

from torch import Tensor

from chassis.closing import Closing
from workers.offload.layout import view_of
from workers.offload.packed import PackedExperts

_PART = 512 << 10  # bytes that are read by one call: several of them keep a disk busy


@dataclass(slots=True, eq=False)
class Read:
    """Experts of a layer that follow one another, to memory as large; what came of it."""

    key: int
    layer: int
    first: int
    into: Sequence[Tensor]  # uint8 [extent], one an expert
    compared: bool = True  # with checksums
    left: int = 0  # parts that have not ended
    error: BaseException | None = None
    done: bool = False


class Readers(Closing):
    """Reads of a file by several threads, for one caller; they end in any order.

    Args:
        packed: the file.
        threads: that read.
    """

    def __init__(self, packed: PackedExperts, threads: int) -> None:
        self._packed = packed
        self._asked: SimpleQueue[tuple[Read, int, int, int] | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.Lock()
        self._flying = 0  # parts under way or asked for
        self._since = self._busy = 0.0
        self._threads = [
            threading.Thread(target=self._work, name=f"experts-{i}", daemon=True)
            for i in range(threads)
        ]
        self.waited = 0.0  # seconds in which the caller could only wait
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> float:
        """Seconds in which reads were under way."""
        with self._lock:
            return self._busy + (perf_counter() - self._since if self._flying else 0.0)

    def begin(self, read: Read) -> None:
        """Have it read; it is `done` when it has ended."""
        parts = [
            (read, i, at, min(_PART, into.nbytes - at))
            for i, into in enumerate(read.into)
            for at in range(0, into.nbytes, _PART)
        ]
        read.left = len(parts)
        with self._lock:
            if not self._flying:
                self._since = perf_counter()
            self._flying += len(parts)
        for part in parts:
            self._asked.put(part)

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
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (part := self._asked.get()) is not None:
            read, i, at, size = part
            try:
                if read.error is None:
                    view = view_of(read.into[i])[at : at + size]
                    self._packed.read_part(read.layer, read.first + i, at, view)
            except BaseException as error:  # for the caller, whatever it is
                read.error = error
            with self._lock:
                read.left -= 1
                is_last = read.left == 0
                self._flying -= 1
                if not self._flying:
                    self._busy += perf_counter() - self._since
            if is_last:
                self._check(read)
                read.done = True
                self._ended.put(None)
            del part, read

    def _check(self, read: Read) -> None:
        try:
            if read.error is None and read.compared:
                for i, into in enumerate(read.into):
                    self._packed.check(read.layer, read.first + i, into)
        except BaseException as error:
            read.error = error
