"""What a simulation says of up to a thousand workers: size, stragglers, kills, links.

A training of one stage: each worker has a micro-batch a step. What the executor and the shards take
is what was measured here; the machines are assumed, as `ASSUMED` says.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.pages import RESULTS
from scheduler.simulation.training import Costs, Kill, Outcome, Rows, Stage, Training, simulate

FORWARD_S, BACKWARD_S = 0.02, 0.04
SAMPLES = 256  # a micro-batch, with 26 keys each
KEYS = 26 * SAMPLES
WEIGHT_BYTES = 4e6
WAY_S = 1e-4
PER_HOST = 8
GBIT = 1e9 / 8
HOST_BYTES_S = 10 * GBIT
NOISE = 0.05
ASSUMED: Final = {
    "micro_batch_s": FORWARD_S + BACKWARD_S,
    "samples": SAMPLES,
    "keys": KEYS,
    "dim": 16,
    "weight_bytes": WEIGHT_BYTES,
    "way_s": WAY_S,
    "workers_a_host": PER_HOST,
    "host_bytes_s": HOST_BYTES_S,
    "noise": NOISE,
}
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SLOWER = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
NOISES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)
LINKS = (0.5, 1, 2, 5, 10, 25, 50, 100)  # Gbit/s
HOURS = (1, 2, 5, 10, 24, 72, 240, 720)  # between the deaths of one worker
_STEPS = 60
_KILL_STEPS = 10_000
_HOPELESS = 5.0  # deaths between two cuts: less than a hundredth of the time is left


@dataclass(frozen=True, slots=True)
class Recovery:
    """How long a training stands still; whether it goes back to a cut every so many steps."""

    name: str
    seconds: float
    cut_every: int = 0


def base(
    workers: int, shards: int, staleness: int, costs: Costs, *, tree: bool = False
) -> Training:
    """The training with so many workers and shards; with sums up and down a `tree`, as none is."""
    stage = Stage(
        workers, FORWARD_S, BACKWARD_S, sum_bytes=WEIGHT_BYTES, per_host=min(PER_HOST, workers)
    )
    if tree:
        levels = math.ceil(math.log2(workers)) if workers > 1 else 0
        sums_s = 2 * levels * (costs.hop_s + WEIGHT_BYTES / HOST_BYTES_S)
        stage = replace(stage, sum_bytes=0.0, sync_s=sums_s)
        costs = replace(costs, hop_s=0.0)
    return Training(
        (stage,),
        workers,
        staleness,
        workers * SAMPLES,
        Rows(shards, keys=KEYS) if shards else None,
        replace(costs, way_s=WAY_S),
        host_bytes_s=HOST_BYTES_S,
        noise=NOISE,
    )


def curves(costs: Costs) -> dict[str, Any]:
    """All that is drawn."""
    began = time.monotonic()
    largest = simulate(base(1000, 200, 1, costs), 1000)
    took = time.monotonic() - began
    return {
        "assumed": ASSUMED,
        "largest": {
            "workers": 1000,
            "shards": 200,
            "steps": 1000,
            "took_s": took,
            "throughput": largest.throughput,
            "step_s": [largest.percentile(p) for p in (1, 50, 99)],
            "spent": dict(largest.spent),
            "serving": largest.serving,
        },
        "size": _size(costs),
        "stragglers": _stragglers(costs),
        "noise": _noise(costs),
        "kills": _kills(costs),
        "links": _links(costs),
    }


def _told(outcome: Outcome, workers: int) -> dict[str, Any]:
    ideal = workers * SAMPLES / (FORWARD_S + BACKWARD_S)
    return {
        "workers": workers,
        "throughput": outcome.throughput,
        "efficiency": outcome.throughput / ideal,
        "step_s": outcome.percentile(50),
        "spent": dict(outcome.spent),
        "serving": outcome.serving,
    }


def _size(costs: Costs) -> list[dict[str, Any]]:
    """Throughput against size: a shard for five workers, or eight for all."""
    found = []
    for name, staleness, shards_of, tree in (
        ("staleness 1", 1, lambda k: math.ceil(k / 5), False),
        ("staleness 0", 0, lambda k: math.ceil(k / 5), False),
        ("staleness 1, 8 shards", 1, lambda k: 8, False),
        ("staleness 1, a tree of sums (not built)", 1, lambda k: math.ceil(k / 5), True),
    ):
        points = [
            _told(simulate(base(k, shards_of(k), staleness, costs, tree=tree), _STEPS), k)
            for k in SIZES
        ]
        found.append({"name": name, "points": points})
    return found


def _stragglers(costs: Costs) -> list[dict[str, Any]]:
    """One worker that is slower, or one shard."""
    found = []
    for name, workers, staleness, of in (
        ("1 of 100 workers, staleness 0", 100, 0, "worker"),
        ("1 of 100 workers, staleness 1", 100, 1, "worker"),
        ("1 of 1,000 workers, staleness 1", 1000, 1, "worker"),
        ("1 of 20 shards, staleness 1", 100, 1, "shard"),
    ):
        points = []
        for factor in SLOWER:
            shards = workers // 5
            training = base(workers, shards, staleness, costs)
            if of == "worker":
                stage = replace(training.stages[0], slow={workers // 2: factor})
                training = replace(training, stages=(stage,))
            else:
                rows = Rows(shards, keys=KEYS, slow={shards // 2: factor})
                training = replace(training, rows=rows)
            told = _told(simulate(training, _STEPS), workers)
            points.append({"slower": factor, **told})
        for point in points:
            point["kept"] = point["throughput"] / points[0]["throughput"]
        found.append({"name": name, "points": points})
    return found


def _noise(costs: Costs) -> list[dict[str, Any]]:
    """Times that vary from micro-batch to micro-batch."""
    found = []
    for workers in (10, 100, 1000):
        points = []
        for noise in NOISES:
            training = replace(base(workers, math.ceil(workers / 5), 1, costs), noise=noise)
            points.append({"noise": noise, **_told(simulate(training, 2 * _STEPS), workers)})
        for point in points:
            point["kept"] = point["throughput"] / points[0]["throughput"]
        found.append({"name": f"{workers:,} workers", "points": points})
    return found


def _links(costs: Costs) -> list[dict[str, Any]]:
    found = []
    for workers, staleness in ((100, 0), (100, 1), (1000, 1)):
        points = []
        for gbit in LINKS:
            training = base(workers, workers // 5, staleness, costs)
            training = replace(training, host_bytes_s=gbit * GBIT)
            points.append({"gbit": gbit, **_told(simulate(training, _STEPS), workers)})
        found.append({"name": f"{workers:,} workers, staleness {staleness}", "points": points})
    return found


def recoveries() -> list[Recovery]:
    """As measured by `bench.survive --rivals`, here and under others, of workers that die."""
    measured = json.loads((RESULTS / "survive_rivals.json").read_text())
    every = int(measured["checkpoint"].split()[0])
    found = []
    for name, of in standstills(measured).items():
        found.append(Recovery(name, of, 0 if name == "HeterPS" else every))
    return found


def standstills(measured: dict[str, Any]) -> dict[str, float]:
    """Median seconds that a training stood still after a worker was killed, by system."""
    return {
        "HeterPS": measured["stood_still_s"]["worker"]["median"],
        "torchrun": measured["torchrun"]["killed"]["stood_still_s"]["median"],
        "Ray Train": measured["ray_train"]["killed"]["stood_still_s"]["median"],
    }


def _kills(costs: Costs) -> list[dict[str, Any]]:
    """Of the time, what is left of a thousand workers that die now and then.

    Their steps are those of the whole simulation; all wait for each other, so that one worker of
    such steps stands for them.
    """
    step_s = simulate(base(1000, 200, 1, costs), _STEPS).percentile(50)
    found = []
    for recovery in recoveries():
        points = []
        for hours in HOURS:
            training = Training(
                (Stage(1, step_s / 3, step_s * 2 / 3),),
                1,
                0,
                1000 * SAMPLES,
                kills=(Kill(1000 / hours, recovery.seconds, recovery.cut_every > 0),),
                cut_every=recovery.cut_every or 1,
            )
            if 1000 / hours / 3600 * step_s * training.cut_every > _HOPELESS:
                points.append({"hours": hours, "kept": 0.0, "kills": 0, "redone": 0})
                continue
            outcome = simulate(training, _KILL_STEPS)
            points.append(
                {
                    "hours": hours,
                    "kept": _KILL_STEPS * step_s / outcome.seconds,
                    "kills": outcome.kills,
                    "redone": outcome.redone,
                }
            )
        found.append(
            {
                "name": recovery.name,
                "seconds": recovery.seconds,
                "cut_every": recovery.cut_every,
                "points": points,
            }
        )
    return found


def ordered(points: Sequence[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    """The columns of a curve."""
    return [float(p[x]) for p in points], [float(p[y]) for p in points]
