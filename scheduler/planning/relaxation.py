"""What would have to change where no plan meets the demands: single changes, the least of each."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from scheduler.decision.record import Relaxation
from scheduler.methods.exact import solve
from scheduler.planning.executed import executed
from scheduler.planning.infeasible import barred
from scheduler.problem.demands import Demands
from scheduler.problem.fields import InputError
from scheduler.problem.plan import Plan
from scheduler.problem.steps import Steps
from scheduler.problem.workload import MAX_LIMIT, Resources, Workload

_SOLVE_S = 0.2  # of the solver for one problem
# A limit is raised to at most so many times itself, or so many units.
_TIMES = 64
_UNITS = 1024
_PRICE_STEP = 1e-3  # a cap is found to this fraction


def relaxations(
    workload: Workload,
    resources: Resources,
    demands: Demands,
    fastest: Plan | None = None,
    seconds: float = 2.0,
    cuts: bool | None = None,
    steps: Steps | None = None,
) -> tuple[Relaxation, ...]:
    """Return changes each of which alone makes a plan possible, the cheapest plan first.

    They are: the floor lowered to the highest throughput that can be (`min_throughput`), the cap
    raised to the least price an hour at the floor (`max_price_per_hour`), the limit of a type
    raised by the fewest units, to at most 64 times itself or 1,024 (`limit.TYPE`), an excluded
    type allowed (`allow.TYPE`, from 0 to 1). What the time does not suffice to find is left out.

    Args:
        fastest: the fastest plan within limits and cap, where one was found.
        seconds: for all of them.
        cuts, steps: as of `CostModel`.
    """
    search = _Search(workload, resources, demands, fastest, time.monotonic() + seconds, cuts, steps)
    found = [change for change in search.all() if change is not None]
    return tuple(sorted(found, key=lambda change: (change.cost, change.key)))


@dataclass(frozen=True, slots=True)
class _Search:
    workload: Workload
    resources: Resources
    demands: Demands
    fastest: Plan | None
    until: float
    cuts: bool | None
    steps: Steps | None

    def all(self) -> Iterator[Relaxation | None]:
        """Every change, the quickest to find first."""
        yield self._floor()
        yield self._cap()
        for name in self.demands.excluded:
            yield self._allow(name)
        for index in range(len(self.resources.types)):
            yield self._limit(index)

    def _floor(self) -> Relaxation | None:
        floor, fastest = self.demands.min_throughput, self.fastest
        if fastest is None or not 0 < fastest.sustained < floor:
            return None
        top = fastest.sustained
        reached = replace(fastest, feasible=True, reason="")
        plan = (
            self._plan(demands=replace(self.demands, min_throughput=top), start=reached) or reached
        )
        return _change("min_throughput", floor, top, plan)

    def _cap(self) -> Relaxation | None:
        """Lower a cap that suffices: each plan found under a cap is itself a lower one."""
        cap = self.demands.max_price_per_hour
        best = self._plan(demands=replace(self.demands, max_price_per_hour=float("inf")))
        if best is None or best.price_per_hour <= cap:
            return None
        low = cap
        while best.price_per_hour > low * (1 + _PRICE_STEP) and self._left() > 0:
            middle = (low + best.price_per_hour) / 2
            plan = self._plan(demands=replace(self.demands, max_price_per_hour=middle))
            if plan is None:
                low = middle
            else:
                best = plan
        return _change("max_price_per_hour", cap, best.price_per_hour, best)

    def _allow(self, name: str) -> Relaxation | None:
        others = tuple(other for other in self.demands.excluded if other != name)
        plan = self._plan(demands=replace(self.demands, excluded=others))
        return _change(f"allow.{name}", 0, 1, plan) if plan else None

    def _limit(self, index: int) -> Relaxation | None:
        """Double the limit until a plan exists, then bisect."""
        kind = self.resources.types[index]

        def plan_with(limit: int) -> Plan | None:
            types = list(self.resources.types)
            types[index] = replace(kind, limit=limit)
            return self._plan(resources=replace(self.resources, types=tuple(types)))

        # Most limits do not stand in the way: one look far above tells.
        most = min(MAX_LIMIT, max(kind.limit * _TIMES, _UNITS))
        if kind.limit >= most or plan_with(most) is None:
            return None
        found = _fewest(kind.limit, most, plan_with, lambda: self._left() > 0)
        return _change(f"limit.{kind.name}", kind.limit, *found) if found else None

    def _plan(
        self,
        demands: Demands | None = None,
        resources: Resources | None = None,
        start: Plan | None = None,
    ) -> Plan | None:
        """The cheapest plan of the problem with one thing changed, None where none is found."""
        left = self._left()
        if left <= 0:
            return None
        demands = demands or self.demands
        try:
            offer = resources or self.resources
            model = demands.model(self.workload, offer, self.cuts, self.steps)
        except InputError:  # a layer is pinned to what is excluded
            return None
        if barred(model):
            return None
        solution = solve(model, demands.min_throughput, start=start, seconds=min(_SOLVE_S, left))
        plan = solution.plan and executed(model, solution.plan, demands.min_throughput)
        return plan if plan is not None and plan.feasible else None

    def _left(self) -> float:
        return self.until - time.monotonic()


def _fewest(
    low: int, most: int, plan_with: Callable[[int], Plan | None], time_left: Callable[[], bool]
) -> tuple[int, Plan] | None:
    """The fewest units above `low` with which a plan exists, and that plan."""
    high, found = low, None
    while found is None and high < most and time_left():
        low, high = high, min(2 * high, most)
        found = plan_with(high)
    if found is None:
        return None
    while high - low > 1 and time_left():
        middle = (low + high) // 2
        plan = plan_with(middle)
        if plan is None:
            low = middle
        else:
            high, found = middle, plan
    return high, found


def _change(key: str, current: float, needed: float, plan: Plan) -> Relaxation:
    return Relaxation(key, current, needed, plan.throughput, plan.price_per_hour, plan.cost)
