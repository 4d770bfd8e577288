"""Traces of our own making: when spot units are on offer, and when some are taken away.

Times of availability and of gaps in it alternate; both have heavy tails, as those of public traces
do: with means of 3 and 2 hours a GPU type in one zone is on offer for about 60 % of the time. While
it is, units are taken away one by one at a rate of their own, and now and then many at once. A gap
takes all.
"""

import random
from dataclasses import dataclass

UP_HOURS, GAP_HOURS = 3.0, 2.0
RATE = 0.1  # interruptions an hour of one unit, bursts left out
BURSTS = 0.05  # an hour, for all units together
BURST_SHARE = (0.2, 0.8)  # of the units that a burst takes
_SPREAD = 0.9  # of the logarithm of a length


@dataclass(frozen=True)
class Trace:
    """Of one zone over some hours.

    Attributes:
        up: hours from and to which units are on offer, in order.
        taken: hours at which some are taken away, and how many of `units`; ends of `up` not among
        them.
    """

    units: int
    up: tuple[tuple[float, float], ...]
    taken: tuple[tuple[float, int], ...]

    def available(self, until: float) -> float:
        """Hours on offer until then."""
        return sum(max(0.0, min(end, until) - start) for start, end in self.up)


def drawn(seed: int, units: int, hours: float) -> Trace:
    """A trace for a job that holds so many units."""
    chance = random.Random(seed)
    up: list[tuple[float, float]] = []
    taken: list[tuple[float, int]] = []
    now = 0.0
    is_up = chance.random() < UP_HOURS / (UP_HOURS + GAP_HOURS)
    while now < hours:
        mean = UP_HOURS if is_up else GAP_HOURS
        length = mean * chance.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)
        if is_up:
            up.append((now, now + length))
            taken += _taken(chance, now, now + length, units)
        now, is_up = now + length, not is_up
    return Trace(units, tuple(up), tuple(taken))


def rate_of_a_unit() -> float:
    """Interruptions an hour of one unit: its own, and its part of bursts."""
    return RATE + BURSTS * sum(BURST_SHARE) / 2


def _taken(chance: random.Random, start: float, end: float, units: int) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = []
    at = start
    while (at := at + chance.expovariate(RATE * units + BURSTS)) < end:
        burst = chance.random() < BURSTS / (RATE * units + BURSTS)
        share = chance.uniform(*BURST_SHARE)
        found.append((at, max(1, round(share * units)) if burst else 1))
    return found
