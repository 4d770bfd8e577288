"""The exact solver against trying every assignment; the rules it is compared with."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scheduler.workloads import problem as generated
from scheduler import load_resources, load_workload
from scheduler.methods import rivals
from scheduler.methods.exact import solve
from scheduler.methods.milp import cheapest
from scheduler.methods.rivals import Budget, Problem
from scheduler.problem.cost import CostModel
from scheduler.problem.plan import Plan
from scheduler.problem.provision import provision
from scheduler.problem.workload import Resources, Workload
from tests.scheduler.instances import (
    EXAMPLE,
    cost,
    every_plan,
    model,
    problems,
    resources,
    workload,
)


def _brute(problem: CostModel, floor: float) -> list[Plan]:
    choices = [np.flatnonzero(row) for row in problem.allowed]
    return [
        provision(problem, tuple(int(kind) for kind in kinds), floor) for kinds in product(*choices)
    ]


def _capped(problem: CostModel, cap: float) -> CostModel:
    return CostModel(problem.workload, problem.resources, max_price_per_hour=cap)


CAPS = st.sampled_from([np.inf, np.inf, 0.5, 1.0, 3.0, 8.0])


@settings(max_examples=150)
@given(problems(layers=4, limit=5), CAPS)
def test_exact_equals_brute_force(drawn: tuple[CostModel, float], cap: float) -> None:
    """Every assignment, provisioned; shared limits, memory, server cores and the cap bind."""
    problem, floor = _capped(drawn[0], cap), drawn[1]
    plans = _brute(problem, floor)
    feasible = [plan.cost for plan in plans if plan.feasible]
    solution = solve(problem, floor, seconds=30.0)
    assert solution.proven
    fastest = max(plan.throughput for plan in _brute(problem, 1e12))
    assert solution.max_throughput == pytest.approx(fastest)
    if feasible:
        assert solution.plan is not None
        assert solution.plan.feasible
        assert solution.plan.cost == pytest.approx(min(feasible), rel=1e-9)
        assert solution.lower_bound == solution.plan.cost
    else:
        assert solution.plan is None or not solution.plan.feasible
        assert solution.lower_bound == np.inf


@settings(max_examples=60)
@given(problems(layers=3, limit=3), CAPS, st.integers(0, 2), st.sampled_from([0.1, 1.0, 30.0]))
def test_exact_equals_every_assignment_with_every_units(
    drawn: tuple[CostModel, float], cap: float, per_host: int, weight_bytes: float
) -> None:
    """Nothing but the cost model's own evaluation on the other side, also of several hosts."""
    problem, floor = _on_hosts(_capped(drawn[0], cap), per_host, weight_bytes), drawn[1]
    choices = [np.flatnonzero(row).tolist() for row in problem.allowed]
    feasible = [
        plan.cost
        for kinds in product(*choices)
        for plan in every_plan(problem, kinds, floor)
        if plan.feasible and not _slowed(problem, kinds, plan)
    ]
    solution = solve(problem, floor, seconds=30.0)
    assert solution.lower_bound == pytest.approx(min(feasible, default=np.inf), rel=1e-9)


def _slowed(problem: CostModel, assignment: tuple[int, ...], plan: Plan) -> bool:
    """Whether fewer units would make a stage faster; none buys units for a smaller server."""
    for run, stage in zip(problem.runs(assignment), plan.stages, strict=True):
        busy = run.busy_s(stage.units)
        if busy.min() < busy[-1]:
            return True
    return False


def _on_hosts(problem: CostModel, per_host: int, weight_bytes: float) -> CostModel:
    """A problem whose stages sum gradients over a network where they are on several hosts."""
    if not per_host:
        return problem
    layers = [replace(layer, weight_bytes=weight_bytes) for layer in problem.workload.layers]
    types = [
        replace(kind, units_per_host=per_host, host_bandwidth_bytes_s=10.0)
        for kind in problem.resources.types
    ]
    return CostModel(
        replace(problem.workload, layers=tuple(layers)),
        replace(problem.resources, types=tuple(types)),
        max_price_per_hour=problem.max_price,
        cuts=False,
    )


