"""What the processes of a job take of the processors, from outside."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

WORKER, SHARD = "workers.stage", "ps.server"  # modules that they run
_EVERY_S = 0.1
_LOOK_EVERY = 4  # times, for new processes
_TICK = os.sysconf("SC_CLK_TCK")


class Processors:
    """Processor seconds of all workers and shards that this process has started, while entered."""

    def __init__(self) -> None:
        self._module: dict[int, str] = {}
        self._used: dict[int, list[tuple[float, float]]] = {}
        self._over = threading.Event()

    def __enter__(self) -> "Processors":
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def seconds(self, module: str, span: tuple[float, float]) -> list[float]:
        """Of each process of a module that was there between two instants of the monotonic clock.

        The time it took in between; those that came later or ended before are left out.
        """
        found = []
        for pid, of in self._module.items():
            seen = self._used[pid]
            if of == module and seen[0][0] <= span[0] and seen[-1][0] >= span[1]:
                times, used = zip(*seen, strict=True)
                first, last = np.interp(span, times, used)
                found.append(float(last - first))
        return found

    def _watch(self) -> None:
        number = 0
        while not self._over.wait(_EVERY_S):
            if number % _LOOK_EVERY == 0:
                for pid in _descendants(os.getpid()):
                    if module := _module(pid):
                        self._module[pid] = module
            number += 1
            for pid in self._module:
                with suppress(OSError):
                    fields = _stat(pid)
                    used = (int(fields[11]) + int(fields[12])) / _TICK
                    self._used.setdefault(pid, []).append((time.monotonic(), used))


def _module(pid: int) -> str:
    """Which of the two a process runs; empty for neither."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for module in (WORKER, SHARD):
            if module.encode() in words:
                return module
    return ""


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            children.setdefault(int(_stat(int(name))[1]), []).append(int(name))
    waiting = [root]
    while waiting:
        some = children.get(waiting.pop(), [])
        waiting += some
        yield from some


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
