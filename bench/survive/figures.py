"""What runs with kills came to, in numbers."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from bench.survive.kills import Kill

_AFTER_S = 10.0


@dataclass
class Run:
    """What a job came to.

    Attributes:
        recovered_s: of each recovery, by the scheduler's clock.
        lost_steps: of each recovery from a checkpoint, see `lost_steps`.
        redone: micro-batches that were computed more than once.
        ended: why attempts before the last one did, and the last one if it failed.
        each_trained_once: whether every sample was, once an epoch.
        seconds: from its first micro-batch to its last.
        gaps: after each kill, see `gaps_of`.
        longest_s: between two beginnings of micro-batches of the last stage.
        caught_up_s: of each worker that was killed and had a successor, see `caught_up`.
    """

    state: str = ""
    digest: str = ""
    each_trained_once: bool = False
    kills: list[Kill] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    lost_steps: list[float] = field(default_factory=list)
    redone: int = 0
    ended: list[str] = field(default_factory=list)
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    caught_up_s: list[float] = field(default_factory=list)

    def timed(self, begun: Sequence[float], firsts: Sequence[float]) -> "Run":
        """Fill in what follows from the layers' own clock; itself.

        Args:
            begun: when each micro-batch's backward began in the last stage, Unix time, in order.
            firsts: when each process began its first micro-batch, of any stage, in order.
        """
        self.seconds = begun[-1] - begun[0] if begun else 0.0
        self.gaps = gaps_of([kill.at for kill in self.kills], begun)
        self.longest_s = max((b - a for a, b in pairwise(begun)), default=0.0)
        killed = [kill.at for kill in self.kills if kill.kind == "worker"]
        self.caught_up_s = [s for at in killed if (s := caught_up(firsts, at)) is not None]
        return self


def figures(parts: Sequence[Sequence[Run]], workers: int) -> dict[str, Any]:
    """Of parts that were measured one after the other: an unfailed run each, and with kills.

    `goodput` is the time of the unfailed runs by that of those with kills. In
    `goodput_of_the_living` that is less the dead capacity: the seconds for which one of the
    `workers` of all stages was dead, divided by their number. A worker is dead from its kill until
    a process that is new begins its first micro-batch (`caught_up_s`, to which its start, its
    state's and the wait for its first micro-batch belong); other kinds of kills count as none.
    """
    killed = [run for part in parts for run in part[1:]]
    digest = parts[0][0].digest
    gaps: dict[str, list[float]] = {}
    for run in killed:
        for kill, gap in zip(run.kills, run.gaps, strict=True):
            gaps.setdefault(kill.kind, []).append(gap)
    without = sum(part[0].seconds * len(part[1:]) for part in parts)
    seconds = sum(run.seconds for run in killed)
    kills = sum(len(run.kills) for run in killed)
    caught_up_s = [s for run in killed for s in run.caught_up_s]
    living_s = seconds - sum(caught_up_s) / workers
    return {
        "holds": holds([run for part in parts for run in part]),
        "jobs_killed": len(killed),
        "kills": kills,
        "kinds": dict(Counter(kill.kind for run in killed for kill in run.kills)),
        "equal": sum(run.digest == digest != "" for run in killed),
        "each_trained_once": sum(run.each_trained_once for run in killed),
        "attempts_ended": sum(len(run.ended) for run in killed),
        "recoveries": sum(len(run.recovered_s) for run in killed),
        "goodput": without / seconds if seconds else 0.0,
        "goodput_of_the_living": without / living_s if living_s else 0.0,
        "lost_s_a_kill": (seconds - without) / kills if kills else 0.0,
        "stood_still_s": {kind: spread(some) for kind, some in sorted(gaps.items())},
        "usual_gap_s": max((part[0].longest_s for part in parts), default=0.0),
        "recovered_s": spread([s for run in killed for s in run.recovered_s]),
        "caught_up_s": spread(caught_up_s),
        "lost_steps": spread([n for run in killed for n in run.lost_steps]),
        "parts": [[asdict(run) for run in part] for part in parts],
    }


def runs_of(parts: Sequence[Sequence[dict[str, Any]]]) -> list[list[Run]]:
    """Those of `figures`' own `parts`, as read from a file."""
    return [
        [Run(**run | {"kills": [Kill(**kill) for kill in run["kills"]]}) for run in part]
        for part in parts
    ]


def holds(runs: Sequence[Run]) -> bool:
    """Whether each trained every sample once an epoch, and all came to the same bits."""
    whole = all(run.each_trained_once and run.digest for run in runs)
    return whole and len({run.digest for run in runs}) == 1


def gaps_of(kills: Sequence[float], begun: Sequence[float]) -> list[float]:
    """Seconds: after each kill, the longest that nothing was begun for until the next one.

    What stands still while others are killed is divided where they are.
    """
    marks = sorted([*begun, *kills[1:]])
    return [
        longest_gap(marks, at, min(end - at, _AFTER_S))
        for at, end in pairwise([*kills, float("inf")])
    ]


def longest_gap(begun: Sequence[float], at: float, after_s: float) -> float:
    """Seconds: the longest without a beginning that has a part in the `after_s` after `at`."""
    near = [t for t in begun if t <= at][-1:] + [t for t in begun if at < t < at + after_s]
    later = [t for t in begun if t >= at + after_s][:1]
    return max((b - a for a, b in pairwise([*near, *later])), default=0.0)


def lost_steps(
    begun: Sequence[float], recoveries: Sequence[tuple[float, int]], micro_batches: int
) -> list[float]:
    """Steps that were begun before each recovery and after the step that all went on from.

    Those that were open count by the micro-batches that the last stage had begun.

    Args:
        begun: when each micro-batch was, in order.
        recoveries: when each was noticed, and its step.
    """
    lost, before, last = [], 0, 0
    for at, step in recoveries:
        until = bisect_right(begun, at)
        lost.append(max(0.0, last + (until - before) / micro_batches - step))
        before, last = until, step
    return lost


def caught_up(firsts: Sequence[float], at: float) -> float | None:
    """Seconds from a kill until a process that is new begins something; None: none does."""
    return next((first - at for first in firsts if first > at), None)


def spread(some: Sequence[float]) -> dict[str, float]:
    """Count, median, 99th percentile and the most; empty of none."""
    if not some:
        return {}
    return {
        "count": len(some),
        "median": float(np.median(some)),
        "p99": float(np.quantile(some, 0.99)),
        "most": max(some),
    }
