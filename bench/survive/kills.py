"""Who is killed, and when: drawn by a seed, of all processes that a job runs on."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import grpc

from chassis.channels import connect
from chassis.process import ChildError
from heterps import Client
from heterps.errors import HeterpsError
from protos.node_pb2 import NodeStatusRequest
from protos.node_pb2_grpc import NodeStub
from protos.scheduler_pb2 import JobRequest, MoveJobRequest
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.machines import REDIS, SCHEDULER, Machines

T = TypeVar("T")
SHARDS = "cpu"  # what names of nodes begin with that have shards
SETTLED_S = 0.5  # after a kill, when those who begin something have noticed it
_ANSWER_S = 2.0
_REPLACED_S = 3.0  # for a replacement to be started, or a cut to be begun
_LOOK_S = 0.002
_STOPPED_S = 10.0  # that one stands still
_NOTICE_S = (3.0, 10.0)
_FULL_S = 3.0
_REVIVED_S = 60.0


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed.

    Attributes:
        kind: one of `KINDS`.
        at: when, Unix time.
        victims: labels of processes.
    """

    kind: str
    at: float
    victims: list[str]


@dataclass
class Killer:
    """Kills processes of one job, and starts again what nobody else would.

    Args:
        nodes: where its processes run, by name.
        cuts: the folder of its checkpoints.
        chance: draws everything but the instants.
    """

    machines: Machines
    job_id: str
    nodes: list[str]
    cuts: Path
    chance: random.Random
    reviving: list[threading.Thread] = field(default_factory=list)

    def kill(self, kind: str) -> Kill | None:
        """Do so; None where there is nobody of that kind."""
        at = time.time()
        victims = KINDS[kind][1](self)
        return Kill(kind, at, victims) if victims else None

    def settle(self) -> None:
        """Wait until all that is started again runs."""
        for thread in self.reviving:
            thread.join()
        self.reviving.clear()

    def processes(self) -> dict[str, int]:
        """Labels and ids of the job's processes that run, as their nodes say."""
        found = {}
        for name in self.nodes:
            with connect(self.machines.node_address(name)) as channel, suppress(grpc.RpcError):
                status = NodeStub(channel).Status(NodeStatusRequest(), timeout=_ANSWER_S)
                for process in status.processes:
                    if process.job_id == self.job_id and process.running:
                        found[f"{process.label} of attempt {process.attempt}"] = process.pid
        return found

    def one(self, begins: str, count: int = 1) -> list[str]:
        """Kill some whose labels begin so."""
        found = {label: pid for label, pid in self.processes().items() if label.startswith(begins)}
        if len(found) < count:
            return []
        victims = self.chance.sample(sorted(found), count)
        for label in victims:
            with suppress(ProcessLookupError):
                os.kill(found[label], signal.SIGKILL)
        return victims

    def replacement(self) -> list[str]:
        """A worker, and who is started in its place."""
        before = set(self.processes())
        victims = self.one("stage")
        delay = self.chance.uniform(0, 0.2)

        def news() -> dict[str, int]:
            return {
                label: pid
                for label, pid in self.processes().items()
                if label not in before and label.startswith("stage")
            }

        if victims and (found := _within(news)):
            time.sleep(delay)
            for label, pid in found.items():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    victims.append(label)
        return victims

    def while_cutting(self) -> list[str]:
        """A worker, or shard, while a checkpoint is taken."""
        what = self.chance.choice(["stage", "stage", "shard"])
        delay = self.chance.uniform(0, 0.05)
        before = self._cut_folders()
        _within(lambda: self._cut_folders() - before)
        time.sleep(delay)
        return self.one(what)

    def while_replaced(self) -> list[str]:
        """A worker, and the scheduler while that is replaced."""
        victims = self.one("stage")
        if victims:
            time.sleep(self.chance.uniform(0, 0.4))
            victims += self.machine(SCHEDULER)
        return victims

    def machine(self, name: str) -> list[str]:
        """A node, the scheduler or Redis, which comes back after a while."""
        self.settle()
        self.machines.kill(name)
        delay = self.chance.uniform(0, 2.0)

        def revive() -> None:
            time.sleep(delay)
            self._start(name)

        self._later(revive)
        return [name]

    def node(self, *, of_shards: bool) -> list[str]:
        """One of those that have shards, or of those that have workers."""
        found = [name for name in self.nodes if name.startswith(SHARDS) == of_shards]
        return self.machine(self.chance.choice(found))

    def survivor(self) -> list[str]:
        """A worker, and another one while it is replaced."""
        victims = self.one("stage")
        time.sleep(self.chance.uniform(0, 0.4))
        return victims and victims + self.one("stage")

    def stopped(self) -> list[str]:
        """Any process stands still for a while; perhaps a worker dies meanwhile."""
        names = (SCHEDULER, REDIS, *self.nodes)
        found = self.processes() | {name: self.machines.pid(name) for name in names}
        label = self.chance.choice(sorted(found))
        pid = found[label]
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            time.sleep(_STOPPED_S)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._later(go_on)
        victims = [f"{label} stands still"]
        if self.chance.random() < 0.5:
            time.sleep(self.chance.uniform(0, 2.0))
            victims += self.one("stage")
        return victims

    def all_together(self) -> list[str]:
        """A worker, Redis and the scheduler."""
        self.settle()
        victims = self.one("stage")
        time.sleep(self.chance.uniform(0, 0.3))
        for name in self.chance.sample([REDIS, SCHEDULER], 2):
            self.machines.kill(name)
        delay = self.chance.uniform(0, 2.0)

        def revive() -> None:
            time.sleep(delay)
            for name in (REDIS, SCHEDULER):
                self._start(name)

        self._later(revive)
        return [*victims, REDIS, SCHEDULER]

    def drained(self) -> list[str]:
        """A node says that it goes; a worker, or the node itself, dies within its notice."""
        self.settle()
        name = self.chance.choice([name for name in self.nodes if not name.startswith(SHARDS)])
        notice, early = self.chance.uniform(*_NOTICE_S), self.chance.random() < 0.3
        try:
            with Client(self.machines.address) as client:
                client.drain(name, notice)
        except HeterpsError:  # no scheduler that knows it
            return []

        def revive() -> None:
            time.sleep(self.chance.uniform(0, 1.0) if early else notice)
            self.machines.kill(name)
            time.sleep(self.chance.uniform(0, 2.0))
            self._start(name)

        self._later(revive)
        time.sleep(self.chance.uniform(0, 1.0))
        return [f"{name} within {notice:.1f} s", *self.one("stage")]

    def moving(self) -> list[str]:
        """A worker, old or new, the scheduler or Redis, while the job goes over to others."""
        self.settle()
        with connect(self.machines.address) as channel, suppress(grpc.RpcError):
            stub = SchedulerStub(channel)
            plan = stub.GetDecision(JobRequest(job_id=self.job_id), timeout=_ANSWER_S)
            asked = MoveJobRequest(job_id=self.job_id, decision=plan)
            stub.MoveJob(asked, timeout=_ANSWER_S)
            time.sleep(self.chance.uniform(0, 2.0))
            what = self.chance.choice(["stage", "stage", SCHEDULER, REDIS])
            return ["moves", *(self.one(what) if what == "stage" else self.machine(what))]
        return []

    def full_disk(self) -> list[str]:
        """No checkpoint can be written for a while; perhaps a worker dies meanwhile."""
        if not self.cuts.parent.is_dir():
            return []
        ballast = self.cuts.parent / "ballast"
        free = os.statvfs(ballast.parent)
        with suppress(OSError), ballast.open("wb") as file:
            file.write(bytes(free.f_bavail * free.f_frsize))

        def relieve() -> None:
            time.sleep(_FULL_S)
            ballast.unlink()

        self._later(relieve)
        if self.chance.random() < 0.5:
            time.sleep(self.chance.uniform(0, 2.0))
            return ["disk", *self.one("stage", self.chance.choice([1, 2]))]
        return ["disk"]

    def two_kinds(self) -> list[str]:
        """Two others of these at once, or nearly so."""
        victims = []
        for _ in range(2):
            victims += KINDS[drawn(self.chance, USUAL)][1](self)
            time.sleep(self.chance.uniform(0, 0.5))
        return victims

    def _start(self, name: str) -> None:
        """Start one again and again until it runs, as whoever watches over it would.

        Raises:
            ChildError: it never does; a scheduler does not while its Redis stands still.
        """
        until = time.monotonic() + _REVIVED_S
        while True:
            try:
                return self.machines.start(name)
            except ChildError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.5)

    def _later(self, action: Callable[[], None]) -> None:
        self.reviving.append(threading.Thread(target=action))
        self.reviving[-1].start()

    def _cut_folders(self) -> set[str]:
        if not self.cuts.is_dir():
            return set()
        return {str(path) for path in [*self.cuts.iterdir(), *self.cuts.glob("tables/*")]}


