"""How a measurement changes a profile: what it tells of which layer, and what it leaves alone."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import Decision, plan
from scheduler.problem.cost import CostModel
from scheduler.problem.workload import Workload
from scheduler.replanning.calibrate import INHERITED, Calibration, calibrate
from scheduler.replanning.measure import MIN_WINDOWS, Filtered, Measurement
from tests.scheduler.instances import cost, resources, workload

OFFER = resources(cpu=(0.05, 64), gpu=(2.0, 8))


def decided(*layers: dict[str, Any], offer: dict[str, Any] = OFFER, **pin: str) -> Decision:
    return plan(workload(*layers), offer, method="exact", pin=pin or None)


def ran(decision: Decision, *busy: float, pace: float = 0.0, windows: int = 9) -> Calibration:
    """Measured `busy` times the predicted computing of each stage, and `pace` in s a sample."""
    times = (
        Filtered(windows, factor * stage.compute_s)
        for factor, stage in zip(busy, decision.stages, strict=False)
    )
    measurement = Measurement(tuple(times), Filtered(windows, pace))
    assert decision.workload is not None
    assert decision.resources is not None
    return calibrate(decision.workload, decision.resources, decision.stages, measurement)


def stages_now(decision: Decision, workload: Workload) -> list[tuple[float, float]]:
    """CT and DT of the decision's stages with the figures of `workload`."""
    assert decision.resources is not None
    model = CostModel(workload, decision.resources)
    found = model.evaluate(
        [model.types.index(kind) for kind in decision.assignment],
        [stage.units for stage in decision.stages],
    )
    return [(stage.compute_s, stage.transfer_s) for stage in found.stages]


def test_what_a_stage_is_busy_with_for_others_is_not_its_layers() -> None:
    """Micro-batches of 25 samples, each 0.5 s of a worker's for either neighbour, and of each
    sample 0.01 s between the first two and 0.03 s between the last two."""
    rows = {"cpu": cost(0.4)}, {"gpu": cost(0.9)}, {"cpu": cost(0.4)}
    given = workload(*rows, handling_s=0.5, batch=100, micro_batches=4, staleness=1)
    given["layers"][0]["passing_s"], given["layers"][1]["passing_s"] = 0.01, 0.03
    decision = plan(given, resources(cpu=(0.05, 2), gpu=(2.0, 1)), method="exact")
    first, second, last = decision.stages
    assert (first.units, second.units, last.units) == (1, 1, 1)
    each_s = 0.5 / 25
    busy = (
        first.compute_s + each_s + 0.01,
        2 * second.compute_s,
        3 * last.compute_s + each_s + 0.03,
    )
    measurement = Measurement(tuple(Filtered(9, one) for one in busy), Filtered(9, 0.0))
    assert decision.workload is not None
    assert decision.resources is not None
    found = calibrate(
        decision.workload, decision.resources, decision.stages, measurement, micro_batches=4
    )
    # On a type that is no CPU, what its core is busy with is not what the device is.
    assert [ratio.compute for ratio in found.ratios] == pytest.approx([1.0, 2.0, 3.0])


TWO = ({"cpu": cost(0.4)}, {"gpu": cost(0.9, sync_s=0.1)}, {"gpu": cost(0.1), "cpu": cost(5.0)})


@cache
def two() -> Decision:
    return decided(*TWO, l2="gpu")


@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_each_stage_computes_as_long_as_it_was_measured_to(first: float, second: float) -> None:
    decision = two()
    known = ran(decision, first, second)
    before = [(stage.compute_s, stage.transfer_s) for stage in decision.stages]
    now = stages_now(decision, known.workload)
    assert [ct for ct, _ in now] == pytest.approx([first * before[0][0], second * before[1][0]])
    assert [dt for _, dt in now] == pytest.approx([dt for _, dt in before])
    assert [ratio.compute for ratio in known.ratios] == pytest.approx([first, second])


def test_nothing_else_changes() -> None:
    decision = decided(*TWO, l2="gpu")
    known = ran(decision, 3.0, 1.0)
    assert decision.workload is not None
    before, after = decision.workload, known.workload
    assert after.layers[0].cost["cpu"].compute_s == pytest.approx(3 * 0.4)
    assert after.layers[1].cost["gpu"].compute_s == pytest.approx(0.9)
    assert after.layers[2].cost["cpu"] == before.layers[2].cost["cpu"]
    scaled = replace(before.layers[0].cost["cpu"], compute_s=after.layers[0].cost["cpu"].compute_s)
    assert after.layers[0].cost["cpu"] == scaled
    assert replace(after, layers=before.layers) == before


def test_too_few_windows_change_nothing() -> None:
    decision = decided(*TWO)
    known = ran(decision, *[3.0] * len(decision.stages), pace=1.0, windows=MIN_WINDOWS - 1)
    assert known.workload == decision.workload
    assert not known.learned


