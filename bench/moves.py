"""What jobs save by moving by themselves: a replay in simulated time.

Planner, measurement and rule are the scheduler's own.

    python -m bench.moves                  # 20 jobs where a move pays, 20 where none does
    python -m bench.moves --jobs 200 --seed 7 --no-write

A job is planned by a profile that is wrong, and runs as long as it truly takes: its windows have
noise, of each stage and of the whole machine, and what they tell goes the way of a running job's:
`Windows`, `propose`, `Recommendation`, `decide`. Moves take seconds in which nothing is trained and
both plans are paid. What a plan truly costs is computed here, apart from the cost model. Results go
to bench/results/moves.json.
"""

import argparse
import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bench.pages import RESULTS, machine, versions, write
from scheduler import plan
from scheduler.decision.record import Decision
from scheduler.problem.plan import PlanStage
from scheduler.replanning.measure import Mark, Windows
from scheduler.replanning.moves import Answer, InARow, Past
from scheduler.replanning.proposal import Moving
from scheduler.replanning.replan import propose
from scheduler.runs.changes.anew import for_job
from scheduler.runs.changes.watch import FIRST_S, MOST_S

WINDOW_S = 2.0
PAYS = 0.7  # the optimum costs at most so much of staying
KEPT = 0.8  # of what the optimum saves
_STEPS = 20  # a window
_ALIKE = 0.7  # of a window's noise that the machine has in the next one, too
_DRAWS = 10_000
_START_S = 5.0  # what processes took to start


@dataclass(frozen=True, slots=True)
class Job:
    """A job with a wrong profile.

    Attributes:
        truth: seconds a sample on one unit, by layer and type.
        profile: what is believed of them.
        noise: standard deviation of the logarithm of a window's time.
        overhead: seconds a sample over those of the slowest stage.
        moving_s: that a move takes.
    """

    seed: int
    truth: tuple[Mapping[str, float], ...]
    profile: tuple[Mapping[str, float], ...]
    parallel: float
    types: Mapping[str, tuple[float, int]]
    floor: float
    samples: float
    noise: float
    overhead: float
    moving_s: float

    def plan(self, seconds: Sequence[Mapping[str, float]], samples: float) -> Decision:
        """The cheapest plan, were this what layers take."""
        cost = {"sync_s": 0.0, "transfer_s": 0.0, "parallel_sync": 0.0, "memory_bytes": 1e3}
        layers = [
            {
                "name": f"layer{number}",
                "kind": "dense",
                "cost": {
                    kind: {"compute_s": own, "parallel_compute": self.parallel, **cost}
                    for kind, own in by_type.items()
                },
            }
            for number, by_type in enumerate(seconds)
        ]
        head = {"name": f"job{self.seed}", "reference_batch": 1, "ps_type": "", "ps_core_s": 0.0}
        kinds = [
            {"name": name, "price_per_hour": price, "limit": limit, "memory_bytes": 1e12}
            for name, (price, limit) in self.types.items()
        ]
        overhead = 1 - 1 / self.overhead
        workload = {**head, "samples": samples, "overhead": overhead, "layers": layers}
        return plan(workload, {"types": kinds}, self.floor or None, method="exact")

    def busy_s(self, stage: PlanStage) -> float:
        """Seconds a sample that a stage truly computes."""
        alone = sum(self.truth[n][stage.type] for n in range(stage.first, stage.last + 1))
        return alone * (1 - self.parallel + self.parallel / stage.units)

    def pace_s(self, stages: Sequence[PlanStage]) -> float:
        """Seconds a sample that a plan truly takes."""
        return self.overhead * max(self.busy_s(stage) for stage in stages)

    def price_s(self, stages: Sequence[PlanStage]) -> float:
        """Dollars a second of a plan."""
        return sum(self.types[stage.type][0] * stage.units for stage in stages) / 3600

    def cost(self, stages: Sequence[PlanStage]) -> float:
        """Dollars that all samples truly cost with a plan."""
        return self.samples * self.pace_s(stages) * self.price_s(stages)


@dataclass(frozen=True, slots=True)
class Result:
    """What a job came to, in dollars; `moved_at` are its seconds at each move.

    Attributes:
        answers: how often each was given.
    """

    seed: int
    stay: float
    optimum: float
    auto: float
    noise: float
    moving_s: float
    moved_at: tuple[float, ...]
    answers: Mapping[str, int]

    @property
    def kept(self) -> float:
        """The share of what the optimum saves."""
        return (self.stay - self.auto) / (self.stay - self.optimum)


