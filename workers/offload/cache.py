"""Experts in memory: slots of one size, and who is in them."""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from chassis.closing import Closing
from workers.offload.layout import PAGE
from workers.offload.packed import PackedExperts, aligned
from workers.offload.policy import Policy


@dataclass(slots=True)
class Stats:
    """What came of the experts that were needed so far.

    hits: of them, those that were in memory.
    misses: those that were read.
    bytes_read: from the file.
    waited: seconds in which nothing was computed, for a read.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    waited: float = 0.0


class Cache(Closing):
    """Fixed memory for some of the experts of a file; for one caller at a time.

    Args:
        packed: the file; closed with this.
        slots: experts that have room.
        policy: who gives way.
        readers: threads that read.
    """

    def __init__(self, packed: PackedExperts, slots: int, policy: Policy, readers: int) -> None:
        self.packed, self.slots, self.stats = packed, slots, Stats()
        self._size = max(layer.extent for layer in packed.layers)
        assert self._size % PAGE == 0
        self._memory = aligned(slots * self._size)
        self._free = list(reversed(range(slots)))
        self._slot: dict[int, int] = {}
        self._reads: dict[int, Future[None]] = {}  # begun, and not yet asked how they ended
        self._held: set[int] = set()
        self._policy = policy
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="experts")
        self._process = os.getpid()
        self._closed = False
        self._first = [0]
        for layer in packed.layers:
            self._first.append(self._first[-1] + layer.experts)

    def arrivals(
        self, layer: int, experts: Sequence[int]
    ) -> Generator[dict[int, Tensor], None, None]:
        """All of these experts of a layer, as they come: uint8 [extent] each, by expert.

        What is given stays as it is until the next is asked for. All are asked for at once: who is
        in memory comes first, while others are read. Close the iterator if it is not exhausted.

        Raises:
            ExpertFileError: an expert was damaged.
            OSError: the disk fails.
            RuntimeError: it was closed, or this is a fork of the process that opened it.
        """
        if self._closed:
            raise RuntimeError(f"{self.packed.path}: the experts' file was closed")
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{self.packed.path}: expected the process that called heterps.offload; a fork of "
                "it has none of the threads that read"
            )
        first = self._first[layer]
        self._settle()
        missing = []
        ready = []
        for expert in experts:
            key = first + expert
            if key in self._slot:
                ready.append(expert)
                self._held.add(key)
                self._policy.used(key)
                self.stats.hits += 1
            else:
                missing.append(expert)
                self.stats.misses += 1
        waiting = missing[::-1]
        try:
            while ready or missing:
                while waiting and self._begin(layer, waiting[-1]):
                    self._held.add(first + waiting.pop())
                if not ready:
                    ready = self._arrived(first, [e for e in missing if e not in waiting])
                    missing = [e for e in missing if e not in ready]
                yield {e: self._view(layer, first + e) for e in ready}
                self._held.difference_update(first + e for e in ready)
                ready = []
        finally:
            self._held.clear()

    def close(self) -> None:
        """Wait for reads that are under way; nothing can be read afterwards."""
        self._closed = True
        self._readers.shutdown(wait=True, cancel_futures=True)
        self.packed.close()

    def _begin(self, layer: int, expert: int) -> bool:
        """Have an expert read; whether there is a slot for it."""
        key = self._first[layer] + expert
        if not self._free:
            victim = self._policy.victim(self._held)
            if victim is None:
                return False
            self._forget(victim)
        self._slot[key] = self._free.pop()
        into = self._view(layer, key)
        self._reads[key] = self._readers.submit(self.packed.read, layer, expert, into)
        self._policy.used(key)
        self.stats.bytes_read += into.nbytes
        return True

    def _arrived(self, first: int, experts: Sequence[int]) -> list[int]:
        """Wait for one of these reads; all that have ended."""
        begin = perf_counter()
        wait([self._reads[first + e] for e in experts], return_when=FIRST_COMPLETED)
        self.stats.waited += perf_counter() - begin
        ready = [e for e in experts if self._reads[first + e].done()]
        for e in ready:
            self._finish(first + e)
        return ready

    def _finish(self, key: int) -> None:
        """Take note of a read that has ended.

        Raises:
            Exception: what it ended with; the expert is not in memory then.
        """
        try:
            self._reads.pop(key).result()
        except BaseException:
            self._forget(key)
            raise

    def _settle(self) -> None:
        """Wait for what a forward that failed has left under way."""
        wait(self._reads.values())
        for key in list(self._reads):
            read = self._reads.pop(key)
            if read.cancelled() or read.exception() is not None:
                self._forget(key)

    def _forget(self, key: int) -> None:
        self._policy.left(key)
        self._free.append(self._slot.pop(key))

    def _view(self, layer: int, key: int) -> Tensor:
        at = self._slot[key] * self._size
        return self._memory[at : at + self.packed.layers[layer].extent]
