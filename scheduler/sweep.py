"""Exact minimisation of tau * price(tau) over a finite set of tau."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scheduler.cost import Floats

_POINTS = 33  # evaluated at first, and of each interval that may hold the best


@dataclass(frozen=True, slots=True)
class Best:
    """The least tau * price found, where, and a bound below which nothing lies."""

    index: int
    value: float
    bound: float


def minimise(
    taus: Floats,
    price_at: Callable[[Floats], tuple[Floats, Floats]],
    incumbent: float = math.inf,
    gaps: bool = False,
) -> Best:
    """Find the least tau * attained(tau).

    `price_at` gives two prices for each tau: `least`, which never increases with tau, and
    `attained` >= `least`, the one to minimise; infinite where infeasible. Between two evaluated
    points lo < hi nothing is below next(lo) * least(hi), so most candidates are never evaluated.

    Args:
        taus: candidates, ascending, [n].
        incumbent: a value already reached; only better ones are searched for.
        gaps: further candidates may lie between those given; the bound allows for them.

    Returns:
        index -1 and value inf where nothing better than `incumbent` was found.
    """
    count = len(taus)
    least, attained = np.full(count, np.nan), np.full(count, np.inf)
    picked = np.unique(np.linspace(0, count - 1, min(count, _POINTS)).astype(int))
    best = incumbent
    pruned = math.inf
    while picked.size:
        least[picked], attained[picked] = price_at(taus[picked])
        best = min(best, float((taus[picked] * attained[picked]).min()))
        known = np.flatnonzero(~np.isnan(least))
        low, high = known[:-1], known[1:]
        bound = taus[low + 1] * least[high]
        is_open = (high - low > 1) & (bound < best * (1 - 1e-12))
        picked = np.array(
            [
                index
                for lo, hi in zip(low[is_open], high[is_open], strict=True)
                for index in np.unique(np.linspace(lo, hi, min(hi - lo, _POINTS) + 1).astype(int))
                if lo < index < hi
            ],
            dtype=int,
        )
    known = np.flatnonzero(~np.isnan(least))
    if gaps and known.size > 1:
        pruned = float((taus[known[:-1]] * least[known[1:]]).min())
    values = taus * attained
    index = int(np.argmin(values))
    found = float(values[index])
    if not found < incumbent:
        return Best(-1, math.inf, min(incumbent, pruned))
    return Best(index, found, min(found, pruned))
