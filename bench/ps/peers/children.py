"""Shard processes of the peers: each prints one line when ready and ends when its input does."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_READY = "shard-ready "


@dataclass(slots=True)
class Child:
    """A started shard process."""

    process: "subprocess.Popen[str]"
    said: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> str:
        """What it announced.

        Raises:
            RuntimeError: it ended first.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_READY):
                self.said = line.removeprefix(_READY).strip()
                return self.said
        raise RuntimeError(
            f"a shard ended with exit code {self.process.wait()} before it was ready"
        )

    def stop(self) -> None:
        """Close its input, and end it if that does not."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(module: str, arguments: Sequence[str]) -> Child:
    """Run a module as a shard, with this interpreter."""
    argv = [sys.executable, "-m", module, *arguments]
    pipe = subprocess.PIPE
    return Child(subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True))


def announce(text: str = "") -> None:
    """Say that this shard is ready."""
    print(f"\n{_READY}{text}", flush=True)


def serve(announcement: str = "") -> None:
    """Say that this shard is ready, then wait until the client ends."""
    announce(announcement)
    os.dup2(2, 1)
    sys.stdin.read()
    os._exit(0)


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
