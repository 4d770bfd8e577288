"""What is simulated: stages of workers, shards, links, and what the executor itself takes.

    outcome = simulate(Training((Stage(8, 0.02, 0.04),), micro_batches=8, staleness=1, batch=2048))
    outcome.throughput, outcome.spent["sums"]

The events are those of scheduler/engine/simulation/run.h; without `costs`, rows and chances they
are those by which plans are priced, and give the same times. Seconds throughout.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduler.engine import _planner

Floats = NDArray[np.float64]

SPENT = ("computing", "executor", "rows", "sums", "crossing", "others", "lost")
_SEGMENT = 1 << 19  # bytes: what goes round a ring at once, workers/links/ring.py
_KEY_BYTES = 8
_MOST_EVENTS = 1 << 25  # micro-batches in all, a few dozen bytes each


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        units: its workers.
        forward_s, backward_s: of a micro-batch.
        cross_s: that it takes to the next stage and back, half each, on the worker's own link;
            `way_s` besides, for which it keeps nothing busy.
        sync_s: after the last backward of a step.
        sum_bytes: of gradients, which go round the ring besides.
        pass_bytes: of a micro-batch, to the next stage and as many back, by the host's link.
        per_host: workers that share a host's link.
        slow: how many times as long some workers take, by their rank.
    """

    units: int
    forward_s: float
    backward_s: float
    cross_s: float = 0.0
    way_s: float = 0.0
    sync_s: float = 0.0
    sum_bytes: float = 0.0
    pass_bytes: float = 0.0
    per_host: int = 1
    slow: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the first stage, on shards of a core each.

    Attributes:
        keys: distinct ones of a micro-batch, evenly over the shards.
        dim: float32 values of each.
        serve_s: of all shards together for a micro-batch, beyond what `Costs` says.
        priced: the stage's times have what pulls and pushes take at shards that are idle, so that
            only waiting for others counts.
        slow: how many times as long some shards take, by number.
    """

    shards: int
    keys: float = 0.0
    dim: int = 16
    serve_s: float = 0.0
    priced: bool = False
    slow: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Costs:
    """What everything but the layers takes, as measured.

    Attributes:
        part_s: of a worker's core, for a micro-batch.
        closing_s: of a worker's core, at the end of a step.
        end_s: from the last sum to the update, for which nobody is busy.
        tell_s: to tell one more worker of an update, of a commit, or to hear of a pull.
        hop_s: from a worker of a ring to the next.
        way_s: a message to a shard, or back.
        client_message_s: of a worker's core, for a message to a shard and its answer.
        client_pull_s, client_push_s: of a worker's core, for a key.
        message_s: of a shard's core, for a message.
        pull_s, push_s, commit_s: of a shard's core, for a key.
    """

    part_s: float = 0.0
    closing_s: float = 0.0
    end_s: float = 0.0
    tell_s: float = 0.0
    hop_s: float = 0.0
    way_s: float = 0.0
    client_message_s: float = 0.0
    client_pull_s: float = 0.0
    client_push_s: float = 0.0
    message_s: float = 0.0
    pull_s: float = 0.0
    push_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Kill:
    """Something that dies `per_hour` times, and what all lose each time.

    `back` to the last checkpoint, or else the steps under way alone.
    """

    per_hour: float
    lost_s: float
    back: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """What is simulated.

    Attributes:
        batch: samples a step, in `micro_batches` of one size.
        host_bytes_s: of each host's link, each way; infinite: links are not looked at.
        cores: that all processes share; 0: each has its own.
        noise: standard deviation of the layers' times, over their mean.
        kills: what dies; with a checkpoint every `cut_every` steps.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    staleness: int
    batch: float
    rows: Rows | None = None
    costs: Costs = Costs()
    whole_batch: bool = False
    host_bytes_s: float = math.inf
    cores: int = 0
    noise: float = 0.0
    kills: tuple[Kill, ...] = ()
    cut_every: int = 1

    @property
    def units(self) -> int:
        """Workers in all."""
        return sum(stage.units for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated training came to.

    Attributes:
        step_s: from update to update, [steps], those to fill the pipeline left out.
        throughput: samples/s over these steps.
        spent: shares of the workers' time, by `SPENT`; they sum to 1. `by_stage` likewise.
        seconds: of all steps.
        kills: how many there were; `redone` updates were made once more.
        backwards: that counted: of all steps' micro-batches in all stages.
        serving: share of their time for which shards are busy.
    """

    step_s: Floats
    throughput: float
    spent: Mapping[str, float]
    by_stage: tuple[Mapping[str, float], ...]
    seconds: float
    kills: int
    redone: int
    backwards: int
    serving: float

    def percentile(self, share: float) -> float:
        """Seconds in which so many of 100 steps are done."""
        return float(np.percentile(self.step_s, share))


def ring_s(units: int, sent_bytes: float, hop_s: float, bytes_s: float) -> float:
    """Seconds until a sum has gone round twice: workers/links/ring.py."""
    if units < 2:
        return 0.0
    first = min(sent_bytes, _SEGMENT)
    return 2 * (units - 1) * (hop_s + first / bytes_s) + 2 * (sent_bytes - first) / bytes_s


def simulate(training: Training, steps: int, warm: int | None = None, seed: int = 0) -> Outcome:
    """Simulate so many steps on end.

    Args:
        warm: steps until the pipeline is full, which are left out of the pace; None for as many as
            it takes, at most half of them.

    Raises:
        ValueError: there is nothing to simulate, or too much.
        RuntimeError: kills come so often that no step gets done.
    """
    if steps * training.micro_batches * len(training.stages) > _MOST_EVENTS:
        raise ValueError(f"{steps} steps of {training.micro_batches} micro-batches are too many")
    rules = _planner.RunRules(
        training.micro_batches, training.staleness, steps, training.whole_batch
    )
    costs = training.costs
    rules.part, rules.closing, rules.end = costs.part_s, costs.closing_s, costs.end_s
    rules.tell = costs.tell_s if len(training.stages) > 1 else 0.0
    rules.tell_rows = costs.tell_s if training.stages[0].units > 1 else 0.0
    rules.cores, rules.noise, rules.seed = training.cores, training.noise, seed
    rules.cut_every = training.cut_every
    rules.kills = [
        _planner.Kills(kill.per_hour / 3600, kill.lost_s, kill.back)
        for kill in training.kills
        if kill.per_hour > 0
    ]
    stages = [_stage(stage, training) for stage in training.stages]
    found = _planner.simulate_run(stages, _serving(training), rules)
    if warm is None:
        fill = 4 + (96 + 4 * training.units) // training.micro_batches + 2 * training.staleness
        warm = min(steps // 2, fill) if training.staleness else 0
    updated = np.array([0.0, *found.updated])
    seconds = float(updated[-1])
    by_stage = tuple(
        _shares(spent, stage.units * seconds)
        for spent, stage in zip(found.spent, training.stages, strict=True)
    )
    total = np.sum(found.spent, axis=0)
    shards = training.rows.shards if training.rows is not None else 0
    return Outcome(
        step_s=np.diff(updated[warm:]),
        throughput=training.batch * (steps - warm) / float(updated[-1] - updated[warm]),
        spent=_shares(total, training.units * seconds),
        by_stage=by_stage,
        seconds=seconds,
        kills=found.kills,
        redone=found.redone,
        backwards=found.backwards,
        serving=found.serving / (shards * seconds) if shards else 0.0,
    )


def _shares(spent: NDArray[np.float64] | list[float], whole: float) -> Mapping[str, float]:
    return {name: float(part) / whole for name, part in zip(SPENT, spent, strict=True)}


def _stage(stage: Stage, training: Training) -> _planner.RunStage:
    slow = [stage.slow.get(rank, 1.0) for rank in range(stage.units)] if stage.slow else []
    host = training.host_bytes_s
    summing = min(stage.units, training.micro_batches)
    return _planner.RunStage(
        stage.units,
        stage.forward_s,
        stage.backward_s,
        stage.cross_s,
        stage.sync_s + ring_s(summing, stage.sum_bytes, training.costs.hop_s, host),
        stage.way_s,
        slow,
        stage.pass_bytes / host,
        stage.per_host,
    )


def _serving(training: Training) -> _planner.Serving:
    serving, rows, costs = _planner.Serving(), training.rows, training.costs
    if rows is None or rows.shards < 1:
        return serving
    keys, host = rows.keys / rows.shards, training.host_bytes_s
    given, values = _KEY_BYTES, 4 * rows.dim
    # A pull names keys and brings values; a push has both. Workers of a host share its link.
    share = host / training.stages[0].per_host
    serving.shards, serving.priced, serving.way = rows.shards, rows.priced, costs.way_s
    serving.client_message = costs.client_message_s
    serving.client_pull = keys * costs.client_pull_s
    serving.client_push = keys * costs.client_push_s
    serving.message = costs.message_s
    extra = rows.serve_s / rows.shards
    serving.pull = keys * costs.pull_s + extra / 2
    serving.push = keys * costs.push_s
    serving.commit = keys * costs.commit_s + extra / 2
    serving.pull_link, serving.shard_pull_link = keys * values / share, keys * values / host
    serving.push_link = keys * (given + values) / share
    serving.shard_push_link = keys * (given + values) / host
    serving.slowness = (
        [rows.slow.get(shard, 1.0) for shard in range(rows.shards)] if rows.slow else []
    )
    return serving
