"""When another plan is proposed for the rest of a run, and when not."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import scheduler_pb2 as pb
from scheduler import Decision, InputError, plan
from scheduler.replanning.measure import Filtered, Measurement
from scheduler.replanning.proposal import NEXT_RUN, Moving, Proposal, Threshold
from scheduler.replanning.replan import propose
from tests.scheduler.instances import cost, resources, workload

OFFER = resources(cpu=(0.05, 200), gpu=(2.0, 8))
# On the GPU by the profile; were it 10 times slower there, CPU cores would be cheaper.
LAYERS = ({"cpu": cost(0.5)}, {"cpu": cost(20.0), "gpu": cost(0.1)})
FREE = Threshold(0.0, 0.0)


def decided(floor: float = 0.0, **other: Any) -> Decision:
    return plan(workload(*LAYERS, samples=1e9), OFFER, floor or None, method="exact", **other)


def measured(decision: Decision, *busy: float, pace: float = 0.0) -> Measurement:
    """Computing of each stage times `busy`; the pipeline's s a sample times `pace`."""
    times = (
        Filtered(50, factor * stage.compute_s)
        for factor, stage in zip(busy, decision.stages, strict=True)
    )
    return Measurement(tuple(times), Filtered(50, pace / decision.throughput))


def test_as_predicted_the_running_plan_stays() -> None:
    decision = decided(1000.0)
    found = propose(decision, measured(decision, 1.0, 1.0, pace=1.0), 5e8)
    assert not found.worthwhile
    assert not found.moves
    assert found.current_cost == pytest.approx(decision.cost / 2)
    assert found.overhead == pytest.approx(1.0)
    assert found.reasons[-1] == "The running plan stays the best."


def test_a_stage_that_is_much_slower_than_predicted_is_moved() -> None:
    decision = decided()
    assert decision.assignment == ("cpu", "gpu")
    found = propose(decision, measured(decision, 1.0, 10.0), 5e8)
    assert found.worthwhile
    assert found.proposed.assignment == ("cpu", "cpu")
    assert found.net_savings > 0
    assert found.savings == pytest.approx(found.current_cost - found.proposed_cost)
    assert found.proposed.cost == pytest.approx(found.proposed_cost)
    again = found.proposed.workload
    assert again is not None
    assert again.samples == 5e8
    assert again.layers[1].cost["gpu"].compute_s == pytest.approx(1.0)
    assert any("10.00 times the predicted" in text for text in found.reasons)
    assert found.reasons[-1].startswith("Proposed: it saves $")


def test_moving_costs_the_units_of_both_plans() -> None:
    decision = decided()
    moving = Moving(10.0, 20.0, 30.0, 40.0)
    found = propose(decision, measured(decision, 1.0, 10.0), moving=moving)
    prices = decision.plan.price_per_hour + found.proposed.plan.price_per_hour
    assert found.moving_s == 100.0
    assert found.moving_cost == pytest.approx(100.0 / 3600 * prices)
    assert propose(decision, measured(decision, 1.0, 10.0), moving=NEXT_RUN).moving_cost == 0.0


@settings(max_examples=30)
@given(st.floats(0.2, 20.0), st.floats(0.2, 20.0), st.floats(0.0, 8.0), st.floats(0.0, 4.0))
def test_nothing_is_proposed_that_does_not_pay(
    first: float, second: float, hours: float, margin: float
) -> None:
    decision = decided()
    threshold = Threshold(margin, 0.02)
    found = propose(
        decision,
        measured(decision, first, second),
        1e8,
        moving=Moving(restart_s=3600 * hours),
        threshold=threshold,
    )
    assert found.worthwhile == (
        found.moves
        and found.savings > (1 + margin) * found.moving_cost
        and found.savings > 0.02 * found.current_cost
    )
    assert found.savings >= -1e-9 * found.current_cost  # exact never comes to a dearer plan


def test_few_samples_are_not_worth_a_move() -> None:
    decision = decided()
    told = measured(decision, 1.0, 10.0)
    assert propose(decision, told, 1e8).worthwhile
    late = propose(decision, told, 1e4)
    assert late.moves
    assert not late.worthwhile
    assert "times the cost of moving" in late.reasons[-1]


def test_both_plans_are_expected_to_fall_behind_the_model_alike() -> None:
    decision = decided()
    on_paper = propose(decision, measured(decision, 1.0, 10.0), 1e8)
    slow = propose(decision, measured(decision, 1.0, 10.0, pace=20.0), 1e8)
    assert slow.overhead == pytest.approx(2.0)
    assert slow.current_cost == pytest.approx(2 * on_paper.current_cost)
    assert slow.proposed_cost == pytest.approx(2 * on_paper.proposed_cost)


def test_a_missed_floor_is_a_reason_of_its_own() -> None:
    decision = decided(2000.0)
    pace = decision.throughput / (0.8 * 2000.0)
    found = propose(decision, measured(decision, 1.0, 1.0, pace=pace), 1e8)
    assert found.worthwhile
    assert found.proposed.throughput / found.overhead >= 2000.0 * (1 - 1e-9)
    assert "the floor is 2,000" in found.reasons[-1]


