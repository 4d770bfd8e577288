"""Plans with a bound on how many units their workers have in all (`schedule.elastic`).

The planner knows a limit of each type, not of all together. So a plan with too many units is made
again with the limits of its types lowered in proportion, and, where that does not do, on each type
alone; one with too few is made for a higher throughput, the lowest that asks for enough, and where
that asks for too many again, on as many as there may be.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.decision.record import Decision
from scheduler.planning.infeasible import alone_among
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
    last = _settled(bounds, resources, floor, found, decide)
    options = [last]
    if bounds.most and (units_of(found) > bounds.most or not bounds.hold(last)):
        for name in resources.names:
            if {*found.pin.values()} - {name}:
                continue  # layers are pinned to others
            alone = _without(decide, [other for other in resources.names if other != name])
            first = alone(resources, floor, ())
            options.append(_settled(bounds, resources, floor, first, alone))
    fitting = [one for one in options if one.feasible and bounds.hold(one)]
    if fitting:
        best = min(fitting, key=lambda one: one.plan.rank)
        return replace(best, min_throughput=found.min_throughput)
    plan = replace(found.plan, feasible=False, reason=_why_none(bounds, found, last))
    return replace(found, plan=plan)


def _settled(
    bounds: Bounds, resources: Resources, floor: float, found: Decision, decide: Decide
) -> Decision:
    """The plan where bounds are kept, or from where no other was found."""
    while found.feasible and not bounds.hold(found):
        if units_of(found) < bounds.least:
            found = _more(bounds, resources, found, decide)
        if not bounds.most or units_of(found) <= bounds.most:
            break
        lowered = _lowered(resources, found, bounds.most)
        if lowered == resources:
            break
        resources = lowered
        found = decide(resources, floor, ())
    return found


def _more(bounds: Bounds, resources: Resources, found: Decision, decide: Decide) -> Decision:
    """A plan of at least as many units, for the lowest floor that asks for them.

    Where none does, that of the highest throughput.
    """
    # Floors are aimed at with what the executor takes besides.
    share = 1 - (found.workload.overhead if found.workload is not None else 0.0)
    low, high = share * found.throughput, share * found.max_throughput * (1 - 1e-9)
    best = decide(resources, high, ())
    if not best.feasible:
        return found
    if units_of(best) < bounds.least:
        return best
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        one = decide(resources, middle, ())
        if one.feasible and units_of(one) < bounds.least:
            low = middle
        elif one.feasible:
            high, best = middle, one
        else:
            high = middle
    return best


def _why_none(bounds: Bounds, found: Decision, last: Decision) -> str:
    """Which key no plan was found for.

    Args:
        found: the plan without bounds.
        last: the last one that was made within them.
    """
    if units_of(last) >= bounds.least or not last.feasible:
        key = f"max: {bounds.most}, and no plan with so few units"
    else:
        key = f"min: {bounds.least}, and no plan with so many units"
    text = f"schedule.elastic.{key} was found"
    parts = last.plan.micro_batches
    if units_of(last) < bounds.least and last.workload is not None and last.workload.micro_batches:
        text += (
            f": the fastest one has {units_of(last)}, with {parts} "
            f"micro-batch{'es' if parts > 1 else ''} a step (train.micro_batches)"
        )
    if units_of(last) < bounds.least:
        text += alone_among(last.workload.layers if last.workload is not None else ())
    return text


def _without(decide: Decide, types: Sequence[str]) -> Decide:
    """The same without some more types."""
    return lambda resources, floor, without: decide(resources, floor, [*without, *types])


def _lowered(resources: Resources, found: Decision, most: int) -> Resources:
    """Limits that leave each type its share of `most` units, besides the parameter server's.

    What is left over of shares goes to the type that has the most to do for a unit.
    """
    units: Counter[str] = Counter()
    work: dict[str, float] = dict.fromkeys((stage.type for stage in found.stages), 0.0)
    for stage in found.stages:
        units[stage.type] += stage.units
        work[stage.type] += stage.busy_s * stage.units
    limits = {name: max(1, k * most // units.total()) for name, k in units.items()}
    for _ in range(most - sum(limits.values())):
        busiest = max(limits, key=lambda name: work[name] / limits[name])
        limits[busiest] += 1
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
