"""A process that is asked by lines of JSON, and answers each with one."""

import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.pages import ROOT

Answer = dict[str, Any]
_END_S = 20.0


class PeerError(RuntimeError):
    """A peer cannot take part, or failed; says why."""


class Answering:
    """It ends when its input does.

    Args:
        log: file that what it says otherwise is added to.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, timeout_s: float, **question: Any) -> Answer:
        """Its answer to a question; without one, what it says by itself.

        Raises:
            PeerError: it ended, or did not answer in time, or something else than JSON.
        """
        assert self._process.stdin is not None
        try:
            if question:
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerError(f"no answer within {timeout_s:.0f} s") from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"ended with exit code {self._process.wait()}: {self._last()}")
        try:
            answer: Answer = json.loads(line)
        except ValueError:
            raise PeerError(f"said {line.strip()[:200]!r} in place of an answer") from None
        return answer

    def close(self) -> None:
        """End it; safe to repeat."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _last(self) -> str:
        said = self._log.read_text(errors="replace").splitlines()
        return next(
            (line.strip()[-300:] for line in reversed(said) if line.strip()), "it said nothing"
        )
