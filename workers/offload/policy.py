"""Which expert gives way when another needs its slot."""

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from typing import Final, Protocol


class Policy(Protocol):
    """Keys are experts in memory; `used` tells of one that was just read, too."""

    def used(self, key: int) -> None:
        """A forward needs it."""

    def left(self, key: int) -> None:
        """It is not in memory any more."""

    def victim(self, kept: Container[int]) -> int | None:
        """Whose slot to take, none of `kept`; None where all are kept. It is told by `left`."""


class LRU:
    """The one that has not been used for longest."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def used(self, key: int) -> None:
        """See `Policy`."""
        self._order[key] = None
        self._order.move_to_end(key)

    def left(self, key: int) -> None:
        """See `Policy`."""
        self._order.pop(key, None)

    def victim(self, kept: Container[int]) -> int | None:
        """See `Policy`."""
        return next((key for key in self._order if key not in kept), None)


class Clock:
    """The next one, in turn, that has not been used since it was last passed."""

    def __init__(self) -> None:
        self._used: OrderedDict[int, bool] = OrderedDict()

    def used(self, key: int) -> None:
        """See `Policy`."""
        self._used[key] = key in self._used

    def left(self, key: int) -> None:
        """See `Policy`."""
        self._used.pop(key, None)

    def victim(self, kept: Container[int]) -> int | None:
        """See `Policy`."""
        for _ in range(2 * len(self._used)):
            key = next(iter(self._used))
            if key not in kept and not self._used[key]:
                return key
            self._used[key] = self._used[key] and key in kept
            self._used.move_to_end(key)
        return None


class LFU:
    """The one of fewest uses, which fade: all are multiplied by `decay` every `period` uses.

    After SE-MoE (https://arxiv.org/abs/2205.10034), with a threshold of 0. Of equals the one that
    has not been used for longest.
    """

    def __init__(self, period: int = 1024, decay: float = 0.5) -> None:
        self._period, self._decay, self._since = period, decay, 0
        self._uses: OrderedDict[int, float] = OrderedDict()

    def used(self, key: int) -> None:
        """See `Policy`."""
        self._uses[key] = self._uses.get(key, 0.0) + 1.0
        self._uses.move_to_end(key)
        self._since += 1
        if self._since == self._period:
            self._since = 0
            for other in self._uses:
                self._uses[other] *= self._decay

    def left(self, key: int) -> None:
        """See `Policy`."""
        self._uses.pop(key, None)

    def victim(self, kept: Container[int]) -> int | None:
        """See `Policy`."""
        open_to = (key for key in self._uses if key not in kept)
        return min(open_to, key=self._uses.__getitem__, default=None)


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {"lfu": LFU, "lru": LRU, "clock": Clock}
