"""The runs under way: who is next, what another scheduler left behind, what runs for nobody."""

import logging
import threading
import time
from collections.abc import Callable

from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_CANCELLED,
    END_DEADLINE,
    END_SCHEDULER_LOST,
    QUEUED,
    RUNNING,
    JobStatus,
)
from scheduler.runs.cleanup import GRACE_S
from scheduler.runs.context import Control
from scheduler.runs.launch import stop_job
from scheduler.runs.processes import Attempt
from scheduler.runs.run import Run
from scheduler.state import nodes as registry
from scheduler.state.endings import Ending

_log = logging.getLogger("heterps.runs")


class Runs:
    """The runs under way, and the rule of who is next.

    Jobs start by priority, within one first come, first served, as far as a node of one of their
    types is alive. One job at a time measures and plans, and one that waits for units keeps those
    behind it waiting, so that a large job gets its turn; a job of a higher priority overtakes it.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._closed = False
        self._deadlines: dict[str, float] = {}  # seconds a job may run, 0: any
        self._strangers: dict[tuple[str, str], float] = {}  # (node, job) -> when seen or told

    def resume(self) -> None:
        """Take up what another scheduler left: follow what trains, put the rest back.

        Call it before any worker is answered.

        Raises:
            StoreError
        """
        control = self._control
        for status in control.jobs.under_way():
            record = control.store.run(status.job_id)
            if status.state == RUNNING and record is not None and record.attempt == status.attempt:
                _log.info("job %s: followed on, attempt %d", status.job_id, status.attempt)
                run = Run(status.job_id, control, record=record)
            else:
                run = Run(status.job_id, control, record=record, lost=status.state)
            self._runs[status.job_id] = run
        for run in self._runs.values():
            run.start()

    def get(self, job_id: str) -> Run | None:
        """A job's run; None when it waits or has ended."""
        with self._lock:
            return self._runs.get(job_id)

    def step(self, wanted_types: Callable[[JobSpec], list[str]]) -> None:
        """Forget what has ended, start what may start, stop what nobody runs any more."""
        with self._lock:
            self._runs = {
                job_id: run for job_id, run in self._runs.items() if not run.ended.is_set()
            }
        self._end_late()
        if not self._closed and self._control.nodes.settled():
            self._start_next(wanted_types)
            self._stop_strangers()

    def cancel_queued(self, job_id: str) -> bool:
        """Cancel a job that has no run yet; False when it has one or has ended."""
        with self._lock:
            return job_id not in self._runs and self._control.jobs.end(
                job_id, Ending(END_CANCELLED)
            )

    def close(self, timeout_s: float, *, hand_over: bool) -> None:
        """End every run.

        Args:
            hand_over: leave the jobs as they are, for the next scheduler to take up; otherwise
                they fail, and their processes are stopped.
        """
        with self._lock:
            self._closed = True
            runs = list(self._runs.values())
        text = "the scheduler was stopped while the job ran"
        for run in runs:
            if hand_over:
                run.abandon()
            else:
                run.cancel(Ending(END_SCHEDULER_LOST, text, "scheduler", text))
        deadline = time.monotonic() + timeout_s
        for run in runs:
            run.ended.wait(max(0.0, deadline - time.monotonic()))

    def _start_next(self, wanted_types: Callable[[JobSpec], list[str]]) -> None:
        control = self._control
        with self._lock:
            planning = [run for run in self._runs.values() if not run.settled.is_set()]
        if any(not run.waiting.is_set() for run in planning):
            return
        least = max((run.priority for run in planning), default=None)
        alive = set(control.nodes.units())
        for job_id in control.jobs.queued():
            status = control.jobs.get(job_id)
            if status is None or (least is not None and status.priority <= least):
                return
            spec = control.store.spec(job_id)
            wanted = wanted_types(spec) if spec is not None else []
            if wanted and not alive.intersection(wanted):
                text = f"waits for a node of type {' or '.join(wanted)}"
                if status.reason != text:
                    control.jobs.change(job_id, lambda s, t=text: _say(s, t))  # type: ignore[misc]
                continue
            with self._lock:
                if self._closed or job_id in self._runs or control.jobs.state(job_id) != QUEUED:
                    continue
                run = self._runs[job_id] = Run(job_id, control, self._may_reserve)
            run.start()
            return

    def _may_reserve(self, run: Run) -> bool:
        with self._lock:
            others = [other for other in self._runs.values() if other.waiting.is_set()]
        return all(other.priority <= run.priority for other in others)

    def _end_late(self) -> None:
        """End the jobs that have run for longer than they may."""
        now = time.time()
        for status in self._control.jobs.begun():
            limit = self._limit(status)
            if not limit or now - status.began_at < limit:
                continue
            hours = limit / 3600
            text = f"it ran for longer than its deadline_hours, {hours:g}"
            ending = Ending(END_DEADLINE, text, error=text)
            run = self.get(status.job_id)
            if run is not None:
                run.cancel(ending)
            else:
                with self._lock:
                    if status.job_id not in self._runs:
                        self._control.jobs.end(status.job_id, ending)

    def _limit(self, status: JobStatus) -> float:
        """Seconds that a job may run, 0 for any."""
        job_id = status.job_id
        if job_id not in self._deadlines:
            spec = self._control.store.spec(job_id)
            self._deadlines[job_id] = spec.deadline_hours * 3600 if spec is not None else 0.0
        return self._deadlines[job_id]

    def _stop_strangers(self) -> None:
        """Stop processes of attempts that have no run: left over from a scheduler before us.

        They get as long as a lease first: workers hear from `Report` that they are to stop.
        """
        control, now = self._control, time.monotonic()
        strangers: dict[tuple[str, str], tuple[str, int]] = {}
        for node in control.nodes.live(registry.NODE):
            for process in node.processes:
                run = self.get(process.job_id)
                if process.running and (run is None or run.number > process.attempt):
                    strangers[node.node_id, process.job_id] = node.address, process.attempt
        self._strangers = {key: self._strangers.get(key, now) for key in strangers}
        for (node_id, job_id), (address, number) in strangers.items():
            if now - self._strangers[node_id, job_id] < control.nodes.lease_s:
                continue
            self._strangers[node_id, job_id] = now
            _log.info("node %s still runs job %s: stopping it", node_id, job_id)
            attempt = Attempt(job_id, number, control.store.term)
            threading.Thread(
                target=stop_job, args=(attempt, [address], control.channels, GRACE_S), daemon=True
            ).start()


def _say(status: JobStatus, text: str) -> None:
    status.reason = text
