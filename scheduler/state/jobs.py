"""The jobs as they stand: changed in one place, told to whoever watches, written to Redis."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from chassis.loops import for_each
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import QUEUED, Cut, EndReason, JobState, JobStatus
from scheduler.state.endings import Ending, end_shares, may_retry, start_over
from scheduler.state.store import TERMINAL, Store, StoreError, TransitionError

_log = logging.getLogger("heterps.jobs")
_WATCH_INTERVAL_S = 0.1  # at most ten updates a second to each watcher
FLUSH_S = 0.5
PRUNE_S = 10.0
PAGE = 200  # jobs at most
KEPT = 1000  # jobs that have ended; each may have megabytes of logs and history
_WAITED_FOR_S = 3600.0
_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Page:
    """Some jobs of all that somebody sees.

    Attributes:
        jobs: by submission, the oldest first; not to be changed.
        next: `before` of the page of older ones; "" where there are none.
        total: jobs on all pages.
        total_unended: of those.
    """

    jobs: Sequence[JobStatus]
    next: str
    total: int
    total_unended: int


class DuplicateError(ValueError):
    """A job id that stands for another job already."""


class Jobs:
    """Statuses in memory over `store`.

    A change of state is written at once, progress at most twice a second; what Redis does not
    take while it is away is written when it is back.

    Args:
        entered: told of each state that a job comes to.
    """

    def __init__(
        self,
        store: Store,
        entered: Callable[[str, "JobState.ValueType"], None] = lambda job_id, state: None,
    ) -> None:
        self._store = store
        self._entered = entered
        self._changed = threading.Condition()
        self._submitting = threading.Lock()
        self._writing = threading.Lock()
        self._statuses = {status.job_id: status for status in store.statuses()}
        self._dirty: set[str] = set()

    def submit(self, job_id: str, spec: JobSpec, user: str = "") -> bool:
        """Queue a job; False when this very job of this user is known under this id.

        Raises:
            DuplicateError: the id stands for a different job, or another user's.
            StoreError: Redis did not take it.
        """
        status = JobStatus(
            job_id=job_id,
            name=spec.name,
            state=QUEUED,
            priority=spec.priority,
            retries=spec.retries,
            submitted_by=user,
        )
        # One at a time, so that memory lists jobs in the order of the queue.
        with self._submitting:
            status.submitted_at = time.time()
            created = self._store.submit(status, spec)
            # Redis may have taken it while its answer was lost: then it is queued all the same.
            kept = status if created else self._store.status(job_id) or status
            if not created and (self._store.spec(job_id) != spec or kept.submitted_by != user):
                raise DuplicateError(
                    f"job {job_id}: submitted before with other content; expected a new id"
                )
            if created or not self._is_listed(job_id):
                with self._changed:
                    self._statuses[job_id] = kept
                    self._changed.notify_all()
                self._entered(job_id, QUEUED)
        return created

    def get(self, job_id: str) -> JobStatus | None:
        """A copy of the status, without the spec; None when unknown."""
        with self._changed:
            return self._copy(job_id)

    def page(
        self, sees: Callable[[JobStatus], bool], limit: int, before: str = "", unended: bool = False
    ) -> "Page":
        """The latest jobs that somebody sees, or of those submitted before one.

        Args:
            limit: 0 for as many as a page has.
            before: a job's id, or the `next` of a page, which goes on where its job was even once
                that is not kept any more; "" for all.
            unended: only those that have not ended.
        """
        with self._changed:
            listed = list(self._statuses.values())
            job_id, after_s = _place(before)
            if job_id in self._statuses:
                after_s = math.inf
        found, end = list[JobStatus](), None
        for status in listed:
            # That job may have ended since its page was asked for.
            if end is None and (status.job_id == job_id or status.submitted_at > after_s):
                end = len(found)
            if sees(status) and not (unended and status.state in TERMINAL):
                found.append(status)
        busy = sum(s.state not in TERMINAL for s in found)
        end = len(found) if end is None else end
        begin = max(0, end - min(limit or PAGE, PAGE))
        shown = found[begin:end]  # a change always makes a new message
        cursor = f"{shown[0].job_id}@{shown[0].submitted_at!r}" if begin else ""
        return Page(shown, cursor, len(found), busy)

    def all(self) -> list[JobStatus]:
        """Copies of all statuses in the order of submission."""
        with self._changed:
            return [copy for job_id in self._statuses if (copy := self._copy(job_id))]

    def prune(self, keep: int) -> list[str]:
        """Forget the jobs that ended, but for the latest `keep`; those that went, some at a time.

        In the order of submission. None goes within an hour of its end: somebody may wait for it.

        Raises:
            StoreError: Redis is away; what it has still is pruned later.
        """
        until = time.time() - _WAITED_FOR_S
        with self._changed:
            ended = [s for s in self._statuses.values() if s.state in TERMINAL]
        old = [s.job_id for s in ended[: max(0, len(ended) - keep)] if s.ended_at < until]
        gone = [job_id for job_id in old[:_AT_ONCE] if self._store.forget(job_id)]
        with self._changed:
            for job_id in gone:
                self._statuses.pop(job_id, None)
                self._dirty.discard(job_id)
        return gone

    def queued(self) -> list[str]:
        """Ids of the jobs that wait: higher priorities first, within one first come first."""
        with self._changed:
            waiting = [s for s in self._statuses.values() if s.state == QUEUED]
            return [s.job_id for s in sorted(waiting, key=lambda s: -s.priority)]

    def started(self) -> list[JobStatus]:
        """Copies of the statuses of jobs that have left the queue and not ended."""
        with self._changed:
            return [
                copy
                for job_id, s in self._statuses.items()
                if s.state != QUEUED and s.state not in TERMINAL and (copy := self._copy(job_id))
            ]

    def begun(self) -> list[JobStatus]:
        """Statuses, not to be changed, of jobs that have left the queue once and not ended."""
        with self._changed:
            return [s for s in self._statuses.values() if s.began_at and s.state not in TERMINAL]

    def state(self, job_id: str) -> "JobState.ValueType":
        """The job's state; JOB_UNSPECIFIED when unknown."""
        with self._changed:
            status = self._statuses.get(job_id)
            return status.state if status is not None else JobState.JOB_UNSPECIFIED

    def change(self, job_id: str, edit: Callable[[JobStatus], None]) -> bool:
        """Apply `edit`; False, and nothing changes, when the job has ended.

        Raises:
            TransitionError: the job is unknown or would go back to an earlier state.
        """
        with self._changed:
            current = self._copy(job_id)
            if current is None:
                raise TransitionError(f"job {job_id}: unknown; expected a submitted job")
            before = current.state
            if before in TERMINAL:
                return False
            edit(current)
            if current.state < before:
                raise TransitionError(
                    f"job {job_id}: cannot go from {JobState.Name(before)} back to "
                    f"{JobState.Name(current.state)}"
                )
            self._statuses[job_id] = current
            self._dirty.add(job_id)
            self._changed.notify_all()
        if current.state != before:
            _log.info("job %s: %s", job_id, JobState.Name(current.state))
            self._entered(job_id, current.state)
            try:
                self._write_if_possible(job_id)
            except StoreError as error:
                _log.warning("%s; job %s is written later", error, job_id)
        return True

    def set_reason(self, job_id: str, text: str) -> None:
        """Tell the job's owner why it does not go on; "": it does."""

        def edit(status: JobStatus) -> None:
            status.reason = text

        self.change(job_id, edit)

    def end(self, job_id: str, ending: Ending) -> bool:
        """Move to the final state that goes with `ending`; False when it had one."""

        def edit(status: JobStatus) -> None:
            status.state = ending.state
            ending.write(status)
            status.ended_at = time.time()
            end_shares(status, status.ended_at)

        _log.info("job %s: %s %s", job_id, EndReason.Name(ending.reason), ending.text)
        return self.change(job_id, edit)

    def take_cuts(self, job_id: str, cuts: Sequence[Cut], error: str = "") -> None:
        """Have these be the cuts of a job that has not ended, in Redis when this returns.

        Args:
            error: what the newest one failed of, which is not among them.

        Raises:
            StoreError: Redis did not take them; they must be told again.
        """

        def edit(status: JobStatus) -> None:
            del status.cuts[:]
            status.cuts.extend(cuts)
            status.cut_error = error

        if self.change(job_id, edit):
            self.write(job_id)

    def retry(
        self, job_id: str, ending: Ending, price_per_hour: float = 0.0, generation: int = 0
    ) -> bool:
        """Put a job whose attempt ended back into the queue; False when it may not start over.

        Args:
            price_per_hour: of the attempt's plan.
            generation: of its workers, the last.

        Raises:
            StoreError: Redis did not take it; nothing has changed.
            TransitionError: Redis does not know the job.
        """
        with self._changed:
            current = self._copy(job_id)
        if current is None or current.state in TERMINAL or not may_retry(current, ending):
            return False
        start_over(current, ending, time.time(), price_per_hour, generation)
        current.state = QUEUED
        with self._writing:
            if not self._store.requeue(current):
                return False
            with self._changed:
                self._statuses[job_id] = current
                self._dirty.discard(job_id)
                self._changed.notify_all()
        _log.warning("job %s: back in the queue: %s", job_id, current.reason)
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait for any change."""
        with self._changed:
            self._changed.wait(timeout_s)

    def watch(self, job_id: str, stop: Callable[[], bool]) -> Iterator[JobStatus]:
        """The status now and after each change, to the final state or until `stop`."""
        last: JobStatus | None = None
        while not stop():
            with self._changed:
                current = self._statuses.get(job_id)
                if current is None:
                    return
                if current is last:  # a change always makes a new message
                    self._changed.wait(0.5)
                    continue
            last = current
            yield current
            if current.state in TERMINAL:
                return
            time.sleep(_WATCH_INTERVAL_S)

    def write(self, job_id: str) -> None:
        """Write one job's status now.

        Raises:
            StoreError: Redis did not take it; it is written later.
            TransitionError: Redis does not know the job, or knows it to be further.
        """
        with self._writing:  # two writers must not overtake each other
            with self._changed:
                status = self._copy(job_id)
                self._dirty.discard(job_id)
            if status is None:
                return
            try:
                self._store.update(status)
            except TransitionError:
                raise
            except Exception:
                with self._changed:
                    self._dirty.add(job_id)
                raise

    def flush(self) -> None:
        """Write every status that has changed.

        Raises:
            StoreError: Redis did not take them; they are written later.
        """
        with self._changed:
            dirty = sorted(self._dirty)
        for_each(dirty, self._write_if_possible, at_once=(StoreError,))

    def _write_if_possible(self, job_id: str) -> None:
        try:
            self.write(job_id)
        except TransitionError as error:
            _log.error("%s", error)

    def _is_listed(self, job_id: str) -> bool:
        with self._changed:
            return job_id in self._statuses

    def _copy(self, job_id: str) -> JobStatus | None:
        status = self._statuses.get(job_id)
        if status is None:
            return None
        copy = JobStatus()
        copy.CopyFrom(status)
        return copy


def _place(before: str) -> tuple[str, float]:
    """The job that a page lies before, and when it was submitted if that is said, in Unix time.

    Without, a job that is not kept lies before all others, as nothing tells where it was.
    """
    job_id, _, submitted_at = before.partition("@")
    try:
        return job_id, float(submitted_at) if before else math.inf
    except ValueError:
        return job_id, -math.inf
