"""One job from the queue to its end: profile, plan, reserve, start, follow, clean up."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from protos.decision_pb2 import Decision, Workload
from protos.job_pb2 import JobSpec
from protos.logs import log_scope
from protos.node_pb2 import SHARD
from protos.scheduler_pb2 import (
    END_CANCELLED,
    END_INFEASIBLE_PLAN,
    END_INTERNAL,
    END_INVALID_JOB,
    END_LOST_NODE,
    END_NO_CAPACITY,
    END_SCHEDULER_LOST,
    END_SUCCEEDED,
    PLANNING,
    PROFILING,
    RUNNING,
    STARTING,
    EndReason,
    JobState,
    JobStatus,
    NodeStatus,
    ProgressReport,
    RunRecord,
)
from scheduler import nodes as registry
from scheduler.calls import CallError, Channels, Interrupted, in_background
from scheduler.charge import Charge
from scheduler.endings import Ending, first_line, last_error, of_text
from scheduler.fields import InputError
from scheduler.follow import Follower
from scheduler.jobs import Jobs
from scheduler.launch import (
    LaunchError,
    begin,
    demand,
    drop_tables,
    launch,
    place,
    stop_job,
)
from scheduler.logs import JobLogs
from scheduler.measure import Measurement
from scheduler.nodes import Nodes
from scheduler.offer import (
    AbsentError,
    Offer,
    OfferError,
    given_workload,
    make_offer,
    profile,
    profiling_types,
)
from scheduler.placed import Attempt, Process
from scheduler.standing import watch
from scheduler.store import DeposedError, Store, StoreError

DEFAULT_METHOD = "ppo"
FINAL_PHASES = frozenset(("trained", "done", "failed"))
GRACE_S = 3.0
_KEEP_TRYING_S = 60.0
_RETURN_S = 60.0  # for lost nodes to be there again before the next attempt is planned
_STOP_TRYING_S = 15.0
_log = logging.getLogger("heterps.runner")


class JobError(RuntimeError):
    """The attempt cannot go on; `ending` says why."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.text)
        self.ending = ending