@pytest.mark.parametrize("seed", range(30))
def test_exact_equals_brute_force_where_everything_binds(seed: int) -> None:
    """Larger than hypothesis tends to draw: limits shared by stages and parameter server."""
    rng = np.random.default_rng(seed)
    rows = [
        {
            name: {
                "compute_s": rng.uniform(0.01, 1),
                "sync_s": float(rng.choice([0, 0.01, 0.4])),
                "transfer_s": float(rng.choice([0, 0.02, 0.5])),
                "parallel_compute": float(rng.choice([0.5, 0.9, 0.97, 1])),
                "parallel_sync": float(rng.choice([0, 0.5, 0.9, 1])),
                "memory_bytes": float(rng.choice([0, 30, 60])),
            }
            for name in ("cpu", "t4", "v100")
        }
        for _ in range(4)
    ]
    ps_core_s = float(rng.choice([1e-4, 2e-3, 5e-3]))
    offer = {
        name: (float(rng.choice([0.05, 0.4, 2.5])), int(rng.integers(1, 9)))
        for name in ("cpu", "t4", "v100")
    }
    problem = model(workload(*rows, ps_core_s=ps_core_s), resources(**offer))
    floor = float(rng.choice([0, 50, 150, 300]))
    feasible = [plan.cost for plan in _brute(problem, floor) if plan.feasible]
    solution = solve(problem, floor, seconds=30.0)
    assert solution.proven
    fastest = max(plan.throughput for plan in _brute(problem, 1e12))
    assert solution.max_throughput == pytest.approx(fastest)
    if feasible:
        assert solution.plan is not None
        assert solution.plan.cost == pytest.approx(min(feasible), rel=1e-9)
    else:
        assert solution.plan is None or not solution.plan.feasible


@settings(max_examples=30)
@given(problems(layers=5, limit=5))
def test_no_rule_beats_exact(drawn: tuple[CostModel, float]) -> None:
    problem, floor = drawn
    rule = Problem(problem, floor)
    solution = solve(problem, floor, seconds=30.0)
    others = (
        rivals.run("greedy", rule).plan,
        rivals.run("all-cpu", rule).plan,
        rivals.run("all-gpu", rule).plan,
        rivals.run("random", rule, Budget(evaluations=64)).plan,
    )
    for plan in others:
        if plan.feasible:
            assert plan.cost >= solution.lower_bound * (1 - 1e-9)


def test_shared_limit_that_binds_is_solved_and_proven() -> None:
    """The best plan ignoring the limit puts both ends on the CPU, which has too few cores."""
    ends = {"cpu": cost(1.0), "v100": cost(1.0)}
    problem = model(
        workload(ends, {"v100": cost(0.2)}, ends), resources(cpu=(0.01, 3), v100=(1.0, 9))
    )
    floor = 200.0
    solution = solve(problem, floor)
    best = min(plan.cost for plan in _brute(problem, floor) if plan.feasible)
    assert solution.proven
    assert solution.plan is not None
    assert solution.plan.cost == pytest.approx(best)


def test_example_is_proven_and_mixed() -> None:
    problem = CostModel(
        load_workload(EXAMPLE / "workload.yaml"), load_resources(EXAMPLE / "resources.yaml")
    )
    solution = solve(problem, 600_000.0)
    assert solution.proven
    assert solution.plan is not None
    assert set(solution.plan.assignment) == {"cpu", "t4", "v100"}


def test_many_layers_and_units_still_give_a_true_bound() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {
            "cpu": cost(0.4 * x, parallel_compute=0.99, sync_s=0.01, transfer_s=0.02),
            "v100": cost(0.02 * y, parallel_compute=0.97, sync_s=0.01, transfer_s=0.02),
        }
        for x, y in rng.lognormal(0, 1, (30, 2))
    ]
    problem = model(workload(*rows), resources(cpu=(0.04, 20_000), v100=(2.42, 64)))
    start = rivals.run("greedy", Problem(problem, 500.0)).plan
    solution = solve(problem, 500.0, start=start)
    assert solution.plan is not None
    assert solution.lower_bound <= solution.plan.cost <= start.cost
    assert solution.plan.cost <= solution.lower_bound * 1.01


