"""One method on one problem, and what it came to, as the scheduler's benchmark records it."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

from bench.scheduler.workloads import Problem
from scheduler import plan
from scheduler.methods.bench import Budget, compare
from scheduler.methods.exact import solve
from scheduler.problem.fields import InputError

# Those that draw nothing and search nothing: one run tells all, whatever the budget.
RULES = ("greedy", "all-cpu", "all-gpu", "aibox", "byteps")
SEARCHES = ("genetic", "annealing", "bayesian", "rl-lstm", "rl-rnn", "random")
REFERENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """What one method came to on one problem.

    `cost` is None where the plan is not feasible; `evaluations` are the assignments provisioned,
    0 for a method that works otherwise. `seconds` are the method's own, of `run_ppo` those of the
    whole call of `plan`, with the bound and the alternatives; `error` is the relative difference
    between the cost reported and the cost model's own for the same stages and units.
    """

    method: str
    feasible: bool
    cost: float | None
    throughput: float
    seconds: float
    evaluations: int = 0
    error: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Reference:
    """What is certain about a problem: no plan costs less than `bound`.

    `exact` is the exact solver's cost (None where it found no plan) after `seconds`; `proven` says
    that it is the least.
    """

    bound: float
    exact: float | None
    proven: bool
    seconds: float
    max_throughput: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def reference(problem: Problem, seconds: float = REFERENCE_SECONDS) -> Reference:
    """Solve exactly, or bound."""
    model = problem.model()
    started = time.perf_counter()
    found = solve(model, problem.min_throughput, seconds=seconds)
    took = time.perf_counter() - started
    good = found.plan is not None and found.plan.feasible
    cost = found.plan.cost if good and found.plan is not None else None
    return Reference(found.lower_bound, cost, found.proven, took, found.max_throughput)


def run_ppo(problem: Problem, seed: int = 0, finetune: float = 0.0) -> Run:
    """Plan as a user does; the seconds are of the whole call."""
    started = time.perf_counter()
    decision = plan(
        problem.workload,
        problem.resources,
        problem.min_throughput or None,
        method="ppo",
        seed=seed,
        finetune=finetune,
    )
    took = time.perf_counter() - started
    error = 0.0
    if decision.feasible:
        model = problem.model()
        again = model.evaluate(
            [model.types.index(name) for name in decision.assignment],
            [stage.units for stage in decision.stages],
            problem.min_throughput,
        )
        error = abs(again.cost / decision.cost - 1) if again.feasible else 1.0
    cost = decision.cost if decision.feasible else None
    return Run("ppo", decision.feasible, cost, decision.throughput, took, error=error)


def run(problem: Problem, method: str, budget: Budget | None = None, seed: int = 0) -> Run:
    """Run any method on its own.

    Raises:
        InputError: the method refuses the problem, or its library is missing.
    """
    given = problem.workload, problem.resources, problem.min_throughput
    outcome = compare(*given, [method], budget, seed)[0]
    if outcome.found is None:
        raise InputError("", "method", outcome.refusal)
    found, made = outcome.found, outcome.found.plan
    cost = made.cost if made.feasible else None
    throughput = made.throughput
    return Run(method, made.feasible, cost, throughput, found.seconds, found.evaluations)


def gap(cost: float | None, bound: float) -> float | None:
    """Return how far a cost is above the bound, relative to it; None where there is no plan."""
    if cost is None or not math.isfinite(bound):
        return None
    return max(0.0, cost / bound - 1) if bound > 0 else 0.0
