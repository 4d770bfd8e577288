"""One attempt at a job: who it is, the states it goes through, what it has on the nodes."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import TypeVar

from protos import scheduler_pb2 as pb
from protos.decision_pb2 import Decision
from protos.node_pb2 import SHARD
from scheduler.replanning.measure import Measurement
from scheduler.runs.beginning import Beginning, descended, leads_cuts
from scheduler.runs.calls import Interrupted
from scheduler.runs.context import Context
from scheduler.runs.follow import Follower
from scheduler.runs.logs import JobLogs
from scheduler.runs.processes import AttemptId, Process
from scheduler.state.endings import Ending, may_retry
from scheduler.state.store import DeposedError, StoreError, TransitionError

R = TypeVar("R")
_PAUSE_S = 1.0
_log = logging.getLogger("heterps.runner")
FINAL_PHASES = frozenset(("trained", "done", "failed"))


class State(Enum):
    """How far an attempt has come."""

    NEW = auto()
    PROFILING = auto()
    PLANNING = auto()
    STARTING = auto()
    RUNNING = auto()
    STOPPING = auto()
    ENDED = auto()
    HANDED_OVER = auto()


_NEXT = {
    State.NEW: {State.PROFILING, State.RUNNING, State.STOPPING, State.HANDED_OVER},
    State.PROFILING: {State.PLANNING, State.STOPPING, State.HANDED_OVER},
    State.PLANNING: {State.STARTING, State.STOPPING, State.HANDED_OVER},
    State.STARTING: {State.RUNNING, State.STOPPING, State.HANDED_OVER},
    State.RUNNING: {State.STOPPING, State.HANDED_OVER},
    State.STOPPING: {State.ENDED, State.HANDED_OVER},
    State.ENDED: set[State](),
    State.HANDED_OVER: set[State](),
}
_OF_JOB = {
    State.PROFILING: pb.PROFILING,
    State.PLANNING: pb.PLANNING,
    State.STARTING: pb.STARTING,
    State.RUNNING: pb.RUNNING,
}


class Attempt:
    """One attempt at a job.

    | state | meanwhile | next |
    |---|---|---|
    | NEW | nothing is asked of any node yet | PROFILING; taken over: RUNNING or STOPPING |
    | PROFILING | its layers are measured | PLANNING |
    | PLANNING | a plan is made and its units are waited for | STARTING |
    | STARTING | it has its units; its processes are started | RUNNING |
    | RUNNING | it is told to train, and trains | STOPPING |
    | STOPPING | what runs of it is stopped, its logs are kept, its end is written | ENDED |
    | ENDED | its job has ended, or is in the queue again | |
    | HANDED_OVER | another scheduler has it, as it was | |

    STOPPING and HANDED_OVER may also come next after every state that is not final. One thread
    moves it on; `cancel` and `hand_over`, from any thread, only ask for that.

    Attributes:
        over: set once it is ENDED or HANDED_OVER.
        waits_for_units: while it is PROFILING or PLANNING, for other jobs to give some back or
            for nodes to come back.
        waits_for_nodes: it is nodes that it waits for, so it keeps no job behind it waiting.
        may_run_unseen: whether nodes may have been asked to start it without our knowing.
        decision: empty until there is a plan.
        beginning: the cut that it begins with, if any.
        processes: of the job, once they are placed.
        started_s: seconds that they took to start.
        follower: of the processes; None until they are started.
    """

    def __init__(self, attempt_id: AttemptId, context: Context, priority: int = 0) -> None:
        self.id = attempt_id
        self.priority = priority
        self.context = context
        self.logs = JobLogs(attempt_id, context.store, context.channels)
        self.over = threading.Event()
        self.waits_for_units = False
        self.waits_for_nodes = False
        self.may_run_unseen = False
        self.decision = Decision()
        self.beginning = Beginning()
        self.processes: list[Process] = []
        self.started_s = 0.0
        self.follower: Follower | None = None
        self._record = pb.RunRecord()
        self._state = State.NEW
        self._had_units = False
        self._cancelled = threading.Event()
        self._ending = Ending(pb.END_CANCELLED)
        self._handed_over = False

    @property
    def state(self) -> State:
        """How far it has come."""
        return self._state

    @property
    def is_preparing(self) -> bool:
        """Whether it is on its way to its units, or still tidies up without: no equal job plans."""
        return not self._had_units and not self.over.is_set()

    def move(self, state: State) -> None:
        """Come to a state.

        Raises:
            TransitionError: it cannot come next.
        """
        self._check(state)
        self._state = state
        if state in (State.STARTING, State.RUNNING):
            self._had_units = True
        if not _NEXT[state]:
            self.over.set()

    def enter(self, state: State) -> None:
        """Come to a state that is also one of the job.

        Raises:
            Interrupted: the job is cancelled or has ended.
            TransitionError: it cannot come next.
        """
        self._check(state)

        def edit(status: pb.JobStatus) -> None:
            status.state, status.reason = _OF_JOB[state], ""
            if state is State.PROFILING:
                status.attempt = self.id.number
                status.began_at = status.began_at or time.time()
                status.step = status.from_step = self.beginning.step
                status.samples = status.from_samples = self.beginning.samples
            if state is State.RUNNING:
                status.started_at = time.time()

        if self.is_cancelled() or not self.context.jobs.change(self.id.job_id, edit):
            raise Interrupted
        self.move(state)

    def take_up(self, record: pb.RunRecord) -> None:
        """Follow on where another scheduler stopped; before any worker is answered."""
        context = self.context
        self._place(record)
        status = context.jobs.get(self.id.job_id) or pb.JobStatus()
        self.beginning = Beginning(status.from_step, status.from_samples)
        self.decision = context.store.decision(self.id.job_id) or Decision()
        self.started_s = record.start_s
        for process in self.processes:
            context.nodes.presume(process.node)
        context.nodes.restore(self.id.job_id, record.units)
        follower = self.new_follower()
        for report in context.store.finals(self.id.job_id):
            if report.attempt == self.id.number:
                follower.report(report)
        self.follower = follower
        self.move(State.RUNNING)

    def give_up(self, state: "pb.JobState.ValueType", record: pb.RunRecord | None) -> None:
        """Stop what another scheduler left in `state`, of which too little is known."""
        if record is not None:
            self._place(record)
        text = f"the scheduler was restarted while the job was {pb.JobState.Name(state).lower()}"
        self._ending = Ending(pb.END_SCHEDULER_LOST, text, "scheduler", text)
        self.may_run_unseen = True
        self.move(State.STOPPING)

    def cancel(self, ending: Ending | None = None) -> None:
        """Stop everything and end the job, unless it has ended; safe to repeat."""
        if not self.is_cancelled():
            self._ending = ending or Ending(pb.END_CANCELLED)
            self._cancelled.set()

    def hand_over(self) -> None:
        """Let go of the job as it stands: another scheduler follows it on."""
        self._handed_over = True
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        """Whether everybody has to stop."""
        return self._cancelled.is_set()

    @property
    def is_handed_over(self) -> bool:
        """Whether what is left to do is another scheduler's."""
        return self._handed_over

    @property
    def ending(self) -> Ending:
        """How it ends when it is cancelled or given up."""
        return self._ending

    def report(self, report: pb.ProgressReport) -> bool:
        """Take in a worker's report; whether the worker must stop.

        Raises:
            StoreError: a worker's last word could not be kept; it must be said again.
        """
        jobs, follower = self.context.jobs, self.follower
        if self._handed_over:
            raise StoreError("this scheduler is ending; another one takes over")
        if report.attempt != self.id.number:
            return True
        if leads_cuts(report):  # also of one that is cancelled: others may go on from them
            with suppress(TransitionError):  # a Redis that lost the job
                cuts = descended(report, self.beginning)
                jobs.take_cuts(self.id.job_id, cuts, report.cuts.failed[:1000])
        if self.is_cancelled() or self.over.is_set():
            return True
        if follower is None or jobs.state(self.id.job_id) not in (pb.STARTING, pb.RUNNING):
            return follower is not None
        if report.phase in FINAL_PHASES:
            self.context.store.put_final(report)
        if follower.report(report):
            self.add_progress(report)
        return False

    def add_progress(self, report: pb.ProgressReport) -> None:
        """Make a worker's progress that of the job."""
        self.context.jobs.change(self.id.job_id, lambda status: _progress(status, report))

    def set_reason(self, text: str) -> None:
        """Tell the job's owner why it does not go on; "": it does."""
        self.context.jobs.set_reason(self.id.job_id, text)

    def measurement(self) -> Measurement | None:
        """What it was measured to take so far; None before it trains."""
        return self.follower.so_far()[0] if self.follower is not None else None

    def shards(self) -> list[tuple[str, str]]:
        """Label and address of the shards that the job runs on, once they listen."""
        found = [one for one in self.processes if one.role == SHARD and one.address]
        return [(one.label, one.address) for one in found]

    @property
    def generation(self) -> int:
        """Of its workers."""
        return self._record.generation

    def former(self) -> list[int]:
        """The last generation of each attempt before."""
        status = self.context.jobs.get(self.id.job_id)
        return [earlier.generation for earlier in status.attempts] if status is not None else []

    @property
    def is_regrouping(self) -> bool:
        """Whether not all workers of this generation were told to go on."""
        return self._record.regrouping

    def run(self, processes: Sequence[Process], units: Sequence[str]) -> None:
        """Keep what another scheduler needs to follow the processes.

        Args:
            units: node ids, one for each unit that the job holds.
        """
        self.processes = list(processes)
        self.logs.set_processes(self.processes)
        self._record = pb.RunRecord(attempt=self.id.number, units=units, start_s=self.started_s)
        self._keep_run()

    def next_generation(self) -> int:
        """The number of another generation of workers, which nobody else will have."""
        self._record.generation += 1
        self._record.regrouping = True
        self._keep_run()
        return self._record.generation

    def move_unit(self, old: str, new: str) -> None:
        """Give back a unit of one node, for one of another that was reserved."""
        self._record.units.append(new)
        if old in self._record.units:
            self._record.units.remove(old)
            self.context.nodes.give_back(self.id.job_id, [old])

    def place(self, processes: Sequence[Process]) -> None:
        """Note the workers of a new generation, before they are told to go on."""
        self.processes = list(processes)
        self.logs.add_processes(self.processes)
        self._keep_run()

    def go_on(self) -> None:
        """All workers of the generation were told to go on."""
        assert self.follower is not None
        self.follower.follow_others(self.processes, self.generation)
        self._record.regrouping = False
        self._keep_run()

    def may_recover(self, ending: Ending) -> bool:
        """Whether workers lost for that reason may be replaced, for one of `retries`."""
        status = self.context.jobs.get(self.id.job_id)
        return status is not None and may_retry(status, ending)

    def recovered(self, recovery: pb.Recovery) -> None:
        """Tell the job's owner of workers that were replaced."""
        self.context.jobs.change(self.id.job_id, lambda status: status.recoveries.append(recovery))

    def _keep_run(self) -> None:
        del self._record.processes[:]
        self._record.processes.extend(process.to_message() for process in self.processes)
        self.persist(lambda: self.context.store.put_run(self.id.job_id, self._record))

    def new_follower(self) -> Follower:
        """A follower of the processes as they are now; not yet the attempt's."""
        nodes, channels = self.context.nodes, self.context.channels
        stages, samples = len(self.decision.stages), self.beginning.samples
        return Follower(self.processes, stages, nodes, channels, samples, self.generation)

    def keep(self, decision: Decision) -> None:
        """Write the decision, waiting for a Redis that is away."""
        self.persist(lambda: self.context.store.put_decision(self.id.job_id, decision))

    def persist(self, action: Callable[[], R]) -> R:
        """Write to Redis, or read from it, waiting for one that is away.

        Raises:
            Interrupted: the job is cancelled, or another scheduler has taken over.
        """
        while True:
            try:
                return action()
            except DeposedError:
                raise Interrupted from None
            except StoreError as error:
                _log.warning("job %s: %s; trying on", self.id.job_id, error)
            if self._cancelled.wait(_PAUSE_S):
                raise Interrupted

    def _check(self, state: State) -> None:
        if state not in _NEXT[self._state]:
            raise TransitionError(
                f"job {self.id.job_id}: attempt {self.id.number} cannot go from "
                f"{self._state.name} to {state.name}"
            )

    def _place(self, record: pb.RunRecord) -> None:
        self._record.CopyFrom(record)
        self.processes = [Process.of(placed) for placed in record.processes]
        self.logs.set_processes(self.processes)


def _progress(status: pb.JobStatus, report: pb.ProgressReport) -> None:
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
