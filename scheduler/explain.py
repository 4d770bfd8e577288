"""Why a decision is as it is, in sentences with numbers.

Everything said is computed: each stage is moved to each other type as a whole, provisioned anew
and compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.cost import TOLERANCE, CostModel, Plan, PlanStage, time_text
from scheduler.decision import Decision
from scheduler.provision import provision
from scheduler.workload import Resources, Workload


def reasons(
    decision: Decision,
    workload: Workload,
    resources: Resources,
    model: CostModel | None = None,
) -> list[str]:
    """Explain a decision.

    Args:
        model: the cost model of the decision where layers were pinned; pins then bind the moves.
    """
    model = model or CostModel(workload, resources)
    if not decision.stages:
        return [_sentence(decision.reason)]
    lines = [] if decision.feasible else [_sentence(decision.reason)]
    lines.append(_headline(decision, workload))
    lines.append(_bottleneck(decision, workload))
    if decision.feasible:
        lines += [_placement(decision, stage, model) for stage in decision.stages]
        lines.append(_pace(decision, model))
    lines += _limits(decision, model)
    if decision.ps_units:
        lines.append(
            f"The parameter server needs {_units(decision.ps_units, workload.ps_type)} at this "
            f"throughput ({time_text(workload.ps_core_s)} of one a sample)."
        )
    lines.append(_provenance(decision, workload))
    if decision.feasible:
        lines.append(_optimality(decision))
    return lines


def _headline(decision: Decision, workload: Workload) -> str:
    hours = workload.samples / decision.throughput / 3600
    stages = len(decision.stages)
    return (
        f"{stages} stage{'s' * (stages != 1)} train {workload.samples:,.0f} samples at "
        f"{decision.throughput:,.0f} samples/s in {hours:,.2f} h for {_money(decision.cost)} "
        f"({_money(decision.price_per_hour)} an hour)."
    )


def _bottleneck(decision: Decision, workload: Workload) -> str:
    slowest = max(decision.stages, key=lambda stage: stage.busy_s)
    kind = "computation" if slowest.compute_s >= slowest.transfer_s else "communication"
    text = f"The bottleneck is {_where(slowest, workload)}: "
    text += f"{time_text(slowest.busy_s)} a sample of {kind}"
    slack = [
        f"{_name(stage, workload)} {1 - stage.busy_s / slowest.busy_s:.0%}"
        for stage in decision.stages
        if stage is not slowest
    ]
    return text + (f"; slack of the others: {', '.join(slack)}." if slack else ".")


def _placement(decision: Decision, stage: PlanStage, model: CostModel) -> str:
    """Say why a stage is on its type: what it would cost on the others."""
    layers = model.workload.layers
    rows = range(stage.first, stage.last + 1)
    moves = []
    clauses = []
    for kind, other in enumerate(model.types):
        if other == stage.type:
            continue
        movable = [row for row in rows if model.usable[row, kind]]
        if movable:
            assignment = [model.types.index(used) for used in decision.assignment]
            for row in movable:
                assignment[row] = kind
            moved = provision(model, assignment, decision.min_throughput)
            moves.append(_Move(other, movable, moved))
    stuck = [row for row in rows if model.usable[row].sum() == 1]
    if stuck:
        clauses.append(f"{_listed([layers[row].name for row in stuck])} may run nowhere else")
    able = [move for move in moves if move.plan.feasible]
    if able:
        best = min(able, key=lambda move: move.plan.cost)
        clauses.append(_compared(decision, stage, best, model))
    else:
        clauses += [
            f"with {_moved(stage, move, model.workload)} on {move.type} the plan fails "
            f"({move.plan.reason})"
            for move in moves
        ]
    if not clauses:
        clauses = [f"its layers have no cost on any type but {stage.type}"]
    return _sentence(f"{_name(stage, model.workload)} on {stage.type}: {'; '.join(clauses)}")


@dataclass(frozen=True, slots=True)
class _Move:
    """Those layers of a stage that may run on `type` put there, and the plan that makes."""

    type: str
    rows: list[int]
    plan: Plan


def _compared(decision: Decision, stage: PlanStage, move: _Move, model: CostModel) -> str:
    """Say what a move would cost and why."""
    layers = model.workload.layers
    change = move.plan.cost - decision.cost
    text = f"moving {_moved(stage, move, model.workload)} to {move.type} would cost "
    if abs(change) <= TOLERANCE * max(move.plan.cost, decision.cost):
        text += "as much"
    else:
        text += f"{_money(move.plan.cost)} instead of {_money(decision.cost)}"
        text += f" ({change / decision.cost:+.1%})" if decision.cost > 0 else ""
    batch_s = sum(layers[row].cost[move.type].compute_s for row in move.rows)
    place = next(s for s in move.plan.stages if s.first <= move.rows[0] <= s.last)
    why = f"{time_text(batch_s)} a batch there takes {_units(place.units, move.type)}"
    others = [layers[n].name for n in range(place.first, place.last + 1) if n not in move.rows]
    if others:
        why += f" together with {_listed(others)}"
    return f"{text}, {'because its' if change > 0 else 'its'} {why}"


def _moved(stage: PlanStage, move: _Move, workload: Workload) -> str:
    if len(move.rows) == stage.last - stage.first + 1:
        return "it"
    return _listed([workload.layers[row].name for row in move.rows])


def _pace(decision: Decision, model: CostModel) -> str:
    """Say whether the floor binds."""
    floor = decision.min_throughput
    if floor <= 0:
        return "No floor was set, so this is the throughput at which a sample is cheapest."
    spare = decision.throughput / floor - 1
    assignment = [model.types.index(used) for used in decision.assignment]
    free = provision(model, assignment, 0.0)
    if free.feasible and free.cost < decision.cost * (1 - TOLERANCE):
        return (
            f"The floor of {floor:,.0f} samples/s binds: without it the same placement would cost "
            f"{_money(free.cost)} at {free.throughput:,.0f} samples/s."
        )
    return (
        f"The floor of {floor:,.0f} samples/s is met with {spare:.1%} to spare and does not bind: "
        f"running slower on the same placement saves nothing, as units are whole."
    )


def _limits(decision: Decision, model: CostModel) -> list[str]:
    """Name the types that are used up."""
    lines = []
    for kind, resource in enumerate(model.resources.types):
        used = sum(stage.units for stage in decision.stages if stage.type == resource.name)
        used += decision.ps_units if kind == model.ps_type else 0
        if used >= resource.limit:
            lines.append(f"All {_units(resource.limit, resource.name)} on offer are used.")
    return lines


def _provenance(decision: Decision, workload: Workload) -> str:
    """Say which figures were measured."""
    guessed = [
        layer.name
        for layer, kind in zip(workload.layers, decision.assignment, strict=True)
        if layer.cost[kind].estimated
    ]
    total = len(workload.layers)
    if not guessed:
        return f"The figures of all {total} layers on their types were measured."
    return (
        f"{total - len(guessed)} of {total} layers were measured on their types; estimated from "
        f"data sheets: {_listed(guessed)}."
    )


def _optimality(decision: Decision) -> str:
    if decision.gap == 0:
        return f"No plan costs less: the lower bound is {_money(decision.lower_bound)} too."
    cheaper = [o for o in decision.alternatives if o.feasible and o.cost < decision.cost]
    text = (
        f"No plan costs less than {_money(decision.lower_bound)}; this one is within "
        f"{decision.gap:.2%} of that"
    )
    if cheaper and cheaper[0].cost < decision.cost * (1 - TOLERANCE):
        text += f" ({cheaper[0].method} found {_money(cheaper[0].cost)})"
    return text + "."


def _name(stage: PlanStage, workload: Workload) -> str:
    first, last = workload.layers[stage.first].name, workload.layers[stage.last].name
    return repr(first) if first == last else f"{first!r} to {last!r}"


def _where(stage: PlanStage, workload: Workload) -> str:
    return f"{_name(stage, workload)} on {_units(stage.units, stage.type)}"


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _units(number: int, kind: str) -> str:
    return f"{number:,} unit{'s' * (number != 1)} of {kind}"


def _money(dollars: float) -> str:
    if not math.isfinite(dollars):
        return "no price"
    digits = 2 if dollars >= 1 or dollars == 0 else 1 - math.floor(math.log10(dollars))
    return f"${dollars:,.{digits}f}"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else text + "."
