"""Plans as they run in steps: provisioning, the exact solver and whole decisions."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Decision, load_resources, load_workload, plan
from scheduler.engine import _planner
from scheduler.methods.exact import solve
from scheduler.planning.executed import steady_rate
from scheduler.problem.cost import CostModel
from scheduler.problem.provision import provision
from scheduler.problem.steps import Steps, in_flight
from scheduler.problem.workload import Resources, Workload
from tests.scheduler.instances import EXAMPLE, cost, every_plan, problems, resources, workload
from tests.scheduler.ticks import ticks


def _stepped(
    drawn: CostModel,
    staleness: int,
    micro_batches: int,
    handling_s: float = 0.0,
    passing_s: Sequence[float] = (),
) -> CostModel:
    """With steps of 100 samples; `passing_s` of layers in turn."""
    layers = drawn.workload.layers
    if passing_s:
        layers = tuple(map(lambda one, s: replace(one, passing_s=s), layers, cycle(passing_s)))
    work = replace(
        drawn.workload,
        layers=layers,
        staleness=staleness,
        batch=100,
        micro_batches=micro_batches,
        crossing_s=2.5 * handling_s,
        handling_s=handling_s,
    )
    return CostModel(
        work, drawn.resources, steps=Steps(staleness, micro_batches, 100, simulated=True)
    )


@settings(max_examples=60)
@given(
    problems(layers=4, limit=3),
    st.integers(0, 1),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.04]),
    st.sampled_from([(), (0.0, 3e-3, 1e-3)]),
)
def test_simulated_steps_are_solved_exactly(
    drawn: tuple[CostModel, float],
    staleness: int,
    micro_batches: int,
    handling_s: float,
    passing_s: Sequence[float],
) -> None:
    """Every assignment with every number of units, each simulated."""
    model = _stepped(drawn[0], staleness, micro_batches, handling_s, passing_s)
    floor = drawn[1] / 4
    best = np.inf
    for kinds in product(*(np.flatnonzero(row) for row in model.allowed)):
        assignment = tuple(int(kind) for kind in kinds)
        costs = [found.cost for found in every_plan(model, assignment, floor) if found.feasible]
        least = min(costs, default=np.inf)
        best = min(best, least)
        found = provision(model, assignment, floor)
        assert found.feasible == np.isfinite(least)
        assert not found.feasible or found.cost == pytest.approx(least, rel=1e-9)
    # With hardly a label it is what the relaxation by step time and trip knows.
    rough = _planner.solve_steps(model.native, floor, [], 1, False, 0.02)
    assert rough.bound * model.samples / 3600 <= best * (1 + 1e-9)
    solution = solve(model, floor, seconds=10.0)
    assert solution.lower_bound <= best * (1 + 1e-9)
    feasible = solution.plan is not None and solution.plan.feasible
    assert feasible == np.isfinite(best)
    if feasible and solution.proven:
        assert solution.plan is not None
        assert solution.plan.cost == pytest.approx(best, rel=1e-9)


@settings(max_examples=40)
@given(
    problems(layers=7, limit=6),
    st.integers(1, 17),
    st.sampled_from([1, 1000, 200_000]),
    st.sampled_from([0.0, 0.04]),
)
def test_no_bound_of_flushed_plans_is_above_a_plan(
    drawn: tuple[CostModel, float], micro_batches: int, labels: int, handling_s: float
) -> None:
    """However few labels stand for all others; plans are those of a search without boxes."""
    model = _stepped(drawn[0], 0, micro_batches, handling_s)
    floor = drawn[1] / 8
    plain = _planner.solve_steps(model.native, floor, [], 30_000, True, 2.0)
    found = _planner.solve_steps(model.native, floor, [], labels, False, 0.5)
    assert found.bound <= plain.value * (1 + 1e-9)
    assert plain.bound <= found.value * (1 + 1e-9)


def test_units_that_only_make_a_trip_longer_may_be_the_cheapest() -> None:
    """A second core, which halves no layer, has a step of 2.00 s instead of 2.02 s: micro-batches
    then come back when the stage before has time for them."""
    rows = [{"t4": cost(each, parallel_compute=0.0)} for each in (1.0, 0.5, 0.5)]
    layers = workload(*rows, {"cpu": cost(1.5, parallel_compute=0.0)}, ps_type="")
    model = CostModel(
        Workload.parse(layers), Resources.parse(resources(cpu=(0.01, 2), t4=(2.5, 1)))
    )
    found = solve(_stepped(model, 0, 7), seconds=10.0)
    assert found.plan is not None
    assert [stage.units for stage in found.plan.stages] == [1, 2]
    assert found.plan.cost == pytest.approx(2.52 * 2.0 * 10)
    assert found.lower_bound == pytest.approx(found.plan.cost)


def test_where_nothing_fits_no_plan_is_found() -> None:
    """Layers that stay together, each of which fits alone."""
    work = _heavy(weight_bytes=30.0) | {"staleness": 0}
    work["layers"][0]["uncut"] = True
    decision = plan(work, resources(gpu=(1.0, 4)), method="exact")
    assert not decision.feasible
    assert "need 120 bytes" in decision.plan.reason


def test_a_flushed_step_pays_for_filling_and_rounding() -> None:
    """A batch of 4 on 3 workers: two rounds of a quarter batch each, of 0.25 s."""
    model = _stepped(CostModel(*_files({"cpu": cost(1.0)}, cpu=(1.0, 9))), 0, 4)
    found = model.evaluate((0,), (3,))
    assert found.throughput == pytest.approx(100 / 0.5)


def test_units_without_a_micro_batch_are_no_way_to_go_slower() -> None:
    """100 samples/s ask for two cores of the parameter server, of which there is one; a second unit
    would have nothing to do but slow the first."""
    offer = {"cpu": (1.0, 1), "t4": (1.0, 2)}
    work, types = _files({"t4": cost(1.0, parallel_compute=0.5)}, **offer)
    work = replace(work, ps_core_s=0.015, staleness=0, batch=100, micro_batches=1)
    model = CostModel(work, types, steps=Steps(0, 1, 100, simulated=True))
    assert model.evaluate((1,), (1,)).reason == "2 units of cpu, limit 1"
    assert model.evaluate((1,), (2,)).reason == "layers 'l0' to 'l0' have 2 units, and use 1"
    assert not provision(model, (1,)).feasible


def _files(*rows: dict[str, Any], **types: tuple[float, int]) -> Any:
    return Workload.parse(workload(*rows)), Resources.parse(resources(**types))


_BLOCKS = [{name: cost(0.4 + 0.2 * n)} for n, name in enumerate(("cpu", "t4", "v100", "cpu"))]
_OFFER = {"cpu": (0.04, 40), "t4": (0.3, 40), "v100": (2.0, 40)}


def _decided(**other: Any) -> Decision:
    floor = other.pop("floor", None)
    method = other.pop("method", "ppo")
    return plan(workload(*_BLOCKS, batch=64, **other), resources(**_OFFER), floor, method)


@pytest.mark.parametrize("method", ["ppo", "exact", "greedy", "auto"])
@pytest.mark.parametrize("other", [{"staleness": 0}, {"staleness": 1}, {"staleness": 3}])
@pytest.mark.parametrize("parts", [0, 4])
def test_floors_hold_as_simulated(method: str, other: dict[str, int], parts: int) -> None:
    decision = _decided(**other, micro_batches=parts, floor=90.0, method=method, overhead=0.1)
    assert decision.feasible
    assert decision.throughput >= 90.0 / 0.9 * (1 - 1e-9)
    assert decision.lower_bound <= decision.cost
    chosen = decision.plan
    assert chosen.staleness is not None
    assert chosen.staleness <= other["staleness"]
    assert chosen.staleness >= min(1, other["staleness"])
    assert chosen.micro_batches == parts or not parts
    model = CostModel(*_files(*_BLOCKS, **_OFFER))
    steps = Steps(chosen.staleness, chosen.micro_batches, 64)
    assert decision.throughput <= steady_rate(model, chosen, steps) * (1 + 1e-9)
    assert Decision.from_json(decision.to_json(inputs=True)) == decision


def test_micro_batches_fill_the_pipeline() -> None:
    """With enough of them the plan and its price are those of the slowest stage alone."""
    decision, simple = (
        _decided(staleness=2, floor=200.0),
        plan(workload(*_BLOCKS), resources(**_OFFER), 200.0),
    )
    assert decision.cost == pytest.approx(simple.cost, rel=0.02)
    assert 1 < decision.plan.micro_batches <= 64
    assert simple.plan.micro_batches == 0
    assert simple.plan.staleness is None


def test_the_ends_of_steps_find_slack() -> None:
    """Six micro-batches, of two steps at once, have twelve units wait for each update; eight go
    round unevenly."""
    found = plan(
        workload({"cpu": cost(1.0)}, batch=768, staleness=1), resources(cpu=(1.0, 12)), 1199.0
    )
    assert [stage.units for stage in found.stages] == [12]
    assert found.plan.micro_batches == 12


_HALVES = [{"cpu": cost(300.0, fixed_s=60.0)}, {"t4": cost(300.0, fixed_s=60.0)}]  # of 96 samples


def _halves_by_ticks(parts: int, staleness: int) -> float:
    """Seconds a step in two stages of a worker each, once the pipeline is as full as it gets."""
    whole = 60.0 + (300.0 - 60.0) / parts
    forward = round(whole)  # tripled, so that thirds are whole
    stages = [(1, forward, 2 * forward, 0, 0)] * 2
    steps = 12 * (staleness + 1)
    made = ticks(stages, parts, staleness, steps)
    return (made[-1] - made[steps // 2 - 1]) / (steps - steps // 2) / 3


@pytest.mark.parametrize("staleness", [0, 1])
def test_small_micro_batches_are_priced_by_what_they_take(staleness: int) -> None:
    """A fifth of a layer's time is of a micro-batch of any size: many fill a pipeline, and cost
    more than that is worth."""
    offer = resources(cpu=(1.0, 1), t4=(1.0, 1))
    work = workload(*_HALVES, ps_type="", batch=96, staleness=staleness, reference_batch=96)
    takes = {parts: _halves_by_ticks(parts, staleness) for parts in (1, 2, 3, 4, 6, 8, 12, 16)}
    free = plan(work, offer, method="exact")
    assert 96 / free.throughput == pytest.approx(takes[free.plan.micro_batches], rel=1e-6)
    assert takes[free.plan.micro_batches] <= min(takes.values()) * 1.02
    for parts, seconds in takes.items():
        fixed = plan(work | {"micro_batches": parts}, offer, method="exact")
        assert 96 / fixed.throughput == pytest.approx(seconds, rel=1e-6)


def test_larger_micro_batches_than_the_reference_are_not_cheaper() -> None:
    offer, batch = resources(cpu=(1.0, 1)), 400
    rows = {"cpu": cost(1.0, fixed_s=0.5)}
    work = workload(rows, ps_type="", batch=batch, micro_batches=1, staleness=0)
    assert plan(work, offer).throughput == pytest.approx(100.0)


def test_a_running_plan_is_priced_at_its_own_micro_batches() -> None:
    offer = resources(cpu=(1.0, 1), t4=(1.0, 1))
    work = workload(*_HALVES, ps_type="", batch=96, staleness=1, reference_batch=96)
    found = plan(work, offer, method="exact")
    assert found.workload is not None
    assert found.resources is not None
    model = found.model(found.workload, found.resources)
    units = [stage.units for stage in found.stages]
    again = model.evaluate(model.codes(found.plan), units)
    assert [s.compute_s for s in again.stages] == [s.compute_s for s in found.stages]
    parts = found.plan.micro_batches
    assert found.stages[0].compute_s == pytest.approx((240.0 + 60.0 * parts) / 96)


def test_few_micro_batches_want_few_units() -> None:
    """Units that four micro-batches cannot keep busy are not rented."""
    work = replace(load_workload(EXAMPLE / "workload.yaml"), staleness=1, micro_batches=4)
    decision = plan(work, load_resources(EXAMPLE / "resources.yaml"))
    assert sum(stage.units for stage in decision.stages) <= 8
    free = plan(replace(work, staleness=None), load_resources(EXAMPLE / "resources.yaml"))
    assert decision.cost > free.cost
    assert decision.lower_bound >= free.lower_bound


def _heavy(**other: float) -> dict[str, Any]:
    """Two layers of weights on one type, a unit of which holds 100 bytes."""
    work = workload({"gpu": cost(1.0)}, {"gpu": cost(1.0)}, ps_type="", batch=8, micro_batches=4)
    for layer in work["layers"]:
        layer.update(other)
    return work


def _stages(work: dict[str, Any], units: int = 4) -> list[tuple[int, int]]:
    decision = plan(work, resources(gpu=(1.0, units)), method="exact")
    return [(stage.first, stage.last) for stage in decision.stages]


def test_memory_counts_versions_and_what_is_in_flight() -> None:
    # Weights and gradients of both: 4 * 24 bytes; a second version, and its gradient, 192.
    assert _stages(_heavy(weight_bytes=24.0) | {"staleness": 0}) == [(0, 1)]
    assert _stages(_heavy(weight_bytes=24.0) | {"staleness": 1}) == [(0, 0), (1, 1)]
    assert _stages(_heavy(weight_bytes=24.0, optimizer_bytes=10.0) | {"staleness": 0}) == [
        (0, 0),
        (1, 1),
    ]
    # In one stage two micro-batches of two samples are in flight, before a second stage more.
    assert _stages(_heavy(activation_bytes=12.0) | {"staleness": 0}) == [(0, 1)]
    assert _stages(_heavy(activation_bytes=13.0) | {"staleness": 0}) == [(0, 1)]
    split = _heavy(activation_bytes=13.0, weight_bytes=10.0) | {"staleness": 0}
    assert _stages(split, units=3) == [(0, 0), (1, 1)]
    four = plan(_heavy(activation_bytes=13.0) | {"staleness": 0}, resources(gpu=(1.0, 4)))
    assert [stage.units for stage in four.stages] == [4]
    assert four.stages[0].memory_bytes == pytest.approx(52.0)


@pytest.mark.parametrize("parts", [0, 1, 4])
@pytest.mark.parametrize("method", ["exact", "ppo", "greedy"])
def test_more_staleness_than_memory_holds_is_no_reason_against_a_plan(
    method: str, parts: int
) -> None:
    """Two versions of both layers and their gradients are 96 of 100 bytes, three 144."""
    work = _heavy(weight_bytes=12.0) | {"micro_batches": parts}
    least = plan(work | {"staleness": 1}, resources(gpu=(1.0, 2)), method=method)
    assert [(stage.first, stage.last) for stage in least.stages] == [(0, 1)]
    for staleness in (2, 3, 8, 50):
        free = plan(work | {"staleness": staleness}, resources(gpu=(1.0, 2)), method=method)
        assert free.feasible
        assert (free.stages, free.plan.staleness) == (least.stages, 1)


@settings(max_examples=40)
@given(
    problems(layers=3, limit=3),
    st.lists(st.sampled_from([0.0, 3.0, 6.0, 12.0]), min_size=3, max_size=3),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_a_plan_is_no_worse_for_being_allowed_more_staleness(
    drawn: tuple[CostModel, float], weights: list[float], parts: int, activations: float
) -> None:
    """Whatever number of versions memory holds; and no bound is above a plan with fewer."""
    layers = [
        replace(layer, weight_bytes=weight, activation_bytes=activations)
        for layer, weight in zip(drawn[0].workload.layers, weights, strict=False)
    ]
    work = replace(drawn[0].workload, layers=tuple(layers), batch=24, micro_batches=parts)
    work = replace(work, ps_core_s=0.0)
    *fewer, free = (
        plan(replace(work, staleness=n), drawn[0].resources, drawn[1] / 4, "exact")
        for n in (1, 2, 3)
    )
    known = [one.cost for one in (*fewer, free) if one.feasible]
    assert free.feasible == bool(known)
    if known:
        assert free.cost <= min(known) * 1.011  # of a pipeline that is filled but for 1 %
        assert free.lower_bound <= min(known) * (1 + 1e-9)
        held = {kind.name: kind.memory_bytes for kind in drawn[0].resources.types}
        assert all(stage.memory_bytes <= held[stage.type] * (1 + 1e-9) for stage in free.stages)


@pytest.mark.parametrize("staleness", [0, 1])
def test_micro_batches_are_as_small_as_memory_asks_for(staleness: int) -> None:
    """Of 64 samples a unit holds 100 bytes' worth at a time, and the reference batch is of all."""
    work = workload({"cpu": cost(1.0)}, batch=64, staleness=staleness, reference_batch=64)
    work["layers"][0]["activation_bytes"] = 10.0
    found = plan(work, resources(cpu=(1.0, 2)), 100.0, method="exact")
    assert found.feasible
    assert found.stages[0].memory_bytes <= 100.0


