"""Experts in memory that change, and are written before they give way."""

from workers.offload.cache import Cache
from workers.offload.policy import Policy
from workers.offload.trained import TrainedExperts


class ChangingCache(Cache):
    """Experts in memory, of which those that have changed are written before they give way."""

    packed: TrainedExperts

    def __init__(self, packed: TrainedExperts, slots: int, policy: Policy, readers: int) -> None:
        super().__init__(packed, slots, policy, readers)
        self.changed: set[int] = set()  # keys
        self.written = 0  # bytes
        self._owner: dict[int, int] = {}  # of a slot, by keys

    def key(self, layer: int, expert: int) -> int:
        """By which an expert is known here."""
        return self._first[layer] + expert

    def write_back(self) -> None:
        """Write all that have changed; they stay.

        Raises:
            OSError: the disk fails.
        """
        for key in sorted(self.changed):
            self._write(key)

    def _begin(self, layer: int, key: int, slot: int) -> None:
        owner = self._owner.pop(slot, None)
        if owner in self.changed:
            self._write(owner, slot)
        self._owner[slot] = key
        super()._begin(layer, key, slot)

    def _write(self, key: int, slot: int | None = None) -> None:
        layer = next(i for i, first in enumerate(self._first[1:]) if key < first)
        place = self._place[self._residents.slot[key] if slot is None else slot]
        extent = self.memory[place, : self.packed.layers[layer].extent]
        self.packed.write(layer, key - self._first[layer], extent)
        self.written += extent.nbytes
        self.changed.discard(key)
