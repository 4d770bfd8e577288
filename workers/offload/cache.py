"""Experts in memory as they are needed: slots of one size, and a policy that says who gives way."""

from collections.abc import Generator, Sequence
from contextlib import closing

from torch import Tensor

from workers.offload.layout import PAGE
from workers.offload.memory import fixed
from workers.offload.packed import PackedExperts
from workers.offload.policy import Policy
from workers.offload.readers import Read
from workers.offload.residents import Residents
from workers.offload.store import Ready, Store


class Cache(Store):
    """Slots for some of the experts of a file.

    Who is in memory comes first, while others are read; all are asked for at once where they have
    room.

    Args:
        packed: the file; closed with this.
        slots: experts that have room.
        policy: who gives way.
        readers: threads that read.
    """

    def __init__(self, packed: PackedExperts, slots: int, policy: Policy, readers: int) -> None:
        size = max(layer.extent for layer in packed.layers)
        assert size % PAGE == 0
        self.slots = slots
        memory, self.locked = fixed(slots * size)
        self.memory = memory.view(slots, size)
        super().__init__(packed, readers)
        self._residents = Residents(slots, policy)
        self._reads: dict[int, Read] = {}  # begun, and not yet asked how they ended
        self._first = [0]
        for layer in packed.layers:
            self._first.append(self._first[-1] + layer.experts)

    def arrivals(self, layer: int, experts: Sequence[int]) -> Generator[Ready, None, None]:
        """See `Store`."""
        self.require_open()
        self._settle()
        first = self._first[layer]
        with closing(self._residents.turns([first + e for e in experts])) as turns:
            for turn in turns:
                for key, slot in turn.begin:
                    self._begin(layer, key, slot)
                waiting = {key for key in turn.give if key in self._reads}
                ready = [key for key in turn.give if key not in waiting]
                while ready or waiting:
                    if not ready:
                        ready = self._arrived(waiting)
                        waiting.difference_update(ready)
                    if ready:
                        slots = {key - first: self._residents.slot[key] for key in ready}
                        yield Ready(self.memory, slots)
                    ready = []
                self._count()

    def view(self, layer: int, slot: int) -> Tensor:
        """The extent of an expert of a layer that is in a slot, uint8 [extent]."""
        return self.memory[slot, : self.packed.layers[layer].extent]

    def _count(self) -> None:
        self._stats.hits, self._stats.misses = self._residents.hits, self._residents.misses

    def _begin(self, layer: int, key: int, slot: int) -> None:
        into = self.view(layer, slot)
        read = self._reads[key] = Read(key, layer, key - self._first[layer], [into])
        self.readers.begin(read)
        self._stats.bytes_read += into.nbytes

    def _arrived(self, waiting: set[int]) -> list[int]:
        """Wait for a read to end; those of `waiting` that have, which may be none of them.

        Raises:
            Exception: what a read ended with; the expert is not in memory then.
        """
        if not any(self._reads[key].done for key in waiting):
            self.readers.wait()
        ended = [self._reads.pop(key) for key in waiting if self._reads[key].done]
        for read in ended:
            self._end(read)
        for read in ended:
            if read.error is not None:
                raise read.error
        return [read.key for read in ended]

    def _settle(self) -> None:
        """Wait for what a forward that failed has left under way."""
        while self._reads:
            _, read = self._reads.popitem()
            while not read.done:
                self.readers.wait()
            self._end(read)

    def _end(self, read: Read) -> None:
        if read.error is not None:
            self._residents.forget(read.key)
