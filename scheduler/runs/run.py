"""One job's run: prepared, followed to its end, cleaned up."""

import logging
import threading
import time
from collections.abc import Callable

from chassis.logs import log_scope
from protos.decision_pb2 import Decision
from protos.node_pb2 import SHARD
from protos.scheduler_pb2 import (
    END_CANCELLED,
    END_INTERNAL,
    END_SCHEDULER_LOST,
    END_SUCCEEDED,
    RUNNING,
    STARTING,
    JobState,
    JobStatus,
    ProgressReport,
    RunRecord,
)
from scheduler.replanning.measure import Measurement
from scheduler.runs.attempt import Underway
from scheduler.runs.calls import Interrupted
from scheduler.runs.cleanup import clean_up
from scheduler.runs.context import Control
from scheduler.runs.failures import JobError, ending_of
from scheduler.runs.prepare import Preparation
from scheduler.runs.processes import Process
from scheduler.runs.watch import watch
from scheduler.state.endings import Ending
from scheduler.state.store import DeposedError, StoreError

FINAL_PHASES = frozenset(("trained", "done", "failed"))
_log = logging.getLogger("heterps.runner")


class Run:
    """One attempt at a job, on a thread of its own.

    Args:
        may_reserve: whether no job of a higher priority waits for units.
        record: of a run that another scheduler started and this one follows on.
        lost: the state that another scheduler left the job in, where it cannot be followed on:
            what runs of it is stopped, and the job goes back to the queue.
    """

    def __init__(
        self,
        job_id: str,
        control: Control,
        may_reserve: "Callable[[Run], bool]" = lambda run: True,
        *,
        record: RunRecord | None = None,
        lost: "JobState.ValueType" = JobState.JOB_UNSPECIFIED,
    ) -> None:
        status = control.jobs.get(job_id) or JobStatus()
        self.job_id = job_id
        self.priority = status.priority
        taken_over = record is not None or bool(lost)
        self.number = status.attempt if taken_over else status.attempt + 1
        self._underway = Underway(job_id, self.number, control)
        self.logs = self._underway.logs
        self.settled = self._underway.settled
        self.waiting = self._underway.waiting
        self.ended = threading.Event()
        self._control = control
        self._may_reserve = may_reserve
        self._lost = lost
        self._abandoned = False
        self._ending = Ending(END_CANCELLED)
        self._thread = threading.Thread(target=self._main, name=f"run {job_id}", daemon=True)
        if taken_over:
            self.settled.set()
        if record is not None:
            self._underway.processes = [Process.of(placed) for placed in record.processes]
            self.logs.set_processes(self._underway.processes)
            if not lost:
                self._take_up(record)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def cancel(self, ending: Ending | None = None) -> None:
        """Stop everything and end the job, unless it has ended; safe to repeat."""
        if not self._underway.cancelled.is_set():
            self._ending = ending or self._ending
            self._underway.cancelled.set()

    def abandon(self) -> None:
        """Let go of the job as it stands: another scheduler follows it on."""
        self._abandoned = True
        self._underway.cancelled.set()

    def report(self, report: ProgressReport) -> bool:
        """Take in a worker's report; whether the worker must stop.

        Raises:
            StoreError: a worker's last word could not be kept; it must be said again.
        """
        jobs, underway = self._control.jobs, self._underway
        follower = underway.follower
        if self._abandoned:
            raise StoreError("this scheduler is ending; another one takes over")
        over = underway.cancelled.is_set() or self.ended.is_set()
        if over or report.attempt != self.number:
            return True
        if follower is None or jobs.state(self.job_id) not in (STARTING, RUNNING):
            return follower is not None
        if report.phase in FINAL_PHASES:
            self._control.store.put_final(report)
        if follower.report(report):
            jobs.change(self.job_id, lambda status: _progress(status, report))
        return False

    def measurement(self) -> Measurement | None:
        """What the run was measured to take so far; None before it trains."""
        follower = self._underway.follower
        return follower.so_far()[0] if follower is not None else None

    def shards(self) -> list[tuple[str, str]]:
        """Label and address of the shards that the job runs on, once they listen."""
        found = [one for one in self._underway.processes if one.role == SHARD and one.address]
        return [(one.label, one.address) for one in found]

    def _main(self) -> None:
        with log_scope(job=self.job_id):
            self._run_to_end()

    def _run_to_end(self) -> None:
        try:
            if self._lost:
                self._give_up()
            if self._underway.follower is None:
                Preparation(self._underway, lambda: self._may_reserve(self)).run()
            self._follow()
            ending = Ending(END_SUCCEEDED)
        except Interrupted:
            ending = self._ending
        except Exception as error:
            ending = ending_of(error)
            if ending.reason == END_INTERNAL:
                _log.exception("job %s", self.job_id)
        if not self._abandoned and self._control.charge.settle():
            try:
                clean_up(self._underway, everywhere=bool(self._lost))
            except Exception:
                _log.exception("job %s: cleaning up", self.job_id)
            self._control.nodes.release(self.job_id)
            self._end(ending)
        self.settled.set()
        self.ended.set()

    def _end(self, ending: Ending) -> None:
        """End the job, or put it back into the queue, waiting for a Redis that is away."""
        if self._underway.cancelled.is_set() and ending.reason != END_SUCCEEDED:
            ending = self._ending
        while not self._abandoned:
            try:
                if not self._control.jobs.retry(self.job_id, ending):
                    self._control.jobs.end(self.job_id, ending)
                return
            except DeposedError:
                return
            except StoreError as error:
                _log.warning("job %s: %s; trying on", self.job_id, error)
                time.sleep(1.0)

    def _take_up(self, record: RunRecord) -> None:
        """Follow on where another scheduler stopped; before any worker is answered."""
        control, underway = self._control, self._underway
        underway.decision = control.store.decision(self.job_id) or Decision()
        underway.started_s = record.start_s
        for process in underway.processes:
            control.nodes.presume(process.node)
        control.nodes.restore(self.job_id, record.units)
        follower = underway.new_follower()
        for report in control.store.finals(self.job_id):
            if report.attempt == self.number:
                follower.report(report)
        underway.follower = follower

    def _follow(self) -> None:
        control, underway = self._control, self._underway
        decision, follower = underway.decision, underway.follower
        assert follower is not None
        with watch(self.job_id, decision, follower.so_far, control.store, underway.started_s):
            outcome = follower.follow(underway.cancelled.is_set)
        report = outcome.report
        if report is None:
            raise JobError(outcome.ending or Ending(END_INTERNAL, "it ended without a reason"))
        control.jobs.change(self.job_id, lambda status: _progress(status, report))
        decision.measured.CopyFrom(follower.measured(decision, report))
        underway.keep(decision)

    def _give_up(self) -> None:
        """End an attempt of which too little is known to follow it on."""
        state = JobState.Name(self._lost).lower()
        text = f"the scheduler was restarted while the job was {state}"
        raise JobError(Ending(END_SCHEDULER_LOST, text, "scheduler", text))


def _progress(status: JobStatus, report: ProgressReport) -> None:
    status.phase = report.phase
    status.step = max(status.step, report.step)
    status.total_steps = report.total_steps or status.total_steps
    status.samples = max(status.samples, report.samples)
    if report.loss:
        status.loss = report.loss
    if report.samples_per_s:
        status.samples_per_s = report.samples_per_s
    status.metrics.update(report.metrics)
    status.output = report.output or status.output
