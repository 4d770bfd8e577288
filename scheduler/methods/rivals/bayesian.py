"""Bayesian optimisation by Optuna's tree-structured Parzen estimator.

A Parzen estimator rather than a Gaussian process: types have no order and no distance, which a
process over one-hot codes has to learn at a cost cubic in the number of evaluations; and Optuna is
the library of the two that is still maintained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from scheduler.methods.rivals.moves import Moves
from scheduler.methods.rivals.problem import Budget, Found, Problem
from scheduler.methods.rivals.search import Search
from scheduler.problem.fields import InputError

_EVALUATIONS = 300


def run(problem: Problem, budget: Budget, seed: int) -> Found:
    """Propose one assignment after the other, each from a model of all so far.

    The one-type placements come first, as a person would try them.

    Raises:
        InputError: Optuna is not installed.
    """
    search = Search(problem, budget, _EVALUATIONS)
    moves = Moves(problem, np.random.default_rng(seed))
    rows = moves.corners()
    with _quiet() as optuna:
        choices = {
            str(layer): optuna.distributions.CategoricalDistribution(np.flatnonzero(row).tolist())
            for layer, row in enumerate(problem.usable)
            if row.sum() > 1
        }
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=2 * len(rows))
        study = optuna.create_study(sampler=sampler)
        for row, value in zip(rows, search.score(rows).tolist(), strict=True):
            if np.isfinite(value):
                params = {name: int(row[int(name)]) for name in choices}
                study.add_trial(
                    optuna.trial.create_trial(params=params, distributions=choices, value=value)
                )
        while not search.over():
            trial = study.ask(choices)
            row = problem.alone.copy()
            row[[int(name) for name in choices]] = [trial.params[name] for name in choices]
            study.tell(trial, float(search.score(row[None])[0]))
    return search.found()


@contextmanager
def _quiet() -> Iterator[Any]:
    """Optuna, without its line of log for each trial."""
    try:
        import optuna
    except ImportError:
        problem = "'bayesian': expected the package optuna: pip install 'heterps[rivals]'"
        raise InputError("", "method", problem) from None
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield optuna
    finally:
        optuna.logging.set_verbosity(verbosity)
