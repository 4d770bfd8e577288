"""The planning methods behind one interface: each turns a problem into its best plan."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from scheduler.decision.record import TrainingPoint
from scheduler.methods import rivals
from scheduler.methods.exact import Solution, solve
from scheduler.methods.names import METHODS, SINGLE
from scheduler.methods.rivals import Budget, Found, Problem
from scheduler.problem.cost import CostModel
from scheduler.problem.fields import InputError
from scheduler.problem.inputs import ResourcesLike, WorkloadLike, as_resources, as_workload
from scheduler.problem.plan import Plan

__all__ = ["METHODS", "Bench", "Budget", "Found", "Outcome", "compare", "methods_for"]

# Considered for every decision: they take milliseconds, and show what the choice is worth.
_ALWAYS: Final = ("exact", "greedy", "all-cpu", "all-gpu")
# Run by `auto` only where the exact solver leaves room for a better plan.
_SEARCHES: Final = ("annealing", "genetic")
_EXACT_SECONDS: Final = 5.0
# For the bound alone, next to another method.
_BOUND_SECONDS: Final = 0.05
# It needs milliseconds up to a hundred layers; the others do not wait for it beyond that.
_GREEDY_SECONDS: Final = 1.0
# What `all` and `auto` give each method, so that they answer within seconds.
_SHARED_BUDGET: Final = Budget(evaluations=2_000, seconds=2.0)
# Beyond this many assignments `all` leaves brute force out.
_BRUTE_MOST: Final = 200_000


def methods_for(method: str) -> tuple[str, ...]:
    """Return the methods to consider when `method` is asked for, the preferred on a tie first."""
    if method == "all":
        return SINGLE
    if method in ("auto", "best"):
        return ("exact", "ppo", "greedy", "aibox", "byteps", "all-cpu", "all-gpu", *_SEARCHES)
    return (*(() if method in _ALWAYS else (method,)), *_ALWAYS)


class Bench:
    """Runs methods on one problem; what they share is computed once.

    Args:
        floor: samples/s.
        budget: what each method may spend; by default its own number of evaluations.
        finetune: seconds that `ppo` may spend on learning this very problem.

    Attributes:
        solution: of the exact solver, once that has run.
        probabilities: of `ppo`, by layer and type, and `values` of its critic, by layer.
        training: its learning curve on this problem; `policy` names the policy.
    """

    def __init__(
        self,
        model: CostModel,
        floor: float,
        seed: int,
        budget: Budget | None = None,
        finetune: float = 0.0,
    ) -> None:
        self.problem = Problem(model, floor)
        self.seed = seed
        self.budget = budget or Budget()
        self.finetune = finetune
        self.solution: Solution | None = None
        self.probabilities: dict[str, dict[str, float]] = {}
        self.values: dict[str, float] = {}
        self.training: tuple[TrainingPoint, ...] = ()
        self.policy = ""
        self._start: Found | None = None

    def run(self, method: str) -> Found:
        """Return what a method comes to.

        Raises:
            InputError: the method refuses this problem, or its library is missing.
        """
        started = time.perf_counter()
        if method == "exact":
            found = self._exact(min(_EXACT_SECONDS, self.budget.seconds))
        elif method == "ppo":
            found = self._ppo()
        elif method == "greedy":
            return self._greedy()
        else:
            # Among all others brute force costs what it costs: it was found small enough.
            shared = self.budget is _SHARED_BUDGET and method == "brute"
            budget = Budget() if shared else self.budget
            found = rivals.run(method, self.problem, budget, self.seed)
        return replace(found, seconds=time.perf_counter() - started)

    def consider(self, method: str) -> dict[str, Found]:
        """Run `method`, or all that it stands for, with what each is compared with."""
        names = methods_for(method)
        if method in names:
            # The bound comes before `ppo`, whose drawing ends where it is met.
            order = ("exact", method, *names) if method == "ppo" else (method, *names)
            return {
                name: self.run(name) if name == method else self._alternative(name)
                for name in dict.fromkeys(order)
            }
        if self.budget == Budget():
            self.budget = _SHARED_BUDGET
        results = {}
        for name in names:
            if method != "all" and name in _SEARCHES and self.solution and self.solution.proven:
                continue
            if name == "brute" and self.problem.assignments > _BRUTE_MOST:
                continue
            try:
                results[name] = self.run(name)
            except InputError:
                continue  # it cannot be run here; the others are
        return results

    def choose(self, method: str, results: dict[str, Found]) -> str:
        """Return the method of `consider`'s results to take: that asked for, else the best."""
        if method in results:
            return method
        return min(results, key=lambda name: _tied(results[name].plan))

    def _alternative(self, name: str) -> Found:
        """Run a cheap method next to the one asked for."""
        if name != "exact":
            return self.run(name)
        started = time.perf_counter()
        found = self._exact(min(_BOUND_SECONDS, self.budget.seconds))
        return replace(found, seconds=time.perf_counter() - started)

    def _exact(self, seconds: float) -> Found:
        greedy = self._greedy()
        model, floor = self.problem.model, self.problem.floor
        self.solution = solve(model, floor, start=greedy.plan, seconds=seconds)
        # Where the solver has no plan, that of greedy says what is in the way.
        plan = self.solution.plan or greedy.plan
        return Found(plan, greedy.evaluations, 0.0, timed_out=not self.solution.proven)

    def _greedy(self) -> Found:
        """Run once: it is an alternative, and the exact solver's start."""
        if self._start is None:
            started = time.perf_counter()
            budget = replace(self.budget, seconds=min(_GREEDY_SECONDS, self.budget.seconds))
            found = rivals.run("greedy", self.problem, budget, self.seed)
            self._start = replace(found, seconds=time.perf_counter() - started)
        return self._start

    def _ppo(self) -> Found:
        from scheduler.agent import draw as agent
        from scheduler.agent.policy import shipped

        impossible = self.problem.impossible()
        if impossible is not None:
            return Found(impossible, 0, 0.0)
        model = self.problem.model
        solution = self.solution
        drawn = agent.draw(
            model,
            self.problem.floor,
            self.seed,
            finetune=self.finetune,
            bound=solution.lower_bound if solution else 0.0,
            attained=solution is not None and solution.proven,
        )
        names = [layer.name for layer in model.workload.layers]
        self.policy = shipped().version
        self.training = drawn.curve
        self.values = dict(zip(names, drawn.values, strict=True))
        self.probabilities = {
            name: dict(zip(model.types, row, strict=True))
            for name, row in zip(names, drawn.probabilities, strict=True)
        }
        return Found(drawn.plan, drawn.evaluations, 0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one method came to in a comparison; `found` is None where it refused, and why."""

    method: str
    found: Found | None
    refusal: str = ""

    @property
    def cost(self) -> float:
        """Dollars for all samples; infinite where no plan was found that meets the demands."""
        found = self.found
        return found.plan.cost if found is not None and found.plan.feasible else math.inf


def compare(
    workload: WorkloadLike,
    resources: ResourcesLike,
    floor: float = 0.0,
    methods: Sequence[str] = SINGLE,
    budget: Budget | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Run methods on one problem, each on its own and with the same budget.

    Args:
        floor: samples/s to reach.
        methods: of `METHODS` without auto, best and all.
        budget: what each may spend; by default each its own number of evaluations.

    Returns:
        One outcome a method, in the order asked for.

    Raises:
        InputError: workload or resources cannot be used, or a method is not known.
    """
    for name in methods:
        if name not in SINGLE:
            raise InputError("", "methods", f"{name!r}: expected one of {', '.join(SINGLE)}")
    model = CostModel(as_workload(workload), as_resources(resources))
    bench = Bench(model, floor, seed, budget)
    outcomes = []
    for name in methods:
        try:
            outcomes.append(Outcome(name, bench.run(name)))
        except InputError as error:
            outcomes.append(Outcome(name, None, str(error)))
    return outcomes


def _tied(found: Plan) -> tuple[bool, float, float]:
    """A plan's rank with costs that differ by rounding alone made equal."""
    missed, cost, slow = found.rank
    return missed, float(f"{cost:.9g}"), 0.0 if not missed else slow
