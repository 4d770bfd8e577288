"""The exact solver: the cheapest plan over all assignments, or a bound that none is below.

The ET of the slowest stage is one of finitely many ET(first, last, type, k). For each such tau a
dynamic program over (first layer of a stage, its type) finds the least price of a partition in
which every stage has ET <= tau. It knows each stage's limit but not that stages of one type share
it; so its optimum is a lower bound, and when its plan keeps the limits it is the optimum. When it
does not, a second program carries the units used so far as labels (`labels.py`).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.cost import TOLERANCE, CostModel, Floats, Plan
from scheduler.labels import Found, OutOfBudgetError, cheapest
from scheduler.provision import provision
from scheduler.sweep import minimise

# Beyond this many (stage, type, k) the numbers of units are thinned out, and a bound remains.
MAX_CANDIDATES = 200_000
_MAX_ELEMENTS = 4_000_000


@dataclass(frozen=True, slots=True)
class Solution:
    """The best plan found and what is known about every other.

    `lower_bound` is infinite where no plan exists; `proven` says that `plan` is the optimum.
    """

    plan: Plan | None
    lower_bound: float
    proven: bool
    max_throughput: float


class Chain:
    """Times of every possible stage, seconds a sample, [first, last, type]."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        layers, types = model.num_layers, model.num_types
        shape = (layers, layers, types)
        self.terms = [np.zeros(shape) for _ in range(4)]  # CT serial, parallel; DT likewise
        sources = (
            model.compute_serial,
            model.compute_parallel,
            model.sync_serial,
            model.sync_parallel,
        )
        self.usable = np.zeros(shape, dtype=bool)
        for first in range(layers):
            for term, source in zip(self.terms, sources, strict=True):
                term[first, first:] = np.cumsum(source[first:], axis=0)
            fits = np.cumsum(model.memory[first:], axis=0) <= model.capacity
            allowed = np.logical_and.accumulate(model.allowed[first:], axis=0)
            self.usable[first, first:] = fits & allowed
        self.terms[2][:, :-1] += model.transfer_serial[:-1]
        self.terms[3][:, :-1] += model.transfer_parallel[:-1]

    def busy_s(self, units: Floats, at: Any) -> Floats:
        """ET with `units` of the stages selected by the index `at`."""
        cs, cp, ds, dp = (term[at] for term in self.terms)
        busy: Floats = np.maximum(cs + cp / units, ds + dp / units)
        return busy

    def candidates(self) -> tuple[Floats, bool]:
        """Every ET that a plan's slowest stage can have, ascending; and whether thinned out."""
        share = MAX_CANDIDATES // max(1, int(self.usable.sum()))
        found, thinned = [], False
        for kind in range(self.model.num_types):
            most = int(self.model.limit[kind])
            units = np.arange(1.0, most + 1.0)
            if most > share:
                thinned = True
                units = np.unique(np.geomspace(1, most, max(2, share)).astype(int)).astype(float)
            first, last = np.nonzero(self.usable[:, :, kind])
            index = (first[:, None], last[:, None], kind)
            found.append(self.busy_s(units[None, :], index).ravel())
        taus = np.unique(np.concatenate(found))
        return taus[taus > 0], thinned

    def units(self, first: int, taus: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """Fewest units with ET <= tau of the stages from `first`, infinite beyond a limit.

        Returns:
            units and whether ET equals tau, both [lasts, types, n].
        """
        at = (first, slice(first, None), slice(None), None)
        cs, cp, ds, dp = (term[at] for term in self.terms)
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.maximum(
                np.where(
                    taus > cs, cp / (taus - cs), np.where((taus == cs) & (cp == 0), 0, np.inf)
                ),
                np.where(
                    taus > ds, dp / (taus - ds), np.where((taus == ds) & (dp == 0), 0, np.inf)
                ),
            )
            units = np.maximum(np.ceil(need), 1.0)
            # The division above rounds: settle on the ET itself, one unit either way.
            units = np.where(self.busy_s(units, at) <= taus, units, units + 1.0)
            fewer = np.maximum(units - 1.0, 1.0)
            units = np.where(self.busy_s(fewer, at) <= taus, fewer, units)
            busy = self.busy_s(units, at)
        good = self.usable[first, first:, :, None] & (busy <= taus)
        good &= units <= self.model.limit[:, None]
        return np.where(good, units, np.inf), busy == taus

    def prices(self, taus: Floats, floor: float) -> tuple[Floats, Floats]:
        """Least price an hour at each tau, and least with a stage of exactly that ET, [n]."""
        layers, types = self.usable.shape[1:]
        chunk = max(1, _MAX_ELEMENTS // (layers * types))
        if len(taus) > chunk:
            parts = [self.prices(taus[i : i + chunk], floor) for i in range(0, len(taus), chunk)]
            return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
        model = self.model
        any_rest, hit_rest, _ = self.program(taus, floor)
        extra = model.ps_units(model.throughput(taus, floor)) * model.price[model.ps_type]
        return any_rest[0].min(axis=0) + extra, hit_rest[0].min(axis=0) + extra

    def program(self, taus: Floats, floor: float) -> tuple[Floats, Floats, Floats]:
        """The dynamic program from the last layer back, without the parameter server's price.

        Returns:
            least price of layers i.. with the first stage on each type, the same with a stage of
            ET tau among them [L, T, n], and of layers i.. with the first stage off each type
            [L + 1, T, n].
        """
        model = self.model
        layers, types, count = model.num_layers, model.num_types, len(taus)
        ps_units = model.ps_units(model.throughput(taus, floor))
        limit = np.repeat(model.limit[:, None].astype(float), count, axis=1)
        limit[model.ps_type] -= ps_units
        any_from, hit_from = (np.full((layers, types, count), np.inf) for _ in range(2))
        any_rest, hit_rest = (np.zeros((layers + 1, types, count)) for _ in range(2))
        hit_rest[layers] = np.inf
        for first in range(layers - 1, -1, -1):
            units, hits = self.units(first, taus)
            units = np.where(units <= limit, units, np.inf)
            price = np.where(np.isfinite(units), model.price[:, None] * units, np.inf)
            after_any, after_hit = any_rest[first + 1 :], hit_rest[first + 1 :]
            any_from[first] = (price + after_any).min(axis=0)
            either = np.where(hits, after_any, after_hit)
            hit_from[first] = (price + either).min(axis=0)
            any_rest[first] = _without_own(any_from[first])
            hit_rest[first] = _without_own(hit_from[first])
        return any_from, hit_from, any_rest


def _without_own(values: Floats) -> Floats:
    """Minimum over the other types, [T, n] -> [T, n]."""
    if len(values) == 1:
        return np.full_like(values, np.inf)
    order = np.argsort(values, axis=0)
    columns = np.arange(values.shape[1])
    least, second = values[order[0], columns], values[order[1], columns]
    own = np.arange(len(values))[:, None] == order[0]
    result: Floats = np.where(own, second, least)
    return result


def solve(
    model: CostModel, floor: float = 0.0, start: Plan | None = None, seconds: float = 5.0
) -> Solution:
    """Find the cheapest plan of all assignments.

    Args:
        start: a plan already known, which saves searching for worse ones.
        seconds: time after which the search with shared limits stops unproven.
    """
    if not model.usable.any(axis=1).all():
        return Solution(None, math.inf, True, 0.0)
    search = _Search(model, floor, time.monotonic() + seconds)
    fastest = search.fastest()
    plan = min((p for p in (start, fastest) if p is not None), key=lambda p: p.rank, default=None)
    bound = search.run(plan)
    plan = min(
        (p for p in (plan, search.plan) if p is not None), key=lambda p: p.rank, default=None
    )
    top = max((p.throughput for p in (plan, fastest) if p is not None), default=0.0)
    if plan is None or not plan.feasible:
        return Solution(plan, math.inf if search.proven else bound, search.proven, top)
    # A bound within rounding of the plan is the plan.
    if plan.cost <= bound * (1 + TOLERANCE):
        return Solution(plan, plan.cost, True, top)
    return Solution(plan, bound, False, top)


class _Search:
    """The search over tau, first without and then with the limits that stages share."""

    def __init__(self, model: CostModel, floor: float, deadline: float) -> None:
        self.model = model
        self.floor = floor
        self.deadline = deadline
        self.halfway = (time.monotonic() + deadline) / 2
        self.chain = Chain(model)
        self.taus, self.thinned = self.chain.candidates()
        self.scale = model.samples / 3600  # dollars per (s a sample x dollars an hour)
        self.plan: Plan | None = None
        self.proven = not self.thinned

    def run(self, known: Plan | None) -> float:
        """Search, keep the best plan found, and return a lower bound of the cost."""
        within = self.taus[self.taus * self.floor * (1 - TOLERANCE) <= 1.0]
        if not within.size:
            return math.inf
        relaxed = minimise(
            within, lambda some: self.chain.prices(some, self.floor), gaps=self.thinned
        )
        bound = relaxed.bound * self.scale
        self.incumbent = known.cost / self.scale if known and known.feasible else math.inf
        try:
            if relaxed.index >= 0:
                self._try(float(within[relaxed.index]))
            if self.incumbent > relaxed.value * (1 + TOLERANCE):
                shared = minimise(within, self._shared, gaps=self.thinned)
                bound = max(bound, min(shared.bound, self.incumbent) * self.scale)
        except OutOfBudgetError:
            self.proven = False
        return bound

    def _shared(self, taus: Floats) -> tuple[Floats, Floats]:
        """Prices under the shared limits, looked at only where the optimum may still be."""
        if time.monotonic() > self.deadline:
            raise OutOfBudgetError
        least, _ = self.chain.prices(taus, self.floor)
        attained = np.full(len(taus), np.inf)
        for n in np.argsort(taus * least):
            tau = float(taus[n])
            if tau * least[n] < self.incumbent * (1 - TOLERANCE):
                least[n], attained[n] = self._try(tau)
        return least, np.maximum(attained, least)

    def _try(self, tau: float) -> tuple[float, float]:
        """Search the plans at one tau; keep the best; return its least and attained price."""
        # Looking somewhat beyond the incumbent gives a bound that also holds just below tau.
        most = 1.05 * self.incumbent / tau
        found = cheapest(self.chain, tau, self.floor, most, self.deadline)
        if found.assignment is not None:
            plan = provision(self.model, found.assignment, self.floor)
            if self.plan is None or plan.rank < self.plan.rank:
                self.plan = plan
            if plan.feasible:
                self.incumbent = min(self.incumbent, plan.cost / self.scale)
        return min(found.least, most), found.attained

    def fastest(self) -> Plan | None:
        """Return a plan of the highest throughput, feasible if that reaches the floor."""
        try:
            start = self._first(0, lambda tau: math.isfinite(self._relaxed(tau)[0]))
            start = self._first(start, lambda tau: math.isfinite(self._label(tau).least))
            # Every stage can be this fast with the parameter server that this tau needs, but a
            # plan that is faster still needs a larger one: look for one of exactly a tau.
            for tau in self.taus[start:].tolist():
                if math.isfinite(self._relaxed(tau)[1]):
                    found = self._label(tau)
                    if found.assignment is not None and math.isfinite(found.attained):
                        return self._at_rate(found.assignment, 1 / tau)
        except OutOfBudgetError:
            self.proven = False
        return None

    def _first(self, start: int, holds: Callable[[float], bool]) -> int:
        """Index of the first tau from `start` on for which `holds`, as it then does for all."""
        # Usually the first: gallop, then bisect.
        low, high, step, at = start, len(self.taus), 1, start
        while low < high:
            if holds(float(self.taus[at])):
                high = at
            else:
                low, step = at + 1, step * 8
            galloping = high == len(self.taus)
            at = min(low + step - 1, high - 1) if galloping else (low + high) // 2
        return low

    def _relaxed(self, tau: float) -> tuple[float, float]:
        if time.monotonic() > self.halfway:
            raise OutOfBudgetError
        least, attained = self.chain.prices(np.array([tau]), self.floor)
        return float(least[0]), float(attained[0])

    def _label(self, tau: float) -> Found:
        return cheapest(self.chain, tau, self.floor, math.inf, self.halfway)

    def _at_rate(self, assignment: tuple[int, ...], rate: float) -> Plan:
        plan = provision(self.model, assignment, rate)
        if rate >= self.floor * (1 - TOLERANCE):
            # Just below the floor counts as the floor, above it changes nothing.
            return provision(self.model, assignment, max(rate, self.floor))
        reason = provision(self.model, assignment, self.floor).reason
        return replace(plan, feasible=False, reason=reason)
