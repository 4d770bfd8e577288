"""What a policy would have read, of a trace: the cache's own bookkeeping, without its reads."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workers.offload.choice.trace import Trace
from workers.offload.slots.policy import POLICIES, Policy, Ranked
from workers.offload.slots.residents import Residents

BELADY = "belady"
REPLAYED = (*POLICIES, BELADY)
_NEVER = float("inf")


class Belady(Ranked):
    """The one that is needed again latest: no policy reads less, and none can know it.

    L. A. Belady, A study of replacement algorithms for a virtual-storage computer (1966).

    Args:
        needed: the experts of every call to come.
    """

    def __init__(self, needed: Iterable[Sequence[int]]) -> None:
        super().__init__()
        self._times: dict[int, deque[int]] = defaultdict(deque)
        for time, keys in enumerate(needed):
            for key in keys:
                self._times[key].append(time)

    def used(self, key: int) -> None:
        """See `Policy`."""
        times = self._times[key]
        times.popleft()
        self.rank(key, -times[0] if times else -_NEVER)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a trace.

    policy, slots: what it was replayed with.
    hits, misses: experts that were in memory as they were needed, and that were not.
    bytes_read: of these.
    tokens: that went through the model.
    """

    policy: str
    slots: int
    hits: int
    misses: int
    bytes_read: int
    tokens: int

    @property
    def hit_rate(self) -> float:
        """Of all experts that were needed; 0 without any."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def bytes_a_token(self) -> float:
        """Bytes read for each token."""
        return self.bytes_read / max(1, self.tokens)


def replay(trace: Trace, slots: int, policy: str, *, after: int = 0) -> Outcome:
    """A trace with so many slots, empty at first.

    Args:
        trace: what was needed.
        slots: experts that have room; one takes a slot whatever its size.
        policy: one of `REPLAYED`.
        after: calls that are not counted: until then the slots fill.

    Raises:
        ValueError: an argument out of range.
    """
    if slots < 1:
        raise ValueError(f"replay: slots: expected at least 1, got {slots}")
    if policy not in REPLAYED:
        raise ValueError(f"replay: policy: expected one of {', '.join(REPLAYED)}, got {policy!r}")
    made: Policy = Belady(trace.keys()) if policy == BELADY else POLICIES[policy]()
    residents = Residents(slots, made)
    hits = misses = bytes_read = 0
    tokens = Trace(trace.layers, trace.calls[after:]).tokens
    for i, (call, keys) in enumerate(zip(trace.calls, trace.keys(), strict=True)):
        before = residents.hits, residents.misses
        for _ in residents.turns(keys):
            pass
        if i >= after:
            hits += residents.hits - before[0]
            missed = residents.misses - before[1]
            misses += missed
            bytes_read += missed * trace.layers[call.layer].bytes
    return Outcome(policy, slots, hits, misses, bytes_read, tokens)


def best(trace: Trace, slots: int) -> Outcome:
    """The policy, of those that need not know the future, that reads least."""
    return min((replay(trace, slots, name) for name in POLICIES), key=lambda one: one.bytes_read)