# How often each is drawn, and what it does.
KINDS: dict[str, tuple[int, Callable[[Killer], list[str]]]] = {
    "worker": (10, lambda killer: killer.one("stage")),
    "two workers": (2, lambda killer: killer.one("stage", 2)),
    "worker and replacement": (2, Killer.replacement),
    "during a checkpoint": (2, Killer.while_cutting),
    "shard": (3, lambda killer: killer.one("shard")),
    "node": (2, lambda killer: killer.node(of_shards=False)),
    "node with shards": (1, lambda killer: killer.node(of_shards=True)),
    "scheduler": (1, lambda killer: killer.machine(SCHEDULER)),
    "scheduler and worker": (2, Killer.while_replaced),
    "redis": (1, lambda killer: killer.machine(REDIS)),
    "survivor": (2, Killer.survivor),
    "stopped": (2, Killer.stopped),
    "all together": (2, Killer.all_together),
    "drained": (3, Killer.drained),
    "moving": (3, Killer.moving),
    "full disk": (2, Killer.full_disk),
    "two kinds": (3, Killer.two_kinds),
}
RARE: Final = (
    *("survivor", "stopped", "all together", "drained", "moving", "full disk", "two kinds"),
)
USUAL: Final = tuple(kind for kind in KINDS if kind not in RARE)


def pause(chance: random.Random, every_s: float) -> float:
    """Seconds until the next kill."""
    return chance.uniform(0.3, 1.7) * every_s


def drawn(chance: random.Random, kinds: Sequence[str]) -> str:
    """What the next kill is, of some kinds."""
    return chance.choices(kinds, [KINDS[kind][0] for kind in kinds])[0]


def _within(found: Callable[[], T]) -> T:
    """What is found in time, if anything is."""
    until = time.monotonic() + _REPLACED_S
    while not (what := found()) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    return what
