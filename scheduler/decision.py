"""The record of a decision: the chosen plan, what else was considered, and how good it is."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from protos import decision_pb2 as pb
from scheduler.cost import Plan, PlanStage
from scheduler.workload import Resources, Workload


@dataclass(frozen=True, slots=True)
class Alternative:
    """What one method came to, and the seconds it took."""

    method: str
    feasible: bool
    reason: str
    assignment: tuple[str, ...]
    stages: tuple[PlanStage, ...]
    ps_units: int
    throughput: float
    price_per_hour: float
    cost: float
    seconds: float

    @classmethod
    def of(cls, method: str, plan: Plan, seconds: float) -> "Alternative":
        """Record `plan`."""
        return cls(method, **{f.name: getattr(plan, f.name) for f in fields(plan)}, seconds=seconds)


@dataclass(frozen=True, slots=True)
class TrainingPoint:
    """The state of the agent's training after `steps` environment steps."""

    steps: int
    mean_reward: float
    best_cost: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run of the plan came to; `stage_s` are busy seconds a sample."""

    throughput: float
    price_per_hour: float
    cost: float
    seconds: float
    emulated: bool
    stage_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and the reasons for it.

    Costs are dollars for all samples, prices dollars an hour, throughputs samples/s. No plan of
    this workload costs less than `lower_bound`, `gap` is cost / lower_bound - 1, and
    `max_throughput` is the highest that any plan was found to reach. Where no plan exists the cost
    is infinite (null in JSON), and so is the bound where the floor cannot be met.
    """

    method: str
    feasible: bool
    reason: str
    assignment: tuple[str, ...]
    stages: tuple[PlanStage, ...]
    ps_units: int
    throughput: float
    price_per_hour: float
    cost: float
    lower_bound: float
    gap: float
    seconds: float
    alternatives: tuple[Alternative, ...]
    seed: int
    min_throughput: float
    max_throughput: float
    probabilities: Mapping[str, Mapping[str, float]]
    reasons: tuple[str, ...]
    training: tuple[TrainingPoint, ...] = ()
    workload: Workload | None = None
    resources: Resources | None = None
    measured: Measured | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `heterps plan --json` prints; the inputs are left out."""
        value = asdict(replace(self, workload=None, resources=None))
        del value["workload"], value["resources"]
        plain: dict[str, Any] = _plain(value)
        return plain

    def to_message(self) -> pb.Decision:
        """Return the message of the same content, with the inputs."""
        message = pb.Decision(
            stages=[pb.PlanStage(**asdict(stage)) for stage in self.stages],
            probabilities=[
                pb.LayerProbabilities(layer=layer, by_type=dict(by_type))
                for layer, by_type in self.probabilities.items()
            ],
            training=[pb.TrainingPoint(**asdict(point)) for point in self.training],
            **{name: getattr(self, name) for name in _PLAIN},
        )
        for other in self.alternatives:
            entry = message.alternatives.add(
                stages=[pb.PlanStage(**asdict(stage)) for stage in other.stages],
                **{f.name: getattr(other, f.name) for f in fields(other) if f.name != "stages"},
            )
            assert entry is not None
        if self.workload is not None:
            message.workload.CopyFrom(self.workload.to_message())
        if self.resources is not None:
            message.resources.CopyFrom(self.resources.to_message())
        if self.measured is not None:
            message.measured.CopyFrom(pb.Measured(**asdict(self.measured)))
        return message

    @classmethod
    def from_message(cls, message: pb.Decision) -> "Decision":
        """Return the decision that a message holds."""
        has = message.HasField
        return cls(
            stages=_stages(message.stages),
            alternatives=tuple(
                Alternative(
                    assignment=tuple(other.assignment),
                    stages=_stages(other.stages),
                    **_scalars(other),
                )
                for other in message.alternatives
            ),
            probabilities={
                entry.layer: {name: entry.by_type[name] for name in sorted(entry.by_type)}
                for entry in message.probabilities
            },
            training=tuple(TrainingPoint(**_scalars(point)) for point in message.training),
            assignment=tuple(message.assignment),
            reasons=tuple(message.reasons),
            workload=Workload.from_message(message.workload) if has("workload") else None,
            resources=Resources.from_message(message.resources) if has("resources") else None,
            measured=(
                Measured(stage_s=tuple(message.measured.stage_s), **_scalars(message.measured))
                if has("measured")
                else None
            ),
            **_scalars(message),
        )


_PLAIN = (
    "method",
    "feasible",
    "reason",
    "assignment",
    "ps_units",
    "throughput",
    "price_per_hour",
    "cost",
    "lower_bound",
    "gap",
    "seconds",
    "seed",
    "min_throughput",
    "max_throughput",
    "reasons",
)


def _stages(messages: Any) -> tuple[PlanStage, ...]:
    return tuple(PlanStage(**_scalars(message)) for message in messages)


def _scalars(message: Any) -> dict[str, Any]:
    """The singular fields of a message that are no messages themselves."""
    return {
        key.name: getattr(message, key.name)
        for key in message.DESCRIPTOR.fields
        if not key.is_repeated and key.message_type is None
    }


def _plain(value: Any) -> Any:
    """What JSON can hold: lists for tuples, null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
