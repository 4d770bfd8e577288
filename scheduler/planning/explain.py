"""Why a decision is as it is, in sentences with numbers.

Everything said is computed: each stage is moved to each other type as a whole, provisioned anew
and compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scheduler.decision.record import Decision
from scheduler.engine import _planner
from scheduler.planning.infeasible import cheapest_change
from scheduler.planning.together import kept_together
from scheduler.problem.cost import TOLERANCE, CostModel
from scheduler.problem.plan import PlanStage
from scheduler.problem.provision import provision
from scheduler.problem.wording import (
    hours_text,
    listed,
    money_text,
    rate_text,
    sentence,
    time_text,
    units_text,
)
from scheduler.problem.workload import Resources, Workload

_FAILURES = 2  # moves that fail are told one by one up to here


def reasons(
    decision: Decision,
    workload: Workload,
    resources: Resources,
    model: CostModel | None = None,
    finish_by: float = 0.0,
) -> list[str]:
    """Explain a decision.

    Args:
        model: the cost model of the decision, where it is at hand.
        finish_by: hours of the deadline that the floor comes from, 0 for none.
    """
    model = model or decision.model(workload, resources)
    lines = [] if decision.feasible else [sentence(decision.plan.reason)]
    if decision.relaxations:
        lines.append(cheapest_change(decision.relaxations[0]))
    if not decision.stages:
        return lines
    lines.append(_headline(decision, workload))
    lines.append(_bottleneck(decision, workload))
    if decision.feasible:
        lines += _placements(decision, model)
        lines.append(_pace(decision, model, finish_by))
        lines += _cap(decision)
    lines += kept_together(workload)
    lines += _limits(decision, model)
    lines += _spot(decision, resources)
    if decision.plan.ps_units:
        units = units_text(decision.plan.ps_units, workload.ps_type)
        lines.append(
            f"The parameter server needs {units} at this throughput "
            f"({time_text(model.ps_unit_s)} of one a sample)."
        )
    lines.append(_provenance(decision, workload))
    if decision.feasible:
        lines.append(_optimality(decision))
    return lines


def _headline(decision: Decision, workload: Workload) -> str:
    hours = workload.samples / decision.plan.sustained / 3600
    stages = len(decision.stages)
    return (
        f"{stages} {'stages train' if stages != 1 else 'stage trains'} {workload.samples:,.0f} "
        f"samples at {rate_text(decision.throughput)} samples/s in {hours_text(hours)} for "
        f"{money_text(decision.cost)} ({money_text(decision.plan.price_per_hour)} an hour)."
    )


def _bottleneck(decision: Decision, workload: Workload) -> str:
    slowest = max(decision.stages, key=lambda stage: stage.busy_s)
    kind = "computation" if slowest.compute_s >= slowest.transfer_s else "communication"
    where = f"{_name(slowest, workload)} on {units_text(slowest.units, slowest.type)}"
    text = f"The bottleneck is {where}: {time_text(slowest.busy_s)} a sample of {kind}"
    slack = [
        f"{_name(stage, workload)} {1 - stage.busy_s / slowest.busy_s:.0%}"
        for stage in decision.stages
        if stage is not slowest
    ]
    return text + (f"; slack of the others: {', '.join(slack)}." if slack else ".")


@dataclass(frozen=True, slots=True)
class _Move:
    """Those layers of a stage that may run on `type` put there.

    `cost` is in dollars for all samples, infinite where that plan fails; `tau` is the seconds a
    sample that its slowest stage takes.
    """

    type: str
    rows: list[int]
    assignment: list[int]
    cost: float = math.inf
    tau: float = math.inf


def _placements(decision: Decision, model: CostModel) -> list[str]:
    """Say why each stage is on its type: what it would cost on the others."""
    usable = model.usable
    moves = [_moves(stage, decision, model, usable) for stage in decision.stages]
    rows = [move.assignment for some in moves for move in some]
    values, taus = iter(()), iter(())
    if rows:
        # All moves of all stages are provisioned at once.
        assignments = np.array(rows, dtype=np.int32)
        found = _planner.provision(model.native, assignments, decision.aim)
        values, taus = (iter(column.tolist()) for column in found)
    scale = model.samples / 3600
    lines = []
    for stage, some in zip(decision.stages, moves, strict=True):
        priced = [replace(move, cost=next(values) * scale, tau=next(taus)) for move in some]
        lines.append(_placement(decision, stage, model, usable, priced))
    return lines


def _moves(
    stage: PlanStage, decision: Decision, model: CostModel, usable: NDArray[np.bool_]
) -> list[_Move]:
    chosen = model.codes(decision.plan)
    moves = []
    for kind, other in enumerate(model.types):
        rows = [row for row in range(stage.first, stage.last + 1) if usable[row, kind]]
        if other == stage.type or not rows:
            continue
        assignment = list(chosen)
        for row in rows:
            assignment[row] = kind
        moves.append(_Move(other, rows, assignment))
    return moves


def _placement(
    decision: Decision,
    stage: PlanStage,
    model: CostModel,
    usable: NDArray[np.bool_],
    moves: Sequence[_Move],
) -> str:
    layers = model.workload.layers
    clauses = []
    stuck = [row for row in range(stage.first, stage.last + 1) if usable[row].sum() == 1]
    if stuck:
        clauses.append(f"{listed([layers[row].name for row in stuck])} may run nowhere else")
    best = min(moves, key=lambda move: move.cost, default=None)
    if best is not None and math.isfinite(best.cost):
        clauses.append(_compared(decision, stage, best, model))
    else:
        for move in moves[:_FAILURES]:
            plan = provision(model, move.assignment, decision.aim)
            what = _moved(stage, move, model.workload)
            clauses.append(f"with {what} on {move.type} the plan fails ({plan.reason})")
        if len(moves) > _FAILURES:
            rest = ", ".join(move.type for move in moves[_FAILURES:])
            clauses.append(f"so does it on {rest}")
    if not clauses:
        clauses = [f"its layers have no cost on any type but {stage.type}"]
    return sentence(f"{_name(stage, model.workload)} on {stage.type}: {'; '.join(clauses)}")


def _compared(decision: Decision, stage: PlanStage, move: _Move, model: CostModel) -> str:
    """Say what a move would cost and why."""
    layers = model.workload.layers
    change = move.cost - decision.cost
    text = f"moving {_moved(stage, move, model.workload)} to {move.type} would cost "
    if abs(change) <= TOLERANCE * max(move.cost, decision.cost):
        text += "as much"
    else:
        text += f"{money_text(move.cost)} instead of {money_text(decision.cost)}"
        text += f" ({change / decision.cost:+.1%})" if decision.cost > 0 else ""
    batch_s = sum(layers[row].cost[move.type].compute_s for row in move.rows)
    rows, units = _stage_of(move, model, decision.aim)
    why = f"{time_text(batch_s)} a batch there takes {units_text(units, move.type)}"
    others = [layers[row].name for row in rows if row not in move.rows]
    if others:
        why += f" together with {listed(others)}"
    return f"{text}, {'because its' if change > 0 else 'its'} {why}"


def _stage_of(move: _Move, model: CostModel, floor: float) -> tuple[range, int]:
    """The layers of the stage that the first moved layer is in after the move, and its units."""
    if model.steps.simulated:
        plan = provision(model, move.assignment, floor)
        units: Sequence[float] = [stage.units for stage in plan.stages]
    else:
        units = _planner.units(model.native, move.assignment, move.tau)
    for number, run in zip(units, model.runs(move.assignment), strict=True):
        if move.rows[0] <= run.last:
            return range(run.first, run.last + 1), int(number)
    raise AssertionError("the moved layer is in one of the stages")


def _moved(stage: PlanStage, move: _Move, workload: Workload) -> str:
    if len(move.rows) == stage.last - stage.first + 1:
        return "it"
    return listed([workload.layers[row].name for row in move.rows])


def _pace(decision: Decision, model: CostModel, finish_by: float) -> str:
    """Say whether the floor binds."""
    floor = decision.min_throughput
    if floor <= 0:
        return "No floor was set, so this is the throughput at which a sample is cheapest."
    name = f"The floor of {rate_text(floor)} samples/s"
    if finish_by:
        name += f" (to finish in {hours_text(finish_by)})"
    assignment = model.codes(decision.plan)
    free = provision(model, assignment, 0.0)
    if free.feasible and free.cost < decision.cost * (1 - TOLERANCE):
        return (
            f"{name} binds: without it the same placement would cost {money_text(free.cost)} at "
            f"{rate_text(free.throughput)} samples/s."
        )
    return (
        f"{name} is met with {decision.plan.sustained / floor - 1:.1%} to spare and does not bind: "
        "running slower on the same placement saves nothing, as units are whole."
    )


def _cap(decision: Decision) -> list[str]:
    """Say how much of the cap on the price an hour is left."""
    cap = decision.max_price_per_hour
    if not cap:
        return []
    spare = max(0.0, cap - decision.plan.price_per_hour)
    return [f"The cap of {money_text(cap)} an hour is kept with {money_text(spare)} to spare."]


def _limits(decision: Decision, model: CostModel) -> list[str]:
    """Name the types that are used up."""
    used = decision.total_units
    return [
        f"All {units_text(kind.limit, kind.name)} on offer are used."
        for kind in model.resources.types
        if used.get(kind.name, 0) >= kind.limit
    ]


def _spot(decision: Decision, resources: Resources) -> list[str]:
    """Say what interruptions add to the time of the plan."""
    lines = []
    for kind in resources.types:
        units, lost = decision.total_units.get(kind.name, 0), kind.recovery_s
        if not units or kind.is_sure or not kind.alone_s:
            continue
        text = (
            f"A unit of {kind.name} is interrupted {kind.interruptions_per_hour:.3g} times an "
            "hour, "
            f"the {units_text(units, kind.name)} {kind.interruptions_per_hour * units:.3g} times; "
            f"all units then wait {time_text(lost)}"
        )
        if kind.alone_s > lost:
            text += f", and {time_text(kind.alone_s)} where it was the only one of its stage"
        lines.append(text + ".")
    if lines:
        lines.append(
            f"Interruptions add {decision.plan.lost_share:.2%} to time and cost: "
            f"{rate_text(decision.plan.sustained)} samples/s are left of "
            f"{rate_text(decision.throughput)}."
        )
    return lines


def _provenance(decision: Decision, workload: Workload) -> str:
    """Say which figures were measured."""
    guessed = [
        layer.name
        for layer, kind in zip(workload.layers, decision.assignment, strict=True)
        if layer.cost[kind].estimated
    ]
    total = len(workload.layers)
    if not guessed and total == 1:
        return "The figures of the only layer on its type were measured."
    if not guessed:
        return f"The figures of all {total} layers on their types were measured."
    measured = total - len(guessed)
    return (
        f"{measured} of {total} layers {'was' if measured == 1 else 'were'} measured on "
        f"{'its type' if measured == 1 else 'their types'}; estimated from data sheets: "
        f"{listed(guessed)}."
    )


def _optimality(decision: Decision) -> str:
    bound = money_text(decision.lower_bound)
    if decision.proven:
        return f"No plan costs less: the lower bound is {bound} too."
    text = f"No plan costs less than {bound}; this one is within {decision.gap:.2%} of that"
    cheaper = [o for o in decision.alternatives if o.plan.feasible and o.plan.cost < decision.cost]
    if cheaper and cheaper[0].plan.cost < decision.cost * (1 - TOLERANCE):
        text += f" ({cheaper[0].method} found {money_text(cheaper[0].plan.cost)})"
    return text + "."


def _name(stage: PlanStage, workload: Workload) -> str:
    first, last = workload.layers[stage.first].name, workload.layers[stage.last].name
    return repr(first) if first == last else f"{first!r} to {last!r}"
