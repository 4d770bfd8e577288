"""What processes take of the cores, looked at from outside by a thread of its own."""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

_TICK = os.sysconf("SC_CLK_TCK")


class Watch(ABC):
    """What is looked at by a thread of its own, while it is entered."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    @abstractmethod
    def _watch(self) -> None:
        """Look until it is over."""


def descendants(root: int) -> Iterator[int]:
    """Processes that a process has started, and those that these have, by number."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it is gone
            children.setdefault(int(_stat(int(name))[1]), []).append(int(name))
    waiting = [root]
    while waiting:
        some = children.get(waiting.pop(), [])
        waiting += some
        yield from some


def used_s(pid: int) -> float:
    """Seconds of processor that a process has used; an `OSError` if it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICK


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
