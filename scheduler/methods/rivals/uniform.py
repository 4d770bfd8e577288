"""Random placement: what any search has to beat."""

import numpy as np

from scheduler.methods.rivals.moves import Moves
from scheduler.methods.rivals.problem import Budget, Found, Problem
from scheduler.methods.rivals.search import Search

_EVALUATIONS = 2_000
_BATCH = 256


def run(problem: Problem, budget: Budget, seed: int) -> Found:
    """Draw assignments, every layer independently and uniformly; the best of them."""
    search = Search(problem, budget, _EVALUATIONS)
    moves = Moves(problem, np.random.default_rng(seed))
    while not search.over():
        search.score(moves.uniform(_BATCH))
    return search.found()
