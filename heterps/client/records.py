"""What the client answers with."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.message import Message

from protos import access_pb2 as access_pb
from protos import scheduler_pb2 as pb

if TYPE_CHECKING:
    from scheduler import Decision

R = TypeVar("R")


class State(StrEnum):
    """Where a job stands; the last three are final."""

    QUEUED = "queued"
    PROFILING = "profiling"
    PLANNING = "planning"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen."""
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt at a job that ended, and was followed by another."""

    number: int
    end_reason: str
    reason: str
    error: str
    process: str
    ended_at: float
    from_step: int = 0  # of the cut that it began with; 0: with none
    step: int = 0  # that it had come to
    started_at: float = 0.0  # training began
    price_per_hour: float = 0.0  # dollars, of its plan


@dataclass(frozen=True, slots=True)
class Recovery:
    """Workers of an attempt that were replaced, while the others kept their processes.

    Attributes:
        lost: the processes that had died.
        seconds: until all were told to go on.
        stood_s: likewise, since `step` had ended: what was done of the next one is done again.
        step: that they went on from.
        reason: what had broken, in one line.
        back: whether nobody had a later state, so that all went back to this step.
        reached: steps that were over; those after `step` are trained again.
        lost_s: seconds in training that had gone into these.
        price_per_hour: dollars, of the plan.
    """

    at: float
    lost: tuple[str, ...]
    seconds: float
    step: int
    attempt: int
    reason: str
    back: bool = False
    reached: int = 0
    lost_s: float = 0.0
    price_per_hour: float = 0.0
    stood_s: float = 0.0

    @property
    def lost_steps(self) -> int:
        """Steps that are trained again."""
        return self.reached - self.step if self.back else 0

    @property
    def lost_cost(self) -> float:
        """Dollars for these."""
        return self.lost_s * self.price_per_hour / 3600


@dataclass(frozen=True, slots=True)
class Share:
    """A worker that had no unit of its own for a while, as none was free when it was replaced.

    Attributes:
        process: that worker.
        node: where it shared one with another of the job.
        at, until: seconds since the epoch; until is 0 while it does.
        price_per_hour: dollars, of a unit: one fewer was paid.
        throughput: samples/s of the plan meanwhile, as predicted.
    """

    process: str
    node: str
    at: float
    until: float
    attempt: int
    price_per_hour: float
    throughput: float


@dataclass(frozen=True, slots=True)
class Move:
    """A job that went over to another plan, or to other nodes, while it ran.

    Attributes:
        at: seconds since the epoch: training paused.
        seconds: until the workers of the other plan were told to go on.
        step: after which that was.
        reason: asked | replanned | drained | joined | deadline.
        before, after: the plans in short, units and types of their stages.
        predicted, measured: samples/s of the plan before; measured 0 where it was too short.
        price_before, price_after: dollars an hour.
        failed: why it went on under the plan before; empty where it did not.
    """

    at: float
    seconds: float
    step: int
    attempt: int
    reason: str
    before: str
    after: str
    predicted: float
    measured: float
    price_before: float
    price_after: float
    failed: str


@dataclass(frozen=True, slots=True)
class PlanUse:
    """A plan that a job has trained under.

    Attributes:
        plan: in short, units and types of its stages.
        attempt: that trained under it.
        from_step: after which it began.
        began_at: seconds since the epoch.
        reason: planned, where the attempt began with it; else as of `Move`.
        price_per_hour: dollars.
        predicted, measured: samples/s; measured 0 where it is not known, or not yet.
    """

    plan: str
    attempt: int
    from_step: int
    began_at: float
    reason: str
    price_per_hour: float
    predicted: float
    measured: float

    @classmethod
    def of(cls, message: pb.PlanUse) -> "PlanUse":
        """Read a message."""
        decision = message.decision
        return _read(
            cls,
            message,
            plan=" + ".join(f"{stage.units} {stage.type}" for stage in decision.stages),
            price_per_hour=decision.price_per_hour,
            predicted=decision.throughput,
            measured=decision.measured.throughput,
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """The state of a job after a step, from which it can go on.

    Attributes:
        step: updates that are in it.
        place: its folder or URL.
        taken_at: seconds since the epoch.
        seconds: from the end of the step until it was complete; training went on meanwhile.
        stall_s: for which training waited.
        bytes: written for it; what was the same in the cut before is not.
        attempt: that took it.
        samples: trained until then.
    """

    step: int
    place: str
    taken_at: float
    seconds: float
    stall_s: float
    bytes: int
    attempt: int
    samples: int
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, message: pb.Cut) -> "Cut":
        """Read a message."""
        return _read(cls, message, metrics=dict(sorted(message.metrics.items())))

    def to_json(self) -> dict[str, Any]:
        """The same for programs; a metric that is not finite is None."""
        metrics = {name: _finite(value) for name, value in self.metrics.items()}
        return {**asdict(self), "metrics": metrics}


@dataclass(frozen=True, slots=True)
class Validated:
    """What held-out data gave in training, of `train.validate`.

    Attributes:
        step: updates until then.
        metrics: those that are finite.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it stands. Times are seconds since the epoch, 0 for what has not happened."""

    job_id: str
    name: str
    state: State
    reason: str
    submitted_at: float
    started_at: float
    ended_at: float
    phase: str
    step: int
    total_steps: int
    samples: int
    loss: float
    samples_per_s: float
    metrics: Mapping[str, float]
    output: str
    end_reason: str = ""  # why it ended, one of a closed list; empty before
    error: str = ""  # what broke it, in one line
    process: str = ""  # which process that was
    last_lines: str = ""  # of its log
    attempt: int = 0
    attempts: tuple[Attempt, ...] = ()  # the earlier ones
    retries: int = 0
    priority: int = 0
    began_at: float = 0.0  # it left the queue for the first time
    submitted_by: str = ""  # the user; empty where nobody is asked for a token
    cancelled_by: str = ""
    cuts: tuple[Cut, ...] = ()  # that are kept, the oldest first
    from_step: int = 0  # of the cut that the attempt began with; 0: with none
    from_samples: int = 0  # trained until then
    cut_error: str = ""  # what the newest cut failed of; empty where it did not
    recoveries: tuple[Recovery, ...] = ()
    moves: tuple[Move, ...] = ()
    shares: tuple[Share, ...] = ()  # the oldest first
    validated: tuple[Validated, ...] = ()  # the latest, the oldest first
    loss_terms: Mapping[str, float] = field(default_factory=dict)  # of `loss`, those with a name

    @classmethod
    def of(cls, status: pb.JobStatus) -> "Job":
        """Read a message."""
        return _read(
            cls,
            status,
            state=State(pb.JobState.Name(status.state).lower()),
            metrics=dict(sorted(status.metrics.items())),
            loss_terms=dict(sorted(status.loss_terms.items())),
            end_reason=_reason(status.end_reason),
            attempts=tuple(
                _read(Attempt, one, end_reason=_reason(one.end_reason)) for one in status.attempts
            ),
            cuts=tuple(Cut.of(cut) for cut in status.cuts),
            recoveries=tuple(
                _read(Recovery, one, lost=tuple(one.lost)) for one in status.recoveries
            ),
            moves=tuple(_read(Move, one) for one in status.moves),
            shares=tuple(_read(Share, one) for one in status.shares),
            validated=tuple(
                Validated(one.step, dict(sorted(one.metrics.items()))) for one in status.validated
            ),
        )

    @property
    def eta_s(self) -> float | None:
        """Seconds until training ends at the pace so far; None when that is unknown."""
        if self.phase != "train" or not self.step or not self.samples_per_s:
            return None
        return (self.total_steps - self.step) * (self.samples / self.step) / self.samples_per_s

    def to_json(self) -> dict[str, Any]:
        """The same for programs; a loss or metric that is not finite is None."""
        metrics = {name: _finite(value) for name, value in self.metrics.items()}
        own = {
            "state": str(self.state),
            "loss": _finite(self.loss),
            "loss_terms": {name: _finite(value) for name, value in self.loss_terms.items()},
            "metrics": metrics,
            "cuts": [cut.to_json() for cut in self.cuts],
        }
        return {**asdict(self), **own}


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a job; `exit_code` counts once it does not run."""

    process_id: str
    job_id: str
    role: str
    label: str
    pid: int
    running: bool
    exit_code: int


