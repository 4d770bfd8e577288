"""Which expert gives way when another needs its slot."""

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from heapq import heapify, heappop, heappush
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


class Ranked:
    """The one of lowest rank; of equals the one that has not been used for longest."""

    def __init__(self) -> None:
        self._time = 0
        self._current: dict[int, tuple[float, int]] = {}  # rank, and when it was given
        self._heap: list[tuple[float, int, int]] = []  # also ranks that are not current any more

    def rank(self, key: int, rank: float) -> None:
        """Of a key that is used now."""
        self._time += 1
        self._current[key] = rank, self._time
        heappush(self._heap, (rank, self._time, key))
        if len(self._heap) > 4 * len(self._current) + 64:
            self.renew()

    def renew(self) -> None:
        """Make the heap of what is current alone."""
        self._heap = [(*at, key) for key, at in self._current.items()]
        heapify(self._heap)

    def left(self, key: int) -> None:
        """See `Policy`."""
        self._current.pop(key, None)

    def victim(self, kept: Container[int]) -> int | None:
        """See `Policy`."""
        passed = []
        found = None
        while self._heap and found is None:
            top = heappop(self._heap)
            if self._current.get(top[2]) == top[:2]:
                passed.append(top)
                found = None if top[2] in kept else top[2]
        for one in passed:
            heappush(self._heap, one)
        return found


class LFU(Ranked):
    """The one of fewest uses since it was read."""

    def used(self, key: int) -> None:
        """See `Policy`."""
        self.rank(key, self._current.get(key, (0.0, 0))[0] + 1)


class FadingLFU(Ranked):
    """The one of fewest uses, in memory or not, which fade: all are halved now and then.

    After SE-MoE (https://arxiv.org/abs/2205.10034), with a threshold of 0; there, uses are counted
    since an expert is in memory. Those of all that ever were are few numbers, and tell more of what
    is read again.

    Args:
        period: uses after which all are halved, as a multiple of the experts that were used.
    """

    _MOST = 2.0**500

    def __init__(self, period: int = 8) -> None:
        super().__init__()
        self._period, self._since = period, 0
        self._use = 1.0  # later uses count for more, in place of all others being halved
        self._uses: dict[int, float] = {}

    def used(self, key: int) -> None:
        """See `Policy`."""
        self._uses[key] = self._uses.get(key, 0.0) + self._use
        self.rank(key, self._uses[key])
        self._since += 1
        if self._since >= self._period * len(self._uses):
            self._since = 0
            self._use *= 2
            if self._use > self._MOST:
                self._rescale()

    def _rescale(self) -> None:
        self._use /= self._MOST
        for key in self._uses:
            self._uses[key] /= self._MOST
        for key, (rank, time) in self._current.items():
            self._current[key] = rank / self._MOST, time
        self.renew()


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "lru": LRU,
    "lfu": LFU,
    "lfu-decay": FadingLFU,
    "clock": Clock,
}
