"""A job's deadline, while it is planned and while it runs."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from protos.decision_pb2 import Decision, Resources
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import END_LOST_NODE, JobStatus
from scheduler.problem.deadline import MARGIN, Deadline
from scheduler.replanning.measure import Measurement
from scheduler.runs.attempt import Attempt
from scheduler.runs.change import ChangeRefusedError, PlanChange
from scheduler.runs.launch import may_regroup
from scheduler.state.endings import Ending, may_retry

ENDING_S: Final = 10.0  # to start and to save, of which no plan knows
MOVING_S: Final = 30.0  # to go over to another plan, where nothing was measured
_LOOK_S = 1.0
_AGAIN_S = 5.0  # until it is asked again to go over
# How much faster than the deadline asks sure units are to be: the more, the later they are needed.
_SPARE = (2.0, 1.5, 1.25, MARGIN, 1.0)
_log = logging.getLogger("heterps.deadline")


def hours_for_all(status: JobStatus, job: JobSpec, samples: float, now: float) -> float:
    """Hours in which a plan is to train all samples, so that those that are left are done in time.

    Zero where there is no deadline; as submitted where it is over.

    Args:
        samples: in all.
        now: seconds since the epoch.
    """
    hours = job.schedule.finish_by_hours
    left_s = finish_at(status, job) - ENDING_S - now
    done = min(status.from_samples / samples, 1.0) if samples else 0.0
    if not hours or left_s <= 0 or done >= 1:
        return hours
    return min(hours, left_s / 3600 / (1 - done))


def finish_at(status: JobStatus, job: JobSpec) -> float:
    """When it is to be done, in seconds since the epoch: so long after it left the queue first."""
    return status.began_at + job.schedule.finish_by_hours * 3600


def unsure(resources: Resources) -> list[str]:
    """Types whose units may be taken away."""
    return [kind.name for kind in resources.types if kind.interruptions_per_hour]


def may_go_over(status: JobStatus, job: JobSpec, decision: Decision) -> bool:
    """Whether a job may train on units that may be taken away, as it can leave them in time.

    One of its retries is kept, as a unit may be taken away while it goes over.
    """
    kept = JobStatus()
    kept.CopyFrom(status)
    kept.retries = max(0, status.retries - 1)
    return may_retry(kept, Ending(END_LOST_NODE)) and may_regroup(job, decision)


def may_be_struck(decision: Decision) -> bool:
    """Whether a plan has units that may be taken away."""
    used = {stage.type for stage in decision.stages}
    used |= {decision.workload.ps_type} if decision.ps_units else set()
    return bool(used & set(unsure(decision.resources)))


def sure_plan(decision: Decision, finish_by_hours: float) -> Decision | None:
    """The plan of units that stay to go over to: faster than the deadline asks, where that can be.

    Raises:
        InputError: the decision lacks its inputs.
    """
    # Brings NumPy: only where there is a deadline and units may be taken away.
    from scheduler.planning.planner import plan

    workload, floor = decision.workload, decision.workload.samples / (finish_by_hours * 3600)
    excluded = [*decision.excluded, *unsure(decision.resources)]
    for spare in _SPARE:
        found = plan(
            workload,
            decision.resources,
            spare * floor,
            method="exact",
            pin=dict(decision.pin) or None,
            exclude=list(dict.fromkeys(excluded)),
            max_price_per_hour=decision.max_price_per_hour or None,
        )
        if found.feasible:
            return found.to_message()
    return None


def guard(attempt: Attempt) -> "DeadlineGuard":
    """The guard of an attempt's deadline, to be entered while it is followed."""
    context, job_id = attempt.context, attempt.id.job_id

    def go(sure: Decision) -> None:
        with suppress(ChangeRefusedError):  # it is asked again at the next look
            attempt.request_change(PlanChange("deadline", sure))
            _log.warning("job %s: goes over to units that stay, for its deadline", job_id)

    job = attempt.persist(lambda: context.store.spec(job_id)) or JobSpec()
    return DeadlineGuard(
        job,
        attempt.decision,
        lambda: context.jobs.get(job_id),
        lambda: slower(attempt.measurement(), attempt.decision),
        go,
        attempt.started_s,
    )


def slower(measurement: Measurement | None, decision: Decision) -> float:
    """How many times longer a sample takes than was predicted, at least 1."""
    pace_s = measurement.pace.seconds if measurement is not None else 0.0
    return max(1.0, pace_s * decision.throughput * (1 - decision.workload.overhead))


class DeadlineGuard:
    """Has a job go over to sure units in time, on a thread of its own, while entered.

    Args:
        status: of the job.
        slower: how many times longer than predicted its samples take; expected of the other plan,
        too. go: makes it go over to a plan, unless it does so already.
        start_s: seconds that its processes took to start.
    """

    def __init__(
        self,
        job: JobSpec,
        decision: Decision,
        status: Callable[[], JobStatus | None],
        slower: Callable[[], float],
        go: Callable[[Decision], None],
        start_s: float,
    ) -> None:
        self._job, self._decision, self._status, self._go = job, decision, status, go
        self._slower = slower
        self._moving_s = max(MOVING_S, 2 * start_s)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "DeadlineGuard":
        if self._job.schedule.finish_by_hours and may_be_struck(self._decision):
            self._thread = threading.Thread(
                target=self._loop, name=f"deadline {self._job.name}", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _loop(self) -> None:
        try:
            sure = sure_plan(self._decision, self._job.schedule.finish_by_hours)
        except Exception:  # the job goes on, though nobody watches its deadline
            _log.exception("job %s: no plan to keep its deadline by", self._job.name)
            return
        if sure is None:
            _log.warning("job %s: no units that stay keep its deadline", self._job.name)
            return
        while not self._stop.wait(_LOOK_S):
            try:
                if self._is_due(sure):
                    self._go(sure)
                    self._stop.wait(_AGAIN_S)
            except Exception:
                _log.exception("job %s: its deadline", self._job.name)

    def _is_due(self, sure: Decision) -> bool:
        status = self._status()
        if status is None or not status.began_at:
            return False
        if not may_go_over(status, self._job, self._decision):
            return True
        at = finish_at(status, self._job) - ENDING_S
        deadline = Deadline(at, self._moving_s, 2 * _LOOK_S)
        return not deadline.may_stay(time.time(), seconds_left(status, sure) * self._slower())


def seconds_left(status: JobStatus, sure: Decision) -> float:
    """What a plan of sure units takes, by what is predicted, for what the last cut lacks."""
    samples = sure.workload.samples
    if status.step:  # a workload that was given need not be right about them
        samples = max(samples, status.samples / status.step * status.total_steps)
    done = max([status.from_samples, *(cut.samples for cut in status.cuts)])
    pace = sure.throughput * (1 - sure.workload.overhead)
    return max(0.0, samples - done) / pace
