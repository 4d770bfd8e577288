"""What a decision shows, row by row: worked out here, drawn by terminal, page and console."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heterps.view.changes import name_of, value_of
from heterps.view.figures import count, duration, money, percent, rate
from heterps.view.plan import layers_text, types_text, units_text

if TYPE_CHECKING:
    from scheduler import Decision
    from scheduler.decision.record import ParetoPoint
    from scheduler.problem.plan import Plan, PlanStage
    from scheduler.problem.workload import ResourceType

_SAME = 1e-6


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of the plan; `slack` is a share of its time, or that it is the slowest."""

    number: int
    stage: "PlanStage"
    layers: str
    slack: str


@dataclass(frozen=True, slots=True)
class MethodRow:
    """What a method came to; the figures in words are of its plan, if it found one."""

    method: str
    plan: "Plan"
    cost: str
    gap: str
    rate: str
    took: str
    tried: str
    units: str


@dataclass(frozen=True, slots=True)
class PointRow:
    """A point of the curve of cost against throughput."""

    point: "ParetoPoint"
    chosen: bool
    rate: str
    price: str
    cost: str
    types: str


@dataclass(frozen=True, slots=True)
class LayerRow:
    """The probability that the agent gave each type, and the critic's estimate in words."""

    layer: str
    chosen: str
    shares: Mapping[str, float]
    value: str


@dataclass(frozen=True, slots=True)
class FigureRow:
    """A predicted figure and what was measured, which `text` writes."""

    name: str
    predicted: float
    measured: float
    text: Callable[[float], str]

    @property
    def ratio(self) -> str:
        """Measured over predicted; empty where nothing was predicted."""
        return f"{self.measured / self.predicted:.2f}" if self.predicted else ""


def types_of(decision: "Decision") -> list[str]:
    """The types on offer, else those of the plan, each once."""
    return list(
        decision.resources.names if decision.resources else dict.fromkeys(decision.assignment)
    )


def offered_type(decision: "Decision", name: str) -> "ResourceType | None":
    """The offer of a type; None where the decision has no resources."""
    offered = decision.resources.types if decision.resources else ()
    return next((kind for kind in offered if kind.name == name), None)


def reasons(decision: "Decision") -> list[str]:
    """Why, sentence by sentence, without the one that says why there is no plan."""
    said = decision.plan.reason.rstrip(".")
    return [text for text in decision.reasons if text.rstrip(".") != said]


def stages(decision: "Decision") -> Iterator[StageRow]:
    """A row a stage, in the order of the layers."""
    for number, (stage, slack) in enumerate(zip(decision.stages, decision.slack, strict=True)):
        layers = layers_text(decision, stage.first, stage.last)
        yield StageRow(number, stage, layers, "slowest" if stage.bottleneck else percent(slack))


def methods(decision: "Decision") -> list[MethodRow]:
    """The method that was chosen, then the others, cheapest first."""
    from scheduler.decision.record import Alternative

    bound = decision.lower_bound
    found = [(Alternative(decision.method, decision.plan, decision.seconds), decision.gap)]
    found += [
        (other, other.plan.cost / bound - 1 if bound else math.inf)
        for other in decision.alternatives
    ]
    return [
        MethodRow(
            one.method,
            one.plan,
            money(one.plan.cost),
            percent(gap),
            rate(one.plan.throughput),
            duration(one.seconds),
            count(one.evaluations) if one.evaluations else "",
            units_text(one.plan.stages),
        )
        for one, gap in found
    ]


def points(decision: "Decision") -> list[PointRow]:
    """The points of the curve, slowest first; one is chosen where the plan lies on it."""
    chosen = next((point for point in decision.pareto if _is_plan(point, decision)), None)
    return [
        PointRow(
            point,
            point is chosen,
            rate(point.throughput),
            money(point.price_per_hour),
            money(point.cost),
            types_text(point.assignment),
        )
        for point in sorted(decision.pareto, key=lambda point: point.throughput)
    ]


def relaxations(decision: "Decision") -> list[tuple[str, ...]]:
    """Change, from, to, and rate, price an hour and cost of the plan that it makes possible."""
    return [
        (
            name_of(change.key),
            value_of(change.key, change.current),
            value_of(change.key, change.needed),
            rate(change.throughput),
            money(change.price_per_hour),
            money(change.cost),
        )
        for change in decision.relaxations
    ]


def probabilities(decision: "Decision") -> tuple[list[str], list[LayerRow]]:
    """The types that the agent weighed, and a row a layer."""
    rows = [
        LayerRow(layer, chosen, shares, f"{decision.values.get(layer, 0.0):.3f}")
        for (layer, shares), chosen in zip(
            decision.probabilities.items(), decision.assignment, strict=False
        )
    ]
    return list(dict.fromkeys(name for row in rows for name in row.shares)), rows


def measured(decision: "Decision") -> list[FigureRow]:
    """The figures of the whole run, each predicted and measured."""
    run = decision.measured
    assert run is not None
    return [
        FigureRow("throughput, samples/s", decision.throughput, run.throughput, rate),
        *(
            [
                FigureRow(
                    f"the same, mean of {run.steady_steps:,} steady steps",
                    decision.throughput,
                    run.steady_throughput,
                    rate,
                )
            ]
            if run.steady_steps
            else []
        ),
        FigureRow("price an hour", decision.plan.price_per_hour, run.price_per_hour, money),
        FigureRow("cost of the training", decision.cost, run.cost, money),
    ]


def measured_stages(decision: "Decision") -> "Iterator[tuple[StageRow, float]]":
    """The stages that were measured, each with its busy seconds a sample."""
    assert decision.measured is not None
    return zip(stages(decision), decision.measured.stage_s, strict=False)


def errors_text(decision: "Decision") -> str:
    """By how much the prediction of each stage was wrong; nothing where none was measured."""
    errors = decision.stage_errors
    told = [
        f"stage {number} {error:+.0%}" for number, error in enumerate(errors) if error is not None
    ]
    return f"Measured against predicted computing: {', '.join(told)}." if told else ""


def _is_plan(point: "ParetoPoint", decision: "Decision") -> bool:
    same_cost = abs(point.cost - decision.cost) <= _SAME * decision.cost
    return same_cost and abs(point.throughput - decision.throughput) <= _SAME * point.throughput
