"""A genetic algorithm."""

import numpy as np

from scheduler.methods.rivals.moves import Moves, seen_once
from scheduler.methods.rivals.problem import Assignments, Budget, Found, Problem
from scheduler.methods.rivals.search import Search
from scheduler.problem.cost import Floats

_EVALUATIONS = 10_000
_POPULATION = 32
_CROSSOVER = 0.5
# Generations without a better plan after which a new population starts.
_PATIENCE = 25


def run(problem: Problem, budget: Budget, seed: int) -> Found:
    """Evolve a population of assignments, the genes being the layers' types.

    Parents by tournament of two; two-point crossover; mutation of single layers and of runs of
    layers; survivors are the best distinct of parents and children. The first population holds
    the one-type placements; one that no longer gets better makes way for a random one.
    """
    search = Search(problem, budget, _EVALUATIONS)
    moves = Moves(problem, np.random.default_rng(seed))
    first = moves.corners()
    while not search.over():
        first = np.concatenate([first, moves.uniform(_POPULATION)])[:_POPULATION]
        _evolve(search, moves, first)
        first = first[:0]
    return search.found()


def _evolve(search: Search, moves: Moves, population: Assignments) -> None:
    scores = search.score(population)
    best, stale = scores.min(), 0
    while stale < _PATIENCE and not search.over():
        children = _children(moves, population, scores)
        pool = np.concatenate([population, children])
        values = np.concatenate([scores, search.score(children)])
        keep = seen_once(pool)
        keep = keep[np.argsort(values[keep], kind="stable")[:_POPULATION]]
        population, scores = pool[keep], values[keep]
        stale = 0 if scores[0] < best else stale + 1
        best = min(best, scores[0])


def _children(moves: Moves, population: Assignments, scores: Floats) -> Assignments:
    rng, layers = moves.rng, population.shape[1]
    one, other = (population[_tournament(rng, scores)] for _ in range(2))
    crossed = rng.random((_POPULATION, 1)) < _CROSSOVER
    children = np.where(crossed, moves.cross(one, other), one)
    painted = rng.random((_POPULATION, 1)) < 0.5
    return np.where(painted, moves.paint(children), moves.redraw(children, 1.5 / layers))


def _tournament(rng: np.random.Generator, scores: Floats) -> Assignments:
    """Return the better of two random individuals, for each child."""
    pairs = rng.integers(0, len(scores), (_POPULATION, 2))
    winners: Assignments = pairs[np.arange(_POPULATION), scores[pairs].argmin(axis=1)]
    return winners
