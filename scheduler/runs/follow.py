"""Following a running job to its end, and finding out what broke it."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.decision_pb2 import Decision, Measured
from protos.node_pb2 import SHARD, NodeStatusRequest
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_USER_ERROR,
    NodeStatus,
    ProcessStatus,
    ProgressReport,
)
from scheduler.replanning.measure import Mark, Measurement, Windows
from scheduler.runs.blame import Symptom, ending_of
from scheduler.runs.calls import CallError, Channels, Interrupted, Stop, call
from scheduler.runs.processes import Process
from scheduler.runs.silence import SILENT_S, Silence
from scheduler.runs.symptoms import Failure, ended, failed, forgotten, gone
from scheduler.state.endings import Ending
from scheduler.state.nodes import Nodes

COLLECT_S = 1.5  # one death makes others fail: their deaths are waited for before one is blamed
_POLL_S = 0.2
_FORGOTTEN_S = 5.0  # a node that says for so long that it knows nothing of a process has lost it
_OUTAGE_S = 300.0  # a shard that brings its rows back may be away for so long, as for its workers
_log = logging.getLogger("heterps.follow")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: with the last stage's final report, or otherwise."""

    report: ProgressReport | None = None
    ending: Ending | None = None
    # Workers and shards that may be replaced, so that it goes on; none, where workers lost touch.
    lost: tuple[Process, ...] | None = None
    due: bool = False  # it has not ended; what was asked for is


