"""Units that a job does not pay, as two of its workers share one."""

from collections.abc import Iterable
from typing import Protocol


class Shared(Protocol):
    """Of a `Share`, whatever holds it."""

    @property
    def at(self) -> float:
        """When it began, in seconds since the epoch."""

    @property
    def until(self) -> float:
        """When it ended; 0: it has not."""

    @property
    def price_per_hour(self) -> float:
        """Dollars, of a unit."""


def less_an_hour(shares: Iterable[Shared], began: float, ended: float) -> float:
    """Dollars an hour, a mean over a time, by which a job cost less than its plan.

    Args:
        began, ended: seconds since the epoch.
    """
    unpaid = 0.0
    for one in shares:
        seconds = min(one.until or ended, ended) - max(one.at, began)
        unpaid += one.price_per_hour * max(0.0, seconds)
    return unpaid / (ended - began) if ended > began else 0.0
