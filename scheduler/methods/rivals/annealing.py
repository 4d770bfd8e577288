"""Simulated annealing, several chains side by side."""

import numpy as np

from scheduler.methods.rivals.moves import Moves
from scheduler.methods.rivals.problem import Budget, Found, Problem
from scheduler.methods.rivals.search import Search

_EVALUATIONS = 10_000
_CHAINS = 8
# Temperatures are in logarithms of cost: at first a plan a tenth dearer is often accepted.
_HOT, _COLD = 0.1, 1e-3
# Steps that propose nothing new after which the chains start again at random.
_PATIENCE = 25
_FIRST_CYCLE = 60  # steps; each later cycle is twice as long, so no budget has to be known


def run(problem: Problem, budget: Budget, seed: int) -> Found:
    """Accept a changed assignment when cheaper, else with probability exp(-dearer / temperature).

    The temperature falls geometrically through a cycle; at its end every chain goes on from the
    better of a random pair of chains. They start from the best of the one-type and some random
    placements.
    """
    search = Search(problem, budget, _EVALUATIONS)
    rng = np.random.default_rng(seed)
    moves = Moves(problem, rng)
    rows = np.concatenate([moves.corners(), moves.uniform(_CHAINS)])
    scores = search.score(rows)
    best = scores.argsort(kind="stable")[:_CHAINS]
    rows, scores = rows[best], scores[best]
    steps, stale = _FIRST_CYCLE, 0
    while not search.over():
        for temperature in np.geomspace(_HOT, _COLD, steps):
            if search.over() or stale >= _PATIENCE:
                break
            before = search.evaluations
            single = rng.random((_CHAINS, 1)) < 0.5
            changed = np.where(single, moves.redraw(rows, 1 / rows.shape[1]), moves.paint(rows))
            values = search.score(changed)
            taken = rng.random(_CHAINS) < np.exp(np.minimum(scores - values, 0) / temperature)
            rows = np.where(taken[:, None], changed, rows)
            scores = np.where(taken, values, scores)
            stale = stale + 1 if search.evaluations == before else 0
        if stale >= _PATIENCE:
            rows = moves.uniform(_CHAINS)
            scores, stale, steps = search.score(rows), 0, _FIRST_CYCLE
            continue
        pairs = rng.integers(0, _CHAINS, (_CHAINS, 2))
        winners = pairs[np.arange(_CHAINS), scores[pairs].argmin(axis=1)]
        rows, scores = rows[winners], scores[winners]
        steps *= 2
    return search.found()
