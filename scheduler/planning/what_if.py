"""What if: a decision made again with a price, a limit or a demand changed, beside the first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.decision.record import Decision
from scheduler.planning.changes import Question
from scheduler.planning.planner import plan
from scheduler.problem.cost import TOLERANCE
from scheduler.problem.wording import listed, money_text, rate_text, units_text


@dataclass(frozen=True, slots=True)
class Comparison:
    """A decision before and after `changes` (new value by key), and what became different.

    `differences` are sentences: whether the demands are met, cost, throughput, layers that moved,
    units of each type.
    """

    changes: Mapping[str, float | str]
    before: Decision
    after: Decision
    differences: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What `heterps plan --what-if KEY=VALUE --json` prints."""
        return {
            "changes": dict(self.changes),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "differences": list(self.differences),
        }


def what_if(
    decision: Decision,
    changes: Mapping[str, float | str],
    method: str | None = None,
    finetune: float = 0.0,
) -> Comparison:
    """Decide again with something changed.

    Args:
        decision: one that keeps its workload and resources, as `plan` returns it.
        changes: new values, numbers or their text, by key: `TYPE.price`, `TYPE.limit`,
            `TYPE.memory`, `TYPE.interruptions`, `TYPE.recovery` and `TYPE.restart` of a type,
            `min-throughput` (samples/s), `max-price` (dollars an hour) and `finish-by` (hours),
            each 0 for none, `exclude` and `allow` (a type), `pin.LAYER` (a type).
        method, finetune: as of `plan`; None for the method of the decision.

    Raises:
        InputError: an unknown key, or a value that cannot be used, with what was expected.
    """
    question = Question(decision)
    for key, value in changes.items():
        question.change(key, value)
    after = plan(
        question.workload,
        question.resources,
        question.min_throughput or None,
        method=method or decision.method,
        seed=decision.seed,
        pin=question.pin or None,
        exclude=question.excluded,
        max_price_per_hour=question.max_price_per_hour or None,
        finish_by=question.finish_by or None,
        finetune=finetune,
    )
    return Comparison(dict(changes), decision, after, tuple(differences(decision, after)))


def differences(before: Decision, after: Decision) -> Iterator[str]:
    """Say what differs between two plans of one workload, in sentences."""
    if not before.feasible or not after.feasible:
        yield from _feasibility(before, after)
        return
    yield _figure("The cost", before.cost, after.cost, money_text)
    yield _figure("The throughput", before.throughput, after.throughput, rate_text, "samples/s")
    yield _figure(
        "The price", before.plan.price_per_hour, after.plan.price_per_hour, money_text, "an hour"
    )
    moved = _moved(before, after)
    for (left, right), layers in moved.items():
        verb = "moves" if len(layers) == 1 else "move"
        yield f"{listed(layers)} {verb} from {left} to {right}."
    old_units, new_units = before.total_units, after.total_units
    for kind in dict.fromkeys([*old_units, *new_units]):
        old, new = old_units.get(kind, 0), new_units.get(kind, 0)
        if old != new:
            yield f"The plan takes {units_text(new, kind)} instead of {old:,}."
    if not moved and old_units == new_units:
        yield "The plan stays the same."


def _feasibility(before: Decision, after: Decision) -> Iterator[str]:
    if before.feasible:
        yield f"No plan meets the demands any more: {after.plan.reason}"
    elif after.feasible:
        cost, rate = money_text(after.cost), rate_text(after.throughput)
        yield f"A plan now meets the demands: {cost} at {rate} samples/s."
    else:
        yield f"No plan meets the demands, before or after: {after.plan.reason}"


def _figure(name: str, before: float, after: float, shape: Any, unit: str = "") -> str:
    unit = f" {unit}" if unit else ""
    if abs(after - before) <= TOLERANCE * max(abs(before), abs(after)):
        return f"{name} stays {shape(before)}{unit}."
    share = f" ({after / before - 1:+.1%})" if before > 0 else ""
    word = "rises" if after > before else "falls"
    return f"{name} {word} from {shape(before)} to {shape(after)}{unit}{share}."


def _moved(before: Decision, after: Decision) -> dict[tuple[str, str], list[str]]:
    """Layers that run on another type, by the types (old, new)."""
    layers = before.workload.layers if before.workload is not None else ()
    moved: dict[tuple[str, str], list[str]] = {}
    for layer, old, new in zip(layers, before.assignment, after.assignment, strict=False):
        if old != new:
            moved.setdefault((old, new), []).append(layer.name)
    return moved
