"""The console beside a cluster on this machine."""

import logging
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from chassis.process import Child, ChildError, module_argv, spawn
from heterps.errors import ClusterError
from heterps.home.local import Role

HOST, PORT = "127.0.0.1", 8700
_READY_S = 30.0
_NEEDS = ("fastapi", "jinja2", "uvicorn")
_log = logging.getLogger("heterps.console")


class ConsoleProcess:
    """A console's process, or none where its extra is not installed or it did not come up.

    Args:
        logs: folder of its log.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._scheduler = ""
        self._child: Child | None = None

    @property
    def children(self) -> list[Child]:
        """The process, if any."""
        return [self._child] if self._child is not None else []

    @property
    def roles(self) -> tuple[Role, ...]:
        """The process, for a record of the cluster."""
        return tuple(
            Role(child.label, child.pid, str(child.facts["url"]), str(child.log))
            for child in self.children
        )

    def start(self, scheduler: str) -> None:
        """Start it for the scheduler at this address, if that can be done."""
        self._scheduler = scheduler
        if missing := [name for name in _NEEDS if find_spec(name) is None]:
            _log.info("no console: %s not installed; see heterps[console]", ", ".join(missing))
            return
        try:
            self._child = self._spawn(_free()).wait_ready(_READY_S)
        except ChildError as error:
            _log.warning("no console: %s", error)

    def revive(self, dead: Child, stop: Callable[[], bool]) -> Child:
        """Start it again at its address, once it has died; the new one.

        Raises:
            ClusterError: it did not come up.
        """
        dead.stop(0.0)  # closes what is left of it
        try:
            child = self._child = self._spawn(dead.address)
            child.facts = dict(dead.facts)  # till it is ready; it stays where it was
            return child.wait_ready(_READY_S, stop)
        except (ChildError, OSError) as error:
            raise ClusterError(f"{dead.label} did not start again: {error}") from None

    def stop(self) -> None:
        """End it; safe to repeat."""
        for child in self.children:
            child.stop()

    def _spawn(self, bind: str) -> Child:
        argv = module_argv("heterps", "console", "--scheduler", self._scheduler, "--bind", bind)
        return spawn("console", argv, directory=self._logs)


def _free() -> str:
    """The port that people remember, any other where that is taken."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, PORT))
        except OSError:
            return f"{HOST}:0"
    return f"{HOST}:{PORT}"
