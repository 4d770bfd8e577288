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
        begun: when each micro-batch's backward began in the last stage, Unix time, in order.
        firsts: when each process began its first micro-batch, of any stage, Unix time, in order.
        recovered_s: of each recovery, by the scheduler's clock.
        lost_steps: of each recovery from a checkpoint, see `lost_steps`.
        redone: micro-batches that were computed more than once.
        ended: why attempts before the last one did, and the last one if it failed.
        each_trained_once: whether every sample was, once an epoch.
    """

    state: str = ""
    digest: str = ""
    each_trained_once: bool = False
    kills: list[Kill] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    lost_steps: list[float] = field(default_factory=list)
    redone: int = 0
    ended: list[str] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From its first micro-batch to its last."""
        return self.begun[-1] - self.begun[0] if self.begun else 0.0

    @property
    def gaps(self) -> list[float]:
        """Seconds: after each kill, the longest that nothing was begun for until the next one.

        What stands still while others are killed is divided where they are.
        """
        others = [kill.at for kill in self.kills[1:]]
        marks = sorted([*self.begun, *others])
        return [
            longest_gap(marks, kill.at, min(end - kill.at, _AFTER_S))
            for kill, end in zip(self.kills, [*others, float("inf")], strict=True)
        ]


def figures(runs: Sequence[Run], workers: int) -> dict[str, Any]:
    """Of an unfailed run and of those after it, which had kills.

    `goodput` is the time of the unfailed run by the mean time of those with kills. In
    `goodput_of_the_living` that mean is less the dead capacity: the seconds for which one of the
    `workers` of all stages was dead, divided by their number. A worker is dead from its kill until
    a process that is new begins its first micro-batch (`caught_up_s`, to which its start, its
    state's and the wait for its first micro-batch belong); other kinds of kills count as none.
    """
    unfailed, killed = runs[0], runs[1:]
    gaps: dict[str, list[float]] = {}
    for run in killed:
        for kill, gap in zip(run.kills, run.gaps, strict=True):
            gaps.setdefault(kill.kind, []).append(gap)
    seconds = sum(run.seconds for run in killed)
    kills = sum(len(run.kills) for run in killed)
    caught_up_s = [
        s
        for run in killed
        for kill in run.kills
        if kill.kind == "worker" and (s := caught_up(run.firsts, kill.at)) is not None
    ]
    living_s = seconds - sum(caught_up_s) / workers
    lost_s = seconds - unfailed.seconds * len(killed)
    return {
        "holds": holds(runs),
        "jobs_killed": len(killed),
        "kills": kills,
        "kinds": dict(Counter(kill.kind for run in killed for kill in run.kills)),
        "equal": sum(run.digest == unfailed.digest != "" for run in killed),
        "each_trained_once": sum(run.each_trained_once for run in killed),
        "attempts_ended": sum(len(run.ended) for run in killed),
        "recoveries": sum(len(run.recovered_s) for run in killed),
        "goodput": unfailed.seconds * len(killed) / seconds if seconds else 0.0,
        "goodput_of_the_living": unfailed.seconds * len(killed) / living_s if living_s else 0.0,
        "lost_s_a_kill": lost_s / kills if kills else 0.0,
        "stood_still_s": {kind: spread(some) for kind, some in sorted(gaps.items())},
        "usual_gap_s": max((b - a for a, b in pairwise(unfailed.begun)), default=0.0),
        "recovered_s": spread([s for run in killed for s in run.recovered_s]),
        "caught_up_s": spread(caught_up_s),
        "lost_steps": spread([n for run in killed for n in run.lost_steps]),
        "unfailed": {"seconds": unfailed.seconds, "digest": unfailed.digest},
        "jobs": [_told(run) for run in killed],
    }


def holds(runs: Sequence[Run]) -> bool:
    """Whether each trained every sample once an epoch, and all came to the same bits."""
    whole = all(run.each_trained_once and run.digest for run in runs)
    return whole and len({run.digest for run in runs}) == 1


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


def _told(run: Run) -> dict[str, Any]:
    told = {k: v for k, v in asdict(run).items() if k not in ("begun", "firsts")}
    return {"seconds": run.seconds, "stood_still_s": run.gaps, **told}
