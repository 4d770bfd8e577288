"""When a running job moves to another plan by itself (`schedule.replan: auto`).

C dollars is what the remaining samples cost with the running plan, N with the proposed one, M what
moving costs: seconds that moving takes, at the price of both plans, as nothing is trained
meanwhile. Were all known, the move would pay where C - N > M. They are not: C and N rest on times
that were measured or profiled.

**How far off N / C is.** The units of a plan are fixed, so its cost is its price times the time of
its slowest stage, times an overhead that is the same for both. In N / C the overhead goes out, and
with it the pace; what is left are the times of two stages, each of which is a sum of measured ones.
Where the logarithm of each time of the running plan has a standard deviation of r at most, and of
each of the proposed plan of p, that of N / C has sqrt(r^2 + p^2) at most. r is the filter's
standard error. p is that, too, for layers that run on that type now, and what the profile says of
itself (`uncertainty`) for all others. So with d = Z sqrt(r^2 + p^2) the proposed plan is taken to
cost N e^d, and the move pays where

    C - N e^d > (1 + margin) M  and  C - N e^d > share C

with the threshold that proposals have. Should noise alone name another plan, its N / C must be off
by Z standard deviations and the share, and so twice in a row (`InARow`); what
is lost then is M and the way back.

**What bounds the loss where the profile is wrong about the other plan.** That shows only there. So
after the n-th move of its own a job stays for `PAUSE_S` 2^(n - 1): in T seconds it makes log2(T /
PAUSE_S) + 1 moves at most, whatever is measured.

**Constraints.** A proposed plan keeps the job's floor, cap, pins and excluded types, or is not
feasible. A running plan that misses the floor by more than the slack, also if it is as much faster
as its times may be off, is left for one that meets it, whatever that costs, unless what is left
takes longer with the move than without. A deadline, with the
move and at N e^d, is kept, or missed by less than by staying.
"""

import math
from dataclasses import dataclass
from enum import Enum, auto

from scheduler.replanning.measure import Measurement
from scheduler.replanning.proposal import FLOOR_SLACK, Proposal, Threshold
from scheduler.replanning.recommendation import CONFIRM

Z = 2.5
LEAST_WINDOWS = 10  # of each stage and of the pipeline: some 20 s of training
PAUSE_S = 600.0


class Answer(Enum):
    """Whether to move, and why not."""

    MOVE = auto()
    BEST = auto()  # no other plan pays, if all is as measured
    AGAIN = auto()  # to move, if the next consideration says so, too
    MEASURE = auto()  # too little was measured
    UNSURE = auto()  # what another plan saves is within what times may be off
    PAUSE = auto()  # the last move was too short a time ago
    LATE = auto()  # a deadline would be missed by it


@dataclass(frozen=True, slots=True)
class Past:
    """Of a job.

    Attributes:
        moves: that it has made by itself.
        since_s: seconds since the last of them.
        left_s: seconds until its deadline.
    """

    moves: int = 0
    since_s: float = math.inf
    left_s: float = math.inf

    @property
    def rests(self) -> bool:
        """Whether it is to stay for a while."""
        return self.moves > 0 and self.since_s < PAUSE_S * 2.0 ** (self.moves - 1)


def decide(
    proposal: Proposal, measurement: Measurement, past: Past, threshold: Threshold | None = None
) -> Answer:
    """Whether a job is to move to the plan of a proposal.

    Args:
        proposal: made from `measurement`.
    """
    threshold = threshold or Threshold()
    if not proposal.proposed.feasible or not proposal.moves:
        return Answer.BEST
    stages = len(proposal.current.stages)
    parts = (*measurement.busy[:stages], measurement.pace)
    if len(parts) <= stages or any(one.windows < LEAST_WINDOWS for one in parts):
        return Answer.MEASURE
    if past.rests:
        return Answer.PAUSE
    running = max(one.error for one in parts)
    factor = math.exp(Z * math.hypot(running, _error(proposal, running)))
    stay_s = proposal.remaining_samples / proposal.current.throughput * proposal.overhead
    go_s = proposal.remaining_samples / proposal.proposed.throughput * proposal.overhead
    go_s = go_s * factor + proposal.moving_s
    if not _misses_floor(proposal, math.exp(Z * running)) or go_s > stay_s:
        if not proposal.worthwhile:
            return Answer.BEST
        savings = proposal.current_cost - proposal.proposed_cost * factor
        if not threshold.met(savings, proposal.moving_cost, proposal.current_cost):
            return Answer.UNSURE
    return Answer.LATE if go_s > past.left_s and go_s > stay_s else Answer.MOVE


class InARow:
    """Has a job move when `CONFIRM` considerations in a row say so, whichever plans they name."""

    def __init__(self) -> None:
        self._seen = 0

    def consider(self, proposal: Proposal, measurement: Measurement, past: Past) -> Answer:
        """As `decide`, of one consideration after the other."""
        answer = decide(proposal, measurement, past)
        self._seen = self._seen + 1 if answer is Answer.MOVE else 0
        return Answer.AGAIN if 0 < self._seen < CONFIRM else answer


def _error(proposal: Proposal, running: float) -> float:
    """The standard deviation of the logarithm of the proposed plan's times, at most."""
    workload, now = proposal.proposed.workload, proposal.current.assignment
    assert workload is not None
    errors = [running]
    layers = zip(workload.layers, proposal.proposed.assignment, now, strict=True)
    errors += [layer.cost[kind].uncertainty for layer, kind, before in layers if kind != before]
    return max(errors)


def _misses_floor(proposal: Proposal, factor: float) -> bool:
    """Whether the running plan does, even if it is faster than measured by `factor`."""
    expected = proposal.current.throughput / proposal.overhead * factor
    return expected < proposal.proposed.min_throughput * (1 - FLOOR_SLACK)