def _large(seed: int, layers: int, types: int, scarce: float = 1.0) -> CostModel:
    """Types of different speed and price; `scarce` shrinks their limits."""
    rng = np.random.default_rng(seed)
    names = ["cpu", *(f"g{n}" for n in range(1, types))]
    speed = np.concatenate([[1.0], rng.uniform(8, 80, types - 1)])
    price = np.concatenate([[0.04], 0.04 * speed[1:] * rng.uniform(0.3, 1.6, types - 1)])
    rows = [
        {
            name: cost(
                float(0.2 * size / fast * rng.uniform(0.8, 1.25)),
                sync_s=float(0.01 * rng.lognormal(0, 0.7)),
                transfer_s=float(0.01 * rng.lognormal(0, 0.7)),
                parallel_compute=float(rng.uniform(0.9, 0.999)),
                parallel_sync=float(rng.uniform(0.3, 0.95)),
                memory_bytes=float(rng.choice([1, 4, 16])),
            )
            for name, fast in zip(names, speed, strict=True)
        }
        for size in rng.lognormal(0, 1, layers)
    ]
    limit = [1000, *rng.integers(8, 128, types - 1)]
    offer = {
        name: (float(dollars), max(2, int(number * scarce)))
        for name, dollars, number in zip(names, price, limit, strict=True)
    }
    return model(workload(*rows, ps_core_s=1e-4), resources(**offer))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scarce", [1.0, 0.1])
def test_medium_instances_are_proven(seed: int, scarce: float) -> None:
    problem = _large(seed, 20, 5, scarce)
    top = solve(problem).max_throughput
    for share in (0.0, 0.5, 0.9):
        solution = solve(problem, share * top, seconds=30.0)
        assert solution.proven
        assert solution.plan is not None
        assert solution.plan.feasible
        assert solution.plan.throughput >= share * top


@pytest.mark.parametrize("seed", range(6))
def test_milp_agrees_at_a_pace(seed: int) -> None:
    """Where the floor fixes the pace, integer programming finds the same least price."""
    pytest.importorskip("scipy")
    problem = _large(seed, 10, 3, 0.1)
    floor = 0.8 * solve(problem).max_throughput
    solution = solve(problem, floor, seconds=30.0)
    assert solution.proven
    assert solution.plan is not None
    tau = 1 / solution.plan.throughput * (1 + 1e-9)
    at_pace = cheapest(problem, tau, floor)
    assert at_pace.price_per_hour == pytest.approx(solution.plan.price_per_hour, rel=1e-6)
    assert at_pace.bound <= at_pace.price_per_hour * (1 + 1e-6)
    # And at no other pace does it find a plan that costs less in all.
    for share in (1.0, 0.97, 0.9):
        found = cheapest(problem, share / floor, floor).assignment
        if found is not None:
            plan = provision(problem, found, floor)
            assert not plan.feasible or plan.cost >= solution.plan.cost * (1 - 1e-9)


def test_milp_says_when_no_plan_keeps_the_pace() -> None:
    pytest.importorskip("scipy")
    problem = model(workload({"cpu": cost(1.0)}), resources(cpu=(1.0, 9)))
    assert cheapest(problem, 1e-6).assignment is None
    assert cheapest(problem, 1e-2).assignment == (0,)


