"""Client processes of peers, as the benchmark drives them."""

import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.pages import ROOT
from bench.ps.peers.peer import Setting
from bench.ps.roster import Entry, launch

Answer = dict[str, Any]


class PeerError(RuntimeError):
    """A peer could not be started, or failed; says why."""


class ClientProcess:
    """One peer's client. It and its shards end when this does.

    Args:
        log: file for what it prints.
        certificates: as `launch` takes them.
    """

    def __init__(
        self, entry: Entry, setting: Setting, log: Path, certificates: Mapping[str, str]
    ) -> None:
        self.entry = entry
        self._log = log
        command = launch(entry, Path(setting.peers_dir), certificates)
        if isinstance(command, str):
            raise PeerError(command)
        argv, environment = command
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*argv, setting.text()],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, do: str, timeout_s: float = 300, **arguments: Any) -> Answer:
        """Give a command; its answer.

        Raises:
            PeerError: it failed, ended or did not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(f"no answer to {do!r} within {timeout_s:.0f} s") from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(
                f"ended with exit code {self._process.wait()} at {do!r}: {self._last()}"
            )
        answer: Answer = json.loads(line)
        if "failed" in answer:
            raise PeerError(f"{do}: {' '.join(answer['failed'].split())}"[:400])
        return answer

    def close(self) -> None:
        """End it; safe to repeat."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _last(self) -> str:
        lines = [
            line for line in self._log.read_text(errors="replace").splitlines() if line.strip()
        ]
        return lines[-1][-300:] if lines else "it said nothing"


def close_all(clients: Sequence[ClientProcess]) -> None:
    """End all."""
    for client in clients:
        client.close()
