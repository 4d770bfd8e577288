"""Watches a running job's deadline, by the rule of `scheduler.problem.deadline`."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from protos.decision_pb2 import Decision
from protos.generations import may_regroup
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import END_LOST_NODE, JobStatus
from scheduler.problem.deadline import Deadline
from scheduler.runs.attempt import Attempt
from scheduler.runs.change import ChangeRefusedError, PlanChange
from scheduler.runs.changes import under_way
from scheduler.runs.changes.deadline import (
    ENDING_S,
    MOVING_S,
    finish_at,
    may_be_struck,
    seconds_left,
    slower,
    sure_plan,
)
from scheduler.runs.launch import devices_of
from scheduler.state.endings import Ending, may_retry

_LOOK_S = 1.0
_AGAIN_S = 5.0  # until it is asked again to go over
_log = logging.getLogger("heterps.deadline")


def guard(attempt: Attempt) -> "DeadlineGuard":
    """The guard of an attempt's deadline, to be entered while it is followed."""
    context, job_id = attempt.context, attempt.id.job_id

    def go(sure: Decision) -> None:
        with suppress(ChangeRefusedError):  # it is asked again at the next look
            under_way.request(attempt, PlanChange("deadline", sure))
            _log.warning("job %s: goes over to units that stay, for its deadline", job_id)

    return DeadlineGuard(
        attempt.spec() or JobSpec(),
        attempt.decision,
        lambda: context.jobs.get(job_id),
        lambda: slower(
            attempt.measurement(),
            attempt.decision,
            attempt.follower.last_report() if attempt.follower is not None else None,
        ),
        go,
        attempt.started_s,
    )


def may_go_over(status: JobStatus, job: JobSpec, decision: Decision) -> bool:
    """Whether a job may train on units that may be taken away, as it can leave them in time.

    One of its retries is kept, as a unit may be taken away while it goes over.
    """
    kept = JobStatus()
    kept.CopyFrom(status)
    kept.retries = max(0, status.retries - 1)
    return may_retry(kept, Ending(END_LOST_NODE)) and may_regroup(job, devices_of(decision))


class DeadlineGuard:
    """Has a job go over to sure units in time, on a thread of its own, while entered.

    Args:
        status: of the job.
        slower: how many times longer than predicted its samples take; expected of the other plan,
            too.
        go: makes it go over to a plan, unless it does so already.
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
