"""Rival planners behind one interface and one budget: what the agent is measured against.

A rival is a function of (problem, budget, seed); each lives in a module of its own, imported when
it is first run.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Final

from scheduler.methods.rivals.problem import Assignments, Budget, Found, Problem

Rival = Callable[[Problem, Budget, int], Found]

# Name -> module and function.
_HOMES: Final = {
    "greedy": ("greedy", "run"),
    "genetic": ("genetic", "run"),
    "annealing": ("annealing", "run"),
    "bayesian": ("bayesian", "run"),
    "rl-lstm": ("reinforce", "lstm"),
    "rl-rnn": ("reinforce", "rnn"),
    "random": ("uniform", "run"),
    "all-cpu": ("rules", "all_cpu"),
    "all-gpu": ("rules", "all_gpu"),
    "aibox": ("rules", "aibox"),
    "byteps": ("rules", "byteps"),
    "brute": ("brute", "run"),
}
RIVALS: Final = tuple(_HOMES)

__all__ = ["RIVALS", "Assignments", "Budget", "Found", "Problem", "run"]


def run(name: str, problem: Problem, budget: Budget | None = None, seed: int = 0) -> Found:
    """Run the rival `name`, one of `RIVALS`.

    Raises:
        InputError: it refuses the problem (`brute`), or its library is missing (`bayesian`).
    """
    reason = problem.impossible()
    if reason is not None:
        return Found(reason, 0, 0.0)
    module, function = _HOMES[name]
    rival: Rival = getattr(import_module(f"{__name__}.{module}"), function)
    return rival(problem, budget or Budget(), seed)
