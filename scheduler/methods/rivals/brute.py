"""Brute force: every assignment."""

import numpy as np
from numpy.typing import NDArray

from scheduler.methods.rivals.problem import Assignments, Budget, Found, Problem
from scheduler.methods.rivals.search import Search
from scheduler.problem.fields import InputError

MAX_ASSIGNMENTS = 2_000_000
_BATCH = 4_096


def run(problem: Problem, budget: Budget, seed: int) -> Found:
    """Provision every assignment: the optimum, unless the seconds end it before.

    Raises:
        InputError: there are more than `MAX_ASSIGNMENTS`, or more than the budget's evaluations.
    """
    count, most = problem.assignments, budget.evaluations or MAX_ASSIGNMENTS
    most = min(most, MAX_ASSIGNMENTS)
    if count > most:
        expected = f"expected at most {most:,} assignments, these layers and types make"
        raise InputError("", "method", f"'brute': {expected} {_number(count)}")
    search = Search(problem, budget, most)
    kinds = [np.flatnonzero(row).astype(np.int32) for row in problem.usable]
    if problem.model.cuts:
        # A stage may begin at each layer, on the type of the one before, too.
        types = problem.model.num_types
        kinds[1:] = [np.concatenate([some, some + types]) for some in kinds[1:]]
    for start in range(0, int(count), _BATCH):
        if search.over():
            break
        search.fresh(_rows(kinds, np.arange(start, min(start + _BATCH, int(count)))))
    return search.found()


def _rows(kinds: list[Assignments], numbers: NDArray[np.intp]) -> Assignments:
    """Return the assignments of these numbers, counted in mixed radix, [n, L]."""
    digits = np.unravel_index(numbers, [len(some) for some in kinds])
    return np.stack([some[digit] for some, digit in zip(kinds, digits, strict=True)], axis=1)


def _number(count: float) -> str:
    return f"{count:,.0f}" if count < 1e15 else f"{count:.1e}"
