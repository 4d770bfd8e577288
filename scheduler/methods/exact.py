"""The exact solver: the cheapest plan over all assignments, or a bound that none is below.

At one pace, with every stage taking at most tau seconds a sample, the cheapest plan is a shortest
path over (first layer of a stage, its type), but for limits that several stages share; those are
met by Lagrangian multipliers and a label-setting search. The search over tau is branch and bound.
All of it is native code, in engine/problem/chain.h and engine/exact/. Where it does not come to an
end, integer programming settles one pace after the other (`milp.py`).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.engine import _planner
from scheduler.methods import milp
from scheduler.problem.cost import TOLERANCE, CostModel
from scheduler.problem.plan import Plan
from scheduler.problem.provision import provision

# Integer programming takes seconds a pace; with less there is no point in starting.
_LONG = 1.0
_FASTEST = 0.15  # of the time, for the fastest plan by simulated steps
# Ways to cover some layers that a search by simulated steps looks at; each takes some 150 bytes.
_LABELS, _LABELS_A_SECOND, _MOST_LABELS = 200_000, 66_000, 4_000_000


@dataclass(frozen=True, slots=True)
class Solution:
    """The best plan found and what is known about every other.

    `lower_bound` (dollars) is infinite where no plan exists; `proven` says that `plan` is the
    optimum, or that there is none. `max_throughput` (samples/s) is the highest found within limits
    and cap, and `fastest` the plan that reaches it, held to no floor; where no plan meets the
    floor, `plan` is the fastest one, not feasible, with the reason.
    """

    plan: Plan | None
    lower_bound: float
    proven: bool
    max_throughput: float
    fastest: Plan | None = None


def solve(
    model: CostModel, floor: float = 0.0, start: Plan | None = None, seconds: float = 5.0
) -> Solution:
    """Find the cheapest plan of all assignments.

    Args:
        floor: samples/s that a plan must reach.
        start: a plan already known, which saves searching for worse ones; none worse is returned.
        seconds: processor time after which the search stops with the best plan and bound so far; a
            few hundredths are enough for a bound to compare other methods with.
    """
    if not model.usable.any(axis=1).all():
        return Solution(None, math.inf, True, 0.0)
    starts = []
    if start is not None and start.assignment:
        starts.append(model.codes(start))
    if model.steps.simulated:
        return _with(start, _by_steps(model, floor, starts, seconds))
    found, bound = _search(model, floor, starts, seconds)
    bound *= model.samples / 3600
    top = 1 / found.fastest_tau if found.fastest else 0.0
    best = found.assignment or found.fastest
    plan = provision(model, best, floor) if best else None
    fastest = None
    if found.fastest:
        units = _planner.units(model.native, found.fastest, found.fastest_tau)
        fastest = model.evaluate(found.fastest, [int(number) for number in units])
    if start is not None and start.feasible and (plan is None or start.rank < plan.rank):
        plan = start
    if plan is None or not plan.feasible:
        return Solution(plan, bound, math.isinf(bound), top, fastest)
    top = max(top, plan.throughput)
    # A bound within rounding of the plan is the plan.
    if plan.cost <= bound * (1 + TOLERANCE):
        return Solution(plan, plan.cost, True, top, fastest)
    return Solution(plan, min(bound, plan.cost), False, top, fastest)


def _with(start: Plan | None, found: Solution) -> Solution:
    """The solution with the plan to start with, where that one is better."""
    if start is None or not start.feasible or (found.plan and found.plan.rank <= start.rank):
        return found
    top = max(found.max_throughput, start.throughput)
    # Where no plan was said to exist nothing is proven.
    proven = start.cost <= found.lower_bound * (1 + TOLERANCE) < math.inf
    return Solution(start, min(found.lower_bound, start.cost), proven, top, found.fastest)


def _by_steps(
    model: CostModel, floor: float, starts: Sequence[Sequence[int]], seconds: float
) -> Solution:
    """The same where what counts is the simulated time of a step.

    First bounding steps by their time and trip, and dropping ways to cover some layers that look
    worse in everything; then dropping none.
    """
    labels = min(max(_LABELS, int(_LABELS_A_SECOND * seconds)), _MOST_LABELS)
    found = _planner.solve_steps(
        model.native, floor, starts, labels, False, (1 - _FASTEST) * seconds
    )
    bound = found.bound
    known = [found.assignment] if found.assignment else starts
    fastest = fastest_by_steps(model, known, _FASTEST * seconds)
    top = fastest.throughput if fastest is not None else 0.0
    bound *= model.samples / 3600
    if found.assignment:
        plan = model.evaluate(found.assignment, found.units, floor)
    elif fastest is not None:
        units = [stage.units for stage in fastest.stages]
        plan = model.evaluate(model.codes(fastest), units, floor)
    else:
        return Solution(None, bound, math.isinf(bound), 0.0)
    if not plan.feasible and plan.lost_share:
        plan = provision(model, model.codes(plan), floor)
    top = max(top, plan.throughput)
    if not plan.feasible:
        return Solution(plan, bound, math.isinf(bound), top, fastest)
    proven = plan.cost <= bound * (1 + TOLERANCE)
    return Solution(plan, plan.cost if proven else min(bound, plan.cost), proven, top, fastest)


def fastest_by_steps(
    model: CostModel, starts: Sequence[Sequence[int]], seconds: float
) -> Plan | None:
    """The fastest plan found by simulated steps within limits and cap; None where there is none."""
    found = _planner.solve_steps(
        model.native, 0.0, starts, _LABELS // 4, False, seconds, fastest=True
    )
    return model.evaluate(found.assignment, found.units) if found.assignment else None


def _search(
    model: CostModel, floor: float, starts: Sequence[Sequence[int]], seconds: float
) -> tuple[_planner.Found, float]:
    """Search natively, then pace by pace with integer programming while there is time.

    Returns the best found, and what no plan's tau times its price an hour is below.
    """
    deadline = time.monotonic() + seconds
    least: dict[float, float] = {}  # tau -> price an hour
    found = _planner.solve(
        model.native, floor, starts, seconds if seconds < 2 * _LONG else seconds / 3
    )
    bound = found.bound
    while found.hard_tau > 0 and found.hard_tau not in least:
        tau, left = found.hard_tau, deadline - time.monotonic()
        if left < _LONG:
            break
        try:
            slow = model.expected.slowdown
            at_pace = milp.cheapest(model, tau / slow, floor * slow, left / 2)
        except ImportError:
            break
        least[tau] = at_pace.bound
        met = (found.assignment, found.fastest, at_pace.assignment)
        starts = [*starts, *(assignment for assignment in met if assignment)]
        left = max(deadline - time.monotonic(), 0.0)
        found = _planner.solve(
            model.native, floor, starts, min(left, left / 4 + 0.1), list(least.items())
        )
        bound = max(bound, found.bound)  # with little time left a search may prove less
    return found, bound
