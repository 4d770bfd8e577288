"""The record of a decision: the chosen plan, what else was considered, and how good it is."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from protos import decision_pb2 as pb
from scheduler.problem.cost import Plan, PlanStage
from scheduler.problem.fields import read_file
from scheduler.problem.workload import Resources, Workload


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
    evaluations: int = 0

    @classmethod
    def of(cls, method: str, plan: Plan, seconds: float, evaluations: int = 0) -> "Alternative":
        """Record `plan`, found in `seconds` by provisioning `evaluations` assignments."""
        values = {f.name: getattr(plan, f.name) for f in fields(plan)}
        return cls(method, **values, seconds=seconds, evaluations=evaluations)


@dataclass(frozen=True, slots=True)
class TrainingPoint:
    """The state of the agent's training after `steps` environment steps."""

    steps: int
    mean_reward: float
    best_cost: float


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """A plan that no other beats in both throughput and cost; `proven` when that is certain."""

    throughput: float
    price_per_hour: float
    cost: float
    assignment: tuple[str, ...]
    proven: bool


@dataclass(frozen=True, slots=True)
class Relaxation:
    """One change, of `key` from `current` to `needed`, with which a plan exists, and its figures.

    `key` is min_throughput, max_price_per_hour or limit.TYPE.
    """

    key: str
    current: float
    needed: float
    throughput: float
    price_per_hour: float
    cost: float


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
    is infinite (null in JSON), and so is the bound where the floor cannot be met. `proven` says
    that no plan costs less. `values` are the critic's estimates before each layer. `relaxations`
    are filled where no plan meets the demands, the cheapest first.
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
    max_price_per_hour: float = 0.0
    pin: Mapping[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    proven: bool = False
    values: Mapping[str, float] = field(default_factory=dict)
    pareto: tuple[ParetoPoint, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()
    input_hash: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    created_at: float = 0.0

    @property
    def slack(self) -> tuple[float, ...]:
        """By stage, the share of the time, 0 to 1, that it waits for the slowest one."""
        slowest = max((stage.busy_s for stage in self.stages), default=0.0)
        return tuple(1 - stage.busy_s / slowest if slowest else 0.0 for stage in self.stages)

    @property
    def total_units(self) -> dict[str, int]:
        """Units rented by type, those of the parameter server included."""
        total: dict[str, int] = {}
        for stage in self.stages:
            total[stage.type] = total.get(stage.type, 0) + stage.units
        if self.ps_units and self.workload is not None:
            kind = self.workload.ps_type
            total[kind] = total.get(kind, 0) + self.ps_units
        return total

    def to_json(self, inputs: bool = False) -> dict[str, Any]:
        """Return plain values: infinities are null, each stage has its slack.

        Args:
            inputs: with the workload and the resources, as `from_json` needs them to plan anew.
        """
        from scheduler.decision.record_json import to_json

        return to_json(self, inputs)

    @classmethod
    def from_json(cls, value: object, source: str = "") -> "Decision":
        """Return the decision that `to_json` wrote, with or without its inputs.

        Raises:
            InputError: naming `source`, key path, value and what was expected.
        """
        from scheduler.decision.record_json import from_json

        return from_json(value, source)

    def export(self, path: str | Path) -> None:
        """Write the decision with its inputs to a JSON file, in one atomic step.

        Raises:
            InputError: the file cannot be written.
        """
        from scheduler.decision.record_json import write_file

        write_file(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "Decision":
        """Return the decision of a file that `export` wrote.

        Raises:
            InputError: the file cannot be read, or is no decision.
        """
        return cls.from_json(read_file(path), str(path))

    def to_message(self) -> pb.Decision:
        """Return the message of the same content, with the inputs."""
        message = pb.Decision(
            stages=[pb.PlanStage(**asdict(stage)) for stage in self.stages],
            probabilities=[
                pb.LayerProbabilities(
                    layer=layer, by_type=dict(by_type), value=self.values.get(layer, 0.0)
                )
                for layer, by_type in self.probabilities.items()
            ],
            training=[pb.TrainingPoint(**asdict(point)) for point in self.training],
            pareto=[pb.ParetoPoint(**asdict(point)) for point in self.pareto],
            relaxations=[pb.Relaxation(**asdict(change)) for change in self.relaxations],
            pin=dict(self.pin),
            versions=dict(self.versions),
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
            values=_values(message),
            training=tuple(TrainingPoint(**_scalars(point)) for point in message.training),
            pareto=tuple(
                ParetoPoint(assignment=tuple(point.assignment), **_scalars(point))
                for point in message.pareto
            ),
            relaxations=tuple(Relaxation(**_scalars(change)) for change in message.relaxations),
            pin=dict(message.pin),
            excluded=tuple(message.excluded),
            versions=dict(message.versions),
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
    "max_price_per_hour",
    "excluded",
    "proven",
    "input_hash",
    "created_at",
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


def _values(message: pb.Decision) -> dict[str, float]:
    """The critic's estimates; none where a method without a critic has left all of them 0."""
    values = {entry.layer: entry.value for entry in message.probabilities}
    return values if any(values.values()) else {}
