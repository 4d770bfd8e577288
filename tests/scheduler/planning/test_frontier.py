"""The Pareto curve: nondominated plans from the cheapest to the fastest."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings

from scheduler import load_resources, load_workload, pareto, pareto_of, plan
from scheduler.planning.frontier import frontier
from scheduler.problem.cost import CostModel
from tests.scheduler.instances import EXAMPLE, cost, every_plan, problems, resources, workload

WORK = load_workload(EXAMPLE / "workload.yaml")
OFFER = load_resources(EXAMPLE / "resources.yaml")


def test_the_curve_runs_from_the_cheapest_to_the_fastest() -> None:
    curve = pareto(WORK, OFFER, points=12, seconds=20)
    free = plan(WORK, OFFER, method="exact")
    assert 5 <= len(curve) <= 12
    for slow, fast in pairwise(curve):
        assert slow.throughput < fast.throughput
        assert slow.cost < fast.cost
    assert curve[0].cost == pytest.approx(free.cost)
    assert curve[-1].throughput == pytest.approx(free.max_throughput)
    for point in curve:
        hours = WORK.samples / point.throughput / 3600
        assert point.cost == pytest.approx(hours * point.price_per_hour)
        assert len(point.assignment) == len(WORK.layers)


@given(problems(layers=3, limit=3))
@settings(max_examples=40)
def test_no_plan_at_all_beats_a_proven_point(problem: tuple[CostModel, float]) -> None:
    model, _ = problem
    curve = frontier(model, points=6, seconds=5)
    choices = [range(model.num_types)] * model.num_layers
    plans = [
        found
        for assignment in product(*choices)
        if not model.why_impossible(assignment, model.runs(assignment))
        for found in every_plan(model, assignment, 0.0)
        if found.feasible
    ]
    assert bool(curve) == bool(plans)
    for point in curve:
        if point.proven:
            as_fast = [p for p in plans if p.throughput >= point.throughput * (1 - 1e-9)]
            assert min(p.cost for p in as_fast) >= point.cost * (1 - 1e-6)


def test_demands_bind_the_curve() -> None:
    curve = pareto(WORK, OFFER, 8, 20, exclude=["t4"], max_price_per_hour=12.0)
    assert curve
    assert all(point.price_per_hour <= 12.0 * (1 + 1e-9) for point in curve)
    assert all("t4" not in point.assignment for point in curve)
    assert pareto(WORK, OFFER, 8, exclude=["cpu"]) == ()


def test_a_decision_has_its_curve_when_asked() -> None:
    row = {"cpu": cost(1.0, parallel_compute=0.9), "v100": cost(0.05, parallel_compute=0.9)}
    files = workload(row, row), resources(cpu=(0.04, 9), v100=(2.42, 3))
    decision = plan(*files, 500.0, "exact", pareto=True)
    points = [(point.throughput, point.cost) for point in decision.pareto]
    # The plan of the decision is on the curve.
    assert any(
        rate == pytest.approx(decision.throughput) and money == pytest.approx(decision.cost)
        for rate, money in points
    )
    assert pareto_of(decision) == decision.pareto
    later = pareto_of(plan(*files, 500.0, "exact"))
    assert later[0].cost == pytest.approx(points[0][1])
    assert plan(*files, 500.0, "exact").pareto == ()


def test_one_point_and_nothing_to_run() -> None:
    one = pareto(workload({"cpu": cost(1.0)}), resources(cpu=(0.04, 1)))
    assert len(one) == 1
    none = pareto(workload({"cpu": cost(1.0, memory_bytes=101)}), resources(cpu=(0.04, 9)))
    assert none == ()
