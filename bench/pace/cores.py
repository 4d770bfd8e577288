"""The cores of this machine: one for the stage that computes, the others for all else.

A plan gives each worker cores of its own; here they share a few. So the stage that computes has a
core to itself, as it has by its plan, and it is asked of Linux how long the workers of the other
stages waited for one (`Waits`). Where that is what a plan lost, this machine cannot run it
(`is_full`), and what it runs at says nothing about the promise.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from bench.watch import Watch

# Of a micro-batch's time: real jobs keep their promise to within as much.
MUCH = 0.15
_EVERY_S, _RARELY_S = 0.25, 1.0
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


class Busy(Watch):
    """How busy some cores are, while it is entered.

    Args:
        cores: by number.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        super().__init__()
        self.cores = cores
        self._seen: list[tuple[float, float]] = []  # monotonic time, core seconds

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


class Foreign(Watch):
    """How busy the machine's cores are with what is not of this program, while it is entered.

    That is what none of its descendants do: where it is much the machine was not ours alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[tuple[float, float]] = []  # as of `Busy`
        self._cores = tuple(range(os.cpu_count() or 1))

    def share(self, begun: float, ended: float) -> float:
        """Of all cores' time between two instants of the monotonic clock."""
        first, last = np.interp([begun, ended], *zip(*self._seen, strict=True))
        return max(0.0, float(last - first) / (ended - begun) / len(self._cores))

    def _watch(self) -> None:
        while True:
            used = _used_s(self._cores)
            self._seen.append((time.monotonic(), used - own_s(os.getpid())))
            if self._over.wait(_RARELY_S):
                return


class Waits(Watch):
    """How long the workers of a job's stages that could run waited for a core, while it is entered.

    Their threads that train are asked, as it is for them that others wait.

    Args:
        job_id: by which its workers are known.
    """

    def __init__(self, job_id: str) -> None:
        super().__init__()
        self._launched = re.compile(rf"/{re.escape(job_id)}/stage-(\d+)-worker-(\d+)\.launch\0")
        self._seen: dict[tuple[int, int], list[tuple[float, float]]] = {}  # as of `Busy`, by worker

    def seconds(self, begun: float, ended: float) -> dict[int, float]:
        """Of all workers of each stage between two instants of the monotonic clock."""
        found: dict[int, float] = {}
        for (stage, _), seen in self._seen.items():
            first, last = np.interp([begun, ended], *zip(*seen, strict=True))
            found[stage] = found.get(stage, 0.0) + float(last - first)
        return found

    def _watch(self) -> None:
        while True:
            for process in Path("/proc").iterdir():
                if process.name.isdigit():
                    self._look(process)
            if self._over.wait(_EVERY_S):
                return

    def _look(self, process: Path) -> None:
        try:
            matched = self._launched.search((process / "cmdline").read_text())
            if matched is None:
                return
            _, waited, _ = (process / "schedstat").read_text().split()
        except (OSError, ValueError):  # it is gone
            return
        stage, rank = map(int, matched.groups())
        seen = self._seen.setdefault((stage, rank), [])
        seen.append((time.monotonic(), int(waited) / 1e9))


def is_full(
    promised_s: float,
    measured_s: float,
    busy_s: Sequence[float],
    waited_s: Sequence[float],
    units: Sequence[int],
) -> bool:
    """Whether it is for want of cores that a plan does not run as promised.

    Its workers waited for one for much of the time, and for no less than what was lost. Where they
    did not wait, each stage would keep the pace: one that takes longer than promised is no excuse.

    Args:
        promised_s: from micro-batch to micro-batch.
        measured_s: the same.
        busy_s: of a micro-batch in each stage, with what its worker waited for a core.
        waited_s: what that is.
        units: of each stage.
    """
    each = zip(busy_s, waited_s, units, strict=True)
    kept = all((busy - waited) / k <= (1 + MUCH) * promised_s for busy, waited, k in each)
    waited, lost = sum(waited_s), measured_s - promised_s
    return kept and waited > MUCH * promised_s and 0 < lost <= waited


def own_s(root: int) -> float:
    """Seconds of processor that a process and its descendants have used."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it is gone
                continue
            parents[int(process.name)] = int(words[1])
            used[int(process.name)] = int(words[11]) + int(words[12])
    ticks = 0
    for process_id, own in used.items():
        above = process_id
        while above != root and above in parents:
            above = parents[above]
        ticks += own if above == root else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _used_s(cores: Sequence[int]) -> float:
    """Seconds that cores were used since the machine began."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    wanted = {f"cpu{core}" for core in cores}
    ticks = sum(int(line[n]) for line in lines if line[0] in wanted for n in _FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")
