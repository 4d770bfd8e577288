"""Unseen problems to judge planners by: seeded, in the format of workload and resources files.

    for problem in problems(count=400, seed=1):
        plan(problem.workload, problem.resources, problem.min_throughput)

Layers are 5 to 64, types 2 to 8. A quarter of the problems has no floor, a quarter one of 0.1 to
0.8 of the highest throughput, a quarter one of 0.9 to 0.995 of it, and in a quarter the limits that
stages share are below what the best plan would use without them. The highest throughput is the
exact solver's, so a plan exists for each problem. It takes a search with a time limit; so that a
slow machine gets the same problems, `--write` keeps what was derived from it in a file.

    python -m bench.scheduler.workloads --count 400 --seed 1 \
        --write bench/results/scheduler_problems.json
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.pages import RESULTS, write
from bench.scheduler.families import FAMILIES, File
from scheduler.methods.exact import Solution, solve
from scheduler.problem.cost import CostModel
from scheduler.problem.workload import Resources, Workload

DEMANDS = ("none", "moderate", "near", "shared")
DERIVED = RESULTS / "scheduler_problems.json"
SECONDS = 5.0  # a solve
_ATTEMPTS = 20
_TIGHTENED = 8  # attempts at limits that bind


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: its files, and the samples/s to reach (0: none)."""

    name: str
    family: str
    demand: str
    workload: File
    resources: File
    min_throughput: float = 0.0
    attempt: int = 0  # the draw that it came from: in earlier ones no plan existed

    @property
    def layers(self) -> int:
        return len(self.workload["layers"])

    @property
    def types(self) -> int:
        return len(self.resources["types"])

    def model(self) -> CostModel:
        return CostModel(Workload.parse(self.workload), Resources.parse(self.resources))

    @property
    def derived(self) -> dict[str, Any]:
        """What `restored` needs: the floor and the limits, which a search decided."""
        limits = [kind["limit"] for kind in self.resources["types"]]
        return {
            "attempt": self.attempt,
            "min_throughput": self.min_throughput,
            "limits": limits,
        }

    def restored(self, derived: Mapping[str, Any]) -> "Problem":
        """With the floor and the limits that were derived before."""
        types = [
            {**kind, "limit": limit}
            for kind, limit in zip(self.resources["types"], derived["limits"], strict=True)
        ]
        floor = float(derived["min_throughput"])
        return replace(self, resources={"types": types}, min_throughput=floor)


def problems(
    count: int = 400,
    seed: int = 1,
    layers: tuple[int, int] = (5, 64),
    types: tuple[int, int] = (2, 8),
    derived: Mapping[str, Any] | None = None,
) -> Iterator[Problem]:
    """Draw `count` problems; number n is the same whatever `count` is.

    Args:
        derived: by name, what an earlier run derived; without it each is searched for.
    """
    for number in range(count):
        yield problem(number, seed, layers, types, derived)


def problem(
    number: int,
    seed: int = 1,
    layers: tuple[int, int] = (5, 64),
    types: tuple[int, int] = (2, 8),
    derived: Mapping[str, Any] | None = None,
) -> Problem:
    """Problem `number` of `seed`: every family meets every demand in turn."""
    families = tuple(FAMILIES)
    family = families[number % len(families)]
    demand = DEMANDS[number // len(families) % len(DEMANDS)]
    name = f"{seed}-{number}-{family}-{demand}"
    kept = (derived or {}).get(name)
    for attempt in range(_ATTEMPTS):
        rng = np.random.default_rng([seed, number, attempt])
        size = int(rng.integers(layers[0], layers[1], endpoint=True))
        kinds = int(rng.integers(types[0], types[1], endpoint=True))
        workload, resources = FAMILIES[family](rng, size, kinds)
        workload["name"] = name
        drawn = Problem(name, family, demand, workload, resources, attempt=attempt)
        if kept is not None:
            if kept["attempt"] == attempt:
                return drawn.restored(kept)
            continue
        found = _demanding(drawn, rng)
        if found is not None:
            return found
    raise RuntimeError(f"{name}: no plan in {_ATTEMPTS} draws")


def _demanding(drawn: Problem, rng: np.random.Generator) -> Problem | None:
    """With a floor, and limits that bind where they should; None where no plan exists."""
    top = _solve(drawn).max_throughput
    if top <= 0:
        return None
    if drawn.demand == "none":
        return drawn
    if drawn.demand == "shared":
        return _shared(drawn, top, rng)
    share = rng.uniform(0.9, 0.995) if drawn.demand == "near" else rng.uniform(0.1, 0.8)
    return replace(drawn, min_throughput=float(share * top))


def _shared(drawn: Problem, top: float, rng: np.random.Generator) -> Problem | None:
    """Limits below what the cheapest plan uses of types that several of its stages share."""
    current = replace(drawn, min_throughput=float(rng.uniform(0.2, 0.7) * top))
    bound = False
    for _ in range(_TIGHTENED):
        found = _solve(current).plan
        if found is None or not found.feasible:
            return None
        used = {kind["name"]: 0 for kind in current.resources["types"]}
        users = dict(used)
        for stage in found.stages:
            used[stage.type] += stage.units
            users[stage.type] += 1
        if found.ps_units:
            used[current.workload["ps_type"]] += found.ps_units
            users[current.workload["ps_type"]] += 1
        sharing = [n for n in used if users[n] > 1 and used[n] > users[n]]
        if not sharing:
            return current if bound else None
        tight = rng.choice(sharing, rng.integers(1, len(sharing), endpoint=True), replace=False)
        share = rng.uniform(0.6, 0.95)
        types = [
            {**kind, "limit": max(users[kind["name"]], int(share * used[kind["name"]]))}
            if kind["name"] in tight
            else kind
            for kind in current.resources["types"]
        ]
        tighter = replace(current, resources={"types": types})
        top = _solve(replace(tighter, min_throughput=0.0)).max_throughput
        if top < current.min_throughput:
            return current if bound else None
        current, bound = tighter, True
        if rng.random() < 0.5:
            break
    return current


def _solve(problem: Problem) -> Solution:
    return solve(problem.model(), problem.min_throughput, seconds=SECONDS)


def load_derived(path: Path = DERIVED) -> dict[str, Any]:
    """What `--write` kept, by name; empty where there is no file."""
    return json.loads(path.read_text()) if path.is_file() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, default=DERIVED, help="where what is derived goes")
    arguments = parser.parse_args()
    kept = load_derived(arguments.write)
    for number in range(arguments.count):
        drawn = problem(number, arguments.seed, derived=kept)
        kept[drawn.name] = drawn.derived
        floor = f"{drawn.min_throughput:,.1f} samples/s" if drawn.min_throughput else "no floor"
        print(f"{drawn.name}: {drawn.layers} layers, {drawn.types} types, {floor}", flush=True)
        if number % 20 == 19 or number == arguments.count - 1:
            write_json(arguments.write, kept)
    return 0


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file whole, one line for each key."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items())
    write(path, "{\n" + lines + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
