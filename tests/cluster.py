"""Roles of a cluster, each a process that a test starts, stops and kills by itself."""

from contextlib import ExitStack
from pathlib import Path

from chassis.channels import connect
from chassis.closing import Closing
from chassis.process import Child, module_argv, spawn
from protos.scheduler_pb2_grpc import SchedulerStub

_READY_S = 120.0  # only a hang reaches it, however busy the machine
_GRACE_S = 8.0


class Roles(Closing):
    """Starts roles; they end with it, the last first.

    Args:
        directory: where logs and data go.
        redis_url: what schedulers share; "" for a Redis of each one's own.
    """

    def __init__(self, directory: Path, redis_url: str = "") -> None:
        self.directory = directory
        self.redis_url = redis_url
        self._stack = ExitStack()
        self._count = 0

    def start(self, module: str, *arguments: str, **environment: str) -> Child:
        """Start `python -m module` and wait until it is ready."""
        self._count += 1
        child = spawn(
            f"{module}-{self._count}",
            module_argv(module, *arguments),
            directory=self.directory / "logs",
            environment={"HETERPS_REDIS": "", **environment},
        )
        self._stack.callback(child.stop, _GRACE_S)
        return child.wait_ready(_READY_S)

    def scheduler(self, *arguments: str) -> Child:
        own = ("--directory", str(self.directory / f"redis-{self._count}"))
        redis = ("--redis", self.redis_url) if self.redis_url else own
        return self.start("scheduler.service", *redis, *arguments)

    def node(self, scheduler: Child, kind: str, *arguments: str) -> Child:
        # Most tests need no worker, or have the nodes of others beside them.
        to = ("--type", kind, "--scheduler", scheduler.address, "--notice", "0", "--cold")
        return self.start("workers.node", *to, *arguments)

    def shard(self, scheduler: Child, *arguments: str) -> Child:
        """One that stands before any job and after it."""
        return self.start("ps.server", "--scheduler", scheduler.address, *arguments)

    def stub(self, scheduler: Child) -> SchedulerStub:
        return SchedulerStub(self._stack.enter_context(connect(scheduler.address)))

    def close(self) -> None:
        self._stack.close()
