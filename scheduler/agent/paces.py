"""Paces worth trying: throughputs between the floor and the highest that can be kept."""

import math

from scheduler.engine import _planner
from scheduler.problem.cost import CostModel

# The highest throughput is found to this relative precision.
_PRECISION = 2e-3
# Beyond the floor a pace that takes long to prove is no loss.
_NODES = 1000
# Before the floor is given up.
_LAST_NODES = 5_000_000


def slowest(model: CostModel) -> float:
    """Return a throughput, samples/s, below which no plan is cheaper than a faster one.

    One unit of a type that runs every layer by itself is never slower than this.
    """
    busy = model.compute_serial + model.compute_parallel
    busy = busy + model.sync_serial + model.sync_parallel
    busy = busy + model.transfer_serial + model.transfer_parallel
    total = float(busy.max(axis=1, where=model.allowed, initial=0.0).sum())
    return 1.0 / total if total > 0 else 0.0


def fastest(problem: _planner.Problem, start: float) -> tuple[float, _planner.Pace | None]:
    """Return about the highest throughput that a plan keeps, samples/s, and its pace.

    `start` is where the search begins. 0 and None where nothing can be kept even there.
    """
    low, best = 0.0, None
    high = start
    while high < 1e15:
        pace = (
            _planner.Pace(problem, high) if best is None else _planner.Pace(problem, high, _NODES)
        )
        if best is None and not pace.feasible:
            pace = _planner.Pace(problem, high, _LAST_NODES)
        if not pace.feasible:
            break
        low, best, high = high, pace, high * 8
    if best is None:
        return 0.0, None
    while high > low * (1 + _PRECISION):
        middle = math.sqrt(low * high)
        pace = _planner.Pace(problem, middle, _NODES)
        if pace.feasible:
            low, best = middle, pace
        else:
            high = middle
    return low, best
