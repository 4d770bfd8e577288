"""Axes: round ticks on a straight or a logarithmic scale, and where a value lies."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_LOG_FROM = 30.0  # a range of more than this ratio is drawn logarithmically


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values from `low` to `high`, with ticks inside it."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def around(cls, values: Iterable[float], zero: bool = False, most: int = 5) -> "Axis":
        """An axis that holds finite values with some room at both ends.

        Args:
            zero: begin at 0.
            most: ticks.
        """
        finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        if not zero and low > 0 and high / low > _LOG_FROM:
            room = (high / low) ** 0.06
            low, high = low / room, high * room
            return cls(low, high, True, _powers(low, high, most))
        if zero:
            low = min(low, 0.0)
        room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        low = low if zero and low == 0 else low - room
        return cls(low, high + room, False, _round_numbers(low, high + room, most))

    def at(self, value: float) -> float:
        """Where a value lies, 0 at `low` and 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _round_numbers(low: float, high: float, most: int) -> tuple[float, ...]:
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(float(f"{n * step:.12g}") for n in range(first, last + 1))


def _powers(low: float, high: float, most: int) -> tuple[float, ...]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [f * 10.0**power for power in range(first, last + 1) for f in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= most + 2:
            return tuple(inside)
    return tuple(inside[:: math.ceil(len(inside) / most)])