def test_a_measurement_as_predicted_changes_no_figure() -> None:
    decision = decided(*TWO, l2="gpu")
    known = ran(decision, 1.0, 1.0, pace=1 / decision.throughput)
    for now, stage in zip(stages_now(decision, known.workload), decision.stages, strict=True):
        assert now == pytest.approx((stage.compute_s, stage.transfer_s))


SLOW_LINE = ({"cpu": cost(0.1, sync_s=0.8, transfer_s=0.4)}, {"gpu": cost(0.2)})


def test_the_pace_is_the_communication_of_the_stage_it_was_to_bound() -> None:
    decision = decided(*SLOW_LINE)
    stage = decision.stages[0]
    known = ran(decision, 1.0, 1.0, pace=2.5 * stage.transfer_s)
    assert known.ratios[0].communication == pytest.approx(2.5)
    assert known.ratios[1].communication is None
    assert stages_now(decision, known.workload)[0][1] == pytest.approx(2.5 * stage.transfer_s)
    cost_now = known.workload.layers[0].cost["cpu"]
    assert (cost_now.sync_s, cost_now.transfer_s) == pytest.approx((2.0, 1.0))


def test_computing_that_explains_the_pace_leaves_communication_alone() -> None:
    decision = decided(*SLOW_LINE)
    slow = 4 * decision.stages[0].transfer_s
    known = ran(decision, 1.0, slow / decision.stages[1].compute_s, pace=slow)
    assert [ratio.communication for ratio in known.ratios] == [None, None]


def test_no_stage_communicates_longer_than_the_pace() -> None:
    decision = decided(*SLOW_LINE)
    stage = decision.stages[0]
    computing = 0.5 * stage.transfer_s / decision.stages[1].compute_s
    known = ran(decision, 1.0, computing, pace=0.5 * stage.transfer_s)
    assert known.ratios[0].communication == pytest.approx(0.5)


def estimates(*names: str, **costs: dict[str, Any]) -> dict[str, Any]:
    return {name: {**one, "estimated": name in names} for name, one in costs.items()}


def test_what_was_measured_is_marked_so_and_its_type_inherits_a_part() -> None:
    decision = decided(
        estimates("gpu", gpu=cost(1.0)),
        estimates("gpu", gpu=cost(1.0), cpu=cost(0.5)),
        estimates(gpu=cost(1.0), cpu=cost(0.5)),
        estimates("cpu", cpu=cost(0.5)),
        l1="cpu",
        l2="cpu",
    )
    known = ran(decision, 4.0, 1.0)
    gpu = [layer.cost.get("gpu") for layer in known.workload.layers]
    cpu = [layer.cost.get("cpu") for layer in known.workload.layers]
    assert gpu[0] is not None
    assert gpu[1] is not None
    assert gpu[2] is not None
    assert (gpu[0].compute_s, gpu[0].estimated) == (pytest.approx(4.0), False)
    assert (gpu[1].compute_s, gpu[1].estimated) == (pytest.approx(4.0**INHERITED), True)
    assert (gpu[2].compute_s, gpu[2].estimated) == (1.0, False)  # it was measured: it stays
    assert cpu[3] is not None
    assert not cpu[3].estimated


def test_measured_figures_that_were_wrong_say_nothing_about_estimates() -> None:
    decision = decided(
        estimates(gpu=cost(1.0)), estimates("gpu", gpu=cost(1.0), cpu=cost(0.5)), l1="cpu"
    )
    known = ran(decision, 4.0)
    assert known.workload.layers[1].cost["gpu"].compute_s == 1.0


def test_a_stage_bound_by_what_was_not_measured_stays_an_estimate() -> None:
    line = {**cost(0.1, sync_s=0.8), "estimated": True}
    decision = decided({"cpu": line}, {"gpu": cost(0.2)})
    without, with_pace = ran(decision, 2.0, 1.0), ran(decision, 2.0, 1.0, pace=1.0)
    assert without.workload.layers[0].cost["cpu"].estimated
    assert not with_pace.workload.layers[0].cost["cpu"].estimated


def test_an_emulated_type_teaches_nothing() -> None:
    offer = resources(cpu=(0.05, 64), gpu=(2.0, 8))
    offer["types"][1]["emulated"] = True
    decision = decided(*TWO, offer=offer, l2="gpu")
    known = ran(decision, 2.0, 30.0, pace=100.0)
    assert known.pace_s is None
    assert known.ratios[1].compute is None
    assert known.workload.layers[1] == decision.workload.layers[1]  # type: ignore[union-attr]
    assert known.workload.layers[0].cost["cpu"].compute_s == pytest.approx(0.8)
