"""A whole cluster on this machine: real processes on loopback.

with Cluster(types={"cpu": 2}, emulate=["t4"]) as cluster:
    client = cluster.client()
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from chassis import scratch, written
from chassis.closing import Closing
from chassis.process import (
    Child,
    ChildError,
    describe_exit,
    last_lines,
    module_argv,
    ready_path,
    spawn,
    stop_all,
)
from heterps.client.client import Client
from heterps.errors import ClusterError, HeterpsError
from heterps.home.local import Role

if TYPE_CHECKING:
    from scheduler.state.redis_server import EmbeddedRedis

REDIS_VARIABLE = "HETERPS_REDIS"
_READY_S = 60.0  # a node imports torch, on a machine that may be busy
_NODE_GRACE_S = 8.0  # nodes end the processes of their jobs first
_SCHEDULER = "scheduler"


class Cluster(Closing):
    """Redis, a scheduler and one node for each type.

    They end with the `with` block and, however this process dies, with it.

    Args:
        directory: where Redis data and logs go; None for a folder that is removed at the end.
        types: units by resource type.
        emulate: types without their device here; each has one unit where `types` gives no number.
        redis_url: a running Redis; None for $HETERPS_REDIS, else one of its own.
        bind: where the scheduler listens.
        devices: "cpu" or "cuda" by type, where the type's name does not tell.

    Raises:
        ClusterError: a process did not come up; quotes its log.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        types: Mapping[str, int] | None = None,
        emulate: Iterable[str] = (),
        *,
        redis_url: str | None = None,
        bind: str = "127.0.0.1:0",
        devices: Mapping[str, str] | None = None,
    ) -> None:
        self._temporary = directory is None
        if directory is None:
            scratch.sweep()  # what killed ones have left
            directory = scratch.temporary("cluster")
        self.directory = Path(directory).absolute()
        self.emulated = frozenset(emulate)
        wanted = dict(types) if types is not None else {"cpu": os.cpu_count() or 1}
        self.types = {**wanted, **{name: 1 for name in self.emulated if name not in wanted}}
        for name, units in self.types.items():
            if units < 1:
                raise ClusterError(f"units of {name!r}: got {units}, expected at least 1")
        self._url = redis_url or os.environ.get(REDIS_VARIABLE) or ""
        self._bind = bind
        self._devices = dict(devices or {})
        self._redis: EmbeddedRedis | None = None
        self._scheduler: Child | None = None
        self._nodes: list[Child] = []
        self._client: Client | None = None
        self._starting = threading.RLock()
        self._stopped = threading.Event()

    @property
    def address(self) -> str:
        """Where the scheduler listens.

        Raises:
            ClusterError: it was not started.
        """
        if self._scheduler is None:
            raise ClusterError("the cluster is not started; expected `with Cluster(...)`")
        return self._scheduler.address

    @property
    def _logs(self) -> Path:
        return self.directory / "logs"

    @property
    def children(self) -> list[Child]:
        """The scheduler and the nodes."""
        return [*([self._scheduler] if self._scheduler else []), *self._nodes]

    @property
    def roles(self) -> tuple[Role, ...]:
        """All processes, for a record of the cluster."""
        roles = [
            Role(child.label, child.pid, str(child.facts.get("address", "")), str(child.log))
            for child in self.children
        ]
        if self._redis is not None:
            log = self.directory / "redis" / "redis.log"
            address = self._redis.url.rpartition("@")[2].removeprefix("redis://").partition("/")[0]
            roles.insert(0, Role("redis", self._redis.pid, address, str(log)))
        return tuple(roles)

    def client(self) -> Client:
        """A client of this cluster, closed with it."""
        if self._client is None:
            self._client = Client(self.address)
        return self._client

    def start(self, on_step: Callable[[str], None] = lambda step: None) -> "Cluster":
        """Start everything and wait until the nodes are registered.

        Args:
            on_step: told what is being started.

        Raises:
            ClusterError: a process did not come up, or another thread has stopped the cluster.
        """
        with self._starting:
            try:
                self._go_on()
                written.claim(self.directory)
                self._start(on_step)
                self._go_on()
            except (ChildError, OSError) as error:
                self.stop()
                raise ClusterError(f"the cluster did not start: {error}") from None
            except BaseException:
                self.stop()
                raise
        return self

    def revive(self, dead: Child, stop: Callable[[], bool] = lambda: False) -> Child:
        """Start a process that has died again, the scheduler at its address; the new one.

        Raises:
            ClusterError: it did not come up, or is none of this cluster's.
        """
        try:
            dead.stop(0.0)  # closes what is left of it
            if dead is self._scheduler:
                child = self._scheduler = self._spawn_scheduler(dead.address)
                # Till it was ready the address is known from before.
                child.facts = dict(dead.facts)
            else:
                place = self._nodes.index(dead)
                child = self._nodes[place] = self._spawn_node(dead.label.removeprefix("node "))
            return child.wait_ready(_READY_S, stop)
        except (ChildError, OSError, ValueError) as error:
            raise ClusterError(f"{dead.label} did not start again: {error}") from None

    def stop(self) -> None:
        """End all processes, nodes first; safe to repeat, and while another thread starts them."""
        self._stopped.set()
        with self._starting:
            if self._client is not None:
                self._client.close()
                self._client = None
            stop_all(self._nodes, _NODE_GRACE_S)
            if self._scheduler is not None:
                self._scheduler.stop(5.0)
            if self._redis is not None:
                self._redis.stop()
            if self._temporary:
                scratch.discard(self.directory)

    def check(self) -> None:
        """Check that all processes live.

        Raises:
            ClusterError: one has ended; quotes its log.
        """
        for child in self.children:
            code = child.poll()
            if code is not None:
                raise ClusterError(
                    f"{child.label} ended {describe_exit(code)}; its log, {child.log}, ends:\n"
                    f"{last_lines(child.log)}"
                )

    def __enter__(self) -> "Cluster":
        return self.start()

    def close(self) -> None:
        """As `stop`."""
        self.stop()

    def _start(self, on_step: Callable[[str], None]) -> None:
        self._begin_nodes()
        if not self._url:
            from scheduler.state.redis_server import EmbeddedRedis, RedisServerError

            on_step("redis")
            try:
                self._redis = EmbeddedRedis(self.directory / "redis").start()
            except RedisServerError as error:
                raise ClusterError(f"the cluster did not start: {error}") from None
            self._url = self._redis.url
        self._go_on()
        on_step(_SCHEDULER)
        self._scheduler = self._spawn_scheduler(self._bind)
        self._scheduler.wait_ready(_READY_S, self._stopped.is_set)
        on_step("nodes")
        self._start_nodes()

    def _go_on(self) -> None:
        """Check that nobody has stopped the cluster meanwhile."""
        if self._stopped.is_set():
            raise ClusterError("the cluster was stopped while it started")

    def _begin_nodes(self) -> None:
        """Have a node for each type start, beside the scheduler: they import what takes longest."""
        # What a cluster before has left in this folder is another scheduler's.
        ready_path(self._logs, _SCHEDULER).unlink(missing_ok=True)
        self._nodes = [self._spawn_node(name) for name in sorted(self.types)]

    def _start_nodes(self) -> None:
        """Wait until the scheduler knows the nodes of all types."""
        for child in self._nodes:
            child.wait_ready(_READY_S, self._stopped.is_set)
        self._await_nodes({child.address: child.label for child in self._nodes})

    def _is_cold(self, name: str) -> bool:
        """Whether a type's node imports what workers need only with the first of them.

        Emulated types share the cores here with real ones, which jobs begin on.
        """
        return name in self.emulated and any(kind not in self.emulated for kind in self.types)

    def _spawn_scheduler(self, bind: str) -> Child:
        # Through the environment: a URL may hold a password, and arguments are public.
        environment = {REDIS_VARIABLE: self._url}
        argv = module_argv("scheduler.service", "--bind", bind)
        argv += ["--artifacts", str(self.directory / "artifacts")]
        return spawn(_SCHEDULER, argv, directory=self._logs, environment=environment)

    def _spawn_node(self, name: str) -> Child:
        argv = module_argv("workers.node", "--type", name, "--units", str(self.types[name]))
        if self._scheduler is not None:
            argv += ["--scheduler", self.address]
        else:
            argv += ["--found-in", str(ready_path(self._logs, _SCHEDULER))]
        argv += ["--wait", f"{_READY_S:g}", "--bind", "127.0.0.1:0", "--notice", "0"]
        argv += ["--cold"] if self._is_cold(name) else []
        argv += ["--directory", str(self.directory / f"node-{name}")]
        argv += ["--emulate"] if name in self.emulated else []
        argv += ["--device", self._devices[name]] if self._devices.get(name) else []
        return spawn(f"node {name}", argv, directory=self._logs)

    def _await_nodes(self, wanted: Mapping[str, str]) -> None:
        """Wait until the scheduler knows every node.

        Args:
            wanted: what to call the node in errors, by address.
        """
        deadline = time.monotonic() + _READY_S
        while True:
            self._go_on()
            self.check()
            registered: set[str] = set()
            with suppress(HeterpsError):  # it may be busy with its first calls
                registered = {node.address for node in self.client().nodes()}
            if wanted.keys() <= registered:
                return
            if time.monotonic() > deadline:
                late = [label for address, label in wanted.items() if address not in registered]
                raise ClusterError(
                    f"not registered within {_READY_S:.0f} s: {', '.join(late)}; "
                    f"see the logs in {self.directory / 'logs'}"
                )
            time.sleep(0.05)
