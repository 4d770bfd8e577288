"""Scheduler, Redis and nodes, each a process that a test kills and starts again as it was."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from chassis.closing import Closing
from chassis.process import Child
from heterps import Client
from heterps.client.records import Node, Process
from tests.cluster import Roles
from tests.pids import alive
from tests.valkey import Valkey
from tests.waiting import wait_until

SCHEDULER, REDIS = "scheduler", "redis"


class Machines(Closing):
    """All of them run once this is made, and end with it.

    Args:
        directory: of all that they keep, logs too.
        nodes: by id, resource type and units; none needs its type's device.

    Attributes:
        address: of the scheduler, whichever runs there.
    """

    def __init__(self, directory: Path, nodes: Mapping[str, tuple[str, int]]) -> None:
        self._directory = directory
        self._nodes = nodes
        directory.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        try:
            self._redis = self._stack.enter_context(Valkey(directory / "valkey"))
            self._roles = self._stack.enter_context(Roles(directory, self._redis.url))
            scheduler = self._start_scheduler("127.0.0.1:0")
            self.address = scheduler.address
            self._children = {SCHEDULER: scheduler}
            self._children |= {name: self._start_node(name) for name in nodes}
        except BaseException:
            self.close()
            raise

    @property
    def redis_url(self) -> str:
        """Where Redis listens."""
        return self._redis.url

    def pid(self, name: str) -> int:
        """Of the scheduler, Redis, or the node of that id."""
        return self._redis.pid if name == REDIS else self._children[name].pid

    def node_address(self, name: str) -> str:
        """Where a node listens, or did."""
        return self._children[name].address

    def kill(self, name: str) -> None:
        """End it at once."""
        if name == REDIS:
            self._redis.kill()
            return
        pid = self.pid(name)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid), f"{name} dies", pause_s=0.005)

    def start(self, name: str) -> None:
        """Start one that was killed, with all that it kept."""
        if name == REDIS:
            self._redis.start()
        elif name == SCHEDULER:
            self._children[name] = self._start_scheduler(self.address)
        else:
            self._children[name] = self._start_node(name)

    def close(self) -> None:
        self._stack.close()

    def _start_scheduler(self, bind: str) -> Child:
        kept = ("--artifacts", str(self._directory / "artifacts"))
        return self._roles.scheduler(*kept, "--bind", bind)

    def _start_node(self, name: str) -> Child:
        kind, units = self._nodes[name]
        where = ("--directory", str(self._directory / name))
        named = ("--node-id", name, "--units", str(units), "--device", "cpu")
        return self._roles.node(self._children[SCHEDULER], kind, *named, *where)


def running(client: Client, job_id: str) -> Iterator[tuple[Node, Process]]:
    """A job's processes that run, each with its node."""
    for node in client.nodes():
        for process in node.processes:
            if process.job_id == job_id and process.running:
                yield node, process
