"""The dynamic program at one tau that respects limits shared by stages of one type.

A label is a way to cover the first layers: its price, the units of each type it uses, whether a
stage has ET of exactly tau. A label is dropped when another at the same place uses no more of
anything, or when even the cheapest way to finish it costs too much.
"""

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scheduler.exact import Chain

MAX_LABELS = 50_000


class OutOfBudgetError(Exception):
    """The search was cut short; nothing is known about what it had left."""


@dataclass(frozen=True, slots=True)
class Found:
    """Least price an hour at tau within the limits; `attained` has a stage of exactly tau.

    `assignment` (type index per layer) is of `attained`, else of `least`; None where none exists.
    """

    least: float
    attained: float
    assignment: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Label:
    price: float
    hit: bool
    used: tuple[int, ...]
    type: int
    first: int
    before: "_Label | None"


def cheapest(chain: "Chain", tau: float, floor: float, most: float, deadline: float) -> Found:
    """Find the least price an hour at `tau`, among plans of at most the price `most`.

    Raises:
        OutOfBudgetError: too many labels, or past `deadline` (time.monotonic).
    """
    model = chain.model
    layers, types = model.num_layers, model.num_types
    one = np.array([tau])
    ps_units = int(model.ps_units(model.throughput(one, floor))[0])
    limit = [int(number) for number in model.limit]
    limit[model.ps_type] -= ps_units
    if limit[model.ps_type] < 0:
        return Found(math.inf, math.inf, None)
    extra = ps_units * float(model.price[model.ps_type])
    rest = chain.program(one, floor)[2][:, :, 0].tolist()
    budget = (most - extra) * (1 + 1e-12)
    price = model.price.tolist()
    at: list[list[list[_Label]]] = [[[] for _ in range(types)] for _ in range(layers + 1)]
    start = _Label(0.0, False, (0,) * types, -1, 0, None)
    made = 0
    for first in range(layers):
        units, hits = chain.units(first, one)
        steps = [
            (first + int(row) + 1, int(kind), int(units[row, kind, 0]), bool(hits[row, kind, 0]))
            for row, kind in np.argwhere(np.isfinite(units[:, :, 0]))
        ]
        if time.monotonic() > deadline or made > MAX_LABELS:
            raise OutOfBudgetError
        for label in [start] if first == 0 else [x for some in at[first] for x in some]:
            for end, kind, number, hit in steps:
                total = label.price + price[kind] * number
                if (
                    kind == label.type
                    or label.used[kind] + number > limit[kind]
                    or total + rest[end][kind] > budget
                ):
                    continue
                used = list(label.used)
                used[kind] += number
                made += 1
                new = _Label(total, label.hit or hit, tuple(used), kind, first, label)
                _insert(at[end][kind], new)
    done = [label for some in at[layers] for label in some]
    return Found(
        min((x.price for x in done), default=math.inf) + extra,
        min((x.price for x in done if x.hit), default=math.inf) + extra,
        _assignment(min(done, key=lambda x: (not x.hit, x.price)), layers) if done else None,
    )


def _insert(labels: list[_Label], new: _Label) -> None:
    """Add a label unless one dominates it, and drop those that it dominates."""
    for old in labels:
        if old.hit >= new.hit and all(a <= b for a, b in zip(old.used, new.used, strict=True)):
            return
    labels[:] = [
        old
        for old in labels
        if old.hit > new.hit or any(a < b for a, b in zip(old.used, new.used, strict=True))
    ]
    labels.append(new)


def _assignment(label: _Label, layers: int) -> tuple[int, ...]:
    kinds: list[int] = []
    end = layers
    walk: _Label | None = label
    while walk is not None and walk.type >= 0:
        kinds = [walk.type] * (end - walk.first) + kinds
        end, walk = walk.first, walk.before
    return tuple(kinds)
