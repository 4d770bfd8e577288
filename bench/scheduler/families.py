"""Families of workloads to plan, drawn at random: files as a user would write them.

Each family is a function of (generator, layers, types) and returns a workload and resources in the
format of the files, with limits wide enough not to matter much. Times have no common scale: each
problem draws its own. Nothing here is shared with what the policy was trained on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

File = dict[str, Any]
Family = Callable[[np.random.Generator, int, int], tuple[File, File]]


@dataclass(frozen=True, slots=True)
class Unit:
    """A type on offer: how many times faster than a CPU core it does dense arithmetic."""

    name: str
    price: float
    speed: float
    memory_bytes: float

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")


# Rounded list prices an hour and speeds of the kind that clouds offer.
REAL = (
    Unit("cpu", 0.04, 1.0, 4e9),
    Unit("t4", 0.35, 12.0, 16e9),
    Unit("l4", 0.70, 22.0, 24e9),
    Unit("a10", 1.00, 25.0, 24e9),
    Unit("v100", 2.42, 30.0, 16e9),
    Unit("a100", 3.67, 55.0, 40e9),
    Unit("h100", 6.90, 90.0, 80e9),
    Unit("cpu-fast", 0.06, 1.4, 8e9),
)


class Draw:
    """Random numbers as the families need them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def log(self, low: float, high: float) -> float:
        """Log-uniform between `low` and `high`."""
        return float(math.exp(self.rng.uniform(math.log(low), math.log(high))))

    def parallel(self, serial: float = 0.5) -> float:
        """A parallel fraction between 1 - `serial` and 1, most often near 1."""
        return 1.0 if self.chance(0.1) else 1.0 - self.log(serial / 500, serial)

    def chance(self, p: float) -> bool:
        """True with probability `p`."""
        return bool(self.rng.random() < p)


def offer(draw: Draw, types: int) -> list[Unit]:
    """One CPU type and accelerators: prices like real ones, or prices and speeds of any kind."""
    if draw.chance(0.5) and types <= len(REAL):
        picks = draw.rng.choice(np.arange(1, len(REAL)), size=types - 1, replace=False)
        return [REAL[0], *(REAL[int(pick)] for pick in sorted(picks))]
    units = [Unit("cpu", draw.log(0.01, 0.2), 1.0, draw.log(1e9, 3e10))]
    for n in range(1, types):
        speed = draw.log(3, 150)
        price = units[0].price * speed * draw.log(0.3, 6)
        units.append(Unit(f"gpu{n}", price, speed, draw.log(8e9, 1e11)))
    return units


def cost(compute: float, sync: float, transfer: float, a: float, b: float, memory: float) -> File:
    """A layer's cost on one type."""
    return {
        "compute_s": compute,
        "sync_s": sync,
        "transfer_s": transfer,
        "parallel_compute": a,
        "parallel_sync": b,
        "memory_bytes": memory,
    }


def files(
    draw: Draw, name: str, units: Sequence[Unit], layers: list[File], ps_share: float
) -> tuple[File, File]:
    """Workload and resources; the parameter server takes about `ps_share` of a core's time."""
    batch = int(draw.log(64, 8192))
    on_cpu = [c["cpu"]["compute_s"] for layer in layers if "cpu" in (c := layer["cost"])]
    workload = {
        "name": name,
        "reference_batch": batch,
        "samples": draw.log(1e6, 1e11),
        "ps_type": "cpu",
        "ps_core_s": ps_share * (sum(on_cpu) / batch if on_cpu else 0.0),
        "layers": [{**layer, "name": f"{layer['kind']}_{n}"} for n, layer in enumerate(layers)],
    }
    types = [
        {
            "name": unit.name,
            "price_per_hour": unit.price,
            "limit": int(draw.log(48, 3000) if unit.is_cpu else draw.log(8, 256)),
            "memory_bytes": unit.memory_bytes,
            "device": "cpu" if unit.is_cpu else "cuda",
        }
        for unit in units
    ]
    return workload, {"types": types}


