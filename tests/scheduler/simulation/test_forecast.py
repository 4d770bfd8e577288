"""A decided plan simulated: its promise first, then what that leaves out."""

import json

import pytest

from scheduler import forecast, load_resources, load_workload, plan
from scheduler.problem.fields import InputError
from scheduler.replanning.measure import Measurement
from scheduler.replanning.replan import propose
from tests.scheduler.instances import EXAMPLE, cost, resources, workload

_OFFER = resources(cpu=(1.0, 12), t4=(3.0, 6))
_ROWS = (
    {
        "cpu": cost(0.4, transfer_s=0.01, delay_s=0.02),
        "t4": cost(2.0, transfer_s=0.01, delay_s=0.02),
    },
    {"cpu": cost(2.0, sync_s=0.02), "t4": cost(0.3, sync_s=0.02)},
)


def _decided(staleness: int | None, micro_batches: int = 0, **other: object):
    size = {"batch": 800, "micro_batches": micro_batches} if staleness is not None else {}
    said = {"staleness": staleness} if staleness is not None else {}
    said |= {"crossing_s": 0.004, "handling_s": 0.001}
    return plan(workload(*_ROWS, **size, **said, **other), _OFFER, 600.0, "exact")


@pytest.mark.parametrize("micro_batches", [0, 8])
def test_without_staleness_the_promise_is_the_simulation(micro_batches: int) -> None:
    decision = _decided(0, micro_batches)
    assert len(decision.stages) == 2
    found = forecast(decision)
    priced = found.scenarios[0]
    assert priced.key == "priced"
    assert priced.throughput == pytest.approx(decision.throughput)
    assert not found.assumed
    assert found.micro_batches == decision.plan.micro_batches


def test_with_staleness_the_promise_is_kept_nearly() -> None:
    decision = _decided(1)
    priced = forecast(decision).scenarios[0]
    assert 0.98 <= priced.throughput / decision.throughput <= 1.001


def test_stages_that_are_cut_for_what_is_in_flight_stay_cut() -> None:
    """Both layers would fit a unit, but for what a loss of whole batches has it keep."""
    steps = {"batch": 100, "micro_batches": 4, "staleness": 1, "whole_batch": True}
    work = workload({"cpu": cost(1.0)}, {"cpu": cost(1.0)}, **steps)
    for layer in work["layers"]:
        layer["activation_bytes"] = 0.4
    decision = plan(work, resources(cpu=(1.0, 2)), method="exact")
    assert [stage.memory_bytes for stage in decision.stages] == pytest.approx([80.0, 80.0])
    priced = forecast(decision).scenarios[0]
    assert priced.throughput == pytest.approx(decision.throughput, rel=0.01)
    assert propose(decision, Measurement()).current.throughput == pytest.approx(decision.throughput)


def test_steps_are_made_up_where_nothing_is_said_of_them() -> None:
    found = forecast(_decided(None))
    assert found.assumed
    assert found.staleness == 1
    assert 0.97 <= found.scenarios[0].kept <= 1.001


def test_each_thing_costs_what_it_may() -> None:
    found = forecast(_decided(1, ps_core_s=0.002, ps_type="cpu"))
    kept = {row.key: row.throughput for row in found.scenarios}
    assert list(kept) == ["priced", "shards", "varied", "slow"]
    assert kept["slow"] < 0.75 * kept["varied"]  # a worker at half speed is what all wait for
    assert kept["varied"] <= kept["shards"] * 1.001 <= kept["priced"] * 1.002
    for row in found.scenarios:
        assert sum(row.spent.values()) == pytest.approx(1.0)
        assert row.late_s >= row.step_s > 0
    assert found.interruptions is None


def test_interruptions_cost_their_wait_and_the_steps_under_way() -> None:
    offer = resources(cpu=(1.0, 12), t4=(3.0, 6))
    for kind in offer["types"]:
        kind |= {"interruptions_per_hour": 0.5, "recovery_s": 30.0, "restart_s": 90.0}
    work = workload(*_ROWS, batch=800, micro_batches=8, staleness=0)
    decision = plan(work, offer, 600.0, "exact")
    found = forecast(decision)
    lost, last = found.interruptions, found.scenarios[-1]
    units = sum(stage.units for stage in decision.stages)
    assert lost.per_hour == pytest.approx(0.5 * units)
    alone = any(stage.units == 1 for stage in decision.stages)
    assert 30 < lost.lost_s < (90 if alone else 30) + 4 * found.scenarios[0].late_s
    assert lost.share == pytest.approx(lost.per_hour * lost.lost_s / 3600)
    # By the cost model the wait alone counts.
    assert decision.plan.lost_share <= lost.share <= 1.3 * decision.plan.lost_share
    varied = next(row for row in found.scenarios if row.key == "varied")
    assert last.throughput == pytest.approx(varied.throughput / (1 + lost.share))
    assert last.spent["lost"] == pytest.approx(lost.share / (1 + lost.share))


def test_the_example_runs_and_is_plain_values() -> None:
    files = EXAMPLE / "workload.yaml", EXAMPLE / "resources.yaml"
    decision = plan(load_workload(files[0]), load_resources(files[1]), 600_000.0, "exact")
    found = forecast(decision)
    assert json.loads(json.dumps(found.to_json()))["scenarios"][0]["key"] == "priced"
    assert found.scenarios[0].kept > 0.97
    assert found.to_json() == forecast(decision).to_json()


def test_without_a_plan_there_is_nothing_to_simulate() -> None:
    layer = {"cpu": cost(1.0, memory_bytes=1e12)}
    assert forecast(plan(workload(layer), resources(cpu=(1.0, 2)), None, "exact")) is None


def test_a_decision_without_inputs_is_refused() -> None:
    from scheduler import Decision

    bare = Decision.from_json(_decided(1).to_json())
    with pytest.raises(InputError, match="no workload or resources"):
        forecast(bare)
