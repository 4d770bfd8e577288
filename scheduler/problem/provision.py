"""Provisioning: the cheapest whole numbers of units for a fixed assignment.

For a target tau of the slowest stage each stage takes the fewest units with ET(k) <= tau. The
search over tau is native code, see engine/problem/provision.h.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduler.engine import _planner
from scheduler.problem.cost import TOLERANCE, CostModel
from scheduler.problem.plan import Plan
from scheduler.problem.run import Run
from scheduler.problem.wording import rate_text, time_text

# Ways to choose the units of some of an assignment's stages that are looked at, and at first.
_LABELS, _QUICK = 20_000, 2_000
_TURNS = 8  # units added for the time that is lost to interruptions


def provision(model: CostModel, assignment: Sequence[int], floor: float = 0.0) -> Plan:
    """Return the cheapest plan of `assignment` (type index per layer) that reaches `floor`.

    Args:
        floor: samples/s.

    Returns:
        Where no units within limits and cap reach the floor, the fastest plan, not feasible, with
        the reason.
    """
    kinds = [int(code) for code in assignment]
    runs = model.runs(kinds)
    if model.why_impossible(kinds, runs):
        return model.evaluate(kinds, [1] * len(runs), floor)
    plan, searched = _by_pace(model, kinds, floor, floor), floor
    for _ in range(_TURNS):
        if plan.feasible or not plan.lost_share or plan.sustained >= floor:
            break
        # Interruptions take more than was allowed for; more units make it faster, and lose more.
        needed = floor * (1 + plan.lost_share) / model.expected.slowdown * (1 + TOLERANCE)
        if needed <= searched:
            break
        plan, searched = _by_pace(model, kinds, floor, needed), needed
    return _refined(model, kinds, plan, floor) if plan.lost_share and plan.feasible else plan


def _refined(model: CostModel, kinds: Sequence[int], plan: Plan, floor: float) -> Plan:
    """The plan with a unit more or less here and there, as long as that makes it cheaper.

    What interruptions cost is not a price a unit, so the search does not see all of it.
    """
    for _ in range(_TURNS):
        units = [stage.units for stage in plan.stages]
        changed = [
            [*units[:n], units[n] + more, *units[n + 1 :]]
            for n in range(len(units))
            for more in (-1, 1)
            if units[n] + more
        ]
        best = min((model.evaluate(kinds, one, floor) for one in changed), key=lambda p: p.rank)
        if not best.feasible or best.cost >= plan.cost * (1 - TOLERANCE):
            break
        plan = best
    return plan


def _by_pace(model: CostModel, kinds: Sequence[int], floor: float, searched: float) -> Plan:
    """The cheapest units for which the search sees the floor `searched`, held to `floor`."""
    if model.steps.simulated:
        return _by_steps(model, kinds, floor, searched)
    runs = model.runs(kinds)
    _, taus = _planner.provision(model.native, np.array([kinds], dtype=np.int32), searched)
    if math.isfinite(taus[0]):
        return model.evaluate(kinds, _units(model, kinds, float(taus[0])), floor)
    fastest = _planner.fastest(model.native, kinds)
    if math.isinf(fastest):
        slow = model.evaluate(kinds, [1] * len(runs), floor)
        return Plan(False, slow.reason, slow.assignment, (), 0, 0.0, 0.0, math.inf)
    plan = model.evaluate(kinds, _units(model, kinds, fastest), floor)
    if plan.feasible and model.interruptions.matter:
        return plan
    reason = (
        f"reaches at most {rate_text(plan.sustained, down=True)} samples/s, "
        f"the floor is {rate_text(floor)}: " + _why_no_faster(model, kinds, runs, fastest)
    )
    return replace(plan, feasible=False, reason=reason)


def _by_steps(model: CostModel, assignment: Sequence[int], floor: float, searched: float) -> Plan:
    """The same where what counts is the simulated time of a step."""
    native = model.native
    quick = _planner.solve_steps(native, searched, [assignment], _QUICK, False, math.inf, True)
    found = _planner.solve_steps(
        native, searched, [assignment], _LABELS, True, math.inf, True, quick.value
    )
    if not found.assignment:
        found = quick
    if not found.assignment:
        found = _planner.solve_steps(
            native, 0.0, [assignment], _QUICK, False, math.inf, True, fastest=True
        )
    if not found.assignment:
        slow = model.evaluate(assignment, [1] * len(model.runs(assignment)), floor)
        return Plan(False, slow.reason, slow.assignment, (), 0, 0.0, 0.0, math.inf)
    plan = model.evaluate(assignment, found.units, floor)
    if plan.feasible or plan.sustained >= floor:
        return plan
    reason = (
        f"reaches at most {rate_text(plan.sustained, down=True)} samples/s, the floor is "
        f"{rate_text(floor)}"
    )
    return replace(plan, reason=reason)


def _units(model: CostModel, assignment: Sequence[int], tau: float) -> list[int]:
    return [int(number) for number in _planner.units(model.native, assignment, tau)]


def _why_no_faster(
    model: CostModel, assignment: Sequence[int], runs: Sequence[Run], tau: float
) -> str:
    """Name what stops the plan at `tau`, the fastest of its assignment, from going faster."""
    more = _planner.units(model.native, assignment, math.nextafter(tau, 0.0))
    # What a stage can have at most: its type's limit, less a unit for each other stage there.
    shared = np.bincount([run.type for run in runs], minlength=model.num_types)
    most = [
        int(min(model.limit[run.type] - shared[run.type] + 1, model.most_of(run))) for run in runs
    ]
    for run, number, limit in zip(runs, more, most, strict=True):
        if number > limit:
            layers = model.workload.layers
            spent = max(run.compute_s(limit), run.transfer_s(limit))
            return (
                f"layers {layers[run.first].name!r} to {layers[run.last].name!r} on "
                f"{model.types[run.type]} take {time_text(spent)} a sample even with "
                f"{limit} unit{'s' * (limit != 1)}"
            )
    faster = model.evaluate(assignment, [int(number) for number in more])
    totals = np.zeros(model.num_types)
    for run, number in zip(runs, more, strict=True):
        totals[run.type] += number
    totals[model.ps_type] += faster.ps_units
    over = np.flatnonzero(totals > model.limit)
    if over.size:
        kind = int(over[0])
        what = f"faster needs {totals[kind]:.0f} units of {model.types[kind]}"
        return f"{what}, limit {model.limit[kind]}"
    return f"faster costs ${faster.price_per_hour:,.2f} an hour, the cap is ${model.max_price:,.2f}"