def test_where_a_whole_batch_is_in_memory_more_units_hold_it() -> None:
    """Of 24 samples of two steps one unit would have 48, two have 24 each; a unit holds 40."""
    work = workload({"cpu": cost(1.0)}, batch=24, staleness=3, reference_batch=24, whole_batch=True)
    work["layers"][0]["activation_bytes"] = 2.5
    found = plan(work, resources(cpu=(1.0, 3)), method="exact")
    assert found.feasible
    assert found.stages[0].units > 1
    assert found.stages[0].memory_bytes <= 100.0


@pytest.mark.parametrize("units", [5, 7, 9, 11])
def test_micro_batches_go_round_evenly_where_all_units_are_needed(units: int) -> None:
    """Without staleness nine units reach their pace with 9, 18, .. micro-batches alone."""
    work = workload({"cpu": cost(1.0)}, batch=6930, staleness=0, reference_batch=100)
    found = plan(work, resources(cpu=(1.0, units)), 99.0 * units, method="exact")
    assert found.feasible
    assert found.plan.micro_batches % units == 0


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("batch", [7, 10, 16, 64, 100])
def test_micro_batches_that_are_chosen_are_nearly_of_a_size(batch: int, staleness: int) -> None:
    """48 micro-batches of 64 samples would be of one or two, and priced as of 1.33."""
    rows = [{"cpu": cost(0.1)}, {"t4": cost(0.1)}]
    work = workload(*rows, batch=batch, staleness=staleness, reference_batch=3)
    parts = plan(work, resources(cpu=(1.0, 12), t4=(1.0, 12)), 900.0).plan.micro_batches
    assert -(-batch // parts) * parts <= 1.05 * batch


@settings(max_examples=40)
@given(problems(layers=3, limit=4), st.integers(1, 6))
def test_workers_in_lockstep_have_as_many_micro_batches_each(
    drawn: tuple[CostModel, float], parts: int
) -> None:
    """With others workers would cut a batch into more of them than the job says."""
    plain = _stepped(drawn[0], 0, parts)
    work = replace(plain.workload, lockstep=True)
    model = CostModel(work, plain.resources, steps=replace(plain.steps, lockstep=True))
    floor, best = drawn[1] / 4, np.inf
    for kinds in product(*(np.flatnonzero(row) for row in model.allowed)):
        for one in every_plan(model, tuple(int(kind) for kind in kinds), floor):
            assert not one.feasible or not any(parts % stage.units for stage in one.stages)
            best = min(best, one.cost if one.feasible else np.inf)
    solution = solve(model, floor, seconds=10.0)
    assert solution.lower_bound <= best * (1 + 1e-9)
    assert (solution.plan is not None and solution.plan.feasible) == np.isfinite(best)
    for method in ("exact", "ppo", "greedy"):
        found = plan(replace(work, staleness=2), model.resources, floor, method)
        # It may cut stages of one type, where memory asks for it.
        assert found.feasible or not np.isfinite(best) or method != "exact"
        assert not found.feasible or found.plan.staleness == 0
        assert not found.feasible or not any(parts % stage.units for stage in found.stages)
        if found.proven and np.isfinite(best):
            assert found.cost == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_memory_counts_copies_of_the_state_on_cpus(kind: str) -> None:
    work = workload({kind: cost(1.0)}, ps_type="", batch=8, micro_batches=4, staleness=1)
    work["layers"][0].update(weight_bytes=10.0, optimizer_bytes=5.0, activation_bytes=1.0)
    offer = resources(**{kind: (1.0, 1)})
    plain, copied = plan(work, offer), plan(work | {"copied": True}, offer)
    # Two versions and the optimizer's; gradients are not copied.
    more = 2 * 10.0 + 5.0 if kind == "cpu" else 0.0
    assert copied.stages[0].memory_bytes - plain.stages[0].memory_bytes == pytest.approx(more)
    offer["types"][0]["memory_bytes"] = plain.stages[0].memory_bytes
    assert plan(work, offer).feasible
    assert plan(work | {"copied": True}, offer).feasible == (kind == "gpu")


def test_what_crosses_hosts_is_priced_at_their_bandwidth() -> None:
    """10 bytes a sample each way at 1,000 bytes a second: 20 ms."""
    work = workload({"cpu": cost(0.1)}, {"t4": cost(0.1)})
    work["layers"][0]["output_bytes"] = 10.0
    offer = resources(cpu=(1.0, 4), t4=(1.0, 4))
    near = plan(work, offer)
    offer["types"][0].update(units_per_host=2, host_bandwidth_bytes_s=1000.0)
    far = plan(work, offer)
    assert far.stages[0].transfer_s - near.stages[0].transfer_s == pytest.approx(0.02)


@pytest.mark.parametrize("staleness", [None, 0, 1])
def test_sums_among_several_hosts_are_priced_at_their_bandwidth(staleness: int | None) -> None:
    """50 bytes of weights go twice round, at 1,000 bytes a second: 0.1 s a step of 100 samples."""
    work = workload({"cpu": cost(1.0)}, batch=100, micro_batches=4)
    work["layers"][0]["weight_bytes"] = 50.0
    if staleness is not None:
        work["staleness"] = staleness
    offer = resources(cpu=(1.0, 4))
    offer["types"][0]["memory_bytes"] = 1e3
    offer["types"][0].update(units_per_host=2, host_bandwidth_bytes_s=1000.0)
    model = CostModel(Workload.parse(work), Resources.parse(offer))
    near, far = (model.evaluate((0,), (units,)) for units in (2, 4))
    assert near.stages[0].transfer_s == 0
    assert far.stages[0].transfer_s == pytest.approx(0.1 / 100)
    if staleness == 0:
        assert (100 / near.throughput, 100 / far.throughput) == pytest.approx((0.5, 0.25 + 0.1))


def test_micro_batches_in_flight() -> None:
    steps = Steps(0, 12, 12)
    assert [in_flight((1, 3, 2), stage, steps) for stage in range(3)] == [12, 4, 2]
    assert in_flight((1, 1), 0, Steps(0, 2, 12)) == 2
    assert in_flight((1, 1), 0, Steps(1, 2, 12)) == 4
    whole = Steps(1, 12, 12, whole_batch=True)
    assert [in_flight((1, 3, 2), stage, whole) for stage in range(3)] == [24, 8, 12]
    together = Steps(0, 12, 12, lockstep=True)
    assert [in_flight((1, 3, 2), stage, together) for stage in range(3)] == [12, 4, 2]
    assert in_flight((1, 1), 0, together) == 12


@pytest.mark.parametrize("method", ["exact", "ppo"])
def test_workers_that_share_out_experts_keep_all_of_a_step_but_in_the_last_stage(
    method: str,
) -> None:
    work = workload(
        *({"t4": cost(0.1)}, {"v100": cost(0.1)}), ps_type="", batch=8, micro_batches=8, staleness=0
    )
    work["layers"][0]["activation_bytes"] = 20.0  # a unit holds 5 samples
    offer = resources(t4=(1.0, 4), v100=(1.0, 4))
    assert plan(work, offer, method=method).stages[0].memory_bytes == 80.0
    together = plan(work | {"lockstep": True}, offer, method=method).stages
    assert (together[0].units, together[0].memory_bytes) == (2, 80.0)
