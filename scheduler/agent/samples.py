"""Assignments drawn so far, and the paces worth drawing at."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scheduler.engine import _planner
from scheduler.problem.cost import CostModel

# Assignments whose stages on one type are cut anew after each draw, and seconds for each, far more
# than it takes.
_CUT, _CUT_S = 4, 0.2
_REVISING = 1000  # nodes of a pace's own search, whose answer revising does not need


@dataclass(slots=True)
class Samples:
    """Assignments drawn so far, each once, with value (tau * price an hour), tau and pace.

    None is worth less than `bound`.

    What the policy draws are types. Where its layers on one exceed a unit's memory, a stage ends
    where that is full; the cheapest cuts may be elsewhere, and are found for the cheapest of what
    is drawn, whose assignments then have codes of `CostModel` for types.
    """

    model: CostModel
    floor: float
    bound: float = 0.0
    best: float = math.inf
    seen: set[bytes] = field(default_factory=set)
    values: list[float] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)
    assignments: list[NDArray[np.int32]] = field(default_factory=list)
    cut: set[bytes] = field(default_factory=set)

    def add(self, drawn: NDArray[np.int32]) -> None:
        """Provision those not seen before."""
        begun = len(self.values)
        self._provision(drawn)
        if self.model.cuts and len(self.values) > begun:
            # Where none meets the demands others may with other cuts.
            cheapest = self.ranked()[:_CUT] or range(begun, len(self.values))[:_CUT]
            self._cut([self.assignments[n] for n in cheapest])

    def _cut(self, assignments: Sequence[NDArray[np.int32]]) -> None:
        native, types = self.model.native, self.model.num_types
        for codes in assignments:
            row = codes % types
            stages = _planner.split(native, row.tolist())
            if row.tobytes() in self.cut or all(a[2] != b[2] for a, b in pairwise(stages)):
                continue
            self.cut.add(row.tobytes())
            if found := _planner.cut(native, row.tolist(), self.floor, _CUT_S):
                self._provision(np.array([found], np.int32))

    def _provision(self, drawn: NDArray[np.int32]) -> None:
        fresh: list[NDArray[np.int32]] = []
        for row in drawn:
            key = row.tobytes()
            if key not in self.seen:
                self.seen.add(key)
                fresh.append(row)
        if not fresh:
            return
        # Plans within a tenth of the best are worth going on from; the units of others do not
        # matter, nor do those that could save less than 1e-4.
        worth = 1.1 * self.best
        values, taus = _planner.provision(
            self.model.native, np.stack(fresh), self.floor, worth, 1e-4
        )
        self.assignments += fresh
        self.values += values.tolist()
        self.taus += taus.tolist()
        self.best = min(self.best, float(values.min()))

    def join(self, other: "Samples") -> None:
        """Take in what another one holds."""
        fresh = [n for n, row in enumerate(other.assignments) if row.tobytes() not in self.seen]
        self.seen |= other.seen
        self.cut |= other.cut
        self.values += [other.values[n] for n in fresh]
        self.taus += [other.taus[n] for n in fresh]
        self.assignments += [other.assignments[n] for n in fresh]
        self.best = min(self.best, other.best)

    @property
    def done(self) -> bool:
        """Whether none can be better than the best."""
        return self.best <= self.bound

    def ranked(self) -> list[int]:
        """Indices of the plans that meet the demands, cheapest first.

        Of equally cheap ones those that are cut least often come first.
        """
        if self.model.cuts:
            values = np.array([float(f"{value:.9g}") for value in self.values])
            changes = np.array([np.count_nonzero(np.diff(codes)) for codes in self.assignments])
            order = np.lexsort((changes, values))
        else:
            order = np.argsort(self.values, kind="stable")
        return [int(n) for n in order if math.isfinite(self.values[n])]


class Search:
    """The paces between the floor and the highest that can be kept, ever closer to the best."""

    def __init__(self, low: float, top: float, most: int) -> None:
        self.low, self.top = low, top
        ratio = max(top / low, 1.0)
        count = int(np.clip(round(6 + 6 * math.log2(ratio)), min(6, most), most))
        self._grid: list[float] = np.geomspace(low, top, count).tolist()
        self._step = ratio ** (1 / max(count - 1, 1))
        self._apart = max(self._step**0.5, 1.01)
        self._made: dict[tuple[float, float], _planner.Pace] = {}

    def grid(self, attempt: int) -> list[float]:
        """Paces from end to end, between those of earlier attempts (van der Corput's sequence)."""
        part, share = 0.0, 0.5
        while attempt:
            part += share * (attempt & 1)
            attempt, share = attempt >> 1, share / 2
        return sorted(
            {*self._grid[:1], *(self.clipped(rate * self._step**part) for rate in self._grid)}
        )

    def clipped(self, rate: float) -> float:
        """The pace nearest to `rate` within the range."""
        return min(max(rate, self.low), self.top)

    def moved(self, rate: float, turn: int, chance: np.random.Generator) -> float:
        """The rate itself, one within a factor of 4 of it, or a neighbour, by turn."""
        reach = (1.0, 4.0, self._apart)[turn]
        return self.clipped(rate * reach ** float(2 * chance.random() - 1))

    def slowed(self, rate: float, turn: int, chance: np.random.Generator) -> float:
        """The rate itself, the slowest, or one between or a little above, by turn.

        A flushed step's stages are faster than its pace, by what filling and draining takes.
        """
        share = (1.0, 0.0, 1.25 * float(chance.random()))[turn]
        return self.clipped(self.low * (self.clipped(rate) / self.low) ** share)

    def pace(self, model: CostModel, rate: float, shadow: float) -> _planner.Pace:
        """A pace for revising, made once."""
        key = rate, shadow
        if key not in self._made:
            self._made[key] = _planner.Pace(model.native, rate, _REVISING, shadow)
        return self._made[key]

    def narrow(self) -> None:
        """Look closer to the best paces from now on; start wide again once very close."""
        self._apart = self._apart**0.7 if self._apart > 1.003 else 1.1

    def around(self, samples: Samples, count: int) -> list[float]:
        """Paces at which the cheapest plans so far run, and their neighbours."""
        rates: list[float] = []
        for index in samples.ranked():
            rate = self.clipped(1 / samples.taus[index])
            if all(abs(math.log(rate / other)) > 1e-3 for other in rates):
                rates.append(rate)
            if 3 * len(rates) >= count:
                break
        # A plan drawn for a neighbour rounds its units otherwise, and often runs at this pace.
        neighbours = [rate * by for rate in rates for by in (self._apart, 1 / self._apart)]
        rates += [rate for rate in neighbours if self.low <= rate <= self.top]
        return rates[:count]