def drawn(seed: int, pays: bool) -> Job:
    """A job where a move pays, or where none does, by seed.

    Where none does, one half has nothing better to go to, for the other too little is left to do.
    """
    rng = np.random.default_rng([seed, pays])
    short = not pays and seed % 2 == 1
    for _ in range(_DRAWS):
        job = _draw(rng, seed, wrong=pays or short)
        found = job.plan(job.profile, job.samples)
        best = job.plan(job.truth, job.samples)
        if not found.feasible or not best.feasible:
            continue
        stay, optimum = job.cost(found.stages), job.cost(best.stages)
        least = job.moving_s * (job.price_s(found.stages) + job.price_s(best.stages))
        if pays and optimum <= PAYS * stay and stay - optimum > 20 * least:
            return job
        if not pays and 1 / job.pace_s(found.stages) < job.floor:
            continue  # a floor that is missed is a reason of its own
        if short and optimum <= PAYS * stay:
            return replace(job, samples=job.samples * 0.9 * least / (stay - optimum))
        if not pays and not short and optimum >= 0.99 * stay:
            return job
    raise ValueError(f"seed {seed}: no such job in {_DRAWS} draws")


def _draw(rng: np.random.Generator, seed: int, wrong: bool) -> Job:
    names = ["cpu", "t4", "v100"][: int(rng.integers(2, 4))]
    types = {
        name: (float(price * rng.uniform(0.7, 1.4)), int(limit))
        for name, price, limit in zip(names, (0.05, 0.5, 2.5), (64, 16, 8), strict=False)
    }
    speed = dict(zip(names, (1.0, *rng.uniform(5, 15, 1), *rng.uniform(20, 70, 1)), strict=False))
    truth, profile = [], []
    believed = dict.fromkeys(names, 1.0)
    if wrong:  # one type is slower than its profile says
        believed[str(rng.choice(names))] = float(np.exp(rng.uniform(np.log(2), np.log(8))))
    for _ in range(int(rng.integers(1, 7))):
        alone = float(np.exp(rng.uniform(np.log(1e-4), np.log(1e-2))))
        true = {name: alone / speed[name] * float(rng.lognormal(0, 0.5)) for name in names}
        truth.append(true)
        profile.append(
            {n: s / believed[n] * float(rng.lognormal(0, 0.05)) for n, s in true.items()}
        )
    job = Job(
        seed=seed,
        truth=tuple(truth),
        profile=tuple(profile),
        parallel=float(rng.uniform(0.9, 1.0)),
        types=types,
        floor=0.0,
        samples=1.0,
        noise=float(rng.uniform(0.05, 0.2)),
        overhead=float(rng.uniform(1.0, 1.3)),
        moving_s=float(rng.uniform(3, 40)),
    )
    if rng.random() < 0.5:
        fastest = job.plan(job.truth, 1.0).max_throughput
        job = replace(job, floor=float(rng.uniform(0.05, 0.4)) * fastest)
    found = job.plan(job.profile, 1.0)
    hours = float(rng.uniform(1, 6))
    if not found.feasible:
        return job
    return replace(job, samples=hours * 3600 / job.pace_s(found.stages))


def replay(job: Job) -> Result:
    """Run a job with `schedule.replan: auto`."""
    rng = np.random.default_rng([job.seed, 99])
    decision = first = job.plan(job.profile, job.samples)
    best = job.plan(job.truth, job.samples)
    left, now, dollars = job.samples, 0.0, 0.0
    moved_at: list[float] = []
    answers: dict[str, int] = {}
    while left > 0:
        run = _Run(job, decision, rng)
        rule = InARow()
        began, wait_s = now, FIRST_S
        due = now + wait_s
        price_s = job.price_s(decision.stages)
        while left > 0:
            trained, seconds = run.window(left)
            left, now, dollars = left - trained, now + seconds, dollars + seconds * price_s
            if now < due or left <= 0:
                continue
            wait_s = min(2 * wait_s, MOST_S)
            due = now + wait_s
            measurement = run.windows.measurement
            if not measurement.counts:
                continue
            moving = Moving.as_before([job.moving_s] * len(moved_at), restart_s=_START_S)
            fresh = propose(decision, measurement, left, moving=moving, cautious=True)
            past = Past(len(moved_at), now - moved_at[-1] if moved_at else math.inf)
            answer = rule.consider(fresh, measurement, past)
            answers[answer.name] = answers.get(answer.name, 0) + 1
            if answer is not Answer.MOVE:
                continue
            moved = for_job(fresh.proposed.to_message(), decision.to_message())
            decision = Decision.from_message(moved)
            both = price_s + job.price_s(decision.stages)
            now, dollars = now + job.moving_s, dollars + job.moving_s * both
            moved_at.append(now)
            break
        assert now > began
    return Result(
        seed=job.seed,
        stay=job.cost(first.stages),
        optimum=job.cost(best.stages),
        auto=dollars,
        noise=job.noise,
        moving_s=job.moving_s,
        moved_at=tuple(moved_at),
        answers=answers,
    )


