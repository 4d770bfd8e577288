"""Random planning problems for the policy to learn from, wide enough that a real one is among them.

A problem mixes layers that move memory (embeddings: hardly faster on a GPU) and layers that compute
(towers, experts: 3 to 200 times faster there), over types whose prices and speeds are related, or
not at all. Scales span many decades; limits, memory, missing types and parameter-server cores bind
in some and not in others.
"""

import math
from dataclasses import dataclass

import numpy as np

from scheduler.agent.paces import fastest
from scheduler.engine import _planner
from scheduler.problem.cost import Floats


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a problem is: layers and resource types."""

    layers: int
    types: int


def draw(rng: np.random.Generator, shape: Shape) -> _planner.Problem:
    """Draw a problem of the given shape."""
    layers, types = shape.layers, shape.types
    price = _prices(rng, types)
    compute, sync, transfer = _times(rng, layers, types, price)
    size = (layers, types)
    a = _fractions(rng, size)
    b = _fractions(rng, size)
    allowed = rng.random(size) >= rng.choice([0.0, 0.0, 0.1, 0.4])
    if rng.random() < 0.4:
        # Some layers run nowhere but on one type: embeddings that only CPUs hold.
        bound = rng.random(layers) < rng.uniform(0, 0.4)
        only = rng.integers(types) if rng.random() < 0.7 else rng.integers(types, size=layers)
        allowed[bound] = np.arange(types) == np.broadcast_to(only, layers)[bound][:, None]
    allowed[np.arange(layers), rng.integers(types, size=layers)] |= ~allowed.any(axis=1)
    capacity = 10 ** rng.uniform(9, 11.5, types)
    memory = np.zeros(size)
    if rng.random() < 0.5:
        load = 10 ** rng.uniform(-3, rng.choice([-1.0, -0.3]), (layers, 1))
        memory = load * capacity.max() * np.ones(size)
        fits = memory <= capacity
        allowed &= fits | ~(allowed & fits).any(axis=1, keepdims=True)
        memory = np.where((allowed & fits).any(axis=1, keepdims=True), memory, 0.0)
    if rng.random() < 0.4:
        limit = np.round(10 ** rng.uniform(0, rng.choice([1.0, 2.0, 3.0]), types))
    else:
        limit = np.round(10 ** rng.uniform(1, 4, types))
    ps = rng.random() < 0.4
    busy = np.where(allowed, np.maximum(compute, sync), np.inf).min(axis=1).sum()
    return _planner.Problem(
        np.ascontiguousarray(allowed),
        compute * (1 - a),
        compute * a,
        sync * (1 - b),
        sync * b,
        transfer * (1 - b),
        transfer * b,
        memory,
        np.full(size, 1 / 3),
        np.zeros(size),
        np.full(size, np.inf),
        np.zeros(layers, dtype=bool),
        False,
        price,
        np.maximum(limit, 1.0),
        capacity,
        1.0,
        float(busy * 10 ** rng.uniform(-3, 0) * rng.random()) if ps else 0.0,
        int(rng.integers(types)) if rng.random() < 0.3 else 0,
        math.inf,
    )


def _prices(rng: np.random.Generator, types: int) -> Floats:
    if rng.random() < 0.6:
        # A cheap one first, as CPU cores are, then accelerators.
        cpu = 0.04 * 10 ** rng.uniform(-0.5, 0.5)
        price = np.concatenate([[cpu], 10 ** rng.uniform(-0.7, 1.2, types - 1)])
        if types > 3 and rng.random() < 0.4:
            price[1] = cpu * 10 ** rng.uniform(-0.2, 0.6)
    else:
        price = 10 ** rng.uniform(-2, 1.3, types)
    if rng.random() < 0.1:
        price = np.round(price, 1) + 0.1
    return price


def _times(
    rng: np.random.Generator, layers: int, types: int, price: Floats
) -> tuple[Floats, Floats, Floats]:
    """Seconds a sample on one unit: compute, sync and transfer, [layers, types]."""
    scale = 10 ** rng.uniform(-7, -2)
    spread = rng.uniform(0.1, 1.0)
    work = scale * 10 ** (spread * rng.normal(size=layers))
    if rng.random() < 0.5:
        work = work[rng.integers(layers, size=layers) // rng.integers(1, 5)]  # repeated blocks
    heavy = rng.random(layers) < rng.uniform(0.2, 0.9)
    if rng.random() < 0.5:
        # Memory-bound layers come first, as in a recommendation model.
        heavy = np.arange(layers) >= rng.integers(0, max(2, layers // 2))
    # What a type is good for: its speed where layers compute, and where they move memory.
    worth = price / price.min()
    if rng.random() < 0.7:
        fast = worth ** rng.uniform(0.4, 1.5) * 10 ** rng.normal(0, 0.25, types)
        wide = worth ** rng.uniform(0.0, 0.9) * 10 ** rng.normal(0, 0.25, types)
    else:
        fast = 10 ** rng.uniform(0, 2, types)
        wide = 10 ** rng.uniform(0, 1.3, types)
    speed = np.where(heavy[:, None], fast, wide)
    taste = rng.choice([0.02, 0.1, 0.3, 0.6])
    speed = speed * 10 ** rng.normal(0, taste, (layers, types))
    compute = work[:, None] / speed
    if rng.random() < 0.1:
        compute = scale * 10 ** rng.uniform(-1.5, 1.5, (layers, types))
    talk = 10 ** rng.uniform(-3, 0.3)
    own = 10 ** (0.4 * rng.normal(size=(layers, 1)))
    if rng.random() < 0.5:
        sync = talk * own * work[:, None] * np.ones(types) / wide.max() ** rng.uniform(0, 1)
    else:
        sync = talk * compute * own * 10 ** rng.normal(0, 0.3, (layers, types))
    move = 10 ** rng.uniform(-3, 0.5)
    base = float(np.median(compute))
    transfer = move * base * 10 ** (rng.uniform(0, 0.7) * rng.normal(size=(layers, 1)))
    transfer = transfer * 10 ** rng.normal(0, rng.choice([0.0, 0.3]), (layers, types))
    if rng.random() < 0.1:
        transfer = transfer * 0
    return compute, sync, transfer


def _fractions(rng: np.random.Generator, size: tuple[int, int]) -> Floats:
    kind = rng.random()
    if kind < 0.25:
        return np.full(size, rng.choice([0.9, 0.95, 0.99, 1.0]))
    if kind < 0.6:
        return 1 - 10 ** rng.uniform(-4, -0.5, size)
    if kind < 0.85:
        return rng.uniform(0.5, 1.0, size)
    return np.broadcast_to(rng.uniform(0.7, 1.0, size[1]), size).copy()


def paces(rng: np.random.Generator, problem: _planner.Problem, count: int) -> list[_planner.Pace]:
    """Draw paces to keep, from very slow to nearly the highest; the last are the hard ones."""
    top, _ = fastest(problem, 1e-6)
    drawn: list[_planner.Pace] = []
    for _ in range(count if top > 0 else 0):
        kind = rng.random()
        if kind < 0.35:
            share = rng.uniform(0.8, 1.0)
        elif kind < 0.7:
            share = 10 ** rng.uniform(-1.5, 0)
        else:
            share = 10 ** rng.uniform(-4, -1)
        pace = _planner.Pace(problem, top * share)
        if pace.feasible:
            drawn.append(pace)
    return drawn
