"""A plan in words: what runs where, and what the figures behind it are worth."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from heterps.view.figures import money, rate

if TYPE_CHECKING:
    from heterps.client.records import PlanUse
    from scheduler import Decision
    from scheduler.problem.plan import PlanStage

EMULATED, ESTIMATED = "emulated", "estimated"
_MOST = 8  # layers that are listed one by one


def layer_names(decision: "Decision") -> list[str]:
    """Names of the layers; their numbers where the workload is not there."""
    if decision.workload is None:
        return [str(row) for row in range(len(decision.assignment))]
    return [layer.name for layer in decision.workload.layers]


def layers_text(decision: "Decision", first: int, last: int) -> str:
    """The layers of a stage: all of a few, the ends of many."""
    if decision.workload is None:
        return f"{first}-{last}" if last > first else str(first)
    names = layer_names(decision)[first : last + 1]
    if len(names) > _MOST:
        return f"{names[0]} to {names[-1]} ({len(names)} layers)"
    return ", ".join(names)


def units_of(stage: "PlanStage") -> str:
    """How many units a stage has, and of how many threads where each has several."""
    several = f" ({stage.threads} threads each)" if stage.threads > 1 else ""
    return f"{stage.units:,}{several}"


def units_text(stages: "Sequence[PlanStage]") -> str:
    """Stages in short: `8×cpu 2×v100`; the number and the types of many."""
    if len(stages) > _MOST:
        return f"{len(stages)} stages on {', '.join(dict.fromkeys(s.type for s in stages))}"
    return " ".join(f"{stage.units}×{stage.type}" for stage in stages)


def types_text(assignment: Sequence[str]) -> str:
    """An assignment in short: `cpu, v100, cpu`."""
    kinds = [kind for kind, _ in groupby(assignment)]
    if len(kinds) > _MOST:
        return f"{len(kinds)} stages on {', '.join(dict.fromkeys(kinds))}"
    return ", ".join(kinds)


def gap_text(decision: "Decision") -> str:
    """How good the plan is for sure."""
    if decision.proven or decision.gap < 1e-9:
        return "no plan costs less"
    if decision.gap < float("inf"):
        from heterps.view.figures import money, percent

        return f"{percent(decision.gap)} above the lower bound {money(decision.lower_bound)}"
    return "no lower bound is known"


def emulated_types(decision: "Decision") -> list[str]:
    """Types on offer that run on another device here."""
    resources = decision.resources
    return [kind.name for kind in resources.types if kind.emulated] if resources else []


def rests_on_estimates(decision: "Decision") -> bool:
    """Whether the plan rests on figures from data sheets."""
    return decision.workload is not None and any(
        kind in layer.cost and layer.cost[kind].estimated
        for layer, kind in zip(decision.workload.layers, decision.assignment, strict=False)
    )


def marked_type(decision: "Decision", kind: str, rows: Iterable[int]) -> str:
    """A type with what its figures for these layers are."""
    marks = [EMULATED] if kind in emulated_types(decision) else []
    layers = decision.workload.layers if decision.workload else ()
    costs = [layers[row].cost.get(kind) for row in rows if row < len(layers)]
    if any(cost is not None and cost.estimated for cost in costs):
        marks.append(ESTIMATED)
    return f"{kind} ({', '.join(marks)})" if marks else kind


def notes(decision: "Decision") -> list[str]:
    """What figures of emulated and estimated types are worth."""
    said = []
    fake = emulated_types(decision)
    if fake:
        said.append(f"{EMULATED}: {', '.join(fake)} run on the CPU here; measured times are its.")
    if rests_on_estimates(decision):
        said.append(f"{ESTIMATED}: from data sheets, for types that are not here to measure.")
    return said


def use_cells(one: "PlanUse") -> tuple[str, ...]:
    """The plan that a job had from some step on, and why; $/h, samples/s predicted and measured."""
    measured = rate(one.measured) if one.measured else ""
    price = money(one.price_per_hour)
    return one.plan, one.reason, f"{one.from_step:,}", price, rate(one.predicted), measured
