"""The history of a job: what its stages reported over time, ready to be drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from heterps.client.records import Job, PlanUse, State
from protos.history_pb2 import JobHistory, StagePoint
from protos.scheduler_pb2 import JobState

if TYPE_CHECKING:
    from scheduler import Decision

_WINDOW_S = 2.0


@dataclass(frozen=True, slots=True)
class Run:
    """The training of one generation of an attempt's workers.

    Attributes:
        began_s: seconds in training of those before it.
        points: at which it had trained further.
    """

    attempt: int
    generation: int
    began_s: float
    points: list[StagePoint]

    @property
    def end_s(self) -> float:
        """Seconds in training of this one and those before it."""
        return self.began_s + self.points[-1].train_seconds


@dataclass(frozen=True, slots=True)
class History:
    """A job's states with their times (seconds since the epoch), and its stages' points."""

    states: Sequence[tuple[State, float]]
    stages: Sequence[Sequence[StagePoint]]  # of the first worker of each; busy_s is so far
    shards: Sequence[tuple[str, str]]
    plans: Sequence[PlanUse] = ()  # that it has trained under, the oldest first

    @classmethod
    def of(cls, history: JobHistory) -> "History":
        """Read a message."""
        found = {stage.stage: stage.points for stage in history.stages}
        return cls(
            [(State(JobState.Name(s.state).lower()), s.at) for s in history.states],
            [found.get(number, []) for number in range(max(found, default=-1) + 1)],
            [(shard.label, shard.address) for shard in history.shards],
            [PlanUse.of(one) for one in history.plans],
        )

    @property
    def runs(self) -> Sequence["Run"]:
        """The training of each generation, by its last stage, which knows the loss."""
        by_last: dict[tuple[int, int], Sequence[StagePoint]] = {}
        for points in self.stages:  # how many there are may change
            trained = [point for point in points if point.train_seconds > 0 and point.step]
            by_last |= {one: [p for p in trained if of(p) == one] for one in map(of, trained)}
        found: list[Run] = []
        for (attempt, generation), points in sorted(by_last.items()):
            began_s = found[-1].end_s if found else 0.0
            found.append(Run(attempt, generation, began_s, [points[0]]))
            for point in points:
                if point.step > found[-1].points[-1].step:
                    found[-1].points.append(point)
        return found

    @property
    def losses(self) -> Sequence[tuple[float, float]]:
        """Seconds in training, of all attempts, and loss."""
        return [
            (run.began_s + point.train_seconds, point.loss)
            for run in self.runs
            for point in run.points
            if point.loss
        ]

    @property
    def rates(self) -> Sequence[tuple[float, float]]:
        """Seconds in training and samples/s, each over `_WINDOW_S` or more: a step is no pace."""
        made: list[tuple[float, float]] = []
        for run in self.runs:
            before = run.points[0]
            for point in run.points[1:]:
                passed = point.train_seconds - before.train_seconds
                if passed >= _WINDOW_S:
                    at = run.began_s + point.train_seconds
                    made.append((at, (point.samples - before.samples) / passed))
                    before = point
        return made

    def utilisation(self, stage: int) -> tuple[float, float] | None:
        """The shares of its time that a stage computed, lately and over all of the training."""
        latest = of(self.stages[stage][-1]) if self.stages[stage] else (0, 0)
        points = [p for p in self.stages[stage] if p.train_seconds > 0 and of(p) == latest]
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

    def measured_so_far(self, decision: "Decision", job: Job) -> "Decision":
        """The decision, with what its run has come to up to now where it has not ended."""
        runs = self.runs
        if decision.measured is not None or not runs or len(self.stages) > len(decision.stages):
            return decision
        from scheduler.decision.record import Measured

        first, last, before = runs[-1].points[0], runs[-1].points[-1], float(job.from_samples)
        passed = last.train_seconds - first.train_seconds
        if (
            runs[-1].generation and passed > 0
        ):  # what it began with, by its pace since its first word
            rate = (last.samples - first.samples) / passed
            before = first.samples - rate * first.train_seconds
        if runs[-1].attempt != job.attempt or last.samples <= before:
            return decision
        kinds = {kind.name: kind for kind in decision.resources.types} if decision.resources else {}
        used = {stage.type for stage in decision.stages}
        throughput = (last.samples - before) / last.train_seconds
        samples = decision.workload.samples if decision.workload is not None else last.samples
        ends = [points[-1] for points in self.stages if points]
        measured = Measured(
            throughput=throughput,
            price_per_hour=decision.plan.price_per_hour,
            cost=decision.plan.price_per_hour * samples / throughput / 3600,
            seconds=last.train_seconds,
            emulated=any(kinds[name].emulated for name in used if name in kinds),
            stage_s=tuple(
                end.busy_s / max(1, (end.samples or last.samples) - before) for end in ends
            ),
        )
        return replace(decision, measured=measured)


def of(point: StagePoint) -> tuple[int, int]:
    """The attempt and the generation of its workers that a point is of."""
    return point.attempt, point.generation
