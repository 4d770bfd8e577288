"""Spot problems and their cheapest plan by trying all: a reference of its own."""

import math
import random
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any


@dataclass(frozen=True)
class Spot:
    """A small problem as files, and a floor in samples/s."""

    workload: dict[str, Any]
    resources: dict[str, Any]
    floor: float


def drawn(seed: int, layers: int = 3, limit: int = 4, cap_s: float = 900.0) -> Spot:
    """A random problem of three types, of which one or two are taken away now and then."""
    chance = random.Random(seed)
    types = []
    for number, name in enumerate(("cpu", "gpu", "spot")):
        kind: dict[str, Any] = {
            "name": name,
            "price_per_hour": round(chance.uniform(0.1, 3.0), 3),
            "limit": chance.randint(1, limit),
            "memory_bytes": 100.0,
        }
        if number == 2 or (number == 1 and chance.random() < 0.4):
            kind["price_per_hour"] = round(kind["price_per_hour"] * 0.35, 3)
            kind["interruptions_per_hour"] = round(chance.uniform(0.05, 2.0), 3)
            kind["recovery_s"] = round(chance.uniform(0.1, cap_s), 1)
            kind["restart_s"] = round(kind["recovery_s"] * chance.uniform(1.0, 3.0), 1)
        types.append(kind)
    rows = [
        {
            name: {
                "compute_s": chance.uniform(0.01, 1.0),
                "sync_s": chance.choice([0.0, 0.05, 0.3]),
                "transfer_s": chance.choice([0.0, 0.02, 0.2]),
                "parallel_compute": chance.choice([0.5, 0.9, 1.0]),
                "parallel_sync": chance.choice([0.0, 0.9, 1.0]),
                "memory_bytes": 0.0,
            }
            for name in ("cpu", "gpu", "spot")
        }
        for _ in range(chance.randint(1, layers))
    ]
    workload = {
        "name": "spot",
        "reference_batch": 100,
        "samples": 3.6e6,
        "ps_type": "cpu",
        "ps_core_s": chance.choice([0.0, 0.002]),
        "layers": [{"name": f"l{n}", "cost": row} for n, row in enumerate(rows)],
    }
    free = cheapest(Spot(workload, {"types": types}, 0.0))
    floor = chance.choice([0.0, 0.8, 1.2]) * (free[1] if free else 0.0)
    return Spot(workload, {"types": types}, floor)


def cheapest(problem: Spot) -> tuple[float, float] | None:
    """Least cost of all plans that reach the floor, and its samples/s over all the time."""
    kinds = {kind["name"]: kind for kind in problem.resources["types"]}
    layers = problem.workload["layers"]
    best: tuple[float, float] | None = None
    for chosen in product(kinds, repeat=len(layers)):
        cuts = [(name, len(list(run))) for name, run in groupby(chosen)]
        for units in product(*(range(1, kinds[name]["limit"] + 1) for name, _ in cuts)):
            found = priced(
                problem, [(name, n, k) for (name, n), k in zip(cuts, units, strict=True)]
            )
            if found is not None and (best is None or found < best):
                best = found
    return best


def priced(problem: Spot, stages: list[tuple[str, int, int]]) -> tuple[float, float] | None:
    """Cost, and samples/s over all the time, of stages of a type, so many layers and units."""
    work, kinds = problem.workload, {kind["name"]: kind for kind in problem.resources["types"]}
    slowest, first = 0.0, 0
    used = dict.fromkeys(kinds, 0)
    lost_hours = 0.0  # an hour trained
    for name, count, units in stages:
        compute = sync = 0.0
        for layer in work["layers"][first : first + count]:
            cost = layer["cost"][name]
            compute += cost["compute_s"] * _share(cost["parallel_compute"], units)
            sync += cost["sync_s"] * _share(cost["parallel_sync"], units)
        first += count
        if first < len(work["layers"]):
            cost = work["layers"][first - 1]["cost"][name]
            sync += cost["transfer_s"] * _share(cost["parallel_sync"], units)
        slowest = max(slowest, compute, sync)
        used[name] += units
        seconds = kinds[name].get("restart_s" if units == 1 else "recovery_s", 0.0)
        lost_hours += units * kinds[name].get("interruptions_per_hour", 0.0) * seconds / 3600
    rate = work["reference_batch"] / slowest
    servers = math.ceil(rate * work["ps_core_s"])
    server = kinds[work["ps_type"]]
    used[work["ps_type"]] += servers
    lost_hours += (
        servers * server.get("interruptions_per_hour", 0.0) * server.get("restart_s", 0.0) / 3600
    )
    sustained = rate / (1 + lost_hours)
    if any(used[name] > kind["limit"] for name, kind in kinds.items()):
        return None
    if sustained < problem.floor * (1 - 1e-9):
        return None
    hours = work["samples"] / sustained / 3600
    return hours * sum(
        used[name] * kind["price_per_hour"] for name, kind in kinds.items()
    ), sustained


def _share(parallel: float, units: int) -> float:
    return 1 - parallel + parallel / units
