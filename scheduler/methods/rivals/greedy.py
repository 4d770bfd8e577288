"""Greedy placement: layer after layer."""

import numpy as np

from scheduler.methods.rivals.problem import Budget, Found, Problem
from scheduler.methods.rivals.search import Search


def run(problem: Problem, budget: Budget, seed: int) -> Found:
    """Place layer after layer, each on the type that makes the cheapest plan.

    Layers still to come are held on the type where each alone is cheapest.
    """
    layers, types = problem.usable.shape
    search = Search(problem, budget, layers * types)
    assignment = problem.alone.copy()
    for layer in range(layers):
        kinds = np.flatnonzero(problem.usable[layer])
        rows = np.repeat(assignment[None], len(kinds), axis=0)
        rows[:, layer] = kinds
        assignment = rows[search.score(rows).argmin()]
        if search.over():
            break
    return search.found()