@dataclass(frozen=True, slots=True)
class Control:
    """What a run works with: the scheduler's other parts and its address."""

    store: Store
    jobs: Jobs
    nodes: Nodes
    channels: Channels
    address: str
    charge: Charge


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
        self.logs = JobLogs(job_id, self.number, control.store, control.channels)
        self.settled = threading.Event()  # it has its units or has ended: the next job may plan
        self.waiting = threading.Event()  # for units
        self.ended = threading.Event()
        self._control = control
        self._may_reserve = may_reserve
        self._lost = lost
        self._attempt = Attempt(job_id, self.number, control.store.term)
        self._cancel = threading.Event()
        self._abandoned = False
        self._ending = Ending(END_CANCELLED)
        self._follower: Follower | None = None
        self._processes: list[Process] = []
        self._decision = Decision()
        self._started_s = 0.0
        self._thread = threading.Thread(target=self._main, name=f"run {job_id}", daemon=True)
        if taken_over:
            self.settled.set()
        if record is not None:
            self._processes = [Process.of(placed) for placed in record.processes]
            self.logs.set_processes(self._processes)
            if not lost:
                self._take_up(record)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def cancel(self, ending: Ending | None = None) -> None:
        """Stop everything and end the job, unless it has ended; safe to repeat."""
        if not self._cancel.is_set():
            self._ending = ending or self._ending
            self._cancel.set()

    def abandon(self) -> None:
        """Let go of the job as it stands: another scheduler follows it on."""
        self._abandoned = True
        self._cancel.set()

    def report(self, report: ProgressReport) -> bool:
        """Take in a worker's report; whether the worker must stop.

        Raises:
            StoreError: a worker's last word could not be kept; it must be said again.
        """
        jobs, follower = self._control.jobs, self._follower
        if self._abandoned:
            raise StoreError("this scheduler is ending; another one takes over")
        if self._cancel.is_set() or self.ended.is_set() or report.attempt != self.number:
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
        follower = self._follower
        return follower.so_far()[0] if follower is not None else None

    def shards(self) -> list[tuple[str, str]]:
        """Label and address of the shards that the job runs on, once they listen."""
        found = [one for one in self._processes if one.role == SHARD and one.address]
        return [(one.label, one.address) for one in found]

    def _main(self) -> None:
        with log_scope(job=self.job_id):
            self._run_to_end()

    def _run_to_end(self) -> None:
        try:
            if self._lost:
                self._give_up()
            if self._follower is None:
                self._prepare()
            self._follow()
            ending = Ending(END_SUCCEEDED)
        except Interrupted:
            ending = self._ending
        except Exception as error:
            ending = _ending_of(error)
            if ending.reason == END_INTERNAL:
                _log.exception("job %s", self.job_id)
        if not self._abandoned and self._control.charge.settle():
            try:
                self._clean_up()
            except Exception:
                _log.exception("job %s: cleaning up", self.job_id)
            self._control.nodes.release(self.job_id)
            self._end(ending)
        self.settled.set()
        self.ended.set()

    def _end(self, ending: Ending) -> None:
        """End the job, or put it back into the queue, waiting for a Redis that is away."""
        if self._cancel.is_set() and ending.reason != END_SUCCEEDED:
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

    def _prepare(self) -> None:
        """From the queue to processes that train."""
        control = self._control
        spec = control.store.spec(self.job_id)
        if spec is None:
            text = "its specification is gone from Redis"
            raise JobError(Ending(END_INTERNAL, text, error=text))
        self._enter(PROFILING)
        # No other attempt may ever have this number: nodes know attempts by it.
        self._persist(lambda: control.jobs.write(self.job_id))
        if self.number > 1:
            self._await_nodes()
        offer = make_offer(spec, control.nodes.live(registry.NODE))
        if offer.note:
            _log.info("job %s: %s", self.job_id, offer.note)
        if spec.schedule.given.layers:
            workload = given_workload(spec, offer)
        else:
            workload = self._profile(spec, offer)
        self._enter(PLANNING)
        decision = self._decision = self._plan(spec, workload, offer)
        units = self._reserve(decision)
        self._enter(STARTING)
        self.settled.set()
        starting = time.monotonic()
        self._processes = place(self._attempt, spec, decision, units, control.nodes)
        self._processes = launch(
            self._attempt,
            spec,
            decision,
            self._processes,
            control.address,
            control.channels,
            self._cancel.is_set,
        )
        self.logs.set_processes(self._processes)
        self._started_s = time.monotonic() - starting
        record = RunRecord(
            attempt=self.number,
            processes=[process.to_message() for process in self._processes],
            units=[node.node_id for node in units],
            start_s=self._started_s,
        )
        self._persist(lambda: control.store.put_run(self.job_id, record))
        follower = Follower(self._processes, len(decision.stages), control.nodes, control.channels)
        self._follower = follower
        try:
            begin(self.job_id, self._processes, control.channels, self._cancel.is_set)
        except CallError as error:
            told = Ending(END_LOST_NODE, str(error), error=first_line(str(error)))
            found = follower.diagnose(self._cancel.is_set, told).ending
            raise JobError(found or told) from None
        self._enter(RUNNING)

    def _await_nodes(self) -> None:
        """Give nodes of the attempt before, which may be starting again, a while to come back."""
        nodes, jobs = self._control.nodes, self._control.jobs
        before = self._control.store.decision(self.job_id)
        if before is None:
            return
        counts = Counter(demand(before, nodes.live(registry.SHARD)))
        until = time.monotonic() + _RETURN_S

        def back() -> bool:
            alive = nodes.units()
            there = all(alive.get(kind, 0) >= count for kind, count in counts.items())
            return there or time.monotonic() > until

        if back():
            return
        jobs.change(self.job_id, lambda s: _say(s, "waits for nodes that have gone to come back"))
        self.waiting.set()
        try:
            if not nodes.wait_for(back, self._cancel.is_set):
                raise Interrupted
        finally:
            self.waiting.clear()
        jobs.change(self.job_id, lambda s: _say(s, ""))

    def _take_up(self, record: RunRecord) -> None:
        """Follow on where another scheduler stopped; before any worker is answered."""
        control = self._control
        self._decision = control.store.decision(self.job_id) or Decision()
        self._started_s = record.start_s
        for process in self._processes:
            control.nodes.presume(process.node)
        control.nodes.restore(self.job_id, record.units)
        stages = len(self._decision.stages)
        follower = Follower(self._processes, stages, control.nodes, control.channels)
        for report in control.store.finals(self.job_id):
            if report.attempt == self.number:
                follower.report(report)
        self._follower = follower

    def _follow(self) -> None:
        control, decision, follower = self._control, self._decision, self._follower
        assert follower is not None
        with watch(self.job_id, decision, follower.so_far, control.store, self._started_s):
            outcome = follower.follow(self._cancel.is_set)
        report = outcome.report
        if report is None:
            raise JobError(outcome.ending or Ending(END_INTERNAL, "it ended without a reason"))
        control.jobs.change(self.job_id, lambda status: _progress(status, report))
        decision.measured.CopyFrom(follower.measured(decision, report))
        self._keep(decision)

    def _give_up(self) -> None:
        """End an attempt of which too little is known to follow it on."""
        state = JobState.Name(self._lost).lower()
        text = f"the scheduler was restarted while the job was {state}"
        raise JobError(Ending(END_SCHEDULER_LOST, text, "scheduler", text))

    def _profile(self, spec: JobSpec, offer: Offer) -> Workload:
        """Measure on one free unit of each type that is to be measured."""
        nodes, owner = self._control.nodes, f"{self.job_id} (profiling)"
        kinds = profiling_types(offer)
        try:
            homes = self._wait_for_units(owner, kinds)
            return profile(
                self._attempt, spec, offer, homes, self._control.channels, self._cancel.is_set
            )
        finally:
            nodes.release(owner)

    def _plan(self, spec: JobSpec, workload: Workload, offer: Offer) -> Decision:
        from scheduler import plan  # brings NumPy and, for ppo, torch: only when it is needed

        schedule = spec.schedule

        def decide() -> Decision:
            return plan(
                workload,
                offer.resources,
                schedule.min_throughput or None,
                method=schedule.method or DEFAULT_METHOD,
                seed=spec.train.seed % 2**32,
                pin=dict(schedule.pin) or None,
                # A type that no live node has is out of reach anyhow.
                exclude=[kind for kind in schedule.exclude if kind not in offer.absent],
                max_price_per_hour=schedule.max_price_per_hour or None,
                finish_by=schedule.finish_by_hours or None,
            ).to_message()

        try:
            decision = in_background(decide, self._cancel.is_set)
        except InputError as error:
            text = "; ".join(filter(None, (str(error), offer.note)))
            raise JobError(Ending(END_INVALID_JOB, text, error=str(error))) from None
        self._keep(decision)
        if not decision.feasible:
            reason = f"no plan meets the job's demands: {decision.reason}"
            text = "; ".join(filter(None, (reason, offer.note)))
            raise JobError(Ending(END_INFEASIBLE_PLAN, text, error=first_line(reason)))
        return decision

    def _reserve(self, decision: Decision) -> list[NodeStatus]:
        return self._wait_for_units(
            self.job_id, demand(decision, self._control.nodes.live(registry.SHARD))
        )

    def _wait_for_units(self, owner: str, wanted: list[str]) -> list[NodeStatus]:
        """Reserve units, waiting for other jobs to give some back."""
        nodes, jobs = self._control.nodes, self._control.jobs
        got: list[NodeStatus] = []
        told = False

        def ready() -> bool:
            nonlocal told
            placed = nodes.reserve(owner, wanted) if self._may_reserve(self) else None
            if placed is not None:
                got.extend(placed)
                return True
            counts, alive = Counter(wanted), nodes.units()
            needs = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            for kind, count in counts.items():
                if alive.get(kind, 0) < count:
                    text = (
                        f"the plan needs {needs}, but only {alive.get(kind, 0)} units of "
                        f"{kind} are alive now: a node has gone since it was made"
                    )
                    raise JobError(Ending(END_NO_CAPACITY, text, error=text))
            if not told:
                told = True
                jobs.change(self.job_id, lambda s: _say(s, f"waits for {needs} to become free"))
            return False

        self.waiting.set()
        try:
            if not nodes.wait_for(ready, self._cancel.is_set):
                raise Interrupted
        finally:
            self.waiting.clear()
        if told:
            jobs.change(self.job_id, lambda status: _say(status, ""))
        return got

    def _enter(self, state: "JobState.ValueType") -> None:
        def edit(status: JobStatus) -> None:
            status.state, status.reason = state, ""
            if state == PROFILING:
                status.attempt = self.number
                status.began_at = status.began_at or time.time()
            if state == RUNNING:
                status.started_at = time.time()

        if self._cancel.is_set() or not self._control.jobs.change(self.job_id, edit):
            raise Interrupted

    def _keep(self, decision: Decision) -> None:
        """Write the decision, waiting for a Redis that is away."""
        self._persist(lambda: self._control.store.put_decision(self.job_id, decision))

    def _persist(self, write: Callable[[], None]) -> None:
        """Write, waiting for a Redis that is away."""
        until = time.monotonic() + _KEEP_TRYING_S
        while True:
            try:
                write()
                return
            except DeposedError:
                raise Interrupted from None
            except StoreError:
                if time.monotonic() > until:
                    raise
            if self._cancel.wait(1.0):
                raise Interrupted

    def _clean_up(self) -> None:
        """Stop what runs, on every node it may run on, and keep its logs."""
        control, processes = self._control, self._processes
        if self._lost:
            self._stop_everywhere()
        addresses = [p.node.address for p in processes if not p.standing]
        for silent in stop_job(self._attempt, addresses, control.channels, GRACE_S):
            _log.warning("%s", silent)
        standing = [p.address for p in processes if p.standing and p.address]
        for silent in drop_tables(self.job_id, standing, control.channels):
            _log.warning("%s", silent)
        self.logs.set_processes(processes)
        self.logs.keep()

    def _stop_everywhere(self) -> None:
        """Stop the attempt on every node that is alive, wherever it may have been started."""
        control, told = self._control, set[str]()
        until = time.monotonic() + _STOP_TRYING_S
        while time.monotonic() < until:
            left = {n.address for n in control.nodes.live(registry.NODE)} - told
            for address in sorted(left):
                if not stop_job(self._attempt, [address], control.channels, GRACE_S):
                    told.add(address)
            if left <= told:
                return
            time.sleep(0.5)


def _ending_of(error: Exception) -> Ending:
    """The ending that goes with an error on the way to the workers."""
    text = str(error)
    if isinstance(error, JobError | LaunchError):
        return error.ending
    if isinstance(error, CallError):
        reason: EndReason.ValueType = of_text(text) if error.refused else END_LOST_NODE
        lines = text.splitlines()
        return Ending(reason, text, "the profiler", last_error(lines), "\n".join(lines[-15:]))
    if isinstance(error, AbsentError):
        return Ending(END_NO_CAPACITY, text, error=text)
    if isinstance(error, OfferError | InputError):
        return Ending(END_INVALID_JOB, text, error=first_line(text))
    if not isinstance(error, StoreError):
        text = f"internal error: {type(error).__name__}: {error}"
    return Ending(END_INTERNAL, text, error=first_line(text))


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


def _say(status: JobStatus, text: str) -> None:
    status.reason = text
