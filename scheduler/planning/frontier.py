"""The Pareto curve of cost against throughput: what each sample/s more costs.

Sailor (SOSP 2025) and Metis (ATC 2024) give their users a ranked list rather than one plan, since
the cheapest plan at a floor says nothing of what slightly more or less speed would cost.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.decision.record import Decision, ParetoPoint
from scheduler.methods.exact import solve
from scheduler.planning.executed import executed, fills
from scheduler.problem.cost import TOLERANCE, CostModel
from scheduler.problem.demands import Demands, Pin
from scheduler.problem.inputs import ResourcesLike, WorkloadLike, as_resources, as_workload
from scheduler.problem.plan import Plan
from scheduler.problem.threads import cut

POINTS = 20
_LEAST_S = 0.01  # of the solver for one point
_SOLVES = 3  # a point at most: a solve may find the plan of the next point again
_BACK_OFF = (1.0, 0.99, 0.9, 0.6, 0.3)
_CLOSE = 1e-4  # ranges of throughput narrower than this fraction are not worth a point


@dataclass(frozen=True, slots=True)
class _Found:
    plan: Plan
    proven: bool


def pareto(
    workload: WorkloadLike,
    resources: ResourcesLike,
    points: int = POINTS,
    seconds: float = 2.0,
    pin: Pin = None,
    *,
    exclude: Sequence[str] = (),
    max_price_per_hour: float | None = None,
) -> tuple[ParetoPoint, ...]:
    """Return plans that no other beats in both throughput and cost, the cheapest first.

    The first is the cheapest plan at any speed, the last the cheapest at the highest throughput;
    between them the widest gap in throughput is halved until there are `points`.

    Args:
        workload, resources: parsed files, dataclasses or messages.
        points: at most so many; fewer where there are no more such plans.
        seconds: for the whole curve; points that the time leaves unproven say so.
        pin, exclude, max_price_per_hour: as of `plan`.

    Returns:
        Points ascending in throughput (samples/s) and cost (dollars for all samples); none where
        nothing can run.

    Raises:
        InputError: an argument that cannot be used, naming key, value and what was expected.
    """
    workload, resources = as_workload(workload), as_resources(resources)
    resources = cut(resources, workload)
    demands = Demands.check(workload, None, max_price_per_hour, None, pin, exclude)
    return frontier(demands.model(workload, resources), points, seconds)


def pareto_of(
    decision: Decision, points: int = POINTS, seconds: float = 2.0
) -> tuple[ParetoPoint, ...]:
    """Return the curve of a decision that keeps its inputs; the stored one where there is one.

    Raises:
        ValueError: the decision was stored without its inputs.
    """
    if decision.pareto:
        return decision.pareto
    if decision.workload is None or decision.resources is None:
        raise ValueError("the decision has no workload and resources; expected one with its inputs")
    model = decision.model(decision.workload, decision.resources)
    return frontier(model, points, seconds)


def frontier(
    model: CostModel, points: int = POINTS, seconds: float = 2.0, at: Sequence[float] = ()
) -> tuple[ParetoPoint, ...]:
    """Return the curve of a cost model; see `pareto`.

    Args:
        at: floors, samples/s, whose plans are to be on the curve whatever the number of points.
    """
    search = _Search(model, points, time.monotonic() + seconds)
    first = search.cheapest(0.0)
    if first is None:
        return ()
    search.between(first.plan, search.fastest(first.plan.throughput))
    for floor in at:
        search.cheapest(floor)
    return _nondominated([_as_run(model, one) for one in search.found])


def _as_run(model: CostModel, found: _Found) -> _Found:
    plan = executed(model, found.plan)
    return _Found(plan, found.proven and (not plan.stages or fills(model, plan)))


class _Search:
    """Solves at one floor after the other within a number of points, of solves and of seconds."""

    def __init__(self, model: CostModel, points: int, until: float) -> None:
        self.model = model
        self.points = points
        self.until = until
        self.found: list[_Found] = []
        self.top = 0.0
        self.solves = 0

    def cheapest(self, floor: float, start: Plan | None = None) -> _Found | None:
        """The cheapest plan that reaches `floor`, kept with those found before."""
        left = max(1, self.points - len(self.found))
        # Each point gets an equal share of the time; what one leaves goes to those after it.
        share = max(_LEAST_S, (self.until - time.monotonic()) / left)
        solution = solve(self.model, floor, start=start, seconds=share)
        self.solves += 1
        self.top = max(self.top, solution.max_throughput)
        if solution.plan is None or not solution.plan.feasible:
            return None
        self.found.append(_Found(solution.plan, solution.proven))
        return self.found[-1]

    def fastest(self, low: float) -> _Found | None:
        """The cheapest plan at the highest throughput, or near it where that takes too long."""
        for share in _BACK_OFF:
            found = self.cheapest(low + share * (self.top - low))
            if found is not None or self.top <= low:
                return found
        return None

    def between(self, first: Plan, last: _Found | None) -> None:
        """Halve the widest range of floors of which nothing is known yet."""
        if last is None:
            return
        gaps = [(first.throughput, last.plan.throughput, last.plan)]
        while (
            gaps
            and len(self.found) < self.points
            and self.solves < _SOLVES * self.points
            and time.monotonic() < self.until
        ):
            low, high, upper = gap = max(gaps, key=lambda gap: gap[1] - gap[0])
            gaps.remove(gap)
            if high <= low * (1 + _CLOSE):
                return
            middle = (low + high) / 2
            point = self.cheapest(middle, upper)
            if point is None or _same(point.plan, upper):
                # Nothing is cheaper from the middle on: what is unknown lies below it.
                if point is not None:
                    self.found.remove(point)
                gaps.append((low, middle, upper))
            else:
                gaps += [(low, middle, point.plan), (point.plan.throughput, high, upper)]


def _same(one: Plan, other: Plan) -> bool:
    return (
        abs(one.cost - other.cost) <= TOLERANCE * other.cost
        and abs(one.throughput - other.throughput) <= TOLERANCE * other.throughput
    )


def _nondominated(found: Sequence[_Found]) -> tuple[ParetoPoint, ...]:
    """The plans that none other beats, ascending in throughput; on a tie a proven one."""
    kept: list[ParetoPoint] = []
    least = math.inf
    order = sorted(found, key=lambda f: (-f.plan.throughput, f.plan.cost, not f.proven))
    for one in order:
        plan = one.plan
        if plan.cost < least * (1 - TOLERANCE):
            least = plan.cost
            kept.append(
                ParetoPoint(
                    plan.throughput,
                    plan.price_per_hour,
                    plan.cost,
                    plan.assignment,
                    one.proven,
                )
            )
    return tuple(reversed(kept))