class Follower:
    """Collects what workers report and what nodes tell about one job's processes.

    Args:
        processes: all of the job's processes.
        stages: how many stages there are.
        samples: that the job had trained before.
        generation: of its workers.

    Attributes:
        paused_at: when they were heard to wait, by time.monotonic().
    """

    def __init__(
        self,
        processes: Sequence[Process],
        stages: int,
        nodes: Nodes,
        channels: Channels,
        samples: int = 0,
        generation: int = 0,
    ) -> None:
        self._processes = processes
        self._generation = generation
        self._stages = stages
        self._cut_off: dict[tuple[int, int], Failure] = {}  # workers that lost touch with others
        self._last_stage = stages - 1
        self._nodes = nodes
        self._channels = channels
        self._before = samples
        self._lock = threading.Lock()
        self._reports: dict[tuple[int, int], ProgressReport] = {}
        self._windows = Windows(stages)
        self._silence = Silence()
        self._trained: set[tuple[int, int]] = set()
        self._failures: dict[tuple[int, int], Failure] = {}
        self._seen: dict[str, float] = {}  # when each process was first seen ended
        self._restarts: dict[str, int] = {}  # of each shard, as told
        self._done: ProgressReport | None = None
        self._paused: int | None = None
        self.paused_at = 0.0
        self._wake = threading.Event()

    @property
    def paused(self) -> int | None:
        """The step after which all workers wait; None: they do not."""
        return self._paused

    def wake(self) -> None:
        """Have who follows look at what is due."""
        self._wake.set()

    def report(self, report: ProgressReport) -> bool:
        """Take in a worker's report; whether it is the one whose progress is the job's."""
        worker = (report.stage, report.rank)
        leads = worker == (self._last_stage, 0)
        with self._lock:
            if report.generation != self._generation:
                return False
            self._reports[worker] = report
            self._silence.hear(worker)
            if report.rank == 0 and report.phase == "train":
                self._windows.add(report.stage, _mark(report))
            if report.phase == "paused" and worker == (0, 0) and self._paused is None:
                self._paused, self.paused_at = report.step, time.monotonic()
                self._wake.set()
            if report.phase == "lost":
                self._cut_off.setdefault(
                    worker, Failure(time.monotonic(), report.error, END_CONNECTION_LOST)
                )
                self._wake.set()
            if report.phase in ("trained", "done"):
                self._trained.add(worker)
            if report.phase == "failed":
                reason = report.end_reason or END_USER_ERROR
                failure = Failure(time.monotonic(), report.error, reason)
                self._failures.setdefault(worker, failure)
                self._wake.set()
            elif report.phase == "done" and leads:
                self._done = report
                self._wake.set()
        return leads

    def follow_others(
        self, processes: Sequence[Process], generation: int, samples: int, stages: int
    ) -> None:
        """Follow a new generation of workers; what those before said of themselves is over.

        Args:
            samples: trained before it.
        """
        with self._lock:
            self._processes, self._generation, self._before = processes, generation, samples
            self._stages, self._last_stage = stages, stages - 1
            self._windows, self._paused = Windows(stages), None
            self._silence.forget()
            for told in (self._trained, self._failures, self._cut_off, self._reports):
                told.clear()

    @property
    def is_broken(self) -> bool:
        """Whether a worker failed, or lost touch with another."""
        with self._lock:
            return bool(self._failures or self._cut_off)

    @property
    def is_ending(self) -> bool:
        """Whether a worker has trained all there is to train."""
        with self._lock:
            return bool(self._trained)

    @property
    def is_done(self) -> bool:
        """Whether the model is saved."""
        with self._lock:
            return self._done is not None

    def follow(
        self,
        stop: Stop,
        may_recover: Callable[[Ending], bool] = lambda ending: False,
        is_due: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Wait for the end, or for workers to be lost that may be replaced, or to be called away.

        Args:
            may_recover: whether workers lost for such a reason may be.
            is_due: asked often; whether something else is to be done.

        Raises:
            Interrupted: `stop` said so.
        """
        while True:
            if stop():
                raise Interrupted
            with self._lock:
                if self._done is not None:
                    return Outcome(report=self._done)
            self._note_silence()
            if symptoms := self._symptoms({}):
                outcome = self._replaceable(symptoms, stop)
                if outcome is not None:
                    if outcome.ending is not None and may_recover(outcome.ending):
                        return outcome
                    outcome = self.diagnose(stop)
                    if outcome.report is not None or outcome.ending is not None:
                        return outcome
            if is_due():
                return Outcome(due=True)
            self._wake.wait(_POLL_S)
            self._wake.clear()

    def diagnose(self, stop: Stop, otherwise: Ending | None = None) -> Outcome:
        """Let what follows from the first failure happen, ask the nodes, name the cause.

        Args:
            otherwise: how it ended when nothing is found.
        """
        until = time.monotonic() + COLLECT_S
        while time.monotonic() < until:
            if stop():
                raise Interrupted
            with self._lock:
                if self._done is not None:
                    return Outcome(report=self._done)
            self._symptoms({})  # notes when each was first seen
            time.sleep(_POLL_S / 2)
        symptoms = self._symptoms(self._ask(stop))
        return Outcome(ending=ending_of(symptoms) if symptoms else otherwise)

    def so_far(self) -> tuple[Measurement, int]:
        """What the windows of the run have told, and the samples trained."""
        with self._lock:
            last = self._reports.get((self._last_stage, 0))
            return self._windows.measurement, last.samples if last is not None else 0

    def last_report(self) -> ProgressReport | None:
        """Of the worker whose progress is the job's."""
        with self._lock:
            return self._reports.get((self._last_stage, 0))

    def measured(
        self, decision: Decision, report: ProgressReport, price_before: float, price_since: float
    ) -> Measured:
        """What the run came to, beside what was predicted.

        Of workers who had only to save what those before had trained, it is what these came to.

        Args:
            price_before, price_since: dollars an hour, of the time before these workers and theirs.
        """
        trained, over_s = max(0, report.samples - self._before), report.train_seconds
        if not trained:
            trained, over_s = report.samples, report.before_s + report.train_seconds
        throughput = trained / over_s if over_s > 0 else 0.0
        paid_s = report.train_seconds + report.apart_s
        cost = price_since * paid_s + price_before * report.before_s
        types = {kind.name: kind for kind in decision.resources.types}
        used = {stage.type for stage in decision.stages}
        measured = Measured(
            throughput=throughput,
            price_per_hour=decision.price_per_hour,
            cost=cost / 3600,
            seconds=report.before_s + report.train_seconds,
            throughput_s=over_s,
            emulated=any(types[name].emulated for name in used if name in types),
        )
        with self._lock:
            steady = self._windows.steady
            measured.steady_throughput = steady.samples_per_s
            measured.steady_steps = steady.steps
            for stage in range(self._last_stage + 1 if report.samples > self._before else 0):
                first = self._reports.get((stage, 0))
                samples = (first.samples if first is not None else 0) or report.samples
                busy_s = first.busy_s if first is not None else 0.0
                samples -= self._before
                measured.stage_s.append(busy_s / samples if samples > 0 else 0.0)
        return measured

    def _symptoms(self, asked: dict[str, NodeStatus | str]) -> list[Symptom]:
        """What is wrong now, by the leases or, where given, by the nodes' own answers."""
        symptoms: list[Symptom] = []
        lost: set[str] = set()
        over: set[str] = set()
        for process in self._processes:
            node_id = process.node.node_id
            answer = asked.get(node_id)
            status = answer if isinstance(answer, NodeStatus) else self._nodes.get(node_id)
            if self._has_trained(process):
                continue  # what it had to give is written, and the model is the leader's
            if process.returns and self._may_return(node_id, status):
                continue
            if isinstance(answer, str) or status is None:
                if node_id not in lost:
                    lost.add(node_id)
                    symptoms.append(self._lost(process, answer if isinstance(answer, str) else ""))
                continue
            entries = [p for p in status.processes if p.process_id == process.process_id]
            if entries:
                self._seen.pop(f"no {process.process_id}", None)
                self._note_restarts(process, entries[0].restarts)
            elif self._is_forgotten(process):
                symptoms.append(forgotten(process, time.monotonic()))
            if entries and not entries[0].running:
                symptoms.append(self._ended(process, entries[0]))
                over.add(process.process_id)
        return symptoms + self._reported(over)

    def _replaceable(self, symptoms: list[Symptom], stop: Stop) -> Outcome | None:
        """Those that are gone, and why; nothing where something else is wrong, too.

        None where all runs, by the nodes' own words: one was only late to renew its lease.

        Where workers only lost touch with others, those are waited for to be seen gone. A shard is
        not gone before its node's lease is.

        Args:
            symptoms: that were seen.
        """
        until = time.monotonic() + COLLECT_S
        while True:
            asked = self._ask(stop)
            away = []
            for process in self._processes:
                if process.standing:
                    if self._is_lost(process):
                        return Outcome()
                    continue
                answer = asked.get(process.node.node_id) or self._nodes.get(process.node.node_id)
                status = answer if isinstance(answer, NodeStatus) else None
                if process.runs_on(status) or self._may_answer(process, answer):
                    continue
                if process.role != SHARD and not self._may_be_replaced(process, status):
                    return Outcome()
                away.append(process)
            found = self._symptoms(asked)
            if not away and not found:
                return None
            if away or time.monotonic() > until:
                ending = ending_of(found or symptoms)
                return Outcome(ending=ending, lost=tuple(away))
            if stop():
                raise Interrupted
            time.sleep(_POLL_S / 4)

    def _may_answer(self, process: Process, answer: NodeStatus | str | None) -> bool:
        """Whether the node of a shard, which does not answer, may do so again as it was."""
        if process.role != SHARD or not isinstance(answer, str):
            return False
        lease = self._nodes.get(process.node.node_id)
        return lease is not None and lease.address == process.node.address

    def _is_lost(self, shard: Process) -> bool:
        """Whether a standing shard is gone, and not only for a while."""
        node_id = shard.node.node_id
        if self._nodes.get(node_id) is not None:
            return False
        return not (shard.returns and self._may_return(node_id, None))

    def _may_be_replaced(self, process: Process, status: NodeStatus | None) -> bool:
        """Whether a worker that is gone was killed: what ended by itself would do so again."""
        worker = (process.index, process.rank)
        with self._lock:
            if worker in self._failures:
                return False
        processes = status.processes if status is not None else ()
        entries = [p for p in processes if p.process_id == process.process_id]
        return all(entry.exit_code < 0 and not entry.out_of_memory for entry in entries)

    def _has_trained(self, process: Process) -> bool:
        with self._lock:
            return process.role != SHARD and (process.index, process.rank) in self._trained

    def _is_forgotten(self, process: Process) -> bool:
        """Whether a live node has been saying for a while that it does not run a process."""
        name = f"no {process.process_id}"
        if process.standing or not self._nodes.has_reported(process.node.node_id):
            self._seen.pop(name, None)
            return False
        return time.monotonic() - self._seen.setdefault(name, time.monotonic()) > _FORGOTTEN_S

    def _may_return(self, node_id: str, status: NodeStatus | None) -> bool:
        """Whether a standing shard that keeps its rows is away, but not for too long."""
        name = f"shard {node_id} away"
        if status is not None:
            if self._seen.pop(name, None) is not None:
                _log.info("standing shard %s is back with its rows; the job goes on", node_id)
            return False
        if name not in self._seen:
            _log.warning(
                "standing shard %s %s; the job waits up to %.0f s for it to come back",
                *(node_id, self._nodes.departure(node_id), _OUTAGE_S),
            )
        return time.monotonic() - self._seen.setdefault(name, time.monotonic()) < _OUTAGE_S

    def _lost(self, process: Process, problem: str) -> Symptom:
        node = process.node
        when = self._seen.setdefault(f"node {node.node_id}", time.monotonic())
        here = [p.label for p in self._processes if p.node.node_id == node.node_id]
        return gone(process, here, problem or self._nodes.departure(node.node_id), when)

    def _note_silence(self) -> None:
        now = time.monotonic()
        with self._lock:
            for worker in self._silence.look(self._trained):
                text = f"it has told nothing for {SILENT_S:.0f} s: it stands still"
                self._cut_off.setdefault(worker, Failure(now, text, END_CONNECTION_LOST))

    def _note_restarts(self, process: Process, count: int) -> None:
        if count > self._restarts.get(process.process_id, 0):
            self._restarts[process.process_id] = count
            _log.warning(
                "%s (%s) died and was started again with its rows; the job goes on",
                process.process_id,
                process.place,
            )

    def _ended(self, process: Process, entry: ProcessStatus) -> Symptom:
        with self._lock:
            when = self._seen.setdefault(process.process_id, time.monotonic())
            told = self._failures.get((process.index, process.rank))
        return ended(process, entry, when, None if process.role == SHARD else told)

    def _reported(self, over: set[str]) -> list[Symptom]:
        """Failures that workers told of, but for the processes whose end has been seen."""
        symptoms = []
        with self._lock:
            failures = dict(self._failures)
            failures = dict(self._cut_off) | failures
        for process in self._processes:
            failure = failures.get((process.index, process.rank))
            if process.role == SHARD or failure is None or process.process_id in over:
                continue
            symptoms.append(failed(process, failure))
        return symptoms

    def _ask(self, stop: Stop) -> dict[str, NodeStatus | str]:
        """Each node's own words now: its lease may be valid while it is already gone."""
        answers: dict[str, NodeStatus | str] = {}
        for process in self._processes:
            node = process.node
            if node.node_id in answers or process.standing:
                continue
            try:
                answers[node.node_id] = call(
                    self._channels.node(node.address).Status,
                    NodeStatusRequest(),
                    what="status",
                    timeout_s=2.0,
                    stop=stop,
                )
            except CallError:
                if self._nodes.get(node.node_id) is None:
                    continue  # how its lease ended tells more
                answers[node.node_id] = "does not answer any more"
        return answers


def _mark(report: ProgressReport) -> Mark:
    return Mark(report.step, report.samples, report.busy_s, report.stepped_s)
