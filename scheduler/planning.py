"""Planning: workload + resources + throughput floor -> decision."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from protos import decision_pb2 as pb
from scheduler import baselines
from scheduler.baselines import Evaluator
from scheduler.cost import CostModel, Plan
from scheduler.decision import Alternative, Decision
from scheduler.exact import Solution, solve
from scheduler.explain import reasons
from scheduler.fields import InputError, nearest
from scheduler.workload import Resources, Workload

METHODS: Final = ("ppo", "exact", "greedy", "all-cpu", "all-gpu", "random", "best", "all")
# Considered for every decision: they take milliseconds, and show what the choice is worth.
_ALWAYS: Final = ("exact", "greedy", "all-cpu", "all-gpu")

WorkloadLike = Workload | pb.Workload | Mapping[str, Any]
ResourcesLike = Resources | pb.Resources | Mapping[str, Any]


def plan(
    workload: WorkloadLike,
    resources: ResourcesLike,
    min_throughput: float | None = None,
    method: str = "ppo",
    seed: int = 0,
    pin: Mapping[str, str] | Sequence[str] | None = None,
) -> Decision:
    """Decide which layer runs on which resource type with how many units.

    Args:
        workload, resources: parsed files, dataclasses or messages.
        min_throughput: samples/s to reach; None or 0 for the cheapest plan at any speed.
        method: one of `METHODS`. `best` returns the best plan of those that take no learning,
            `all` the best of every method; each other method returns its own plan.
        seed: of `ppo` and `random`; the same seed gives the same plan.
        pin: types that layers must run on, by layer name; or one type per layer.

    Returns:
        The decision, with what the other methods came to as alternatives. Where the floor cannot
        be met, `feasible` is false, `reason` names the highest throughput that can be.

    Raises:
        InputError: an argument that cannot be used, naming file, key, value, what was expected.
    """
    started = time.perf_counter()
    model = CostModel(as_workload(workload), as_resources(resources), pin)
    floor = _floor(min_throughput)
    if method not in METHODS:
        problem = f"{method!r}: expected a planning method{nearest(str(method), METHODS)}"
        raise InputError("", "method", problem)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise InputError("", "seed", f"{seed!r}: expected a whole number from 0 to 4294967295")
    bench = _Bench(model, floor, seed)
    names: tuple[str, ...]
    if method == "all":
        names = ("ppo", *_ALWAYS, "random")
    elif method == "best":
        names = _ALWAYS
    else:
        names = (*(() if method in _ALWAYS else (method,)), *_ALWAYS)
    # The cheap ones first: greedy is the reference of the agent's rewards.
    results = {name: bench.run(name) for name in sorted(names, key=lambda name: name == "ppo")}
    # On a tie the method named first wins.
    chosen = method if method in results else min(names, key=lambda name: _tied(results[name][0]))
    return _decision(model, floor, seed, chosen, results, bench, started)


def as_workload(value: WorkloadLike) -> Workload:
    """Return a workload from its parsed file, message or dataclass."""
    if isinstance(value, Workload):
        return value
    if isinstance(value, pb.Workload):
        return Workload.from_message(value, "workload")
    return Workload.parse(value, "workload")


def as_resources(value: ResourcesLike) -> Resources:
    """Return resources from their parsed file, message or dataclass."""
    if isinstance(value, Resources):
        return value
    if isinstance(value, pb.Resources):
        return Resources.from_message(value, "resources")
    return Resources.parse(value, "resources")


def _floor(value: float | None) -> float:
    if value is None:
        return 0.0
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < 0:
        problem = f"{value!r}: expected samples/s, a finite number of at least 0"
        raise InputError("", "min_throughput", problem)
    return float(value)


class _Bench:
    """Runs methods on one problem; what they share is computed once."""

    def __init__(self, model: CostModel, floor: float, seed: int) -> None:
        self.model = model
        self.floor = floor
        self.seed = seed
        self.evaluate = Evaluator(model, floor)
        self.solution: Solution | None = None
        self.probabilities: dict[str, dict[str, float]] = {}
        self.training: tuple[Any, ...] = ()

    def run(self, method: str) -> tuple[Plan, float]:
        """Return what a method comes to, and the seconds it took."""
        methods: dict[str, Callable[[], Plan]] = {
            "ppo": self._ppo,
            "exact": self._exact,
            "greedy": lambda: baselines.greedy(self.evaluate),
            "all-cpu": lambda: baselines.one_device(self.evaluate, cpu=True),
            "all-gpu": lambda: baselines.one_device(self.evaluate, cpu=False),
            "random": lambda: baselines.random(self.evaluate, self.seed),
        }
        started = time.perf_counter()
        found = methods[method]()
        return found, time.perf_counter() - started

    def _exact(self) -> Plan:
        greedy = baselines.greedy(self.evaluate)
        self.solution = solve(self.model, self.floor, start=greedy)
        return self.solution.plan or greedy

    def _ppo(self) -> Plan:
        from scheduler import agent

        usable = self.model.usable.any(axis=1)
        if not usable.all():
            return baselines.greedy(self.evaluate)  # which says what is impossible
        reference = baselines.greedy(self.evaluate).cost
        trained = agent.train(self.evaluate, reference, self.seed)
        self.training = trained.curve
        self.probabilities = {
            layer.name: dict(zip(self.model.types, row, strict=True))
            for layer, row in zip(self.model.workload.layers, trained.probabilities, strict=True)
        }
        return trained.plan


def _tied(found: Plan) -> tuple[bool, float, float]:
    """A plan's rank with costs that differ by rounding alone made equal."""
    missed, cost, slow = found.rank
    return missed, float(f"{cost:.9g}"), 0.0 if not missed else slow