@dataclass(frozen=True, slots=True)
class Node:
    """A host's daemon, or a standing parameter-server shard (`kind` is "shard").

    One that is `draining` takes nothing new and ends in `ends_in_s` seconds at the latest.
    """

    node_id: str
    kind: str
    address: str
    type: str
    units: int
    units_used: int
    emulated: bool
    device: str
    processes: tuple[Process, ...]
    draining: bool = False
    ends_in_s: float = 0.0

    @classmethod
    def of(cls, status: pb.NodeStatus) -> "Node":
        """Read a message."""
        processes = tuple(_read(Process, one) for one in status.processes)
        return _read(cls, status, kind=status.kind or "node", processes=processes)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a client is to its scheduler; `user` is empty where nobody is asked for a token."""

    user: str
    role: str

    @classmethod
    def of(cls, message: access_pb.Identity) -> "Identity":
        """Read a message."""
        return _read(cls, message)


@dataclass(frozen=True, slots=True)
class Token:
    """A token that opens a cluster, in the words of its `role`.

    Attributes:
        expires_at: seconds since the epoch; 0 for never.
        secret: what is shown to be let in; empty unless it was made by this very call.
    """

    name: str
    role: str
    created_at: float
    created_by: str
    expires_at: float
    secret: str = field(default="", repr=False)

    @classmethod
    def of(cls, message: access_pb.Token, secret: str = "") -> "Token":
        """Read a message."""
        return _read(cls, message, secret=secret)


@dataclass(frozen=True, slots=True)
class LogText:
    """A piece of a process's log."""

    process: str
    text: str


