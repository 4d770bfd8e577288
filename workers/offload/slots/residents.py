"""Who is in memory: the same whether experts are read or a trace is replayed."""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from workers.offload.slots.policy import Policy


@dataclass(frozen=True, slots=True)
class Turn:
    """What happens next in a forward.

    begin: keys to be read from now on, and their slots.
    give: keys that are computed when they are there, in any order, and may then give way.
    """

    begin: list[tuple[int, int]]
    give: list[int]


class Residents:
    """Slots, and the experts in them, by keys; which give way does not depend on time.

    Args:
        slots: experts that have room, at least one.
        policy: who gives way.

    Attributes:
        early: keys that were read ahead and not needed since.
        foreseen: of the misses, those that were.
    """

    def __init__(self, slots: int, policy: Policy) -> None:
        self.slot: dict[int, int] = {}
        self.hits = self.misses = self.foreseen = 0
        self.early: set[int] = set()
        self._free = list(reversed(range(slots)))
        self._held: set[int] = set()
        self._policy = policy

    def turns(self, keys: Sequence[int]) -> Generator[Turn, None, None]:
        """A forward that needs these, all different; what was given is released by `next`.

        Who is in memory comes first. None gives way that was not yet given. Where all have room,
        the second turn is the last, and all are asked for in the first.
        """
        hits, missing = self._come(keys)
        try:
            begin = self._begin(missing)
            yield Turn(begin, hits)
            self._held.difference_update(hits)
            waiting = deque(key for key, _ in begin)
            while missing:
                begin = self._begin(missing)
                waiting.extend(key for key, _ in begin)
                given = waiting.popleft()
                yield Turn(begin, [given])
                self._held.discard(given)
            if waiting:
                yield Turn([], list(waiting))
        finally:
            self._held.clear()

    def turns_ahead(self, keys: Sequence[int], ahead: Sequence[int]) -> Generator[Turn, None, None]:
        """The same, one by one, so that each makes room for another as soon as it was given.

        Once all of these are asked for, those are that are expected next, as far as there is room:
        none gives way to them that was not yet given, and none that is expected itself.
        """
        hits, missing = self._come(keys)
        waiting, expected = deque(hits), set(ahead)
        later: deque[int] | None = None
        try:
            while True:
                begin = self._begin(missing)
                waiting.extend(key for key, _ in begin)
                if not missing:
                    if later is None:
                        self._held.update(key for key in ahead if key in self.slot)
                        later = deque(key for key in ahead if key not in self.slot)
                    early = self._begin(later)
                    self.early.update(key for key, _ in early)
                    begin += early
                if not (begin or waiting):
                    return
                given = [waiting.popleft()] if waiting else []
                yield Turn(begin, given)
                if later is None or not expected.issuperset(given):
                    self._held.difference_update(given)
        finally:
            self._held.clear()

    def forget(self, key: int) -> None:
        """It is not in memory: its read failed."""
        self._policy.left(key)
        self.early.discard(key)
        self._free.append(self.slot.pop(key))

    def _come(self, keys: Sequence[int]) -> tuple[list[int], deque[int]]:
        """Those that are in memory, which are held from now on, and those that are not."""
        hits = [key for key in keys if key in self.slot and key not in self.early]
        early = [key for key in keys if key in self.early]
        missing = deque(key for key in keys if key not in self.slot)
        for key in hits:  # of those that were read ahead the policy knows since
            self._policy.used(key)
        self._held.update(hits, early)
        self.early.difference_update(early)
        self.hits += len(hits)
        self.misses += len(early) + len(missing)
        self.foreseen += len(early)
        return hits + early, missing

    def _begin(self, missing: deque[int]) -> list[tuple[int, int]]:
        """Give slots to as many of these as there are any for."""
        begun = []
        while missing:
            if not self._free:
                victim = self._policy.victim(self._held)
                if victim is None:
                    break
                self.forget(victim)
            key = missing.popleft()
            self.slot[key] = self._free.pop()
            self._held.add(key)
            self._policy.used(key)
            begun.append((key, self.slot[key]))
        return begun
