"""Plans within a bound on all units, against every plan that there is."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Decision, plan
from scheduler.planning.elastic import Bounds, plan_within, units_of
from scheduler.problem.workload import Resources
from tests.scheduler.instances import cost, model, resources, workload

TIMES = st.sampled_from([0.02, 0.1, 0.5, 2.0])


def within(
    work: dict[str, Any],
    offer: dict[str, Any],
    floor: float,
    bounds: Bounds,
    pin: dict[str, str] | None = None,
) -> Decision:
    def decide(some: Resources, aim: float, exclude: Sequence[str]) -> Decision:
        return plan(work, some, aim or None, method="exact", exclude=exclude, pin=pin)

    return plan_within(bounds, Resources.parse(offer), floor, decide)


def brute(work: dict[str, Any], offer: dict[str, Any], floor: float, bounds: Bounds) -> float:
    """The cost of the cheapest plan within bounds, by trying all; infinite where there is none."""
    problem = model(work, offer)
    best = math.inf
    for codes in product(range(problem.num_types), repeat=problem.num_layers):
        if not all(problem.allowed[row, code] for row, code in enumerate(codes)):
            continue
        runs = problem.runs(codes)
        ranges = [range(1, int(problem.limit[run.type]) + 1) for run in runs]
        for units in product(*ranges):
            fits = bounds.least <= sum(units) <= (bounds.most or math.inf)
            found = problem.evaluate(codes, units, floor)
            if fits and found.feasible:
                best = min(best, found.cost)
    return best


@settings(max_examples=25)
@given(
    st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=3),
    st.sampled_from([0.0, 20.0, 100.0, 400.0]),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_what_is_found_keeps_the_bounds_and_the_floor(
    times: list[tuple[float, float]], floor: float, least: int, more: int
) -> None:
    work = workload(*({"cpu": cost(20 * a), "gpu": cost(b)} for a, b in times))
    offer = resources(cpu=(0.05, 4), gpu=(1.0, 3))
    bounds = Bounds(least, least + more if more else 0)
    found = within(work, offer, floor, bounds)
    cheapest = brute(work, offer, floor, bounds)
    if found.feasible:
        assert bounds.hold(found)
        assert found.throughput >= floor * (1 - 1e-9)
        assert found.min_throughput == floor
        assert found.cost >= cheapest * (1 - 1e-9)
    if cheapest < math.inf and not least:
        assert found.feasible, "there is one"


def test_without_need_the_plan_is_the_planners() -> None:
    work = workload({"cpu": cost(2.0)})
    offer = resources(cpu=(0.05, 8))
    free = plan(work, offer, 100.0, method="exact")
    assert within(work, offer, 100.0, Bounds(1, 8)).plan == free.plan


def test_at_least_so_many_are_as_few_as_do() -> None:
    work, offer = workload({"cpu": cost(2.0)}), resources(cpu=(0.05, 8))
    found = within(work, offer, 0.0, Bounds(5))
    assert units_of(found) == 5
    assert found.min_throughput == 0.0


def test_a_floor_that_takes_more_is_refused_with_the_key() -> None:
    work, offer = workload({"cpu": cost(2.0)}), resources(cpu=(0.05, 8))
    found = within(work, offer, 300.0, Bounds(0, 2))
    assert not found.feasible
    assert "schedule.elastic.max: 2" in found.plan.reason


@pytest.mark.parametrize("least", [9, 100])
def test_more_than_there_are_is_refused_with_the_key(least: int) -> None:
    work, offer = workload({"cpu": cost(2.0)}), resources(cpu=(0.05, 8))
    found = within(work, offer, 0.0, Bounds(least))
    assert not found.feasible
    assert f"schedule.elastic.min: {least}" in found.plan.reason


@pytest.mark.parametrize("units", [1, 2, 3])
def test_just_so_many_are_found_where_more_are_cheaper(units: int) -> None:
    """Two of three micro-batches wait for one worker of two: three of them cost less a sample."""
    work = workload(
        {"cpu": cost(0.02)}, ps_core_s=1e-6, batch=96, micro_batches=3, staleness=0, samples=1000
    )
    found = within(work, resources(cpu=(0.05, 8)), 0.0, Bounds(units, units))
    assert found.feasible, found.plan.reason
    assert units_of(found) == units


def test_micro_batches_that_no_more_units_compute_sooner_are_told() -> None:
    work = workload({"cpu": cost(0.02)}, batch=96, micro_batches=4, staleness=0)
    found = within(work, resources(cpu=(0.05, 8)), 0.0, Bounds(3, 3))
    assert not found.feasible
    assert "schedule.elastic.min: 3" in found.plan.reason
    assert "has 2, with 4 micro-batches a step (train.micro_batches)" in found.plan.reason


def test_layers_that_one_unit_computes_alone_are_named() -> None:
    work = workload({"cpu": cost(2.0)}, {"cpu": cost(2.0)}, {"cpu": cost(2.0)})
    for layer in work["layers"][:2]:
        layer["alone"] = True
    found = within(work, resources(cpu=(0.05, 8)), 0.0, Bounds(3))
    assert "schedule.elastic.min: 3" in found.plan.reason
    assert "'l0', 'l1' change a buffer in forward, for which a stage has" in found.plan.reason


@pytest.mark.parametrize("first", [2.0, 0.5])
def test_units_that_no_share_has_go_where_they_are_needed(first: float) -> None:
    """Four units, two of each type, are made three: of shares alone one of each would be left."""
    rows = [{"cpu": cost(first)}, {"gpu": cost(1.0)}]
    work = workload(*rows, batch=96, micro_batches=4, staleness=0)
    found = within(work, resources(cpu=(0.05, 4), gpu=(0.05, 4)), 0.0, Bounds(3, 3))
    assert found.feasible, found.plan.reason
    assert [stage.units for stage in found.stages] == ([2, 1] if first > 1 else [1, 2])


def test_layers_that_are_pinned_stay_there() -> None:
    work = workload({"cpu": cost(2.0), "gpu": cost(2.0)}, {"cpu": cost(0.5), "gpu": cost(0.5)})
    offer, pin = resources(cpu=(0.05, 8), gpu=(0.05, 8)), {"l0": "gpu", "l1": "cpu"}
    found = within(work, offer, 100.0, Bounds(0, 3), pin)
    assert found.feasible, found.plan.reason
    assert units_of(found) <= 3
    assert found.assignment == ("gpu", "cpu")
    refused = within(work, offer, 300.0, Bounds(0, 3), pin)
    assert "schedule.elastic.max: 3" in refused.plan.reason
