"""One attempt at a job: who it is, the states it goes through, what it has on the nodes."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from protos import scheduler_pb2 as pb
from protos.decision_pb2 import Decision
from protos.generations import keeps_cuts
from protos.job_pb2 import JobSpec
from protos.node_pb2 import SHARD
from scheduler.problem.threads import node_units
from scheduler.replanning.measure import Measurement
from scheduler.runs.beginning import Beginning, descended, leads_cuts
from scheduler.runs.calls import Interrupted
from scheduler.runs.change import Change
from scheduler.runs.context import Context
from scheduler.runs.follow import Follower
from scheduler.runs.logs import JobLogs
from scheduler.runs.processes import AttemptId, Process
from scheduler.runs.progress import forget_validated, take_progress
from scheduler.runs.record import Record
from scheduler.runs.recoveries import note_beginning, note_recovery
from scheduler.runs.sharing import note, sharing
from scheduler.runs.states import NEXT, OF_JOB, State
from scheduler.state.endings import Ending, may_retry
from scheduler.state.store import DeposedError, StoreError, TransitionError

R = TypeVar("R")
_PAUSE_S = 1.0
_log = logging.getLogger("heterps.runner")
FINAL_PHASES = frozenset(("trained", "done", "failed"))


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
        record: of its processes, as another scheduler finds it.
        started_s: seconds that they took to start.
        lacking: types of units that it lacks, so that its workers share some: the next are its.
        running_at: since when it is RUNNING, by time.monotonic(); None: it is not yet.
        follower: of the processes; None until they are started.
        change: that is under way.
    """

    def __init__(self, attempt_id: AttemptId, context: Context, priority: int = 0) -> None:
        job_id = attempt_id.job_id
        self.id = attempt_id
        self.priority = priority
        self.context = context
        self.logs = JobLogs(attempt_id, context.store, context.channels)
        self.over = threading.Event()
        self.waits_for_units = False
        self.waits_for_nodes = False
        self.may_run_unseen = False
        self._decision = Decision()
        self.beginning = Beginning()
        self.started_s = 0.0
        self.lacking: frozenset[str] = frozenset()
        self.running_at: float | None = None
        self.follower: Follower | None = None
        self.record = Record(self._put_run, lambda units: context.nodes.restore(job_id, units))
        self.change: Change | None = None
        self._state = State.NEW
        self._had_units = False
        self._cancelled = threading.Event()
        self._ending = Ending(pb.END_CANCELLED)
        self._handed_over = False

    @property
    def decision(self) -> Decision:
        """What it runs by."""
        return self._decision

    @decision.setter
    def decision(self, decision: Decision) -> None:
        # Units that it reserves, and gives back, are those of its plan from here on.
        self.context.nodes.size(self.id.job_id, node_units(decision.resources.types))
        self._decision = decision

    @property
    def processes(self) -> list[Process]:
        """Of the job, once they are placed."""
        return self.record.processes

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
        if state is State.RUNNING:
            self.running_at = time.monotonic()
        if state in (State.STARTING, State.RUNNING):
            self._had_units = True
        if not NEXT[state]:
            self.over.set()

    def enter(self, state: State) -> None:
        """Come to a state that is also one of the job.

        Raises:
            Interrupted: the job is cancelled or has ended.
            TransitionError: it cannot come next.
        """
        self._check(state)

        def edit(status: pb.JobStatus) -> None:
            status.state, status.reason = OF_JOB[state], ""
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
        status = self.context.jobs.get(self.id.job_id)
        if state is State.RUNNING and status is not None:
            note_beginning(self.context.store, status, {s.type for s in self.decision.stages})

    def take_up(self, record: pb.RunRecord) -> None:
        """Follow on where another scheduler stopped; before any worker is answered."""
        context = self.context
        self._place(record)
        status = context.jobs.get(self.id.job_id) or pb.JobStatus()
        self.beginning = Beginning(status.from_step, status.from_samples)
        decision = context.store.decision(self.id.job_id) or Decision()
        if record.HasField("decision"):  # the job's may not have been written any more
            decision.CopyFrom(record.decision)
            context.store.put_decision(self.id.job_id, decision)
        self.decision = decision
        self.started_s = record.start_s
        for process in self.processes:
            context.nodes.presume(process.node)
        context.nodes.restore(self.id.job_id, record.units)
        follower = self.new_follower()
        for report in context.store.finals(self.id.job_id):
            if report.attempt == self.id.number:
                follower.report(report)
        self.follower = follower
        self._note_shares()
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
        # Also when it is cancelled: others may go on from them.
        if leads_cuts(report, self.record.generation):
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
        """Make a worker's progress that of the job; of others than its workers only the end."""

        def edit(status: pb.JobStatus) -> None:
            if report.generation == self.record.generation or report.phase == "done":
                take_progress(status, report)

        self.context.jobs.change(self.id.job_id, edit)

    def is_due(self) -> bool:
        """Whether a change is to be taken further, or workers wait to be told to go on."""
        change, follower = self.change, self.follower
        paused = follower is not None and follower.paused is not None
        return paused or (change is not None and change.is_due)

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

    def spec(self) -> JobSpec | None:
        """What its owner submitted; waits for a Redis that is away, None where that has lost it.

        Raises:
            Interrupted: as of `persist`.
        """
        return self.persist(lambda: self.context.store.spec(self.id.job_id))

    def former(self) -> list[int]:
        """The last generation of each attempt before."""
        status = self.context.jobs.get(self.id.job_id)
        return [earlier.generation for earlier in status.attempts] if status is not None else []

    def run(self, processes: Sequence[Process], units: Sequence[str]) -> None:
        """Keep what another scheduler needs to follow the processes.

        Args:
            units: node ids, one for each unit that the job holds.
        """
        self.logs.set_processes(processes)
        message = pb.RunRecord(
            attempt=self.id.number,
            units=units,
            start_s=self.started_s,
            resumed=bool(self.beginning.place),
            samples=self.beginning.samples,
        )
        self.record.begin(message, processes)

    def go_over(
        self,
        decision: Decision,
        processes: Sequence[Process],
        move: pb.Move,
        for_shards: Sequence[str] | None = None,
    ) -> None:
        """Be of another plan, with its workers, from a cut on.

        Args:
            move: what is to be told of it.
            for_shards: as of `Record.go_over`.
        """
        self.decision = decision
        self.record.go_over(decision, processes, move, for_shards)
        self.logs.add_processes(processes)
        self.keep(decision)
        self._note_shares()

    def forget_cuts(self) -> None:
        """A job that has its model keeps no cuts that it only moved by."""
        job_id = self.id.job_id
        status = self.context.jobs.get(job_id)
        if status is None or not status.cuts:
            return
        spec = self.spec()
        if spec is not None and not keeps_cuts(spec):
            self.persist(lambda: self.context.jobs.take_cuts(job_id, []))

    def place(self, processes: Sequence[Process], for_shards: Sequence[str] = ()) -> None:
        """Note the processes of a new generation, before its workers are told to go on.

        Args:
            for_shards: as of `Record.place`.
        """
        self.record.place(processes, for_shards)
        self.logs.add_processes(processes)
        self._note_shares()

    def go_on(self, samples: int) -> None:
        """All workers of the generation were told to go on.

        Args:
            samples: trained until then.
        """
        assert self.follower is not None
        stages = len(self.decision.stages)
        self.follower.follow_others(self.processes, self.record.generation, samples, stages)
        self.record.go_on(samples)

    @property
    def step(self) -> int:
        """How many steps are over, as workers have told."""
        status = self.context.jobs.get(self.id.job_id)
        return status.step if status is not None else 0

    def may_recover(self, ending: Ending) -> bool:
        """Whether workers lost for that reason may be replaced, for one of `retries`."""
        status = self.context.jobs.get(self.id.job_id)
        return status is not None and may_retry(status, ending)

    def recovered(self, recovery: pb.Recovery, kinds: Iterable[str], samples: int) -> None:
        """Tell the job's owner of workers that were replaced, and note how long it took.

        Args:
            kinds: types of the units that were lost.
            samples: trained until the step that all went on from.
        """

        def edit(status: pb.JobStatus) -> None:
            status.recoveries.append(recovery)
            if recovery.back:
                status.step, status.samples = recovery.step, samples
                forget_validated(status)

        self.context.jobs.change(self.id.job_id, edit)
        note_recovery(self.context.store, self.id.job_id, recovery, kinds)

    def _note_shares(self) -> None:
        """Tell the job's owner which workers have no unit of their own."""
        status = self.context.jobs.get(self.id.job_id)
        told = status.shares if status is not None else ()
        if sharing(self.processes) or any(not one.until for one in told):
            now, number = time.time(), self.id.number
            self.context.jobs.change(
                self.id.job_id,
                lambda status: note(status, self.processes, self.decision, number, now),
            )

    def _put_run(self, message: pb.RunRecord) -> None:
        self.persist(lambda: self.context.store.put_run(self.id.job_id, message))

    def new_follower(self) -> Follower:
        """A follower of the processes as they are now; not yet the attempt's."""
        nodes, channels = self.context.nodes, self.context.channels
        stages, samples = len(self.decision.stages), self.record.samples
        return Follower(self.processes, stages, nodes, channels, samples, self.record.generation)

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
        if state not in NEXT[self._state]:
            raise TransitionError(
                f"job {self.id.job_id}: attempt {self.id.number} cannot go from "
                f"{self._state.name} to {state.name}"
            )

    def _place(self, record: pb.RunRecord) -> None:
        self.record.take_up(record)
        self.logs.set_processes(self.processes)