@dataclass(frozen=True, slots=True)
class JobsPage:
    """Some of the jobs, by submission, the oldest first.

    Attributes:
        next: `before` of the page of older ones; "" where there are none.
        total: jobs on all pages.
        total_unended: of those.
    """

    jobs: list[Job]
    next: str
    total: int
    total_unended: int

    @classmethod
    def of(cls, reply: pb.ListJobsReply) -> "JobsPage":
        """From the scheduler's message."""
        jobs = [Job.of(status) for status in reply.jobs]
        return cls(jobs, reply.next, reply.total, reply.total_unended)


@dataclass(frozen=True, slots=True)
class JobDecision:
    """A job's decision in a list: its figures and stages, perhaps without its inputs."""

    job_id: str
    job_name: str
    submitted_at: float
    decision: "Decision"

    @property
    def decided_at(self) -> float:
        """Seconds since the epoch."""
        return self.decision.created_at or self.submitted_at

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        decision = self.decision.to_json()
        measured = decision["measured"]
        names = ("method", "feasible", "throughput", "price_per_hour", "cost", "lower_bound", "gap")
        return {
            "job_id": self.job_id,
            "job_name": self.job_name,
            "decided_at": self.decided_at,
            **{name: decision[name] for name in names},
            "measured": measured,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read(record: type[R], message: Message, /, **given: Any) -> R:
    """A record of a message's fields of the same names, but for those that are given."""
    names = {one.name for one in fields(cast(Any, record))} - given.keys()
    return record(**{name: getattr(message, name) for name in names}, **given)


def _reason(value: "pb.EndReason.ValueType") -> str:
    """The name of a reason, such as user_error; empty for none, a number for a newer one."""
    if not value:
        return ""
    try:
        return pb.EndReason.Name(value).removeprefix("END_").lower()
    except ValueError:
        return str(int(value))
