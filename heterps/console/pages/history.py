"""The history of a job: what its stages reported over time, ready to be drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from heterps.client.records import State
from protos.history_pb2 import JobHistory, StagePoint
from protos.scheduler_pb2 import JobState

if TYPE_CHECKING:
    from scheduler import Decision

_WINDOW_S = 2.0


@dataclass(frozen=True, slots=True)
class History:
    """A job's states with their times (seconds since the epoch), and its stages' points."""

    states: Sequence[tuple[State, float]]
    stages: Sequence[Sequence[StagePoint]]  # of the first worker of each; busy_s is so far
    shards: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, history: JobHistory) -> "History":
        """Read a message."""
        found = {stage.stage: stage.points for stage in history.stages}
        return cls(
            [(State(JobState.Name(s.state).lower()), s.at) for s in history.states],
            [found.get(number, []) for number in range(max(found, default=-1) + 1)],
            [(shard.label, shard.address) for shard in history.shards],
        )

    @property
    def leading(self) -> Sequence[StagePoint]:
        """Points of the last stage, which knows the loss, at which it had trained further."""
        found: list[StagePoint] = []
        for point in self.stages[-1] if self.stages else ():
            if point.step > (found[-1].step if found else 0):
                found.append(point)
        return found

    @property
    def rates(self) -> Sequence[tuple[float, float]]:
        """Seconds in training and samples/s, each over `_WINDOW_S` or more: a step is no pace."""
        made: list[tuple[float, float]] = []
        before: StagePoint | None = None
        for point in self.leading:
            if before is None:
                before = point
            elif (passed := point.train_seconds - before.train_seconds) >= _WINDOW_S:
                made.append((point.train_seconds, (point.samples - before.samples) / passed))
                before = point
        return made

    def utilisation(self, stage: int) -> tuple[float, float] | None:
        """The shares of its time that a stage computed, lately and over all of the training."""
        points = [p for p in self.stages[stage] if p.train_seconds > 0]
        if not points:
            return None
        last = points[-1]
        before = [p for p in points if p.train_seconds < last.train_seconds - _WINDOW_S]
        since = before[-1] if before else None
        whole = last.busy_s / last.train_seconds
        if since is None:
            return min(whole, 1.0), min(whole, 1.0)
        recent = (last.busy_s - since.busy_s) / (last.train_seconds - since.train_seconds)
        return min(max(recent, 0.0), 1.0), min(whole, 1.0)

    def measured_so_far(self, decision: "Decision") -> "Decision":
        """The decision, with what its run has come to up to now where it has not ended."""
        points = self.leading
        if decision.measured is not None or not points or len(self.stages) > len(decision.stages):
            return decision
        from scheduler.decision.record import Measured

        last = points[-1]
        if last.train_seconds <= 0 or not last.samples:
            return decision
        kinds = {kind.name: kind for kind in decision.resources.types} if decision.resources else {}
        used = {stage.type for stage in decision.stages}
        throughput = last.samples / last.train_seconds
        samples = decision.workload.samples if decision.workload is not None else last.samples
        ends = [points[-1] for points in self.stages if points]
        measured = Measured(
            throughput=throughput,
            price_per_hour=decision.plan.price_per_hour,
            cost=decision.plan.price_per_hour * samples / throughput / 3600,
            seconds=last.train_seconds,
            emulated=any(kinds[name].emulated for name in used if name in kinds),
            stage_s=tuple(end.busy_s / (end.samples or last.samples) for end in ends),
        )
        return replace(decision, measured=measured)