def _decision(
    model: CostModel,
    floor: float,
    seed: int,
    chosen: str,
    results: Mapping[str, tuple[Plan, float]],
    bench: _Bench,
    started: float,
) -> Decision:
    solution = bench.solution
    assert solution is not None
    found, _ = results[chosen]
    costs = [other.cost for other, _ in results.values() if other.feasible]
    # Costs of one plan from two sums differ in the last digit; a bound is below all of them.
    bound = min([solution.lower_bound, *costs])
    top = max([solution.max_throughput, *(other.throughput for other, _ in results.values())])
    others = sorted((name for name in results if name != chosen), key=lambda n: results[n][0].rank)
    gap = math.inf
    if found.feasible:
        gap = found.cost / bound - 1 if bound > 0 else 0.0 if found.cost == bound else math.inf
    decision = Decision(
        method=chosen,
        feasible=found.feasible,
        reason=_reason(found, floor, top, others, results),
        assignment=found.assignment,
        stages=found.stages,
        ps_units=found.ps_units,
        throughput=found.throughput,
        price_per_hour=found.price_per_hour,
        cost=found.cost,
        lower_bound=bound,
        gap=gap,
        seconds=time.perf_counter() - started,
        alternatives=tuple(Alternative.of(name, *results[name]) for name in others),
        seed=seed,
        min_throughput=floor,
        max_throughput=top,
        probabilities=bench.probabilities,
        reasons=(),
        training=bench.training,
        workload=model.workload,
        resources=model.resources,
    )
    sentences = tuple(reasons(decision, model.workload, model.resources, model))
    return replace(decision, reasons=sentences, seconds=time.perf_counter() - started)


def _reason(
    found: Plan,
    floor: float,
    top: float,
    others: Sequence[str],
    results: Mapping[str, tuple[Plan, float]],
) -> str:
    """Say why a plan is not feasible, and what would be."""
    if found.feasible:
        return ""
    able = [name for name in others if results[name][0].feasible]
    if able:
        return f"{found.reason}; {able[0]} reaches the floor for ${results[able[0]][0].cost:,.2f}"
    if top <= 0:
        return f"no plan can run: {found.reason}"
    if floor > top:
        return (
            f"no plan reaches {floor:,.1f} samples/s; the highest throughput that can be is "
            f"{top:,.1f}. This one {found.reason}"
        )
    return found.reason
