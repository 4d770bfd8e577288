"""Provisioning against trying every number of units."""

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.problem.cost import CostModel
from scheduler.problem.provision import provision
from scheduler.problem.workload import Resources, Workload
from tests.scheduler.instances import cost, every_plan, model, problems, resources, workload


@settings(max_examples=50)
@given(problems(layers=4, limit=6), st.randoms(use_true_random=False))
def test_equals_brute_force(problem: tuple[CostModel, float], random: object) -> None:
    """Over random placements, with shared limits, memory, parameter-server cores and a floor."""
    instance, floor = problem
    choices = [np.flatnonzero(row) for row in instance.allowed]
    assume(np.prod([len(some) for some in choices]) <= 81)
    for assignment in list(product(*choices))[:4]:
        kinds = tuple(int(kind) for kind in assignment)
        plans = every_plan(instance, kinds, floor)
        assume(len(plans) <= 600)
        feasible = [plan.cost for plan in plans if plan.feasible]
        plan = provision(instance, kinds, floor)
        assert plan.feasible == bool(feasible)
        if feasible:
            assert plan.cost == pytest.approx(min(feasible), rel=1e-9)
            assert plan.throughput >= floor
        else:
            # Then it is the fastest that the limits allow.
            free = [p.throughput for p in every_plan(instance, kinds, 0.0) if p.feasible]
            assert plan.throughput == pytest.approx(max(free, default=0.0))
            assert plan.reason


@pytest.mark.parametrize("units", range(1, 10))
def test_a_floor_exactly_reached_counts(units: int) -> None:
    """Rounding in the times must not ask for one unit more."""
    problem = model(workload({"cpu": cost(0.3, parallel_compute=0.9)}), resources(cpu=(1.0, 9)))
    floor = 100 / (0.3 * (0.1 + 0.9 / units))
    plan = provision(problem, [0], floor)
    assert plan.stages[0].units == units
    assert plan.throughput >= floor


def test_serial_stage_that_cannot_go_faster_is_named() -> None:
    problem = model(workload({"cpu": cost(1.0, parallel_compute=0.0)}), resources(cpu=(1.0, 9)))
    plan = provision(problem, [0], floor=1000.0)
    assert not plan.feasible
    assert plan.throughput == pytest.approx(100.0)
    assert "reaches at most 100 samples/s" in plan.reason
    assert "'l0' to 'l0' on cpu take 10 ms a sample even with 9 units" in plan.reason


def test_units_that_a_stage_may_not_have_are_not_told_of() -> None:
    work = workload({"cpu": cost(1.0)}, {"cpu": cost(1.0)})
    work["layers"][1]["alone"] = True
    plan = provision(model(work, resources(cpu=(1.0, 9))), [0, 0], floor=1000.0)
    assert "'l0' to 'l1' on cpu take 20 ms a sample even with 1 unit" in plan.reason


def test_binding_limit_is_named() -> None:
    problem = model(
        workload({"cpu": cost(1.0)}, {"v100": cost(1.0)}, {"cpu": cost(1.0)}),
        resources(cpu=(1.0, 5), v100=(1.0, 9)),
    )
    plan = provision(problem, [0, 1, 0], floor=1000.0)
    assert "faster needs 6 units of cpu, limit 5" in plan.reason


def test_no_plan_at_all_has_no_stages() -> None:
    problem = model(workload({"cpu": cost(1.0)}, ps_core_s=1.0), resources(cpu=(1.0, 5)))
    plan = provision(problem, [0])
    assert not plan.feasible
    assert plan.stages == ()
    assert plan.throughput == 0.0


def test_cap_is_kept_and_named() -> None:
    """One unit more would be faster and, without serial time, no dearer a sample."""
    work = Workload.parse(workload({"cpu": cost(1.0)}))
    offer = Resources.parse(resources(cpu=(1.0, 9)))
    problem = CostModel(work, offer, max_price_per_hour=4.5)
    plan = provision(problem, [0], floor=300.0)
    assert plan.feasible
    assert plan.price_per_hour <= 4.5
    beyond = provision(problem, [0], floor=600.0)
    assert not beyond.feasible
    assert beyond.stages[0].units == 4
    assert "faster costs $5.00 an hour, the cap is $4.50" in beyond.reason
    assert "the cap is $0.50" in provision(CostModel(work, offer, None, (), 0.5), [0]).reason


def test_parameter_server_that_stops_a_plan_is_named() -> None:
    problem = model(
        workload({"v100": cost(1.0)}, ps_core_s=0.01), resources(cpu=(1.0, 2), v100=(1.0, 9))
    )
    plan = provision(problem, [1], floor=500.0)
    assert plan.throughput == pytest.approx(200.0)
    assert "faster needs 3 units of cpu, limit 2" in plan.reason


def test_large_limits_are_not_enumerated() -> None:
    row = {"cpu": cost(0.5, parallel_compute=0.999999), "v100": cost(0.05, parallel_compute=0.9)}
    problem = model(workload(*[row] * 12), resources(cpu=(0.04, 1_000_000), v100=(2.42, 64)))
    plan = provision(problem, [0, 0, 1, 1] * 3, floor=900.0)
    assert plan.feasible
    assert plan.throughput >= 900.0
    alone = provision(problem, [0] * 12, floor=1e6)
    assert alone.feasible
    assert alone.stages[0].units > 10_000
