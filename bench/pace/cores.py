"""The cores of this machine: one for the stage that computes, the others for all else.

A plan gives each worker cores of its own; here they share a few. So the stage that computes has a
core to itself, as it has by its plan. Where all else needs more than the other cores give, this
machine cannot run the plan, and what it runs at says nothing about the promise.
"""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

FULL = 0.9  # of the other cores: who waits for one of them waits for long
_EVERY_S = 0.25
# Of a core's line in /proc/stat: user and system time and interrupts. What others run at a low
# priority gives way.
_FIELDS = (1, 3, 6, 7)


@dataclass(frozen=True, slots=True)
class Cores:
    """One that computes, and the others."""

    computing: int
    others: tuple[int, ...]

    @classmethod
    def of_machine(cls) -> Self | None:
        """Those that this process may use; None where there is only one."""
        first, *others = sorted(os.sched_getaffinity(0))
        return cls(first, tuple(others)) if others else None


@dataclass
class Busy:
    """How busy some cores are, while it is entered.

    Args:
        cores: by number.
    """

    cores: Sequence[int]
    _seen: list[tuple[float, float]] = field(default_factory=list)  # monotonic time, core seconds
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def share(self, begun: float, ended: float) -> float:
        """Of the cores' time between two instants of the monotonic clock; 1: all were full."""
        times, seconds = zip(*self._seen, strict=True)
        first, last = np.interp([begun, ended], times, seconds)
        return float(last - first) / (ended - begun) / max(1, len(self.cores))

    def _watch(self) -> None:
        while True:
            self._seen.append((time.monotonic(), _used_s(self.cores)))
            if self._over.wait(_EVERY_S):
                return


def _used_s(cores: Sequence[int]) -> float:
    """Seconds that cores were used since the machine began."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    wanted = {f"cpu{core}" for core in cores}
    ticks = sum(int(line[n]) for line in lines if line[0] in wanted for n in _FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")
