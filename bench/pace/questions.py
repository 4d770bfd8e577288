"""What is asked of the planner: layers that sleep, on types of a cluster of our own.

A question is given by its stages (`given`), or drawn: stages and units at random, or costs at
random, of which `exact` or `ppo` makes the stages. Drawn ones are answered with `UNITS` units, or
hardly fewer, and every micro-batch takes a stage `LEAST_S` or longer, so that sleeping is what is
measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scheduler import plan
from scheduler.decision.record import Decision

UNITS = 12
LEAST_S = 0.05  # a micro-batch in a stage
TYPES = tuple("abcdef")
_BATCH = 768  # samples a step, where the planner chooses the micro-batches: all nearly of a size
_MICRO_BATCHES = 24
_DRAWS = 200
_SCALINGS = 4  # of one: with its times a plan may have other micro-batches
_LEAST_UNITS = 9
_FLOORS = 25  # tried for the highest


@dataclass(frozen=True, slots=True)
class Executor:
    """What the executor takes besides its layers, measured here as a profile would.

    Args:
        each_s: of a micro-batch, whatever its size.
        handling_s: of a micro-batch more, in either worker of two stages; `crossing_s` is what it
            takes to the next stage and back.
        step_s: what a step takes each worker besides, however few micro-batches it has of it.
        end_s: what the end of a step takes where one stage has all units: its gradient summed,
            judged and applied.
    """

    each_s: float = 0.0
    handling_s: float = 0.0
    crossing_s: float = 0.0
    step_s: float = 0.0
    end_s: float = 0.0


_FREE = Executor()


@dataclass(frozen=True, slots=True)
class Question:
    """A problem for the planner, and the job's say about steps.

    Args:
        seconds: a sample takes in each layer, by type.
        floor: samples a second to plan for; 0 for none.
        cap: dollars an hour that all units may cost; 0 for none.
        micro_batches: 0 where the planner chooses.
        executor: what it takes besides the layers.
    """

    name: str
    seconds: tuple[Mapping[str, float], ...]
    limits: Mapping[str, int]
    floor: float = 0.0
    cap: float = 0.0
    pin: Mapping[str, str] = field(default_factory=dict)
    method: str = "exact"
    batch: int = _BATCH
    micro_batches: int = 0
    staleness: int = 1
    seed: int = 0
    executor: Executor = _FREE

    @property
    def reference(self) -> int:
        """Samples of a micro-batch; where the planner chooses them, of those it begins with."""
        return self.batch // (self.micro_batches or _MICRO_BATCHES)

    @property
    def overhead(self) -> float:
        """The executor's share of a worker's time, did it have all layers, as in a profile."""
        layers_s = self.reference * sum(min(by_type.values()) for by_type in self.seconds)
        return self.executor.each_s / (self.executor.each_s + layers_s)

    @property
    def workload(self) -> dict[str, Any]:
        """The content of a workload file."""
        reference = self.reference
        # A stage of some of the layers has as much of the units, or nearly.
        each = reference / self.batch / len(self.seconds)
        step_s = self.executor.step_s * each
        sync = {"sync_s": self.executor.end_s * each, "parallel_sync": 0.0, "transfer_s": 0.0}
        layers: list[dict[str, Any]] = [
            {
                "name": f"layer{index}",
                "kind": "dense",
                "cost": {
                    kind: {
                        "compute_s": seconds * reference + step_s,
                        "parallel_compute": seconds * reference / (seconds * reference + step_s),
                        "memory_bytes": 1e3,
                        **sync,
                    }
                    for kind, seconds in by_type.items()
                },
            }
            for index, by_type in enumerate(self.seconds)
        ]
        for cost in layers[-1]["cost"].values():
            cost["fixed_s"] = self.executor.each_s
        steps = {"batch": self.batch, "staleness": self.staleness}
        if self.micro_batches:
            steps["micro_batches"] = self.micro_batches
        head = {"name": self.name, "reference_batch": reference, "samples": 1e6}
        besides = {
            "overhead": self.overhead,
            "handling_s": self.executor.handling_s,
            "crossing_s": self.executor.crossing_s,
        }
        return {**head, **steps, **besides, "layers": layers}

    @property
    def resources(self) -> dict[str, Any]:
        """The content of a resources file."""
        types = [
            {
                "name": name,
                "price_per_hour": 1.0,
                "limit": limit,
                "memory_bytes": 1e12,
                "device": "cpu",
            }
            for name, limit in self.limits.items()
        ]
        return {"types": types}

    def decide(self) -> Decision:
        """What the planner answers; a job of this question gets the same."""
        return plan(
            self.workload,
            self.resources,
            self.floor or None,
            self.method,
            self.seed,
            self.pin or None,
            max_price_per_hour=self.cap or None,
        )

    def at_its_best(self) -> "Question":
        """With about the highest floor that a plan meets."""
        left = 1 - self.overhead
        low = left * self.decide().throughput
        high = left * UNITS / sum(min(by_type.values()) for by_type in self.seconds)
        for floor in np.geomspace(high, low, _FLOORS):
            question = replace(self, floor=0.999999 * float(floor))
            if question.decide().feasible:
                return question
        return replace(self, floor=0.999999 * low)


def given(
    units: Sequence[int],
    seconds: float,
    micro_batches: int,
    staleness: int,
    executor: Executor = _FREE,
    size: int = 4,
) -> Question:
    """Stages of so many units, each busy all the time.

    Args:
        seconds: a micro-batch takes in a stage of one unit; k times that in one of k.
        size: samples of a micro-batch, where it is not the planner who chooses them.
    """
    names = TYPES[: len(units)]
    costs = [{kind: seconds * k / size} for kind, k in zip(names, units, strict=True)]
    return Question(
        name="+".join(map(str, units)),
        seconds=tuple(costs),
        limits=dict(zip(names, units, strict=True)),
        batch=size * micro_batches if micro_batches else _BATCH,
        micro_batches=micro_batches,
        staleness=staleness,
        executor=executor,
    ).at_its_best()


def drawn(
    number: int,
    stages: int,
    method: str,
    staleness: int,
    micro_batches: int,
    executor: Executor = _FREE,
) -> Question:
    """A question by seed that is answered with `stages` stages.

    Args:
        method: "random" draws the stages; of others it is the planner that makes them.
    """
    rng = np.random.default_rng([number, stages, staleness])
    for _ in range(_DRAWS):
        question = replace(
            _stages_at_random(rng, stages) if method == "random" else _costs_at_random(rng, stages),
            name=f"{method}-{stages}-{number}",
            method="exact" if method == "random" else method,
            micro_batches=micro_batches,
            staleness=staleness,
            seed=number,
            executor=executor,
        )
        question = question.at_its_best() if method == "random" or stages == 1 else question
        if not _fits(question.decide(), stages):
            continue
        for _ in range(_SCALINGS):
            question = _long_enough(question)
            if not _fits(question.decide(), stages):
                break
            if _shortest(question) > LEAST_S * (1 - 1e-9):
                return question
    raise ValueError(f"{method}: no plan of {stages} stages in {_DRAWS} draws")


def _stages_at_random(rng: np.random.Generator, stages: int) -> Question:
    """Every stage on a type of its own, busy for so long that it needs all its units."""
    cuts = np.sort(rng.choice(np.arange(1, UNITS), stages - 1, replace=False))
    units = np.diff([0, *cuts, UNITS])
    needed = np.array([rng.uniform(max(0.5, (k - 1) / k), 1.0) for k in units])
    needed[rng.integers(stages)] = 1.0
    seconds, pin = [], {}
    for kind, k, share in zip(TYPES, units, needed, strict=False):
        for part in rng.dirichlet(np.full(rng.integers(1, 3), 5.0)):
            pin[f"layer{len(seconds)}"] = kind
            seconds.append({kind: float(k * share * part)})
    names = TYPES[:stages]
    limits = dict(zip(names, units.tolist(), strict=True))
    return Question("", tuple(seconds), limits, pin=pin)


def _costs_at_random(rng: np.random.Generator, stages: int) -> Question:
    """Layers in groups that each have a type that suits them."""
    groups = np.sort([*range(stages), *rng.integers(stages, size=rng.integers(1, 5))])
    names = TYPES[: max(2, min(stages, len(TYPES)))]
    favourites = rng.permuted(np.resize(np.arange(len(names)), stages))
    base = rng.lognormal(0.0, 0.3, len(groups))
    worse = rng.uniform(3.0, 9.0, (stages, len(names)))
    worse[np.arange(stages), favourites] = 1.0
    seconds = tuple(
        {kind: float(base[row] * worse[group, at]) for at, kind in enumerate(names)}
        for row, group in enumerate(groups)
    )
    return Question("", seconds, dict.fromkeys(names, UNITS), cap=UNITS)


def _long_enough(question: Question) -> Question:
    """Scaled so that no stage has a micro-batch in less than `LEAST_S`."""
    factor = LEAST_S / _shortest(question)
    scaled = tuple({k: s * factor for k, s in by_type.items()} for by_type in question.seconds)
    longer = replace(question, seconds=scaled, floor=0.0)
    return longer.at_its_best() if question.floor else longer  # what is besides is not longer


def _shortest(question: Question) -> float:
    """Seconds of the shortest micro-batch of a stage."""
    found = question.decide()
    size = question.batch / micro_batches_of(question, found)
    return min(
        size * sum(question.seconds[row][stage.type] for row in range(stage.first, stage.last + 1))
        for stage in found.stages
    )


def micro_batches_of(question: "Question", found: Decision) -> int:
    """Micro-batches a step: those that the decision chose, or else the job's own."""
    return found.plan.micro_batches or question.micro_batches or 1


def _fits(found: Decision, stages: int) -> bool:
    units = sum(stage.units for stage in found.stages) if found.feasible else 0
    return len(found.stages) == stages and _LEAST_UNITS <= units <= UNITS
