"""What is different between two decisions: their inputs, their plans and their figures."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from heterps.view.figures import money, percent, rate, size

if TYPE_CHECKING:
    from scheduler import Decision

Value = float | str | bool | None
_DEMANDS = {"min_throughput": "floor on throughput", "max_price_per_hour": "cap on price an hour"}
_FIGURES = {
    "feasible": "feasible",
    "throughput": "throughput, samples/s",
    "price_per_hour": "price an hour",
    "hours": "hours for all samples",
    "cost": "cost",
    "lower_bound": "lower bound",
    "gap": "gap",
    "stages": "stages",
    "measured.throughput": "measured, samples/s",
    "measured.steady_throughput": "measured in steady steps, samples/s",
    "measured.cost": "measured cost",
}
_NAMES = {
    **_DEMANDS,
    **_FIGURES,
    "ps_units": "units of parameter servers",
    "micro_batches": "micro-batches a step",
    "staleness": "updates that a step lacks",
    "cuts": "cut on one type after",
}


@dataclass(frozen=True, slots=True)
class Change:
    """`key` was `before` and is `after`; None for what is not there."""

    key: str
    before: Value
    after: Value

    @property
    def is_real(self) -> bool:
        """Whether the two differ by more than rounding."""
        one, other = self.before, self.after
        if isinstance(one, float) and isinstance(other, float):
            return not math.isclose(one, other, rel_tol=1e-9)
        return one != other

    @property
    def ratio(self) -> float | None:
        """After over before, where that says something."""
        before, after = _number(self.before), _number(self.after)
        return after / before if before and after is not None else None

    def row(self, factor_from: float = math.inf) -> tuple[str, str, str, str]:
        """Name, before, after, and by how much it changed.

        Args:
            factor_from: the ratio from which on it is a factor, not a percentage.
        """
        key, ratio = self.key, self.ratio
        if not self.is_real:
            effect = "same"
        elif ratio is None or key in ("gap", "seed"):
            effect = ""
        else:
            effect = f"{ratio:.1f}x" if ratio >= factor_from else f"{ratio - 1:+.1%}"
        return name_of(key), value_of(key, self.before), value_of(key, self.after), effect


@dataclass(frozen=True, slots=True)
class Changes:
    """Inputs and plan that differ, and the figures of both decisions.

    `compared_inputs` is false where one of the decisions was kept without workload or resources.
    """

    inputs: tuple[Change, ...]
    plan: tuple[Change, ...]
    figures: tuple[Change, ...]
    compared_inputs: bool

    def to_json(self) -> dict[str, Any]:
        """The same for programs; numbers that are not finite are null."""
        value = asdict(self)
        for part in ("inputs", "plan", "figures"):
            for change in value[part]:
                change.update({k: None for k, v in change.items() if v in (math.inf, -math.inf)})
        return value


def compare(before: "Decision", after: "Decision") -> Changes:
    """Compare two decisions; layers and types are matched by name."""
    whole = is_whole(before) and is_whole(after)
    return Changes(
        inputs=_changed(_inputs(before, whole), _inputs(after, whole)),
        plan=_changed(_plan(before), _plan(after)),
        figures=tuple(
            change
            for change in _pairs(_figures(before), _figures(after))
            if change.before is not None or change.after is not None
        ),
        compared_inputs=whole,
    )


def is_whole(decision: "Decision") -> bool:
    """Whether a decision was kept with its workload and resources."""
    return decision.workload is not None and decision.resources is not None


def name_of(key: str) -> str:
    """A key in words."""
    for prefix, text in (
        ("limit.", "limit of {}"),
        ("allow.", "allow {}"),
        ("exclude.", "{} excluded"),
        ("pin.", "{} pinned to"),
        ("units.", "units of {}"),
        ("layer.", "{}"),
        ("stage.", "units from {} on"),
        ("threads.", "threads of a unit of {}"),
    ):
        if key.startswith(prefix):
            return text.format(key.removeprefix(prefix))
    return _NAMES.get(key, key)


def value_of(key: str, value: Value) -> str:
    """A value as a person reads it, in the unit of its key."""
    if value is None:
        return "-"
    if isinstance(value, bool) or key.startswith("allow."):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    last = key.rpartition(".")[2]
    if last in ("min_throughput", "throughput", "steady_throughput"):
        return rate(value) if value else "none"
    if last == "max_price_per_hour":
        return money(value) if value else "none"
    if last in ("price_per_hour", "cost", "lower_bound"):
        return money(value)
    if last == "gap":
        return percent(value)
    if last == "memory_bytes":
        return size(value)
    if last == "hours":
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _number(value: Value) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _inputs(decision: "Decision", whole: bool) -> Iterator[tuple[str, Value]]:
    yield "method", decision.method
    yield "seed", decision.seed
    yield "min_throughput", decision.min_throughput
    yield "max_price_per_hour", decision.max_price_per_hour
    for name, kind in decision.pin.items():
        yield f"pin.{name}", kind
    for kind in decision.excluded:
        yield f"exclude.{kind}", True
    if not whole:
        return
    assert decision.workload is not None
    assert decision.resources is not None
    for one in decision.resources.types:
        yield from _flat(one.name, asdict(one), ("name",))
    yield from _flat("workload", asdict(decision.workload), ("layers", "source"))
    for layer in decision.workload.layers:
        yield from _flat(layer.name, asdict(layer), ("name", "cost"))
        for kind, cost in layer.cost.items():
            yield from _flat(f"{layer.name}.{kind}", asdict(cost), ())


def _plan(decision: "Decision") -> Iterator[tuple[str, Value]]:
    from heterps.view.plan import layer_names

    if not decision.stages:
        return
    names = layer_names(decision)
    for name, kind in zip(names, decision.assignment, strict=True):
        yield f"layer.{name}", kind
    for kind, units in decision.total_units.items():
        yield f"units.{kind}", units
    of_type = Counter(stage.type for stage in decision.stages)
    for stage in decision.stages:
        if of_type[stage.type] > 1:  # else its units are those of the type
            yield f"stage.{names[stage.first]}", stage.units
        yield f"threads.{stage.type}", stage.threads or 1
    yield "ps_units", decision.plan.ps_units
    yield "micro_batches", decision.plan.micro_batches or None
    yield "staleness", decision.plan.staleness
    yield "cuts", ", ".join(_cuts(decision)) or None


def _cuts(decision: "Decision") -> Iterator[str]:
    """The layers after which a stage ends though the next one is on the same type."""
    from heterps.view.plan import layer_names

    names = layer_names(decision)
    for stage, following in pairwise(decision.stages):
        if stage.type == following.type:
            yield names[stage.last]


def _figures(decision: "Decision") -> Iterator[tuple[str, Value]]:
    yield "feasible", decision.feasible
    yield "stages", len(decision.stages)
    yield "throughput", decision.throughput
    yield "price_per_hour", decision.plan.price_per_hour
    yield "cost", decision.cost
    yield "lower_bound", decision.lower_bound
    yield "gap", decision.gap
    if decision.workload is not None and decision.throughput > 0:
        yield "hours", decision.workload.samples / decision.plan.sustained / 3600
    if decision.measured is not None:
        yield "measured.throughput", decision.measured.throughput
        yield "measured.steady_throughput", decision.measured.steady_throughput or None
        yield "measured.cost", decision.measured.cost


def _flat(
    prefix: str, values: Mapping[str, Any], without: tuple[str, ...]
) -> Iterator[tuple[str, Value]]:
    for key, value in values.items():
        if key not in without:
            yield f"{prefix}.{key}", value


def _changed(
    before: Iterator[tuple[str, Value]], after: Iterator[tuple[str, Value]]
) -> tuple[Change, ...]:
    return tuple(change for change in _pairs(before, after) if change.is_real)


def _pairs(
    before: Iterator[tuple[str, Value]], after: Iterator[tuple[str, Value]]
) -> Iterator[Change]:
    old, new = dict(before), dict(after)
    for key in dict.fromkeys((*old, *new)):
        yield Change(key, old.get(key), new.get(key))
