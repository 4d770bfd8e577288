"""Experts in memory as they are needed: slots of one size, and a policy that says who gives way."""

from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import closing

from workers.offload.experts.layout import PAGE, view_of
from workers.offload.experts.packed import PackedExperts
from workers.offload.slots.memory import fixed
from workers.offload.slots.policy import Policy
from workers.offload.slots.readers import Read
from workers.offload.slots.residents import Residents, Turn
from workers.offload.slots.store import Guess, Ready, Store

_FADES = 1 / 32  # the share of the latest guess in how often guesses are right
_WORTH = 0.5  # how often they must be: a wrong one holds up others for a part of a read


class Cache(Store):
    """Slots for some of the experts of a file.

    Who is in memory comes first, while others are read; all are asked for at once where they have
    room. Behind these, experts that the next layer is likely to need are read ahead, to places of
    their own: one that is needed gets a slot by exchange of places, and so who is in memory, and
    who gives way, is as it were without.

    Args:
        packed: the file; closed with this.
        slots: experts that have room.
        policy: who gives way.
        readers: threads that read.
        ahead: further places, for experts that are read ahead.
    """

    def __init__(
        self, packed: PackedExperts, slots: int, policy: Policy, readers: int, ahead: int = 0
    ) -> None:
        size = max(layer.extent for layer in packed.layers)
        assert size % PAGE == 0
        self.slots = slots
        memory, self.locked = fixed((slots + ahead) * size)
        self.memory = memory.view(slots + ahead, size)
        self._view = view_of(memory)
        self._extents = [layer.extent for layer in packed.layers]
        super().__init__(packed, readers, ahead > 0)
        self._residents = Residents(slots, policy)
        self._place = list(range(slots))  # in memory, of each slot
        self._spare: list[tuple[int, Read | None]] = [(slots + i, None) for i in range(ahead)]
        self._reads: dict[int, Read] = {}  # begun, and not yet asked how they ended
        self._ahead: dict[int, tuple[int, Read]] = {}  # to which place, of guesses
        self._guessed: list[tuple[int, int]] = []  # rank and key, also of those that are not read
        self._right = [1.0] * ahead  # how often the likeliest is needed, the next, ...
        self._first = [0]
        for layer in packed.layers:
            self._first.append(self._first[-1] + layer.experts)

    def arrivals(
        self, layer: int, experts: Sequence[int], guess: Guess | None = None
    ) -> Generator[Ready, None, None]:
        """See `Store`."""
        self.require_open()
        self._settle()
        first, slots = self._first[layer], self._residents.slot
        keys = [first + e for e in experts]
        self._learn(keys)
        left = sum(key not in slots for key in keys)
        with closing(self._turns(keys, guess)) as turns:
            for turn in turns:
                for key, slot in turn.begin:
                    self._begin(key, slot)
                left -= len(turn.begin)
                if left == 0 and guess is not None and self._right:
                    self._look_ahead(guess())  # which is read behind these
                    guess = None
                waiting = {key for key in turn.give if key in self._reads}
                ready = [key for key in turn.give if key not in waiting]
                while ready or waiting:
                    if not ready:
                        ready = self._arrived(waiting)
                        waiting.difference_update(ready)
                    if ready:
                        yield Ready(
                            self.memory, {key - first: self._place[slots[key]] for key in ready}
                        )
                    ready = []
                self._count()

    def close(self) -> None:
        """See `Store`; the memory is given back, but for what others have views of."""
        super().close()
        self._reads.clear()  # which have views of it
        self.memory, self._view = self.memory.new_empty(0, 0), memoryview(b"")

    def _turns(self, keys: Sequence[int], guess: Guess | None) -> Generator[Turn, None, None]:
        """Of a forward that needs these."""
        return self._residents.turns(keys)

    def _count(self) -> None:
        self._stats.hits, self._stats.misses = self._residents.hits, self._residents.misses

    def _begin(self, key: int, slot: int) -> None:
        """Have it read."""
        if key in self._ahead:
            place, read = self._ahead.pop(key)
            self._spare.append((self._place[slot], None))
            self._place[slot] = place
            self._stats.ahead += 1
            self.readers.hurry(read)
        else:
            read = self._read(key, self._place[slot])
            self.readers.begin(read)
        self._reads[key] = read

    def _read(self, key: int, place: int) -> Read:
        """An expert's, to a place."""
        layer = self._layer_of(key)
        into = self._extent_at(place, layer)
        self._stats.bytes_read += into.nbytes
        return Read(self.packed, key, layer, key - self._first[layer], [into])

    def _layer_of(self, key: int) -> int:
        return bisect_right(self._first, key) - 1

    def _extent_at(self, place: int, layer: int) -> memoryview:
        """The bytes at a place of an expert of a layer."""
        begin = place * self.memory.shape[1]
        return self._view[begin : begin + self._extents[layer]]

    def _learn(self, keys: Sequence[int]) -> None:
        """See which guesses were right, and read no more of the others."""
        needed = set(keys)
        for rank, key in self._guessed:
            self._right[rank] += _FADES * ((key in needed) - self._right[rank])
        self._guessed.clear()
        for key in [key for key in self._ahead if key not in needed]:
            place, read = self._ahead.pop(key)
            saved = self.readers.drop(read)
            self._stats.bytes_read -= saved
            self._stats.bytes_wasted += read.into[0].nbytes - saved
            self._spare.append((place, read))

    def _look_ahead(self, likely: Sequence[tuple[int, int]]) -> None:
        """Have those be read that are not in memory, as far as there are places."""
        for at, (layer, expert) in enumerate(likely):
            key = self._first[layer] + expert
            if key in self._residents.slot or key in self._ahead:
                continue
            rank = min(at, len(self._right) - 1)
            self._guessed.append((rank, key))
            if self._right[rank] < _WORTH:
                continue
            free = (i for i, (_, read) in enumerate(self._spare) if read is None or read.done)
            if (i := next(free, None)) is None:
                return
            place, _ = self._spare.pop(i)
            read = self._read(key, place)
            self._ahead[key] = place, read
            self.readers.begin_ahead(read)

    def _arrived(self, waiting: set[int]) -> list[int]:
        """Wait for a read to end; those of `waiting` that have, which may be none of them.

        Raises:
            Exception: what a read ended with; the expert is not in memory then.
        """
        self.readers.wait(*(self._reads[key] for key in waiting))
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
            key, read = next(iter(self._reads.items()))
            self._stats.bytes_read -= self.readers.drop(read)
            self.readers.wait(read)  # it may be broken off, and is not forgotten then
            del self._reads[key]
            self._end(read)

    def _end(self, read: Read) -> None:
        if read.error is not None:
            self._residents.forget(read.key)
