"""A cluster under the soak: small jobs all the time, while its processes are killed and paused."""

import hashlib
import os
import random
import signal
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from chassis.closing import Closing
from heterps import Client
from heterps.errors import UnknownJobError, UnreachableError
from scheduler.state.store import Store
from tests.machines import REDIS, SCHEDULER, Machines
from tests.scheduler.lives import job, log_of, prepare, steps_of
from tests.soak.tables import Breach
from tests.waiting import wait_until

_NODES = ("node-0", "node-1")
_STEPS = 20
_LIMIT_S = 300.0
_CANCEL_S = 30.0  # for a job to end once its cancel is acknowledged
# How a job may end here besides well: by what was done to it.
_FAULTS = {"lost_node", "no_capacity", "worker_crashed", "connection_lost", "scheduler_lost"}


@dataclass
class Figures:
    """Of the cluster, for the page."""

    kills: dict[str, int] = field(default_factory=dict)
    pauses: dict[str, int] = field(default_factory=dict)
    submitted: int = 0
    cancelled: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    retried: int = 0


class Jobs(Closing):
    """Scheduler, nodes and Redis, each a process that dies and is started again."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.figures = Figures()
        self._directory, self._chance = directory, chance
        directory.mkdir(parents=True, exist_ok=True)
        prepare(directory, _STEPS)
        self._stack = ExitStack()
        nodes = dict.fromkeys(_NODES, ("cpu", 2))
        self._machines = self._stack.enter_context(Machines(directory, nodes))
        self._client = self._stack.enter_context(Client(self._machines.address))
        self._open: dict[str, float] = {}  # jobs, and when a cancel was acknowledged; 0: none was
        self._taken: set[str] = set()  # jobs whose submit was acknowledged
        self._unanswered: set[str] = set()  # jobs whose cancel was not acknowledged
        self._weights: str | None = None
        self._count = 0

    def submit(self) -> None:
        """One more, if few are open."""
        if len(self._open) >= 3:
            return
        name = f"job-{self._count}"
        self._count += 1
        spec = job(self._directory, name, pause_s=0.1)
        spec.output = f"output-{name}"
        spec.retries = 5
        with suppress(UnreachableError):
            self._client.submit(spec, job_id=name)
            self._taken.add(name)
        self._open[name] = 0.0  # it may have been taken, whatever was answered
        self.figures.submitted += 1

    def cancel(self) -> None:
        """One of them; an acknowledged cancel is one."""
        if not self._open or self._chance.random() < 0.7:
            return
        name = self._chance.choice(sorted(self._open))
        try:
            self._client.cancel(name)
            self._open[name] = self._open[name] or time.time()
        except (UnreachableError, UnknownJobError):
            self._unanswered.add(name)

    def kill_scheduler(self) -> None:
        """It is started again at its address."""
        self._kill(SCHEDULER, "scheduler")
        self._machines.start(SCHEDULER)

    def kill_node(self) -> None:
        """With its workers; it comes back by its name."""
        name = self._chance.choice(_NODES)
        self._kill(name, "node")
        self._machines.start(name)

    def kill_redis(self) -> None:
        """It comes back with all that it had answered."""
        self._kill(REDIS, "redis")
        time.sleep(self._chance.uniform(0, 2.0))
        self._machines.start(REDIS)

    def pause(self) -> None:
        """One of them stands still for a while."""
        what = self._chance.choice([REDIS, SCHEDULER, "node"])
        pid = self._machines.pid(self._chance.choice(_NODES) if what == "node" else what)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._chance.uniform(0.1, 3.0))
        os.kill(pid, signal.SIGCONT)
        self._count_fault(self.figures.pauses, what)

    def look(self) -> None:
        """Take in the jobs that have ended; each has ended truly."""
        for name in sorted(self._open):
            try:
                status = self._client.status(name)
            except (UnreachableError, UnknownJobError):
                continue  # lost only if it is still unknown at the end
            if status.state.is_final:
                self._check(name, self._open.pop(name))

    def settle(self) -> None:
        """Every job that was taken ends."""
        try:
            wait_until(lambda: self.look() or not self._known(), "all jobs end", _LIMIT_S)
        except AssertionError:
            raise Breach(f"jobs do not end: {sorted(self._open)}") from None

    def memory(self) -> int:
        """Resident bytes of the scheduler."""
        pages = int(Path(f"/proc/{self._machines.pid(SCHEDULER)}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def close(self) -> None:
        self._stack.close()

    def _known(self) -> set[str]:
        """The open jobs that the cluster was really given."""
        with closing(Store(self._machines.redis_url)) as store:
            known = {status.job_id for status in store.statuses()}
        if lost := self._taken.intersection(self._open) - known:
            raise Breach(f"{sorted(lost)} were taken, and nobody knows them")
        for name in [n for n in self._open if n not in known]:
            del self._open[name]  # its submit was never answered
        return set(self._open)

    def _check(self, name: str, cancelled_at: float) -> None:
        status = self._client.status(name)
        end = status.state.value
        self.figures.ends[end] = self.figures.ends.get(end, 0) + 1
        self.figures.retried += len(status.attempts)
        if cancelled_at:
            self.figures.cancelled += 1
            if end != "cancelled" and status.ended_at > cancelled_at + _CANCEL_S:
                raise Breach(f"{name} {end} long after its cancel was acknowledged")
        if end == "succeeded":
            computed = steps_of(log_of(self._directory, name))
            if max((computed.count(pid) for pid in set(computed)), default=0) < _STEPS:
                raise Breach(f"{name} succeeded, but no attempt computed {_STEPS} steps")
            weights = self._digest(name)
            if self._weights not in (None, weights):
                raise Breach(f"{name} succeeded with weights of its own")
            self._weights = weights
        elif end == "failed":
            if status.end_reason not in _FAULTS:
                raise Breach(f"{name} failed by {status.end_reason!r}: {status.reason}")
        elif end == "cancelled" and not cancelled_at and name not in self._unanswered:
            raise Breach(f"{name} was cancelled by nobody")

    def _digest(self, name: str) -> str:
        folder = next((self._directory / f"output-{name}").iterdir())
        found = sorted(folder.rglob("dense.safetensors"))
        if not found:
            raise Breach(f"{name} succeeded and {folder} has no model")
        return hashlib.sha256(found[0].read_bytes()).hexdigest()

    def _kill(self, name: str, what: str) -> None:
        self._machines.kill(name)
        self._count_fault(self.figures.kills, what)

    @staticmethod
    def _count_fault(of: dict[str, int], what: str) -> None:
        of[what] = of.get(what, 0) + 1
