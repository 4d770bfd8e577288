"""The record of a decision: the chosen plan, what else was considered, and how good it is."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from chassis.files import replace_file
from protos import decision_pb2 as pb
from scheduler.problem import mapper
from scheduler.problem.cost import CostModel
from scheduler.problem.demands import Demands
from scheduler.problem.fields import InputError, read_file
from scheduler.problem.plan import Plan, PlanStage
from scheduler.problem.steps import Steps
from scheduler.problem.workload import Resources, Workload

STEADY = 100  # steps whose mean says whether a floor was met


@dataclass(frozen=True, slots=True)
class Alternative:
    """What one method came to, in `seconds`, by provisioning `evaluations` assignments."""

    method: str
    plan: Plan = field(metadata=mapper.FLAT)
    seconds: float
    evaluations: int = 0


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
    """What a run of the plan came to; `stage_s` are busy seconds a sample.

    `seconds` in training went into all samples, and `cost` is theirs, at the prices of the plans
    that the job had. `throughput` and `stage_s` are means over `throughput_s` of them, those under
    this plan in the latest attempt; where that is 0 they are over all. `steady_throughput` is the
    mean of the `steady_steps` steps after the first ones, in samples/s; both are 0 where there were
    none.
    """

    throughput: float
    price_per_hour: float
    cost: float
    seconds: float
    emulated: bool
    stage_s: tuple[float, ...]
    steady_throughput: float = 0.0
    steady_steps: int = 0
    throughput_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and the reasons for it.

    Costs are dollars for all samples, prices dollars an hour, throughputs samples/s. No plan of
    this workload costs less than `lower_bound`, `gap` is cost / lower_bound - 1, and
    `max_throughput` is the highest that any plan was found to reach. Where no plan exists the cost
    is infinite (null in JSON), and so is the bound where the floor cannot be met. `proven` says
    that no plan costs less. `values` are the critic's estimates before each layer. `relaxations`
    are filled where no plan meets the demands, the cheapest first. `overhead` is the share of the
    time that the executor takes besides, by which the plan exceeds a floor: its throughput is at
    least min_throughput / (1 - overhead), and a job's is to be that of the plan less that share.
    `finish_by` are the hours of the deadline that is in `min_throughput`, 0 for none.
    """

    method: str
    plan: Plan = field(metadata=mapper.FLAT)
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
    overhead: float = field(default=0.0, metadata=mapper.OPTIONAL)
    finish_by: float = field(default=0.0, metadata=mapper.OPTIONAL)

    DERIVED: ClassVar = ("floor_met",)

    @property
    def feasible(self) -> bool:
        """Whether the plan meets the demands; where it does not, `plan.reason` says why."""
        return self.plan.feasible

    @property
    def assignment(self) -> tuple[str, ...]:
        """The type of each layer."""
        return self.plan.assignment

    @property
    def stages(self) -> tuple[PlanStage, ...]:
        """The plan's stages, in the order of the layers."""
        return self.plan.stages

    @property
    def throughput(self) -> float:
        """Predicted, samples/s."""
        return self.plan.throughput

    @property
    def cost(self) -> float:
        """Predicted, dollars for all samples."""
        return self.plan.cost

    @property
    def demands(self) -> Demands:
        """What it was made under."""
        cap = self.max_price_per_hour or math.inf
        return Demands(self.min_throughput, cap, dict(self.pin), self.excluded, self.finish_by)

    def model(self, workload: Workload, resources: Resources, as_run: bool = False) -> CostModel:
        """The cost model of workload and resources under its demands, with cuts if it has some.

        Args:
            as_run: with the steps of its plan, where it has some: what these keep in flight may be
                what its stages are cut for.
        """
        cut = any(a.type == b.type for a, b in pairwise(self.stages))
        parts, staleness = self.plan.micro_batches, self.plan.staleness
        steps = None
        if as_run and parts and staleness is not None:
            steps = Steps.of(replace(workload, micro_batches=parts, staleness=staleness))
            steps = replace(steps, simulated=True)
        model = self.demands.model(workload, resources, cut or None, steps)
        return model.sized(parts) if parts else model

    @property
    def aim(self) -> float:
        """The throughput that it was made for: the floor, and what the executor takes besides."""
        return self.demands.aim(self.overhead)

    @property
    def slack(self) -> tuple[float, ...]:
        """By stage, the share of the time, 0 to 1, that it waits for the slowest one."""
        slowest = max((stage.busy_s for stage in self.stages), default=0.0)
        return tuple(1 - stage.busy_s / slowest if slowest else 0.0 for stage in self.stages)

    @property
    def stage_errors(self) -> tuple[float | None, ...]:
        """By stage, measured over predicted seconds computing, less 1; None where not measured.

        A stage on an emulated type ran on another device, so its error is None, too.
        """
        emulated = {k.name for k in self.resources.types if k.emulated} if self.resources else ()
        busy = self.measured.stage_s if self.measured is not None else ()
        measured = dict(enumerate(busy))
        return tuple(
            measured[number] / stage.compute_s - 1
            if measured.get(number) and stage.compute_s and stage.type not in emulated
            else None
            for number, stage in enumerate(self.stages)
        )

    @property
    def floor_met(self) -> bool | None:
        """Whether the mean of `STEADY` or more steps reached the floor.

        None where there is no floor, it has not run, or not for long enough to tell.
        """
        run = self.measured
        if not self.min_throughput or run is None or run.steady_steps < STEADY:
            return None
        return run.steady_throughput >= self.min_throughput

    @property
    def total_units(self) -> dict[str, int]:
        """Units rented by type, those of the parameter server included."""
        total: dict[str, int] = {}
        for stage in self.stages:
            total[stage.type] = total.get(stage.type, 0) + stage.units
        if self.plan.ps_units and self.workload is not None:
            kind = self.workload.ps_type
            total[kind] = total.get(kind, 0) + self.plan.ps_units
        return total

    def to_json(self, inputs: bool = False) -> dict[str, Any]:
        """Return plain values: infinities are null, each stage has its slack and error.

        Args:
            inputs: with the workload and the resources, as `from_json` needs them to plan anew.
        """
        unwanted = [
            name for name in ("workload", "resources") if not inputs or getattr(self, name) is None
        ]
        value = mapper.to_json(self, unwanted)
        derived = zip(value["stages"], self.slack, self.stage_errors, strict=True)
        for stage, slack, error in derived:
            stage["slack"] = slack
            if self.measured is not None:
                stage["error"] = error
        if self.measured is not None:
            value["floor_met"] = self.floor_met
        return value

    @classmethod
    def from_json(cls, value: object, source: str = "") -> "Decision":
        """Return the decision that `to_json` wrote, with or without its inputs.

        Raises:
            InputError: naming `source`, key path, value and what was expected.
        """
        decision = mapper.from_json(cls, value, source)
        _check(decision, source)
        return decision

    def export(self, path: str | Path) -> None:
        """Write the decision with its inputs to a JSON file, in one atomic step.

        Raises:
            InputError: the file cannot be written.
        """
        text = json.dumps(self.to_json(inputs=True), indent=2, allow_nan=False) + "\n"
        try:
            replace_file(Path(path), text)
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            raise InputError(str(path), "", reason) from error

    @classmethod
    def load(cls, path: str | Path) -> "Decision":
        """Return the decision of a file that `export` wrote.

        Raises:
            InputError: the file cannot be read, or is no decision.
        """
        return cls.from_json(read_file(path), str(path))

    def to_message(self) -> pb.Decision:
        """Return the message of the same content, with the inputs."""
        probabilities = [
            pb.LayerProbabilities(layer=layer, by_type=by_type, value=self.values.get(layer, 0.0))
            for layer, by_type in self.probabilities.items()
        ]
        content = mapper.to_fields(self, ("probabilities", "values"))
        return pb.Decision(probabilities=probabilities, **content)

    @classmethod
    def from_message(cls, message: pb.Decision) -> "Decision":
        """Return the decision that a message holds."""
        content = mapper.of_message(message)
        layers = content.pop("probabilities")
        values = {entry["layer"]: entry["value"] for entry in layers}
        return mapper.from_fields(
            cls,
            content,
            probabilities={entry["layer"]: entry["by_type"] for entry in layers},
            # A method without a critic has left all of them 0.
            values=values if any(values.values()) else {},
        )


def _check(decision: Decision, source: str) -> None:
    """Refuse a decision whose parts do not fit together."""
    layers = len(decision.assignment)
    if decision.workload is not None and len(decision.workload.layers) != layers:
        expected = f"a type for each of the {len(decision.workload.layers)} layers"
        raise InputError(source, "assignment", f"{layers} types: expected {expected}")
    names = decision.resources.names if decision.resources is not None else None
    others = enumerate(decision.alternatives)
    plans = {"": decision.plan, **{f"alternatives[{n}].": one.plan for n, one in others}}
    for place, plan in plans.items():
        following = 0
        for number, stage in enumerate(plan.stages):
            where = f"{place}stages[{number}]"
            if stage.first != following or not stage.first <= stage.last < layers:
                value = f"layers {stage.first} to {stage.last}"
                expected = f"layers from {following} to at most {layers - 1}"
                raise InputError(source, where, f"{value}: expected {expected}")
            if names is not None and stage.type not in names:
                expected = f"one of {', '.join(names)}"
                raise InputError(source, f"{where}.type", f"{stage.type!r}: expected {expected}")
            following = stage.last + 1
        if plan.stages and following != layers:
            raise InputError(source, f"{place}stages", f"end before layer {layers - 1}")
