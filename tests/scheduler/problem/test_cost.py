"""The cost model against figures worked out by hand."""

import math

import pytest

from scheduler import InputError
from scheduler import plan as plan_
from tests.scheduler.instances import cost, model, resources, workload


def test_two_stages_by_hand() -> None:
    problem = model(
        workload(
            {"cpu": cost(0.2, sync_s=0.05, transfer_s=0.1, parallel_compute=0.9)},
            {"cpu": cost(0.4, transfer_s=0.3, parallel_sync=0.5)},
            {"v100": cost(0.1, sync_s=0.04, transfer_s=9.0, parallel_compute=0.5)},
            ps_core_s=0.002,
        ),
        resources(cpu=(0.5, 50), v100=(2.0, 4)),
    )
    plan = problem.evaluate([0, 0, 1], [4, 2], floor=100.0)
    first, second = plan.stages
    # CT = (0.2 (0.1 + 0.9/4) + 0.4 / 4) / 100; DT = (0.05/4 + 0.3 (0.5 + 0.5/4)) / 100:
    # within a stage nothing is transferred, so l0's transfer_s does not count.
    assert first.compute_s == pytest.approx((0.065 + 0.1) / 100)
    assert first.transfer_s == pytest.approx((0.0125 + 0.1875) / 100)
    # The final stage transfers nothing.
    assert second.compute_s == pytest.approx(0.1 * (0.5 + 0.25) / 100)
    assert second.transfer_s == pytest.approx(0.04 / 2 / 100)
    assert plan.throughput == pytest.approx(500.0)
    assert (first.bottleneck, second.bottleneck) == (True, False)
    assert plan.ps_units == math.ceil(plan.throughput * 0.002)
    assert plan.price_per_hour == pytest.approx((4 + plan.ps_units) * 0.5 + 2 * 2.0)
    assert plan.cost == pytest.approx(3.6e6 / 500 / 3600 * plan.price_per_hour)
    assert plan.feasible


def test_one_unit_of_everything() -> None:
    problem = model(workload({"cpu": cost(1.0)}), resources(cpu=(0.04, 8)))
    plan = problem.evaluate([0], [1])
    assert plan.throughput == pytest.approx(100.0)
    assert plan.cost == pytest.approx(3.6e6 / 100 / 3600 * 0.04)


def test_ps_cores_count_against_the_limit_of_their_type() -> None:
    problem = model(workload({"cpu": cost(1.0)}, ps_core_s=0.01), resources(cpu=(0.04, 8)))
    assert problem.evaluate([0], [4]).ps_units == 4
    assert problem.evaluate([0], [4]).feasible
    over = problem.evaluate([0], [5])
    assert not over.feasible
    assert over.reason == "10 units of cpu, limit 8"


def test_servers_have_all_cores_of_their_units() -> None:
    work = workload({"cpu4": cost(1.0)}, ps_type="cpu4", ps_core_s=0.01, threads={"cpu4": 4})
    offer = resources(cpu4=(0.16, 8))
    offer["types"][0]["threads"] = 4
    problem = model(work, offer)
    for units, servers in ((1, 1), (4, 1), (5, 2)):
        plan = problem.evaluate([0], [units])
        assert plan.throughput == pytest.approx(100.0 * units)
        assert plan.ps_units == servers == math.ceil(plan.throughput * 0.01 / 4)
        assert plan.price_per_hour == pytest.approx(0.16 * (units + servers))
        assert [stage.threads for stage in plan.stages] == [4]
    for method in ("exact", "greedy"):  # 8 units for 600 cost less a sample than 7 for 500
        decision = plan_(work, offer, min_throughput=500, method=method)
        assert (decision.stages[0].units, decision.plan.ps_units) == (6, 2)


def test_floor_memory_and_barred_types_are_reasons() -> None:
    problem = model(
        workload({"cpu": cost(1.0, memory_bytes=60)}, {"cpu": cost(1.0, memory_bytes=60)}),
        resources(cpu=(0.04, 8), v100=(2.0, 1)),
    )
    assert "need 120 bytes" in problem.evaluate([0, 0], [1]).reason
    assert "may not run on v100" in problem.evaluate([0, 1], [1, 1]).reason
    problem = model(workload({"cpu": cost(1.0)}), resources(cpu=(0.04, 8)))
    assert "the floor is 200" in problem.evaluate([0], [1], floor=200.0).reason
    assert problem.evaluate([0], [2], floor=200.0).feasible


def test_stages_of_one_type_share_its_limit() -> None:
    row = {"cpu": cost(1.0), "v100": cost(1.0)}
    problem = model(workload(row, row, row), resources(cpu=(0.04, 3), v100=(2.0, 1)))
    assert problem.evaluate([0, 1, 0], [1, 1, 2]).feasible
    assert problem.evaluate([0, 1, 0], [2, 1, 2]).reason == "4 units of cpu, limit 3"


def test_pins() -> None:
    row = {"cpu": cost(1.0), "v100": cost(1.0)}
    files = workload(row, row), resources(cpu=(0.04, 3), v100=(2.0, 1))
    assert model(*files, pin={"l1": "v100"}).allowed.tolist() == [[True, True], [False, True]]
    assert model(*files, pin=["cpu", "v100"]).allowed.tolist() == [[True, False], [False, True]]
    with pytest.raises(InputError, match=r"pin: 'l3'.*did you mean 'l"):
        model(*files, pin={"l3": "cpu"})
    with pytest.raises(InputError, match=r"pin.l1: 'v10'.*did you mean 'v100'"):
        model(*files, pin={"l1": "v10"})
    with pytest.raises(InputError, match=r"one type for each of the 2 layers"):
        model(*files, pin=["cpu"])


@pytest.mark.parametrize("staleness", [None, 0, 1])
@pytest.mark.parametrize("method", ["exact", "ppo", "greedy", "annealing"])
def test_a_layer_that_is_alone_has_a_stage_of_one_unit(method: str, staleness: int | None) -> None:
    """Whose time no other unit shortens: the others have as many as keep up with it."""
    work = workload({"cpu": cost(4.0)}, {"gpu": cost(1.0)}, {"cpu": cost(4.0)})
    work["layers"][1]["alone"] = True
    if staleness is not None:
        work |= {"staleness": staleness, "micro_batches": 64, "batch": 640}
    offer = resources(cpu=(1.0, 16), gpu=(1.0, 8))
    found = plan_(work, offer, method=method)
    assert [stage.units for stage in found.stages][1] == 1
    assert max(stage.units for stage in found.stages) > 1
    assert found.throughput <= 100 * (1 + 1e-9)
    beyond = plan_(work, offer, 120.0, method=method)
    assert not beyond.feasible
    problem = model(work, offer)
    refused = problem.evaluate([0, 1, 0], [4, 2, 4])
    assert not refused.feasible
    assert "'l1' to 'l1' have 2 units, and use 1: 'l1' changes a buffer" in refused.reason
    work["layers"][1]["alone"] = False
    assert plan_(work, offer, 120.0, method=method).feasible