class _Run:
    """A plan that trains: windows as its workers report them."""

    def __init__(self, job: Job, decision: Decision, rng: np.random.Generator) -> None:
        self.windows = Windows(len(decision.stages))
        self._job, self._rng = job, rng
        self._busy_s = [job.busy_s(stage) for stage in decision.stages]
        self._pace_s = job.pace_s(decision.stages)
        self._machine = 0.0  # noise that all stages have, and that lasts
        self._marks = [Mark(0, 0, 0.0, 0.0) for _ in decision.stages]
        self._samples = 0.0
        for stage in range(len(decision.stages)):
            self.windows.add(stage, Mark(0, 0, 0.0, 1e-9))

    def window(self, left: float) -> tuple[float, float]:
        """Train for a window, or less to the end; the samples and the seconds."""
        rng, noise = self._rng, self._job.noise / math.sqrt(2)
        fresh = rng.normal(0, noise * math.sqrt(1 - _ALIKE**2))
        self._machine = _ALIKE * self._machine + float(fresh)
        own = rng.normal(0, noise, len(self._marks))
        even = math.exp(self._job.noise**2 / 2)  # the mean of a window's samples stays
        pace_s = self._pace_s * math.exp(self._machine + float(own[-1])) * even
        trained = WINDOW_S / pace_s
        seconds = WINDOW_S if trained <= left else left * pace_s
        trained = min(trained, left)
        self._samples += trained
        for stage, before in enumerate(self._marks):
            busy_s = self._busy_s[stage] * math.exp(self._machine + float(own[stage])) * even
            mark = Mark(
                step=before.step + _STEPS,
                samples=round(1000 * self._samples) // 1000,
                busy_s=before.busy_s + trained * busy_s,
                train_s=before.train_s + seconds,
            )
            self._marks[stage] = mark
            self.windows.add(stage, mark)
        return trained, seconds


def results(jobs: int, seed: int, pays: bool) -> Iterator[Result]:
    """Of so many jobs from a seed on."""
    for number in range(seed, seed + jobs):
        yield replay(drawn(number, pays))


def main() -> int:
    arguments = _parse()
    paying = list(results(arguments.jobs, arguments.seed, True))
    others = list(results(arguments.jobs, arguments.seed, False))
    least = min(one.kept for one in paying)
    total = sum(one.stay - one.auto for one in paying)
    total /= sum(one.stay - one.optimum for one in paying)
    moved = [one.seed for one in others if one.moved_at]
    for one in paying:
        print(
            f"seed {one.seed}: staying ${one.stay:.3f}, optimum ${one.optimum:.3f}, auto "
            f"${one.auto:.3f}: {one.kept:.1%} kept, {len(one.moved_at)} moves"
        )
    print(f"{arguments.jobs} jobs where a move pays: {total:.1%} kept in all, {least:.1%} at least")
    print(f"{arguments.jobs} jobs where none does: {len(moved)} moved {moved or ''}")
    if not arguments.no_write:
        content = {
            "benchmark": "moves",
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "versions": versions("numpy"),
            "seed": arguments.seed,
            "kept": total,
            "kept_least": least,
            "moved_without_gain": moved,
            "paying": [_told(one) | {"kept": one.kept} for one in paying],
            "not_paying": [_told(one) for one in others],
        }
        write(RESULTS / "moves.json", json.dumps(content, indent=1) + "\n")
    return 0 if least >= KEPT and not moved else 1


def _told(result: Result) -> dict[str, Any]:
    return asdict(result)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.moves",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    parser.add_argument("--jobs", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the first")
    parser.add_argument("--no-write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
