"""Drawing and changing assignments, all rows at once; only types that can run a layer."""

import numpy as np
from numpy.typing import NDArray

from scheduler.methods.rivals.problem import Assignments, Problem


class Moves:
    """Random assignments of one problem, and steps from given ones.

    Good plans are made of few stages, since each boundary costs a transfer: so besides single
    layers, whole runs of layers change type.
    """

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self.problem = problem
        self.rng = rng
        self.usable = problem.usable
        self._number = self.usable.sum(axis=1)
        # The usable types of each layer, the rest after them.
        self._types = np.argsort(~self.usable, axis=1, kind="stable").astype(np.int32)
        self._layers = np.arange(self.usable.shape[0])

    def uniform(self, count: int) -> Assignments:
        """Draw `count` assignments, every layer independently."""
        draws = self.rng.random((count, len(self._layers)))
        rows: Assignments = self._types[self._layers, (draws * self._number).astype(int)]
        return rows

    def corners(self) -> Assignments:
        """Everything on one type as far as it can be, for each type; and each layer's own best."""
        alone = self.problem.alone
        kinds = np.arange(self.usable.shape[1], dtype=np.int32)[:, None]
        return np.concatenate([np.where(self.usable.T, kinds, alone), alone[None]])

    def redraw(self, rows: Assignments, rate: float) -> Assignments:
        """Draw each layer anew with probability `rate`."""
        hit = self.rng.random(rows.shape) < rate
        changed: Assignments = np.where(hit, self.uniform(len(rows)), rows)
        return changed

    def paint(self, rows: Assignments) -> Assignments:
        """Give a random run of layers one type: any, or that of the layer next to the run."""
        rng, count, layers = self.rng, len(rows), len(self._layers)
        first = rng.integers(0, layers, count)
        # Short runs as often as long ones.
        length = np.exp(rng.random(count) * np.log(layers)).round().astype(int)
        last = np.minimum(first + length, layers) - 1
        each = np.arange(count)
        before = rows[each, np.maximum(first - 1, 0)]
        after = rows[each, np.minimum(last + 1, layers - 1)]
        anything = self._types[first, (rng.random(count) * self._number[first]).astype(int)]
        kind = np.choose(rng.integers(0, 4, count), [before, after, anything, anything])
        inside = (self._layers >= first[:, None]) & (self._layers <= last[:, None])
        changed: Assignments = np.where(
            inside & self.usable.T[kind], kind[:, None].astype(np.int32), rows
        )
        return changed

    def cross(self, one: Assignments, other: Assignments) -> Assignments:
        """Two-point crossover: a run of layers from `other`, the rest from `one`."""
        layers = len(self._layers)
        ends = np.sort(self.rng.integers(0, layers + 1, (2, len(one))), axis=0)
        inside = (self._layers >= ends[0][:, None]) & (self._layers < ends[1][:, None])
        child: Assignments = np.where(inside, other, one)
        return child


def seen_once(rows: Assignments) -> NDArray[np.intp]:
    """Return the positions of the first of each distinct row, ascending."""
    _, first = np.unique(rows, axis=0, return_index=True)
    return np.sort(first)
