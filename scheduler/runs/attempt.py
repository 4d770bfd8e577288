"""An attempt at a job, as far as it has come: what all who prepare, follow and end it share."""

import threading
import time
from collections.abc import Callable

from protos.decision_pb2 import Decision
from protos.scheduler_pb2 import PROFILING, RUNNING, JobState, JobStatus
from scheduler.runs.calls import Interrupted
from scheduler.runs.context import Control
from scheduler.runs.follow import Follower
from scheduler.runs.logs import JobLogs
from scheduler.runs.processes import Attempt, Process
from scheduler.state.store import DeposedError, StoreError

_KEEP_TRYING_S = 60.0


class Underway:
    """One attempt.

    Attributes:
        settled: it has its units or has ended: the next job may plan.
        waiting: for units.
        cancelled: everybody has to stop.
        decision: empty until there is a plan.
        processes: of the job, once they are placed.
        started_s: seconds that they took to start.
        follower: of the processes; None until they are started.
    """

    def __init__(self, job_id: str, number: int, control: Control) -> None:
        self.job_id = job_id
        self.number = number
        self.control = control
        self.attempt = Attempt(job_id, number, control.store.term)
        self.logs = JobLogs(job_id, number, control.store, control.channels)
        self.settled = threading.Event()
        self.waiting = threading.Event()
        self.cancelled = threading.Event()
        self.decision = Decision()
        self.processes: list[Process] = []
        self.started_s = 0.0
        self.follower: Follower | None = None

    def new_follower(self) -> Follower:
        """A follower of the processes as they are now; not yet the attempt's."""
        control = self.control
        return Follower(self.processes, len(self.decision.stages), control.nodes, control.channels)

    def enter(self, state: "JobState.ValueType") -> None:
        """Come to a state.

        Raises:
            Interrupted: the job is cancelled or has ended.
        """

        def edit(status: JobStatus) -> None:
            status.state, status.reason = state, ""
            if state == PROFILING:
                status.attempt = self.number
                status.began_at = status.began_at or time.time()
            if state == RUNNING:
                status.started_at = time.time()

        if self.cancelled.is_set() or not self.control.jobs.change(self.job_id, edit):
            raise Interrupted

    def say(self, text: str) -> None:
        """Tell the job's owner why it does not go on; "": it does."""

        def edit(status: JobStatus) -> None:
            status.reason = text

        self.control.jobs.change(self.job_id, edit)

    def keep(self, decision: Decision) -> None:
        """Write the decision, waiting for a Redis that is away."""
        self.persist(lambda: self.control.store.put_decision(self.job_id, decision))

    def persist(self, write: Callable[[], None]) -> None:
        """Write, waiting for a Redis that is away.

        Raises:
            StoreError: it stays away.
            Interrupted: the job is cancelled, or another scheduler has taken over.
        """
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
            if self.cancelled.wait(1.0):
                raise Interrupted
