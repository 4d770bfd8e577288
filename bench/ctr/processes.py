"""A peer's process, idle until its turn."""

import json
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.ctr.roster import Entry, launch
from bench.pages import ROOT

_START_S, _TURN_S, _END_S = 300.0, 120.0, 20.0


class PeerError(RuntimeError):
    """A peer cannot take part; says why."""


class Peer:
    """It has trained its first steps, and answers.

    Args:
        data: the file with the samples.
        home: where other systems are installed.
        folder: for its log and the rows that it hands over.

    Raises:
        PeerError: it is not installed, ended or did not answer.
    """

    def __init__(self, entry: Entry, data: Path, home: Path, folder: Path) -> None:
        self.entry = entry
        self._log, self._rows = folder / f"{entry.name}.log", folder / f"{entry.name}.npy"
        try:
            argv, environment = launch(entry, home)
        except FileNotFoundError as error:
            raise PeerError(str(error)) from None
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*argv, str(data), str(os.cpu_count() or 1), str(self._rows)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.losses: Sequence[float] = self._answer(_START_S).get("losses", ())
        except PeerError:
            self.close()
            raise

    def rows(self) -> NDArray[np.float32]:
        """What its first steps made of the rows that are checked."""
        found: NDArray[np.float32] = np.load(self._rows)
        return found

    def turn(self, seconds: float, threads: int = 0) -> dict[str, Any]:
        """Train for so long, on so many threads; what that came to.

        Raises:
            PeerError: it ended or did not answer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"seconds": seconds, "threads": threads}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        return self._answer(seconds + _TURN_S)

    def close(self) -> None:
        """End it; safe to repeat."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _answer(self, patience_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=patience_s)
        except queue.Empty:
            raise PeerError(f"no answer within {patience_s:.0f} s") from None
        if not line:
            code = self._process.wait()
            said = self._log.read_text(errors="replace").split("\n")
            last = next((text for text in reversed(said) if text.strip()), "it said nothing")
            raise PeerError(f"ended with exit code {code}: {last.strip()[-300:]}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerError(f"said {line.strip()[:200]!r} in place of an answer") from None
        return answer

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")
