"""A running job that is to go over to another plan, or to other nodes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from protos.decision_pb2 import Decision
from protos.node_pb2 import SHARD
from protos.scheduler_pb2 import Move
from scheduler.runs.processes import Process


class ChangeRefusedError(RuntimeError):
    """A change that cannot be begun; says why."""


class BestPlanError(ChangeRefusedError):
    """The plan that a job would go over to is the one that it has."""


@dataclass(frozen=True)
class PlanChange:
    """What a job is to go over to.

    Attributes:
        reason: "asked" | "replanned" | "drained" | "joined" | "deadline" | "shared".
        decision: the plan to go over to; None: the same plan.
        avoid: ids of nodes to leave.
        until: `time.monotonic` by when it must be done; None: it has time.
    """

    reason: str
    decision: Decision | None
    avoid: frozenset[str] = field(default=frozenset())
    until: float | None = None


class Stage(Enum):
    """How far a change is."""

    WANTED = auto()
    STARTING = auto()  # its workers are started, while those of the plan before train
    READY = auto()  # they listen
    PAUSING = auto()  # those before were told to take a cut and wait there


@dataclass(slots=True)
class Change:
    """A change that is under way.

    Attributes:
        decision: the plan to go over to.
        move: what is to be told of it, by whoever takes over before there is more to say.
        processes: shards and workers that are started for it; without shards those before stay.
        for_shards: node ids, one for each unit that was reserved for these shards.
        generation: that they are started for.
        failed: why it cannot be; empty: it can.
    """

    wanted: PlanChange
    decision: Decision
    move: Move
    stage: Stage = Stage.WANTED
    processes: Sequence[Process] = ()
    for_shards: Sequence[str] = ()
    generation: int = 0
    failed: str = ""

    @staticmethod
    def of(
        wanted: PlanChange, before: Decision, after: Decision, attempt: int, step: int
    ) -> "Change":
        """One that is asked for, of a job that is at a step."""
        move = Move(
            at=time.time(),
            step=step,
            attempt=attempt,
            reason=wanted.reason,
            before=in_short(before),
            after=in_short(after),
            predicted=before.throughput,
            price_before=before.price_per_hour,
            price_after=after.price_per_hour,
            failed="the scheduler was restarted before it could go over",
        )
        return Change(wanted, after, move)

    @property
    def is_due(self) -> bool:
        """Whether the attempt's thread is to take it further."""
        return bool(self.failed) or self.stage in (Stage.WANTED, Stage.READY)

    @property
    def shards(self) -> list[Process]:
        """That the tables begin on; none: they stay where they are."""
        return [process for process in self.processes if process.role == SHARD]


def check(before: Decision, after: Decision) -> None:
    """Check that a job can go over from one plan to another.

    Raises:
        ChangeRefusedError
    """
    if not after.feasible or not after.stages:
        raise ChangeRefusedError(f"the plan cannot be run: {after.reason or 'it has no stages'}")
    layers = [layer.name for layer in before.workload.layers]
    others = [layer.name for layer in after.workload.layers]
    if layers != others:
        raise ChangeRefusedError(
            f"the plan's layers are {', '.join(others)}; the job's are {', '.join(layers)}"
        )
    kinds = {kind.name for kind in after.resources.types}
    used = [stage.type for stage in after.stages]
    used += [after.workload.ps_type] if after.ps_units else []
    if absent := [kind for kind in used if kind not in kinds]:
        raise ChangeRefusedError(
            f"the plan's resources are {', '.join(sorted(kinds))}; it is to run on {absent[0]}"
        )
    ends = [-1, *(stage.last for stage in after.stages)]
    whole = all(s.first == end + 1 for s, end in zip(after.stages, ends, strict=False))
    if not whole or ends[-1] != len(layers) - 1 or any(not s.units for s in after.stages):
        raise ChangeRefusedError("the plan's stages do not cover all layers, each once")


def in_short(decision: Decision) -> str:
    """A plan's units and types, stage by stage."""
    return " + ".join(f"{stage.units} {stage.type}" for stage in decision.stages)
