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
from typing import TypeVar

import grpc

from chassis.channels import connect
from protos.node_pb2 import NodeStatusRequest
from protos.node_pb2_grpc import NodeStub
from tests.machines import REDIS, SCHEDULER, Machines

T = TypeVar("T")
SHARDS = "cpu"  # what names of nodes begin with that have shards
SETTLED_S = 0.5  # after a kill, when those who begin something have noticed it
_ANSWER_S = 2.0
_REPLACED_S = 3.0  # for a replacement to be started, or a cut to be begun
_LOOK_S = 0.002


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
            self.machines.start(name)

        self.reviving.append(threading.Thread(target=revive))
        self.reviving[-1].start()
        return [name]

    def node(self, *, of_shards: bool) -> list[str]:
        """One of those that have shards, or of those that have workers."""
        found = [name for name in self.nodes if name.startswith(SHARDS) == of_shards]
        return self.machine(self.chance.choice(found))

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
}


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
