"""Plans with a bound on how many units their workers have in all (`schedule.elastic`).

The planner knows a limit of each type, not of all together. So a plan with too many units is made
again with the limits of its types lowered in proportion, and, where that does not do, on each type
alone; one with too few is made for a higher throughput, the lowest that asks for enough.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.decision.record import Decision
from scheduler.problem.workload import Resources

_HALVINGS = 12

# The best plan on resources, for a floor, without some types.
Decide = Callable[[Resources, float, Sequence[str]], Decision]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Units of a plan's workers: at least, and at most; 0 for no bound."""

    least: int = 0
    most: int = 0

    def hold(self, decision: Decision) -> bool:
        """Whether a feasible plan keeps them."""
        units = units_of(decision)
        return self.least <= units and (not self.most or units <= self.most)


def units_of(decision: Decision) -> int:
    """Units of all workers."""
    return sum(stage.units for stage in decision.stages)


def plan_within(bounds: Bounds, resources: Resources, floor: float, decide: Decide) -> Decision:
    """The plan of `decide`, within bounds; one that is not feasible where none was found.

    Args:
        floor: samples/s.
    """
    found = decide(resources, floor, ())
    if not found.feasible or bounds.hold(found):
        return found
    if bounds.most and units_of(found) > bounds.most:
        better = _fewer(bounds, resources, floor, found, decide)
        text = f"schedule.elastic.max: {bounds.most}, and no plan with so few units was found"
    else:
        better = _more(bounds, resources, found, decide)
        text = f"schedule.elastic.min: {bounds.least}, and no plan with so many units was found"
    if better is None:
        return replace(found, plan=replace(found.plan, feasible=False, reason=text))
    return replace(better, min_throughput=found.min_throughput)


def _fewer(
    bounds: Bounds, resources: Resources, floor: float, found: Decision, decide: Decide
) -> Decision | None:
    tried = resources
    while found.feasible and not bounds.hold(found):
        lowered = _lowered(tried, found, bounds.most)
        if lowered == tried:
            break
        tried = lowered
        found = decide(tried, floor, ())
    options = [found]
    for name in resources.names:
        others = [other for other in resources.names if other != name]
        options.append(decide(_limited(resources, {name: bounds.most}), floor, others))
    fitting = [one for one in options if one.feasible and bounds.hold(one)]
    return min(fitting, key=lambda one: one.plan.rank, default=None)


def _more(bounds: Bounds, resources: Resources, found: Decision, decide: Decide) -> Decision | None:
    # Floors are aimed at with what the executor takes besides.
    share = 1 - (found.workload.overhead if found.workload is not None else 0.0)
    low, high = share * found.throughput, share * found.max_throughput * (1 - 1e-9)
    best = decide(resources, high, ())
    if not best.feasible or units_of(best) < bounds.least:
        return None
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        one = decide(resources, middle, ())
        if one.feasible and units_of(one) < bounds.least:
            low = middle
        else:
            high, best = middle, one
    return best if best.feasible and bounds.hold(best) else None


def _lowered(resources: Resources, found: Decision, most: int) -> Resources:
    """Limits that leave each type its share of `most` units, besides the parameter server's."""
    units: Counter[str] = Counter()
    for stage in found.stages:
        units[stage.type] += stage.units
    limits = {name: max(1, k * most // units.total()) for name, k in units.items()}
    if found.workload is not None and found.workload.ps_type in limits:
        limits[found.workload.ps_type] += found.plan.ps_units
    return _limited(resources, limits)


def _limited(resources: Resources, most: Mapping[str, int]) -> Resources:
    """Resources with lower limits."""
    types = [
        replace(kind, limit=min(kind.limit, most.get(kind.name, kind.limit)))
        for kind in resources.types
    ]
    return replace(resources, types=tuple(types))
