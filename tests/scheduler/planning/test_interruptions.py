"""Units that are taken away: what it costs, against every plan tried by a reference of its own."""

import math
from dataclasses import replace

import pytest

from bench.spot.coupled import Spot, cheapest, drawn, priced
from scheduler import plan
from scheduler.decision.record import Decision
from tests.scheduler.instances import cost, resources, workload


def solved(problem: Spot, method: str = "exact") -> Decision:
    return plan(problem.workload, problem.resources, problem.floor or None, method)


def check(problem: Spot, decision: Decision) -> float:
    """By how much it costs more than the cheapest of all plans; none where there is no plan."""
    best = cheapest(problem)
    if best is None:
        assert not decision.feasible
        return 0.0
    assert decision.feasible, decision.plan.reason
    stages = [(s.type, s.last - s.first + 1, s.units) for s in decision.stages]
    own = priced(problem, stages)
    assert own is not None
    assert decision.cost == pytest.approx(own[0], rel=1e-9)
    assert decision.plan.sustained == pytest.approx(own[1], rel=1e-9)
    assert decision.lower_bound <= best[0] * (1 + 1e-9)
    assert decision.cost >= best[0] * (1 - 1e-9)
    if decision.proven:
        assert decision.cost == pytest.approx(best[0], rel=1e-8)
    return decision.cost / best[0] - 1


def test_no_bound_is_above_and_no_plan_below_the_cheapest_of_all() -> None:
    over = [check(problem, solved(problem)) for problem in map(drawn, range(12))]
    assert max(over) < 0.05


def test_a_floor_that_only_some_of_the_unsure_types_keep_is_kept() -> None:
    """The fastest units are lost too often: a plan with the others is found."""
    assert check(drawn(1203), solved(drawn(1203))) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.exhaustive
def test_no_bound_is_above_the_cheapest_of_many_problems() -> None:
    over = [check(problem, solved(problem)) for problem in map(drawn, range(1000, 1300))]
    assert sum(over) / len(over) < 0.002


def test_every_unit_of_a_plan_waits_for_the_one_that_was_taken() -> None:
    kind = {"price_per_hour": 1.0, "limit": 8, "memory_bytes": 1.0}
    spot = {**kind, "interruptions_per_hour": 0.5, "recovery_s": 360.0, "restart_s": 720.0}
    cost = {"compute_s": 1.0, "sync_s": 0.0, "transfer_s": 0.0}
    full = {**cost, "parallel_compute": 1.0, "parallel_sync": 1.0, "memory_bytes": 0.0}
    work = {
        "name": "two",
        "reference_batch": 1,
        "samples": 14400,
        "layers": [{"name": "a", "cost": {"sure": full}}, {"name": "b", "cost": {"spot": full}}],
    }
    offer = {"types": [{"name": "sure", **kind}, {"name": "spot", **spot}]}
    one = plan(work, offer, None, "exact", exclude=[])
    # At any width a sample costs the same but for interruptions; of one unit they take longest.
    assert [stage.units for stage in one.stages] in ([2, 2], [1, 1])
    two = plan(work, offer, 1.8, "exact")
    assert [stage.units for stage in two.stages] == [2, 2]
    # Two units, each taken away half a time an hour, and each time a tenth of an hour is lost.
    assert two.plan.lost_share == pytest.approx(2 * 0.5 * 0.1)
    assert two.plan.price_per_hour == pytest.approx(4.0)
    assert two.throughput == pytest.approx(2.0)
    assert two.cost == pytest.approx(4.0 * 14400 / 2 / 3600 * 1.1)
    assert two.plan.sustained >= 1.8
    text = " ".join(two.reasons)
    assert "A unit of spot is interrupted 0.5 times an hour" in text
    assert "Interruptions add 10.00% to time and cost" in text
    again = Decision.from_message(two.to_message())
    assert again.plan == two.plan
    assert Decision.from_json(two.to_json(inputs=True)).plan == two.plan


def test_without_interruptions_nothing_of_them_is_said() -> None:
    problem = drawn(3)
    kinds = [
        {k: v for k, v in kind.items() if k not in ("interruptions_per_hour", "recovery_s")}
        for kind in problem.resources["types"]
    ]
    for kind in kinds:
        kind.pop("restart_s", None)
    decision = solved(replace(problem, resources={"types": kinds}))
    assert decision.plan.lost_share == 0
    assert "lost_share" not in decision.to_json()
    assert not any("interrupt" in reason.lower() for reason in decision.reasons)


def test_a_deadline_needs_units_that_stay() -> None:
    layer = {"cpu": cost(1.0), "spot": cost(1.0)}
    offer = resources(cpu=(1.0, 10), spot=(0.1, 40))
    offer["types"][1].update(interruptions_per_hour=0.5, recovery_s=1.0)
    work = workload(layer)  # 3.6 M samples, of which 10 cores do 1,000 a second

    def within(hours: float) -> Decision:
        return plan(work, offer, None, "exact", finish_by=hours)

    assert within(1.2).assignment == ("spot",)
    # Those that stay are fast enough, but not to make up for anything.
    close = within(1.05)
    assert close.assignment == ("cpu",)
    assert "with 10% to spare" in close.reasons[-1]
    hurried = within(0.9)
    assert plan(work, offer, 3.6e6 / 0.9 / 3600, "exact").feasible
    assert not hurried.feasible
    assert hurried.plan.reason.startswith("finish_by: units that are never taken away")
    assert math.isinf(hurried.gap)
