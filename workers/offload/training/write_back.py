"""Experts in memory that change, and are written as they give way.

Neither is waited for: who is to come is read into a slot as soon as who was there is written, by
the threads that read, while others are computed.
"""

from collections.abc import Generator, Sequence

from workers.offload.experts.trained import TrainedExperts
from workers.offload.slots.cache import Cache
from workers.offload.slots.policy import Policy
from workers.offload.slots.readers import Read
from workers.offload.slots.residents import Turn
from workers.offload.slots.store import Guess
from workers.offload.slots.writes import Write

_NOBODY = -1


class ChangingCache(Cache):
    """Experts in memory, of which those that have changed are written as they give way.

    What is guessed is read into slots that nobody else needs, see `Residents.turns_ahead`.
    """

    packed: TrainedExperts

    def __init__(self, packed: TrainedExperts, slots: int, policy: Policy, readers: int) -> None:
        super().__init__(packed, slots, policy, readers)
        self.changed: set[int] = set()  # keys
        self.written = 0  # bytes
        self._owner: dict[int, int] = {}  # of a slot, by keys
        self._leaving: dict[int, Write] = {}  # by keys; begun, and not yet asked how they ended

    def key(self, layer: int, expert: int) -> int:
        """By which an expert is known here."""
        return self._first[layer] + expert

    def write_back(self) -> None:
        """Write all that have changed; they stay.

        Raises:
            OSError: the disk fails, now or since others have given way.
        """
        for key in sorted(self.changed):
            self._leave(key, self._residents.slot[key])
        for key in list(self._leaving):
            self._gone(key)

    def close(self) -> None:
        """See `Cache`: what has changed is written by `write_back` alone."""
        super().close()
        self._leaving.clear()

    def _turns(self, keys: Sequence[int], guess: Guess | None) -> Generator[Turn, None, None]:
        for key in self._residents.early.intersection(keys):
            self._stats.bytes_wasted -= self._extents[self._layer_of(key)]
        ahead = () if guess is None else [self.key(layer, e) for layer, e in guess()]
        return self._residents.turns_ahead(keys, ahead)

    def _count(self) -> None:
        super()._count()
        self._stats.ahead = self._residents.foreseen

    def _settle(self) -> None:
        """See how writes have ended; reads that are under way may be of what is needed now."""
        for key in [key for key, write in self._leaving.items() if write.done]:
            self._gone(key)

    def _begin(self, key: int, slot: int) -> None:
        owner = self._owner.get(slot, _NOBODY)
        if owner in self._reads:  # nobody has needed it after all, and nobody asks how it ends
            self.readers.wait(self._reads[owner])
            del self._reads[owner]
        if key in self._leaving:
            self._gone(key)
        read = self._read(key, slot)
        if owner in self.changed:
            self._leave(owner, slot, read)
        else:
            self.readers.begin(read)
        self._owner[slot], self._reads[key] = key, read
        if key in self._residents.early:
            self._stats.bytes_wasted += read.into[0].nbytes  # so far

    def _leave(self, key: int, slot: int, then: Read | None = None) -> None:
        """Have one be written that has changed; `then` is read to the same memory."""
        layer = self._layer_of(key)
        extent = self._extent_at(slot, layer)
        write = Write(self.packed, layer, key - self._first[layer], extent)
        self.readers.begin(write, then)
        self._leaving[key] = write
        self.changed.discard(key)
        self.written += extent.nbytes

    def _gone(self, key: int) -> None:
        """Wait until one is written; what it ended with is told whenever it is asked for.

        Raises:
            OSError: the disk fails, or is full.
        """
        self.readers.finish(self._leaving[key])
        del self._leaving[key]
