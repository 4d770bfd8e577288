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
    CANCELLED,
    FAILED,
    PLANNING,
    PROFILING,
    RUNNING,
    STARTING,
    SUCCEEDED,
    JobState,
    JobStatus,
    NodeStatus,
    ProgressReport,
)
from scheduler import nodes as registry
from scheduler.calls import CallError, Channels, Interrupted, in_background
from scheduler.fields import InputError
from scheduler.follow import Follower
from scheduler.jobs import Jobs
from scheduler.launch import (
    LaunchError,
    Process,
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
    Offer,
    OfferError,
    given_workload,
    make_offer,
    profile,
    profiling_types,
)
from scheduler.standing import watch
from scheduler.store import TERMINAL, Store, StoreError

DEFAULT_METHOD = "ppo"
_GRACE_S = 3.0
_KEEP_TRYING_S = 60.0
_log = logging.getLogger("heterps.runner")


class JobError(RuntimeError):
    """The job cannot go on; the message is the reason its owner reads."""


@dataclass(frozen=True, slots=True)
class Control:
    """What a run works with: the scheduler's other parts and its address."""

    store: Store
    jobs: Jobs
    nodes: Nodes
    channels: Channels
    address: str


class Run:
    """Runs one job on a thread of its own."""

    def __init__(self, job_id: str, control: Control) -> None:
        self.job_id = job_id
        self.logs = JobLogs(job_id, control.store, control.channels)
        self.settled = threading.Event()  # it has its units or has ended: the next job may plan
        self.ended = threading.Event()
        self._control = control
        self._cancel = threading.Event()
        self._end_state: JobState.ValueType = CANCELLED
        self._end_reason = ""
        self._follower: Follower | None = None
        self._processes: list[Process] = []
        self._thread = threading.Thread(target=self._main, name=f"run {job_id}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def cancel(self, state: "JobState.ValueType" = CANCELLED, reason: str = "") -> None:
        """Stop everything and end the job in `state`, unless it has ended; safe to repeat."""
        if not self._cancel.is_set():
            self._end_state, self._end_reason = state, reason
            self._cancel.set()

    def report(self, report: ProgressReport) -> bool:
        """Take in a worker's report; whether the worker must stop."""
        jobs, follower = self._control.jobs, self._follower
        if self._cancel.is_set() or self.ended.is_set():
            return True
        if follower is None or jobs.state(self.job_id) not in (STARTING, RUNNING):
            return follower is not None
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
        state: JobState.ValueType = FAILED
        reason = ""
        try:
            self._run()
            state = SUCCEEDED
        except Interrupted:
            state, reason = self._end_state, self._end_reason
        except (JobError, LaunchError, CallError, OfferError, InputError, StoreError) as error:
            reason = str(error)
        except Exception as error:
            _log.exception("job %s", self.job_id)
            reason = f"internal error: {type(error).__name__}: {error}"
        try:
            self._clean_up(self._processes)
        except Exception:
            _log.exception("job %s: cleaning up", self.job_id)
        self._control.nodes.release(self.job_id)
        self._control.jobs.end(self.job_id, state, reason)
        self.settled.set()
        self.ended.set()

    def _run(self) -> None:
        control = self._control
        spec = control.store.spec(self.job_id)
        if spec is None:
            raise JobError("its specification is gone from Redis")
        self._enter(PROFILING)
        offer = make_offer(spec, control.nodes.live(registry.NODE))
        if offer.note:
            _log.info("job %s: %s", self.job_id, offer.note)
        if spec.schedule.given.layers:
            workload = given_workload(spec, offer)
        else:
            workload = self._profile(spec, offer)
        self._enter(PLANNING)
        decision = self._plan(spec, workload, offer)
        units = self._reserve(decision)
        self._enter(STARTING)
        self.settled.set()
        starting = time.monotonic()
        self._processes = place(self.job_id, spec, decision, units, control.nodes)
        self._processes = launch(
            self.job_id,
            spec,
            decision,
            self._processes,
            control.address,
            control.channels,
            self._cancel.is_set,
        )
        self.logs.set_processes(self._processes)
        follower = Follower(self._processes, len(decision.stages), control.nodes, control.channels)
        self._follower = follower
        try:
            begin(self.job_id, self._processes, control.channels, self._cancel.is_set)
        except CallError as error:
            raise JobError(follower.diagnose(self._cancel.is_set, str(error)).reason) from None
        self._enter(RUNNING)
        started_s = time.monotonic() - starting
        with watch(self.job_id, decision, follower.so_far, control.store, started_s):
            outcome = follower.follow(self._cancel.is_set)
        if outcome.report is None:
            raise JobError(outcome.reason)
        decision.measured.CopyFrom(follower.measured(decision, outcome.report))
        self._keep(decision)

    def _profile(self, spec: JobSpec, offer: Offer) -> Workload:
        """Measure on one free unit of each type that is to be measured."""
        nodes, owner = self._control.nodes, f"{self.job_id} (profiling)"
        kinds = profiling_types(offer)
        try:
            homes = self._wait_for_units(owner, kinds)
            return profile(
                self.job_id, spec, offer, homes, self._control.channels, self._cancel.is_set
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
            raise JobError("; ".join(filter(None, (str(error), offer.note)))) from None
        self._keep(decision)
        if not decision.feasible:
            reason = f"no plan meets the job's demands: {decision.reason}"
            raise JobError("; ".join(filter(None, (reason, offer.note))))
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
            placed = nodes.reserve(owner, wanted)
            if placed is not None:
                got.extend(placed)
                return True
            counts, alive = Counter(wanted), nodes.units()
            needs = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            for kind, count in counts.items():
                if alive.get(kind, 0) < count:
                    raise JobError(
                        f"the plan needs {needs}, but only {alive.get(kind, 0)} units of "
                        f"{kind} are alive now: a node has gone since it was made"
                    )
            if not told:
                told = True
                jobs.change(self.job_id, lambda s: _say(s, f"waits for {needs} to become free"))
            return False

        if not nodes.wait_for(ready, self._cancel.is_set):
            raise Interrupted
        if told:
            jobs.change(self.job_id, lambda status: _say(status, ""))
        return got

    def _enter(self, state: "JobState.ValueType") -> None:
        def edit(status: JobStatus) -> None:
            status.state, status.reason = state, ""
            if state == RUNNING:
                status.started_at = time.time()

        if self._cancel.is_set() or not self._control.jobs.change(self.job_id, edit):
            raise Interrupted

    def _keep(self, decision: Decision) -> None:
        """Write the decision, waiting for a Redis that is away."""
        until = time.monotonic() + _KEEP_TRYING_S
        while True:
            try:
                self._control.store.put_decision(self.job_id, decision)
                return
            except StoreError:
                if time.monotonic() > until:
                    raise
            if self._cancel.wait(1.0):
                raise Interrupted

    def _clean_up(self, processes: list[Process]) -> None:
        """Stop what runs, on every node it may run on, and keep its logs."""
        control = self._control
        addresses = [p.node.address for p in processes if not p.standing]
        for silent in stop_job(self.job_id, addresses, control.channels, _GRACE_S):
            _log.warning("%s", silent)
        standing = [p.address for p in processes if p.standing and p.address]
        for silent in drop_tables(self.job_id, standing, control.channels):
            _log.warning("%s", silent)
        self.logs.set_processes(processes)
        self.logs.keep()


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


class Runs:
    """The runs under way, and the rule of who is next.

    Jobs start first come, first served, as far as a node of one of their types is alive. One job
    at a time measures and plans; once it has its units the next one may.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._closed = False
        self._strangers: dict[tuple[str, str], float] = {}  # (node, job) -> when seen or told

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
            busy = self._closed or any(not run.settled.is_set() for run in self._runs.values())
        if not busy:
            self._start_next(wanted_types)
        self._stop_strangers()

    def cancel_queued(self, job_id: str) -> bool:
        """Cancel a job that has no run yet; False when it has one or has ended."""
        with self._lock:
            return job_id not in self._runs and self._control.jobs.end(job_id, CANCELLED)

    def close(self, reason: str, timeout_s: float) -> None:
        """Stop every run and fail its job."""
        with self._lock:
            self._closed = True
            runs = list(self._runs.values())
        for run in runs:
            run.cancel(FAILED, reason)
        deadline = time.monotonic() + timeout_s
        for run in runs:
            run.ended.wait(max(0.0, deadline - time.monotonic()))

    def _start_next(self, wanted_types: Callable[[JobSpec], list[str]]) -> None:
        control = self._control
        alive = set(control.nodes.units())
        for job_id in control.jobs.queued():
            spec = control.store.spec(job_id)
            wanted = wanted_types(spec) if spec is not None else []
            if wanted and not alive.intersection(wanted):
                text = f"waits for a node of type {' or '.join(wanted)}"
                status = control.jobs.get(job_id)
                if status is not None and status.reason != text:
                    control.jobs.change(job_id, lambda s, t=text: _say(s, t))  # type: ignore[misc]
                continue
            with self._lock:
                if self._closed or control.jobs.state(job_id) in TERMINAL:
                    continue
                run = self._runs[job_id] = Run(job_id, control)
            run.start()
            return

    def _stop_strangers(self) -> None:
        """Stop processes of jobs that have no run: left over from a scheduler before us.

        They get as long as a lease first: workers hear from `Report` that they are to stop.
        """
        control, now = self._control, time.monotonic()
        strangers = {
            (node.node_id, process.job_id): node.address
            for node in control.nodes.live(registry.NODE)
            for process in node.processes
            if process.running and self.get(process.job_id) is None
        }
        self._strangers = {key: self._strangers.get(key, now) for key in strangers}
        for (node_id, job_id), address in strangers.items():
            if now - self._strangers[node_id, job_id] < control.nodes.lease_s:
                continue
            self._strangers[node_id, job_id] = now
            _log.info("node %s still runs job %s: stopping it", node_id, job_id)
            threading.Thread(
                target=stop_job,
                args=(job_id, [address], control.channels, _GRACE_S),
                daemon=True,
            ).start()