@pytest.mark.parametrize("seconds", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_bound_of_a_short_search_is_below_every_plan(seed: int, seconds: float) -> None:
    problem = _large(seed, 24, 6, 0.1)
    floor = 0.7 * solve(problem, seconds=1.0).max_throughput
    best = solve(problem, floor, seconds=10.0)
    short = solve(problem, floor, seconds=seconds)
    assert best.plan is not None
    assert short.lower_bound <= best.plan.cost * (1 + 1e-9)


def test_start_is_never_made_worse() -> None:
    problem = _large(0, 24, 6, 0.1)
    start = rivals.run("greedy", Problem(problem, 100.0)).plan
    assert start.feasible
    solution = solve(problem, 100.0, start=start, seconds=0.0)
    assert solution.plan is not None
    assert solution.plan.cost <= start.cost


@pytest.mark.parametrize("number", [6, 9, 18])
def test_a_flushed_start_is_never_made_worse(number: int) -> None:
    given_ = generated(number, seed=31, layers=(5, 16), types=(2, 6))
    work = given_.workload | {"staleness": 0, "micro_batches": 16}
    work["batch"] = work["reference_batch"]
    problem = CostModel(Workload.parse(work), Resources.parse(given_.resources))
    best = solve(problem, seconds=2.0).plan
    assert best is not None
    again = solve(problem, start=best, seconds=0.0)
    assert again.plan is not None
    assert again.plan.cost <= best.cost
    assert again.lower_bound <= best.cost
    # A plan that misses the floor makes nothing possible.
    floor = 2 * solve(problem).max_throughput
    slow = problem.evaluate(problem.codes(best), [stage.units for stage in best.stages], floor)
    missed = solve(problem, floor, start=slow)
    assert missed.plan is None or not missed.plan.feasible


def test_thousand_layers_with_sixteen_types_end_with_a_bound() -> None:
    problem = _large(0, 1000, 16, 30.0)
    solution = solve(problem, seconds=1.5)
    assert solution.plan is not None
    assert solution.plan.feasible
    assert 0 <= solution.lower_bound <= solution.plan.cost


def test_floor_out_of_reach_gives_the_fastest_plan() -> None:
    problem = _large(1, 12, 4)
    top = solve(problem).max_throughput
    solution = solve(problem, 1.01 * top, seconds=30.0)
    assert solution.proven
    assert solution.lower_bound == np.inf
    assert solution.plan is not None
    assert not solution.plan.feasible
    assert solution.plan.throughput == pytest.approx(solution.max_throughput)
    assert "reaches at most" in solution.plan.reason


def test_one_device() -> None:
    row = {"cpu": cost(1.0), "t4": cost(0.3), "v100": cost(0.1)}
    problem = model(
        workload({"cpu": cost(0.1)}, row, row), resources(cpu=(0.04, 99), t4=(0.3, 9), v100=(9, 9))
    )
    offered = Problem(problem, 100.0)
    assert rivals.run("all-cpu", offered).plan.assignment == ("cpu",) * 3
    # The embedding stays on the parameter server's type; of the GPUs the cheaper one is taken.
    assert rivals.run("all-gpu", offered).plan.assignment == ("cpu", "t4", "t4")
    lone = model(workload({"cpu": cost(0.1)}), resources(cpu=(0.04, 99)))
    plan = rivals.run("all-gpu", Problem(lone, 0.0)).plan
    assert plan.reason == "no GPU type is on offer"


def test_random_repeats_by_seed() -> None:
    row = {"cpu": cost(1.0), "t4": cost(0.3), "v100": cost(0.1)}
    problem = model(workload(*[row] * 8), resources(cpu=(0.04, 99), t4=(0.3, 9), v100=(9, 9)))
    few = Budget(evaluations=4)
    one, two = (rivals.run("random", Problem(problem, 0.0), few, 3).plan for _ in range(2))
    assert one == two


def test_memory_of_a_whole_stage_forces_a_split() -> None:
    row = {"cpu": cost(1.0, memory_bytes=60), "v100": cost(1.0, memory_bytes=60)}
    problem = model(workload(row, row), resources(cpu=(0.04, 9), v100=(2.0, 9)))
    solution = solve(problem)
    assert solution.plan is not None
    assert len(solution.plan.stages) == 2


def test_impossible_has_no_plan() -> None:
    problem = model(workload({"cpu": cost(1.0, memory_bytes=101)}), resources(cpu=(0.04, 9)))
    solution = solve(problem)
    assert solution.plan is None
    assert solution.max_throughput == 0.0
