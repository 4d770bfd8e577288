"""Batches of ids for the parameter-server benchmark, the same for every peer."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
SLOTS = 26
_SLOT_BIT = 48
_STRIDE = 7_368_787  # coprime to the keys a slot: popular keys are not neighbours


@dataclass(frozen=True, slots=True)
class Shape:
    """What the ids look like.

    Attributes:
        samples: of a batch; each has an id in every slot.
        keys_a_slot: how many ids a slot has.
        exponent: of Zipf's law: the r-th most popular id has a share in proportion to r^-exponent.
        table_rows: distinct keys that tables hold while calls are timed.
        batches: of each workload.
    """

    samples: int = 4096
    keys_a_slot: int = 10_000_000
    exponent: float = 1.05
    table_rows: int = 1_000_000
    batches: int = 8
    seed: int = 1

    @property
    def ids(self) -> int:
        """Ids of a batch."""
        return self.samples * SLOTS


def write(shape: Shape, path: Path) -> dict[str, float]:
    """Draw the batches into a file; mean distinct keys of a batch by workload."""
    rng = np.random.default_rng(shape.seed)
    drawn = zipf(shape, rng)
    universe = _universe(drawn, shape, rng)
    if len(universe) < shape.ids:
        raise ValueError(f"table rows {len(universe):,}; expected at least {shape.ids:,}, a batch")
    distinct = np.stack(
        [rng.choice(len(universe), shape.ids, replace=False) for _ in range(shape.batches)]
    )
    order = np.argsort(universe)
    zipf_rows = order[np.searchsorted(universe, drawn, sorter=order)]
    np.savez(
        path,
        zipf_keys=drawn,
        zipf_rows=zipf_rows,
        distinct_keys=universe[distinct],
        distinct_rows=distinct,
        universe=universe,
    )
    return {
        "zipf": float(np.mean([len(np.unique(batch)) for batch in drawn])),
        "distinct": float(shape.ids),
    }


def zipf(shape: Shape, rng: np.random.Generator) -> Ints:
    """Keys [batches, ids]: samples follow each other, each with one id of every slot."""
    weights = np.arange(1, shape.keys_a_slot + 1, dtype=np.float64) ** -shape.exponent
    cumulative = np.cumsum(weights)
    drawn = rng.random((shape.batches, shape.ids)) * cumulative[-1]
    ranks = np.searchsorted(cumulative, drawn).astype(np.int64)
    slots = np.tile(np.arange(SLOTS), shape.samples)
    # Each slot begins its cycle elsewhere, or all would have the same popular ids.
    ids = (ranks * _STRIDE + slots * 1_234_577) % shape.keys_a_slot
    keys: Ints = ids + (slots << _SLOT_BIT)
    return keys


def _universe(drawn: Ints, shape: Shape, rng: np.random.Generator) -> Ints:
    """All keys of the batches and others up to `table_rows`, in random order."""
    keys = np.unique(drawn)
    while len(keys) < shape.table_rows:
        missing = shape.table_rows - len(keys)
        slots = rng.integers(0, SLOTS, missing)
        ids = rng.integers(0, shape.keys_a_slot, missing)
        keys = np.union1d(keys, ids + (slots << _SLOT_BIT))
    shuffled: Ints = rng.permutation(keys)
    return shuffled
