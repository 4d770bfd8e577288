"""How each job came to where it stands: its states and what its stages reported, for drawing.

Of a long run every second point is dropped whenever there are too many, and only every second
taken from then on, so that a curve spans the whole run evenly in a bounded number of points. Kept
in memory, and in Redis every few seconds.
"""

import threading
import time
from collections.abc import Sequence

from protos.history_pb2 import JobHistory, StageHistory, StagePoint
from protos.scheduler_pb2 import JobState, ProgressReport
from scheduler.state.store import TERMINAL, Store, StoreError

MOST_POINTS = 512  # of a stage
_MOST_JOBS = 64  # in memory; others are read from Redis
FLUSH_S = 5.0


class Histories:
    """The histories of the latest jobs; safe to use from many threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._jobs: dict[str, JobHistory] = {}
        self._dirty: set[str] = set()
        self._unread: set[str] = set()  # of these, what an earlier scheduler kept

    def enter(self, job_id: str, state: "JobState.ValueType") -> None:
        """A job has come to a state."""
        with self._lock:
            found = self._of(job_id)
            if not found.states or found.states[-1].state != state:
                found.states.add(state=state, at=time.time())
                self._dirty.add(job_id)

    def add(self, report: ProgressReport) -> None:
        """Take in what a worker reports; the first one of a stage speaks for it."""
        if report.rank:
            return
        with self._lock:
            stage = _stage(self._of(report.job_id), report.stage)
            _append(
                stage,
                StagePoint(
                    at=time.time(),
                    phase=report.phase,
                    step=report.step,
                    samples=report.samples,
                    loss=report.loss,
                    loss_terms=report.loss_terms,
                    samples_per_s=report.samples_per_s,
                    busy_s=report.busy_s,
                    train_seconds=report.train_seconds,
                    metrics=report.metrics,
                    attempt=report.attempt,
                    generation=report.generation,
                ),
            )
            self._dirty.add(report.job_id)

    def forget(self, job_ids: Sequence[str]) -> None:
        """Jobs that are not kept any more."""
        with self._lock:
            for job_id in job_ids:
                self._jobs.pop(job_id, None)
                self._dirty.discard(job_id)
                self._unread.discard(job_id)

    def get(self, job_id: str) -> JobHistory:
        """A copy; empty when nothing is known."""
        with self._lock:
            history = self._jobs.get(job_id)
            if history is not None:
                copy = JobHistory()
                copy.CopyFrom(history)
                return copy
        return self._store.history(job_id) or JobHistory()

    def flush(self) -> None:
        """Write what has changed; what is not written stays for the next time.

        Raises:
            StoreError: Redis does not take it.
        """
        for job_id in sorted(self._unread):
            self._read(job_id)
        with self._lock:
            changed = {j: self._jobs[j].SerializeToString() for j in self._dirty if j in self._jobs}
            self._dirty.clear()
        for job_id, data in changed.items():
            try:
                self._store.put_history(job_id, data)
            except Exception:
                with self._lock:
                    self._dirty |= changed.keys()  # to write one twice does no harm
                raise
        with self._lock:
            clean = [j for j in self._jobs if j not in self._dirty and _has_ended(self._jobs[j])]
            for job_id in clean[: max(0, len(self._jobs) - _MOST_JOBS)]:
                del self._jobs[job_id]

    def _of(self, job_id: str) -> JobHistory:
        """A job's history, taken up where a scheduler before this one left it."""
        if job_id not in self._jobs:
            try:
                kept = self._store.history(job_id)
            except StoreError:
                kept = None
                self._unread.add(job_id)
            self._jobs[job_id] = kept or JobHistory()
        return self._jobs[job_id]

    def _read(self, job_id: str) -> None:
        """Put what an earlier scheduler kept before what was entered while Redis was away.

        Raises:
            StoreError: it is still away.
        """
        before = self._store.history(job_id)
        with self._lock:
            since = self._jobs.get(job_id)
            if before is not None and since is not None:
                self._jobs[job_id] = _joined(before, since)
            self._unread.discard(job_id)


def _stage(history: JobHistory, number: int) -> StageHistory:
    for stage in history.stages:
        if stage.stage == number:
            return stage
    return history.stages.add(stage=number)


def _append(stage: StageHistory, point: StagePoint) -> None:
    """Every `every`-th report stays; the latest is replaced by the next where it is not one."""
    stage.every = stage.every or 1
    if stage.reports and (stage.reports - 1) % stage.every:
        del stage.points[-1]
    stage.points.append(point)
    stage.reports += 1
    if len(stage.points) > MOST_POINTS:
        stage.every *= 2
        latest = (stage.reports - 1) % stage.every != 0
        del stage.points[1 : -1 if latest else None : 2]


def _joined(history: JobHistory, since: JobHistory) -> JobHistory:
    for entry in since.states:
        if not history.states or history.states[-1].state != entry.state:
            history.states.append(entry)
    for stage in since.stages:
        into = _stage(history, stage.stage)
        for point in stage.points:
            _append(into, point)
    return history


def _has_ended(history: JobHistory) -> bool:
    return bool(history.states) and history.states[-1].state in TERMINAL
