"""Constants fitted to the jobs of a few workers, and what they say of those of more.

What takes a core was measured as such, of workers and of shards. What only takes time follows from
the steps' own: the delays that make the simulation's steps as long as those measured. What a hop of
the ring of sums takes `bench.sums` has measured, of workers that do nothing else. All processes
share the cores of one machine, which the simulation does, too.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from bench.pages import RESULTS
from bench.scale.job import Case
from scheduler.simulation.training import Costs, Rows, Stage, Training, simulate

FITTED = 3  # workers at most, of the jobs that constants are fitted to
_STEPS, _WARM = 80, 20
_DELAYS = ("end_s", "way_s")
_SMALL = 1024  # bytes of a sum that is all hops
_FIRST, _LAST = 1e-3, 1e-6  # by how much delays are changed


@dataclass(frozen=True, slots=True)
class Seen:
    """A case with the medians of its runs."""

    case: Case
    step_s: float
    worker_cpu_s: float
    shard_cpu_s: float
    runs: int


@dataclass(frozen=True, slots=True)
class Predicted:
    """A case's step as measured and as simulated."""

    seen: Seen
    simulated_s: float

    @property
    def error(self) -> float:
        """Simulated over measured, less 1."""
        return self.simulated_s / self.seen.step_s - 1


def seen(cases: Sequence[Case], jobs: Sequence[Mapping[str, Any]]) -> list[Seen]:
    """The cases that were measured."""
    found = []
    for case in cases:
        key = case.kind, case.front, case.back, case.staleness
        runs = [
            j for j in jobs if key == tuple(j[k] for k in ("kind", "front", "back", "staleness"))
        ]
        if runs:
            figures = (
                median(run[name] for run in runs)
                for name in ("step_s", "worker_cpu_s", "shard_cpu_s")
            )
            found.append(Seen(case, *figures, len(runs)))
    return found


def fitted(all_seen: Sequence[Seen], cores: int) -> Costs:
    """Constants that follow from the jobs of `FITTED` workers at most."""
    few = [one for one in all_seen if one.case.workers <= FITTED]
    costs = replace(_processor_costs(few), hop_s=hop_s())

    def wrong(delays: Sequence[float]) -> float:
        tried = replace(costs, **dict(zip(_DELAYS, delays, strict=True)))
        return sum(predicted(one, tried, cores).error ** 2 for one in few)

    best = [1e-3, 2e-4]
    error, by = wrong(best), _FIRST
    while by > _LAST:
        around = itertools.product((-by, 0.0, by), repeat=len(best))
        tried = [[max(0.0, b + d) for b, d in zip(best, change, strict=True)] for change in around]
        found = min(tried, key=wrong)
        if wrong(found) < error * (1 - 1e-9):
            best, error = found, wrong(found)
        else:
            by /= 2
    return replace(costs, **dict(zip(_DELAYS, best, strict=True)))


def hop_s() -> float:
    """Seconds from one worker of a ring to the next, the median of what `bench.sums` measured."""
    sums = json.loads((RESULTS / "sums.json").read_text())["sums"]
    small = [one for one in sums if one["bytes"] == _SMALL]
    return median(one["seconds"]["ring"] / (2 * (one["workers"] - 1)) for one in small)


def predicted(one: Seen, costs: Costs, cores: int) -> Predicted:
    """A case by simulation."""
    training = training_of(one.case, costs, cores)
    return Predicted(one, float(simulate(training, _STEPS, warm=_WARM).step_s.mean()))


def training_of(case: Case, costs: Costs, cores: int) -> Training:
    """A case as it is simulated: layers that sleep take no core, all else does."""
    stages = [Stage(case.front, case.seconds / 3, case.seconds * 2 / 3)]
    if case.back:
        stages.append(Stage(case.back, case.back_s / 3, case.back_s * 2 / 3))
    rows = Rows(case.shards, keys=case.size * case.keys) if case.keys else None
    return Training(
        tuple(stages),
        case.micro_batches,
        case.staleness,
        case.batch,
        rows,
        costs,
        cores=cores,
    )


def _processor_costs(few: Sequence[Seen]) -> Costs:
    """What takes a core, by the time that workers and shards had one."""
    plain = [one for one in few if not one.case.keys]
    parts = [one.case.micro_batches * (2 if one.case.back else 1) for one in plain]
    known = np.array([[p / one.case.workers, 1.0] for p, one in zip(parts, plain, strict=True)])
    used = np.array([one.worker_cpu_s for one in plain])
    part, closing = np.linalg.lstsq(known, used, rcond=None)[0]
    if closing < 0:
        part, closing = float((used / known[:, 0]).mean()), 0.0
    costs = Costs(part_s=float(part), closing_s=float(closing))
    with_rows = [one for one in few if one.case.keys]
    if not with_rows:
        return costs
    keys = with_rows[0].case.size * with_rows[0].case.keys
    more = np.mean([one.worker_cpu_s for one in with_rows]) - part - closing
    client = max(0.0, float(more)) / keys / 2
    served = np.mean([one.shard_cpu_s * one.case.shards / one.case.front for one in with_rows])
    shard = float(served) / keys / 3
    return replace(
        costs,
        client_pull_s=client,
        client_push_s=client,
        pull_s=shard,
        push_s=shard,
        commit_s=shard,
    )
