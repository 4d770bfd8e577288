"""The attempts at work: who is next, what another scheduler left behind, what runs for nobody."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from chassis.loops import for_each
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_CANCELLED,
    END_DEADLINE,
    END_SCHEDULER_LOST,
    QUEUED,
    RUNNING,
    JobStatus,
    NodeStatus,
)
from scheduler.runs.attempt import Attempt
from scheduler.runs.cleanup import GRACE_S
from scheduler.runs.context import Context
from scheduler.runs.failures import ending_of
from scheduler.runs.launch import stop_job
from scheduler.runs.processes import AttemptId
from scheduler.runs.run import start
from scheduler.runs.states import State
from scheduler.state import nodes as registry
from scheduler.state.endings import Ending
from scheduler.state.store import TERMINAL, StoreError, TransitionError

_TRIES = 5  # at a job that cannot even be begun: what is wrong may pass
_POLL_S = 0.02
_SETTLED_S = 10.0  # that a job has trained, for spare nodes to get ready
_log = logging.getLogger("heterps.dispatcher")


class Dispatcher:
    """The attempts at work, one a job, and the rule of who is next.

    Jobs start by priority, within one first come, first served, as far as a node of one of their
    types is alive. One job at a time measures and plans, and one that waits for units keeps those
    behind it waiting, so that a large job gets its turn; a job of a higher priority overtakes it.
    One that waits for nodes that have gone keeps nobody waiting. A job that trains with fewer units
    than its plan has, as some were lost, has the next.

    Attributes:
        wake: has whoever calls `step` do so now.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._attempts: dict[str, Attempt] = {}
        self._closed = False
        self._deadlines: dict[str, float] = {}  # seconds a job that has begun may run, 0: any
        self._orphans: dict[tuple[str, str], float] = {}  # (node, job) -> when seen or told
        self._failed: Counter[str] = Counter()  # how often each job could not be begun

    def resume(self) -> None:
        """Take up what another scheduler left: follow what trains, put the rest back.

        Call it before any worker is answered.

        Raises:
            StoreError
        """
        context = self._context
        for status in context.jobs.started():
            record = context.store.run(status.job_id)
            attempt = self._attempt(status, status.attempt)
            if status.state == RUNNING and record is not None and record.attempt == status.attempt:
                _log.info("job %s: followed on, attempt %d", status.job_id, status.attempt)
                attempt.take_up(record)
            else:
                attempt.give_up(status.state, record)
            if (user := context.store.cancelled(status.job_id)) is not None:
                attempt.cancel(Ending(END_CANCELLED, cancelled_by=user))
        for job_id in context.jobs.queued():
            if (user := context.store.cancelled(job_id)) is not None:
                context.jobs.end(job_id, Ending(END_CANCELLED, cancelled_by=user))
        for attempt in self._attempts.values():
            start(attempt)

    def get(self, job_id: str) -> Attempt | None:
        """The attempt at a job; None when it waits or has ended."""
        with self._lock:
            return self._attempts.get(job_id)

    def may_need(self, node: NodeStatus) -> bool:
        """Whether a job that has trained for a while may get a worker on a node.

        Short ones are over before that is ready.
        """
        until = time.monotonic() - _SETTLED_S
        with self._lock:
            running = [one for one in self._attempts.values() if one.state is State.RUNNING]
        return node.kind == registry.NODE and any(
            node.type == stage.type
            for one in running
            if one.running_at is not None and one.running_at < until
            for stage in one.decision.stages
        )

    def step(self, wanted_types: Callable[[JobSpec], list[str]]) -> None:
        """Forget what has ended, start what may start, stop what nobody runs any more.

        Raises:
            StoreError
            ExceptionGroup: of what went wrong with some jobs; it did not keep others from theirs.
        """
        with self._lock:
            self._attempts = {
                job_id: one for job_id, one in self._attempts.items() if not one.over.is_set()
            }
        parts: list[Callable[[], None]] = [self._give_up_left, self._end_late]
        if not self._closed and self._context.nodes.rejoined():
            parts += [lambda: self._start_next(wanted_types), self._stop_orphans]
        for_each(parts, lambda part: part(), at_once=(StoreError,))

    def cancel(self, job_id: str, ending: Ending, timeout_s: float) -> None:
        """End a job, whatever it is at; without effect where it has ended.

        That it is to end is in Redis when this returns, also where its end takes longer: a
        scheduler that takes over ends it.

        Raises:
            StoreError: Redis did not take that; the job is ended as long as this scheduler lives.
        """
        until = time.monotonic() + timeout_s
        while not self._cancel_queued(job_id, ending):
            attempt = self.get(job_id)
            if attempt is not None:
                attempt.cancel(ending)
                self._context.store.put_cancelled(job_id, ending.cancelled_by)
                attempt.over.wait(max(0.0, until - time.monotonic()))
            if time.monotonic() >= until:
                return
            time.sleep(_POLL_S)
        with suppress(TransitionError):  # a Redis that lost the job has nothing to bring back
            self._context.jobs.write(job_id)

    def close(self, timeout_s: float, *, hand_over: bool) -> None:
        """End every attempt.

        Args:
            hand_over: leave the jobs as they are, for the next scheduler to take up; otherwise
                they fail, and their processes are stopped.
        """
        with self._lock:
            self._closed = True
            attempts = list(self._attempts.values())
        text = "the scheduler was stopped while the job ran"
        for attempt in attempts:
            if hand_over:
                attempt.hand_over()
            else:
                attempt.cancel(Ending(END_SCHEDULER_LOST, text, "scheduler", text))
        deadline = time.monotonic() + timeout_s
        for attempt in attempts:
            attempt.over.wait(max(0.0, deadline - time.monotonic()))

    def _start_next(self, wanted_types: Callable[[JobSpec], list[str]]) -> None:
        context = self._context
        with self._lock:
            preparing = [one for one in self._attempts.values() if one.is_preparing]
        if any(not attempt.waits_for_units for attempt in preparing):
            return
        keeping = [attempt.priority for attempt in preparing if not attempt.waits_for_nodes]
        least = max(keeping, default=None)
        failed: list[Exception] = []
        for job_id in context.jobs.queued():
            status = context.jobs.get(job_id)
            if status is None or (least is not None and status.priority <= least):
                break
            try:
                if self._start(status, wanted_types):
                    break
            except StoreError:
                raise
            except Exception as error:
                failed.append(error)
                self._not_begun(job_id, error)
        if failed:
            raise ExceptionGroup("jobs that cannot be begun", failed)

    def _start(self, status: JobStatus, wanted_types: Callable[[JobSpec], list[str]]) -> bool:
        """Start a job that waits; False when it goes on waiting, and others may pass it."""
        context, job_id = self._context, status.job_id
        spec = context.store.spec(job_id)
        wanted = wanted_types(spec) if spec is not None else []
        if wanted and not set(context.nodes.units()).intersection(wanted):
            text = f"waits for a node of type {' or '.join(wanted)}"
            if status.reason != text:
                context.jobs.set_reason(job_id, text)
            return False
        with self._lock:
            waits = context.jobs.state(job_id) == QUEUED
            if self._closed or job_id in self._attempts or not waits:
                return False
            attempt = self._attempt(status, status.attempt + 1)
        start(attempt, self._may_reserve)
        self._failed.pop(job_id, None)
        return True

    def _not_begun(self, job_id: str, error: Exception) -> None:
        """Something is wrong with a job, or with us: try again, but not for ever."""
        self._failed[job_id] += 1
        if self._failed[job_id] >= _TRIES:
            del self._failed[job_id]
            self._context.jobs.end(job_id, ending_of(error))

    def _cancel_queued(self, job_id: str, ending: Ending) -> bool:
        """End a job that nothing is done for; False when something is."""
        with self._lock:
            attempt = self._attempts.get(job_id)
            if attempt is not None and not attempt.over.is_set():
                return False
            self._context.jobs.end(job_id, ending)
            return self._context.jobs.state(job_id) in TERMINAL

    def _give_up_left(self) -> None:
        """Have the jobs start over whose attempt broke without an end."""
        if self._closed:
            return
        for status in self._context.jobs.started():
            record = self._context.store.run(status.job_id) if self._is_left(status) else None
            with self._lock:
                if self._closed or not self._is_left(status):
                    continue
                attempt = self._attempt(status, status.attempt)
            attempt.give_up(status.state, record)
            start(attempt)

    def _is_left(self, status: JobStatus) -> bool:
        job_id = status.job_id
        return job_id not in self._attempts and self._context.jobs.state(job_id) == status.state

    def _attempt(self, status: JobStatus, number: int) -> Attempt:
        token = self._context.job_token(status.job_id)
        attempt_id = AttemptId(status.job_id, number, self._context.store.term, token)
        attempt = Attempt(attempt_id, self._context, status.priority)
        self._attempts[status.job_id] = attempt
        return attempt

    def _may_reserve(self, attempt: Attempt) -> bool:
        with self._lock:
            everybody = list(self._attempts.values())
        others = [one for one in everybody if one.waits_for_units and not one.waits_for_nodes]
        if any(other.priority > attempt.priority for other in others):
            return False
        lacking = [one for one in everybody if one.priority >= attempt.priority]
        nodes = self._context.nodes
        return not any(
            nodes.available(other.id.job_id, own=False).get(kind)
            for other in lacking
            for kind in other.lacking
        )

    def _end_late(self) -> None:
        """End the jobs that have run for longer than they may."""
        begun = self._context.jobs.begun()
        ids = {status.job_id for status in begun}
        self._deadlines = {job_id: s for job_id, s in self._deadlines.items() if job_id in ids}
        for_each(begun, self._end_if_late, at_once=(StoreError,))

    def _end_if_late(self, status: JobStatus) -> None:
        limit = self._limit(status)
        if not limit or time.time() - status.began_at < limit:
            return
        hours = limit / 3600
        text = f"it ran for longer than its deadline_hours, {hours:g}"
        ending = Ending(END_DEADLINE, text, error=text)
        attempt = self.get(status.job_id)
        if attempt is not None:
            attempt.cancel(ending)
            return
        with self._lock:
            if status.job_id not in self._attempts:
                self._context.jobs.end(status.job_id, ending)

    def _limit(self, status: JobStatus) -> float:
        """Seconds that a job may run, 0 for any."""
        job_id = status.job_id
        if job_id not in self._deadlines:
            spec = self._context.store.spec(job_id)
            self._deadlines[job_id] = spec.deadline_hours * 3600 if spec is not None else 0.0
        return self._deadlines[job_id]

    def _stop_orphans(self) -> None:
        """Stop processes of attempts that are not at work: left by a scheduler before us.

        They get as long as a lease first: workers hear from `Report` that they are to stop.
        """
        context, now = self._context, time.monotonic()
        orphans: dict[tuple[str, str], tuple[str, int]] = {}
        for node in context.nodes.live(registry.NODE):
            for process in node.processes:
                latest = self.get(process.job_id)
                if process.running and (latest is None or latest.id.number > process.attempt):
                    orphans[node.node_id, process.job_id] = node.address, process.attempt
        self._orphans = {key: self._orphans.get(key, now) for key in orphans}
        for (node_id, job_id), (address, number) in orphans.items():
            if now - self._orphans[node_id, job_id] < context.nodes.lease_s:
                continue
            self._orphans[node_id, job_id] = now
            _log.info("node %s still runs job %s: stopping it", node_id, job_id)
            attempt_id = AttemptId(job_id, number, context.store.term)
            threading.Thread(
                target=stop_job,
                args=(attempt_id, [address], context.channels, GRACE_S),
                daemon=True,
            ).start()