def click(rng: np.random.Generator, layers: int, types: int) -> tuple[File, File]:
    """CTR models: embeddings that accelerators hardly help, dense layers that they do."""
    draw = Draw(rng)
    units = offer(draw, types)
    scale = draw.log(1e-4, 1.0)
    spread = [unit.speed * draw.log(0.5, 2) for unit in units]
    rows, towers = [], int(rng.integers(1, 4))
    starts = {0, *(int(x) for x in rng.integers(0, layers, towers))}
    left = 0
    for n in range(layers):
        left = int(rng.integers(1, 1 + max(1, layers // 8))) if n in starts else left - 1
        if left > 0:
            rows.append(_embedding(draw, units, scale))
        elif draw.chance(0.15):
            rows.append(_dense(draw, units, spread, scale * draw.log(0.01, 0.3), "elementwise"))
        else:
            rows.append(_dense(draw, units, spread, scale * draw.log(0.3, 30), "dense"))
    return files(draw, "click", units, rows, draw.log(0.01, 1) if draw.chance(0.8) else 0.0)


def _embedding(draw: Draw, units: Sequence[Unit], scale: float) -> File:
    compute, pull = scale * draw.log(0.1, 2), scale * draw.log(0.05, 5)
    memory, a, b = draw.log(1e7, 3e9), draw.parallel(), draw.parallel()
    row = {}
    for unit in units:
        # Rows live with the CPU servers: an accelerator computes no faster and pulls more slowly.
        if unit.is_cpu:
            row[unit.name] = cost(compute, pull, scale * draw.log(0.01, 0.5), a, b, memory)
        elif not draw.chance(0.6):
            slower = pull * draw.log(1, 10)
            transfer = scale * draw.log(0.01, 0.5)
            row[unit.name] = cost(compute / draw.log(1, 4), slower, transfer, a, b, memory)
    return {"kind": "embedding", "cost": row}


def _dense(
    draw: Draw, units: Sequence[Unit], speeds: Sequence[float], compute: float, kind: str
) -> File:
    sync = 0.0 if kind == "elementwise" else compute * draw.log(1e-3, 0.3)
    transfer, memory = compute * draw.log(1e-3, 0.3), draw.log(1e5, 5e8)
    a, b = draw.parallel(), draw.parallel()
    row = {}
    for unit, speed in zip(units, speeds, strict=True):
        own = 1.0 if unit.is_cpu else max(1.0, speed * draw.log(0.5, 2))
        link = 1.0 if unit.is_cpu else draw.log(0.2, 2)
        row[unit.name] = cost(compute / own, sync * link, transfer * link, a, b, memory)
    return {"kind": kind, "cost": row}


def transformer(rng: np.random.Generator, layers: int, types: int) -> tuple[File, File]:
    """Transformers, dense or of experts: blocks alike, bound by memory, hopeless on a CPU."""
    draw = Draw(rng)
    units = offer(draw, types)
    scale, experts = draw.log(1e-3, 1.0), draw.chance(0.5)
    speeds = [unit.speed * draw.log(0.7, 1.5) for unit in units]
    capacity = max(unit.memory_bytes for unit in units)
    share = draw.log(0.03, 0.5)  # of the largest memory, for the largest layer
    exact = draw.chance(0.5)  # all blocks the same
    parallel = [(draw.parallel(0.2), draw.parallel()) for _ in units]
    kinds = ["embedding" if n == 0 else "head" if n == layers - 1 else "" for n in range(layers)]
    names = {0: "moe" if experts else "dense", 1: "attention"}
    kinds = [kind or names[n % 2] for n, kind in enumerate(kinds)]
    work = {"embedding": 0.05, "head": 1.5, "attention": 1.0, "dense": 2.0, "moe": 3.0}
    size = {"embedding": 0.5, "head": 0.5, "attention": 0.3, "dense": 0.6, "moe": 1.0}
    rows = []
    for kind in kinds:
        wobble = 1.0 if exact else draw.log(0.7, 1.4)
        compute = 30 * scale * work[kind] * wobble
        row = {}
        for unit, speed, (a, b) in zip(units, speeds, parallel, strict=True):
            own = 1.0 if unit.is_cpu else speed
            link = draw.log(0.5, 2) if not exact else 1.0
            memory = capacity * share * size[kind] * wobble
            if memory > unit.memory_bytes and draw.chance(0.5):
                continue
            sync = scale * (2.0 if kind == "moe" else 0.3) * link
            row[unit.name] = cost(compute / own, sync, 0.2 * scale * link, a, b, memory)
        rows.append({"kind": kind, "cost": row})
    return files(draw, "transformer", units, rows, 1e-4 if draw.chance(0.3) else 0.0)


def profiled(rng: np.random.Generator, layers: int, types: int) -> tuple[File, File]:
    """As a profiler writes it: all-reduce that no unit shortens, layers of wildly unequal size."""
    draw = Draw(rng)
    units = offer(draw, types)
    scale = draw.log(1e-4, 1e-1)
    rows = []
    for _ in range(layers):
        kind = str(rng.choice(["dense", "dense", "elementwise", "embedding"]))
        compute, a = scale * draw.log(0.01, 30), float(rng.uniform(0.15, 1.0))
        reduced = kind == "dense"
        sync = compute * draw.log(0.05, 0.5) if reduced else 0.0
        sync = compute * draw.log(1, 8) if kind == "embedding" else sync
        b = 0.0 if reduced else float(rng.uniform(0.2, 1.0))
        transfer, memory = scale * draw.log(0.01, 3), draw.log(1e6, 1e8)
        launch = scale * 0.01
        row = {}
        for unit in units:
            own = compute if unit.is_cpu else compute / (unit.speed * draw.log(0.8, 1.25)) + launch
            row[unit.name] = cost(own, sync, transfer, a if unit.is_cpu else 0.95, b, memory)
        rows.append({"kind": kind, "cost": row})
    return files(draw, "profiled", units, rows, draw.log(0.01, 0.3))


def anything(rng: np.random.Generator, layers: int, types: int) -> tuple[File, File]:
    """No structure at all: every number of every layer and type on its own, over decades."""
    draw = Draw(rng)
    units = offer(draw, types)
    scale = draw.log(1e-5, 10)
    decades = draw.log(2, 1000)
    rows = []
    for _ in range(layers):
        row = {}
        for unit in units:
            compute, sync = scale * draw.log(1, decades), scale * draw.log(0.01, decades)
            if draw.chance(0.3):
                sync = 0.0
            transfer = scale * draw.log(0.001, decades)
            memory = unit.memory_bytes * draw.log(1e-4, 0.9)
            row[unit.name] = cost(compute, sync, transfer, draw.parallel(), draw.parallel(), memory)
        rows.append({"kind": "dense", "cost": _bar(draw, row, 0.25)})
    return files(draw, "anything", units, rows, draw.log(1e-3, 0.3) if draw.chance(0.5) else 0.0)


def ladder(rng: np.random.Generator, layers: int, types: int) -> tuple[File, File]:
    """Each layer is best on another type, and leaving a type costs more than it seems to save."""
    draw = Draw(rng)
    units = offer(draw, types)
    scale = draw.log(1e-4, 1)
    bonus, step = draw.log(1.5, 20), int(rng.integers(1, types + 1))
    period = int(rng.integers(1, 5))
    rows = []
    for n in range(layers):
        best = (n // period * step) % types
        transfer = scale * draw.log(0.05, 20)
        row = {}
        for t, unit in enumerate(units):
            # Dollars a sample are alike on all types but the best.
            compute = scale / unit.price * units[0].price * draw.log(0.9, 1.1)
            compute /= bonus if t == best else 1.0
            memory = draw.log(1e6, 1e8)
            row[unit.name] = cost(
                compute, compute * draw.log(0.05, 0.5), transfer, draw.parallel(), 1.0, memory
            )
        rows.append({"kind": "dense", "cost": row})
    return files(draw, "ladder", units, rows, 0.05 if draw.chance(0.5) else 0.0)


def serial(rng: np.random.Generator, layers: int, types: int) -> tuple[File, File]:
    """Much that no number of units shortens: only splitting into more stages does."""
    draw = Draw(rng)
    units = offer(draw, types)
    scale = draw.log(1e-3, 1)
    speeds = [unit.speed ** draw.rng.uniform(0.5, 1) for unit in units]
    rows = []
    for _ in range(layers):
        compute = scale * draw.log(0.1, 10)
        row = {}
        for unit, speed in zip(units, speeds, strict=True):
            own = compute / (1.0 if unit.is_cpu else speed * draw.log(0.7, 1.4))
            a, b = float(rng.uniform(0.5, 0.9)), float(rng.uniform(0.5, 1))
            memory = unit.memory_bytes * draw.log(0.02, 0.4)
            row[unit.name] = cost(
                own, own * draw.log(0.01, 1), own * draw.log(0.01, 1), a, b, memory
            )
        rows.append({"kind": "dense", "cost": _bar(draw, row, 0.1)})
    return files(draw, "serial", units, rows, 0.0)


def _bar(draw: Draw, row: File, chance: float) -> File:
    """Without some types, one at least left."""
    kept = {name: value for name, value in row.items() if not draw.chance(chance)}
    return kept or dict([list(row.items())[int(draw.rng.integers(len(row)))]])


FAMILIES: dict[str, Family] = {
    "click": click,
    "transformer": transformer,
    "profiled": profiled,
    "anything": anything,
    "ladder": ladder,
    "serial": serial,
}
