"""Where the time goes: what processes say, in order, in seconds since the command."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a process said.

    Attributes:
        at: seconds since the command.
    """

    at: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at:7.3f}  {self.who:18} {self.what}"


def timeline(
    began: float, ended: float, logs: Iterable[Path], said: str, job_id: str
) -> list[Event]:
    """What was said between a command and the end of the first step.

    Args:
        began, ended: seconds since 1970.
        logs: files of processes that write JSON.
        said: the same of the job's own, as `heterps logs` prints it.
    """
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    found = {Event(ended - began, "bench", "the first step is over")}
    for line in (*lines, *said.splitlines()):
        _, brace, rest = line.partition("{")
        try:
            told = json.loads(brace + rest)
            at = datetime.fromisoformat(told["time"]).timestamp()
            event = Event(round(at - began, 3), told["role"], told["message"].partition("\n")[0])
        except (ValueError, KeyError, TypeError):
            continue
        if -0.001 <= event.at <= ended - began and told.get("job", job_id) == job_id:
            found.add(event)
    return sorted(found, key=lambda event: event.at)