def test_a_floor_missed_within_noise_adds_no_units() -> None:
    decision = decided(2000.0)
    pace = decision.throughput / (0.97 * 2000.0)
    found = propose(decision, measured(decision, 1.0, 1.0, pace=pace), 1e8, threshold=FREE)
    assert not found.worthwhile


def test_a_floor_that_no_plan_meets_is_said_and_nothing_proposed() -> None:
    top = decided().max_throughput
    decision = decided(0.99 * top)
    found = propose(decision, measured(decision, *[1.0] * len(decision.stages), pace=3.0), 1e8)
    assert not found.worthwhile
    assert found.proposed_cost == math.inf
    assert found.to_json()["proposed_cost"] is None
    assert found.reasons[-1].startswith("No other plan is proposed: ")


def test_pins_bind_the_new_plan_too() -> None:
    decision = replace(decided(pin={"l1": "gpu"}), pin={"l1": "gpu"})
    found = propose(decision, measured(decision, 1.0, 10.0))
    assert found.proposed.assignment[1] == "gpu"


def test_without_windows_enough_the_profile_stays() -> None:
    decision = decided()
    found = propose(decision, Measurement((Filtered(2), Filtered(3)), Filtered(3)))
    assert not found.worthwhile
    assert found.proposed.workload == decision.workload
    assert found.reasons[0] == "Too little was measured to change the profile (3 windows)."


def test_a_plan_that_was_not_the_best_is_left_without_any_measurement() -> None:
    greedy = plan(workload(*LAYERS, samples=1e9), OFFER, method="all-cpu")
    assert propose(greedy, Measurement()).worthwhile


def test_a_proposal_survives_its_message() -> None:
    decision = decided()
    found = propose(decision, measured(decision, 1.0, 10.0), 1e8)
    data = found.to_message().SerializeToString()
    assert Proposal.from_message(pb.Proposal.FromString(data)) == found


def test_bad_arguments_are_refused_by_name() -> None:
    decision = decided()
    with pytest.raises(InputError, match=r"remaining_samples: 0\.0: expected"):
        propose(decision, Measurement(), 0.0)
    with pytest.raises(InputError, match="decision: without workload"):
        propose(replace(decision, workload=None), Measurement())
    with pytest.raises(InputError, match="decision: there is no plan to compare with"):
        propose(decided(1e12), Measurement())
    with pytest.raises(InputError, match=r"moving\.save_s: -1: expected"):
        Moving(save_s=-1)
    with pytest.raises(InputError, match=r"threshold\.margin: nan: expected"):
        Threshold(margin=math.nan)
    with pytest.raises(InputError, match="method"):
        propose(decision, Measurement(), method="oracle")


def stepping(staleness: int, **other: Any) -> Decision:
    """A plan of two stages of a job that says what a step is."""
    told = {"batch": 1024, "staleness": staleness, **other}
    return plan(workload(*LAYERS, samples=1e9, **told), OFFER, 500.0, method="exact")


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_pipeline_that_fills_and_drains_as_predicted_has_no_overhead(staleness: int) -> None:
    decision = stepping(staleness)
    assert len(decision.stages) == 2
    found = propose(decision, measured(decision, 1.0, 1.0, pace=1.0), 1e8)
    assert found.overhead == pytest.approx(1.0, rel=1e-6)
    assert found.current.throughput == pytest.approx(decision.throughput)
    assert not found.worthwhile


def test_each_stage_is_corrected_by_its_own_time_and_the_rest_is_overhead() -> None:
    decision = stepping(0)
    slower = propose(decision, measured(decision, 1.0, 2.0, pace=0.0), 1e8)
    pace = decision.throughput / slower.current.throughput  # what the slower stage explains
    assert pace > 1.01
    found = propose(decision, measured(decision, 1.0, 2.0, pace=pace), 1e8)
    assert found.overhead == pytest.approx(1.0, rel=1e-6)
    again = found.proposed.workload
    before = decision.workload
    assert again is not None
    assert before is not None
    ratios = [
        new.cost[kind].compute_s / old.cost[kind].compute_s
        for new, old, kind in zip(again.layers, before.layers, decision.assignment, strict=True)
    ]
    assert ratios == pytest.approx([1.0, 2.0])
    late = propose(decision, measured(decision, 1.0, 2.0, pace=1.25 * pace), 1e8)
    assert late.overhead == pytest.approx(1.25, rel=1e-6)
    assert late.proposed.workload is not None
    assert late.proposed.workload.overhead == pytest.approx(0.2)
    if late.proposed.feasible and late.proposed.min_throughput:
        assert late.proposed.throughput >= late.proposed.min_throughput / 0.8 * (1 - 1e-9)


def test_what_a_workload_says_besides_costs_stays() -> None:
    base = workload(*LAYERS, samples=1e9)
    base["layers"][0] |= {"output_bytes": 8.0}
    decision = plan(base, OFFER, method="exact")
    found = propose(decision, measured(decision, 1.0, 3.0), 1e8)
    assert found.proposed.workload is not None
    assert found.proposed.workload.layers[0].output_bytes == 8.0
