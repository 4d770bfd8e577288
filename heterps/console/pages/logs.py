"""Logs for a browser: the end of each, bounded however much a job writes, and what comes after."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from chassis.logs import readable
from heterps.client.client import Client
from heterps.errors import HeterpsError

KEPT = 60_000  # characters of each process, its latest
_LINE = 2_000  # characters of a line that are shown
_SEND_S = 0.4
_BEAT_S = 10.0


@dataclass(slots=True)
class Tail:
    """The latest text of each process; what is pushed out is counted."""

    _texts: dict[str, str] = field(default_factory=dict)
    _lost: dict[str, int] = field(default_factory=dict)

    def add(self, process: str, text: str) -> None:
        """Take in what a process wrote."""
        whole = self._texts.get(process, "") + text
        if len(whole) > KEPT:
            cut = whole.find("\n", len(whole) - KEPT) + 1 or len(whole) - KEPT
            self._lost[process] = self._lost.get(process, 0) + cut
            whole = whole[cut:]
        self._texts[process] = whole

    def take(self, whole: bool = True) -> dict[str, str]:
        """What is there, by process, in order of their names.

        Args:
            whole: also the beginning of a line; else it waits for its end.
        """
        found = {}
        for process in sorted(self._texts):
            text = self._texts[process]
            end = len(text) if whole else text.rfind("\n") + 1
            self._texts[process] = text[end:]
            if lost := self._lost.pop(process, 0):
                found[process] = f"[{lost:,} characters left out]\n"
            if end:
                found[process] = found.get(process, "") + shown(text[:end])
        return found


def shown(text: str) -> str:
    """Lines as a person reads them, none of them longer than a screen or so."""
    lines = [readable(line) for line in text.splitlines()]
    cut = [line if len(line) <= _LINE else f"{line[:_LINE]} […]" for line in lines]
    return "\n".join(cut) + "\n" if cut else ""


def latest_logs(client: Client, job_id: str) -> dict[str, str]:
    """The end of each process's log as it stands."""
    tail = Tail()
    for piece in client.logs(job_id):
        tail.add(piece.process, piece.text)
    return tail.take()


async def log_events(connect: Callable[[], Client], job_id: str) -> AsyncIterator[str]:
    """Server-sent events: `log` with process and text, then `end`.

    What a slow reader does not keep up with is left out, as is all but the end of what was written
    before it came. A thread reads for it, over a connection that is closed when it goes.
    """
    client = connect()
    lock, tail, over = threading.Lock(), Tail(), threading.Event()
    problem = ""

    def read() -> None:
        nonlocal problem
        try:
            for piece in client.logs(job_id, follow=True):
                with lock:
                    tail.add(piece.process, piece.text)
        except HeterpsError as error:
            problem = str(error)
        except ValueError:  # the connection was closed: the reader has gone
            pass
        finally:
            over.set()

    threading.Thread(target=read, name=f"log of {job_id}", daemon=True).start()
    quiet_s = 0.0
    try:
        yield "retry: 3000\n\n"
        while True:
            ended = over.is_set()
            with lock:
                found = tail.take(whole=ended)
            for process, text in found.items():
                yield _event("log", {"process": process, "text": text})
            if ended:
                yield _event("end", {"problem": problem})
                return
            quiet_s = 0.0 if found else quiet_s + _SEND_S
            if quiet_s >= _BEAT_S:
                quiet_s = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(_SEND_S)
    finally:
        client.close()


def _event(name: str, data: dict[str, str]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
