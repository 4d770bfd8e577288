"""What the processes of a job take of the processors, from outside."""

import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from bench.watch import Watch, descendants, used_s

WORKER, SHARD = "workers.stage", "ps.server"  # modules that they run
_EVERY_S = 0.1
_LOOK_EVERY = 4  # times, for new processes


class Processors(Watch):
    """Processor seconds of all workers and shards that this process has started, while entered."""

    def __init__(self) -> None:
        super().__init__()
        self._module: dict[int, str] = {}
        self._used: dict[int, list[tuple[float, float]]] = {}

    def seconds(self, module: str, span: tuple[float, float]) -> dict[int, float]:
        """Of each process of a module that was there between two instants of the monotonic clock.

        By number, the time it took in between; those that came later or ended before are left out.
        """
        found = {}
        for pid, of in self._module.items():
            seen = self._used[pid]
            if of == module and seen[0][0] <= span[0] and seen[-1][0] >= span[1]:
                times, used = zip(*seen, strict=True)
                first, last = np.interp(span, times, used)
                found[pid] = float(last - first)
        return found

    def _watch(self) -> None:
        number = 0
        while not self._over.wait(_EVERY_S):
            if number % _LOOK_EVERY == 0:
                for pid in descendants(os.getpid()):
                    if module := _module(pid):
                        self._module[pid] = module
            number += 1
            for pid in self._module:
                with suppress(OSError):
                    used = used_s(pid)
                    self._used.setdefault(pid, []).append((time.monotonic(), used))


def _module(pid: int) -> str:
    """Which of the two a process runs; empty for neither."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for module in (WORKER, SHARD):
            if module.encode() in words:
                return module
    return ""
