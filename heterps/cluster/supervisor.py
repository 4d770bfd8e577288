"""The process that stays behind `heterps up`: it holds the cluster until `heterps down`."""

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from chassis import written
from chassis.process import (
    Child,
    announce,
    describe_exit,
    install_signals,
    last_lines,
    module_argv,
    setup_logging,
)
from heterps.cluster.console import ConsoleProcess
from heterps.cluster.embedded import REDIS_VARIABLE, Cluster
from heterps.errors import ClusterError
from heterps.home import local
from heterps.home.local import Running
from workers.node.restart import RestartRule

_UP_S = 120.0
_DOWN_S = 30.0
_log = logging.getLogger("heterps.supervisor")


class Group(Protocol):
    """Processes that belong together, and the way to start one of them again."""

    @property
    def children(self) -> list[Child]:
        """The processes."""

    def revive(self, dead: Child, stop: Callable[[], bool]) -> Child:
        """Start one that has died again; the new one.

        Raises:
            ClusterError: it did not come up.
        """


class Reviver:
    """Starts processes again when they die: soon, then later, not for ever.

    The jobs of a dead node end, or start over where they may; those of a dead scheduler go on.
    """

    def __init__(
        self, groups: Sequence[Group], stop: threading.Event, rule: RestartRule | None = None
    ) -> None:
        self._groups = groups
        self._stop = stop
        self._rule = rule or RestartRule()
        self._restarts: dict[str, list[float]] = {}  # when, by label
        self._due: dict[str, float] = {}
        self._given_up: set[str] = set()

    def step(self) -> bool:
        """Look after every process once; whether one was started again."""
        revived = [
            self._look_after(group, child) for group in self._groups for child in group.children
        ]
        return any(revived)

    def _look_after(self, group: Group, child: Child) -> bool:
        label, code, now = child.label, child.poll(), time.monotonic()
        if code is None or label in self._given_up:
            return False
        restarts = self._restarts.setdefault(label, [])
        if label not in self._due:
            pause = self._rule.pause_before(restarts, now)
            told = f"{label} ended {describe_exit(code)}; its log is {child.log}"
            if pause is None:
                self._given_up.add(label)
                _log.error("%s; it %s and stays down", told, self._rule.exhausted)
                return False
            _log.error("%s; it is started again", told)
            self._due[label] = now + pause
        if now < self._due[label]:
            return False
        del self._due[label]
        restarts.append(now)
        try:
            again = group.revive(child, self._stop.is_set)
        except ClusterError as error:
            _log.error("%s", error)
            return False
        _log.info("%s runs again (pid %d)", label, again.pid)
        return True


def up(
    types: Mapping[str, int],
    emulate: Sequence[str],
    *,
    redis_url: str | None = None,
    bind: str = "127.0.0.1:0",
    ray: str | None = None,
) -> Running:
    """Start a cluster that outlives this process.

    Args:
        ray: address of the Ray cluster that the nodes go to; None for nodes on this machine.

    Raises:
        ClusterError: one is up already, or it did not start; quotes its log.
    """
    there = local.running()
    if there is not None or local.lock_held():
        where = f" at {there.address}" if there else ""
        raise ClusterError(f"a cluster is up already{where}; end it with `heterps down`")
    directory = local.home() / "cluster"
    written.claim(directory)
    log, ready = directory / "supervisor.log", directory / "ready.json"
    ready.unlink(missing_ok=True)
    argv = module_argv("heterps.cluster.supervisor", "--directory", str(directory), "--bind", bind)
    argv += ["--ready-file", str(ready)]
    argv += [f"--type={name}={units}" for name, units in types.items()]
    argv += [f"--emulate={name}" for name in emulate]
    argv += ["--ray", ray] if ray is not None else []
    environment = {**os.environ, **({REDIS_VARIABLE: redis_url} if redis_url else {})}
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    deadline = time.monotonic() + _UP_S
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise ClusterError(last_lines(log, 25) or "the cluster ended at once")
            if time.monotonic() > deadline:
                raise ClusterError(f"not up within {_UP_S:.0f} s\n{last_lines(log)}")
            time.sleep(0.05)
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_DOWN_S)
        process.kill()
        raise
    running = local.running()
    if running is None:
        raise ClusterError(f"the cluster ended at once\n{last_lines(log)}")
    return running


def down() -> Running | None:
    """End the cluster that is up; None when none was."""
    running = local.running()
    if running is None:
        if local.lock_held():
            raise ClusterError("a cluster is just starting or ending; try again in a moment")
        return None
    with suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_S
    while local.lock_held():
        if time.monotonic() > deadline:  # its children end with it
            with suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)
            deadline += _DOWN_S
        time.sleep(0.05)
    local.forget()
    return running


def main(argv: Sequence[str] | None = None) -> int:
    """Hold a cluster until told to end."""
    parser = argparse.ArgumentParser(prog="heterps.supervisor", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--bind", default="127.0.0.1:0")
    parser.add_argument("--type", action="append", default=[], metavar="TYPE=UNITS")
    parser.add_argument("--emulate", action="append", default=[], metavar="TYPE")
    parser.add_argument("--ray", metavar="ADDRESS")
    parser.add_argument("--ready-file")
    options = parser.parse_args(argv)
    types = {name: int(units) for name, _, units in (t.rpartition("=") for t in options.type)}
    setup_logging("supervisor")
    stop = threading.Event()
    install_signals(stop)
    with local.lock() as ours:
        if not ours:
            print("a cluster is up already; end it with `heterps down`")
            return 1
        try:
            cluster = _cluster(options, types)
        except ClusterError as error:
            print(error)
            return 1
        console = ConsoleProcess(cluster.directory / "logs")
        try:
            cluster.start()
            started_at = time.time()
            console.start(cluster.address)

            def write() -> None:
                where = (cluster.address, str(cluster.directory))
                roles = (*cluster.roles, *console.roles)
                Running(os.getpid(), *where, started_at, roles).write()

            write()
            announce(options.ready_file, address=cluster.address)
            reviver = Reviver((cluster, console), stop)
            while not stop.wait(0.5):
                if reviver.step():
                    write()
        except ClusterError as error:
            print(error)
            return 1
        finally:
            local.forget()
            console.stop()
            cluster.stop()
    return 0


def _cluster(options: argparse.Namespace, types: dict[str, int]) -> Cluster:
    """The cluster that the command line asks for, not started."""
    if options.ray is None:
        return Cluster(options.directory, types, options.emulate, bind=options.bind)
    from heterps.cluster.on_ray import RayCluster

    return RayCluster(options.directory, types, options.emulate, bind=options.bind, ray=options.ray)


if __name__ == "__main__":
    sys.exit(main())
