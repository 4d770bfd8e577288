"""Provisioning for a searcher: within its budget, each assignment once, keeping the best."""

import math
import time

import numpy as np
from numpy.typing import NDArray

from scheduler.engine import _planner
from scheduler.methods.rivals.problem import Assignments, Budget, Found, Problem
from scheduler.methods.rivals.shortfall import shortfall
from scheduler.problem.cost import Floats

# Objective of a plan that only just misses a demand: beyond that of any that meets all.
MISSED = 50.0
# A searcher that has converged proposes what it knows; past this many times its budget it ends.
_PROPOSALS = 10


class Search:
    """The best of the assignments that a searcher proposes.

    The objective, to be minimised, is log(cost) relative to what the layers cost alone; where a
    demand is missed it is `MISSED` + log(1 + shortfall), so it falls towards the plans that meet
    them (`shortfall`). One evaluation is one distinct assignment provisioned.

    Args:
        evaluations: the number for a budget that leaves it to the method.
    """

    def __init__(self, problem: Problem, budget: Budget, evaluations: int) -> None:
        self.problem = problem
        self.limit = int(min(budget.evaluations or evaluations, problem.assignments))
        self.evaluations = 0
        self.timed_out = False
        self._started = time.perf_counter()
        self._deadline = self._started + budget.seconds
        self._proposed = 0
        self._objectives: dict[bytes, float] = {}
        self._best = math.inf
        self._row: NDArray[np.int32] = problem.alone
        scale = float(problem.money.min(axis=1).sum())
        self._scale = scale if scale > 0 else 1.0

    def over(self) -> bool:
        """Whether the budget is spent, or nothing is left to be proposed."""
        if self.evaluations >= self.limit or self._proposed > _PROPOSALS * (self.limit + 100):
            return True
        self.timed_out = time.perf_counter() >= self._deadline
        return self.timed_out

    def score(self, rows: Assignments) -> Floats:
        """Return the objective of each row, [n]; infinite for those beyond the budget."""
        # A table of what is known costs a tenth of a microsecond a row, provisioning several.
        packed, width = rows.astype(np.int8).tobytes(), rows.shape[1]
        keys = [packed[at : at + width] for at in range(0, len(packed), width)]
        self._proposed += len(keys)
        fresh = {key: at for at, key in enumerate(keys) if key not in self._objectives}
        picked = sorted(fresh.values())[: self.limit - self.evaluations]
        if picked:
            values = self.fresh(rows[picked])
            self._objectives.update(zip((keys[at] for at in picked), values.tolist(), strict=True))
        return np.array([self._objectives.get(key, math.inf) for key in keys])

    def fresh(self, rows: Assignments) -> Floats:
        """Return the objective of rows not seen before, [n], and count them."""
        problem = self.problem
        rows = np.ascontiguousarray(rows, dtype=np.int32)
        value, _ = _planner.provision(problem.model.native, rows, problem.floor)
        missed = np.isinf(value)
        objective = np.log(np.maximum(value / self._scale, 1e-15))
        if missed.any():
            objective[missed] = MISSED + np.log1p(shortfall(problem, rows[missed]))
        self.evaluations += len(rows)
        at = int(objective.argmin())
        if objective[at] < self._best:
            self._best, self._row = float(objective[at]), rows[at].copy()
        return objective

    def found(self) -> Found:
        """Return the best so far, as a plan."""
        plan = self.problem.plan(self._row)
        return Found(plan, self.evaluations, time.perf_counter() - self._started, self.timed_out)
