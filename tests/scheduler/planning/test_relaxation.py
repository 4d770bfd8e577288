"""Where nothing is feasible: the least change of each kind, which works, and less does not."""

from dataclasses import replace

import pytest

from scheduler import Decision, Resources, load_resources, load_workload, plan
from scheduler.decision.record import Relaxation
from tests.scheduler.instances import EXAMPLE, cost, resources, workload

WORK = load_workload(EXAMPLE / "workload.yaml")
OFFER = load_resources(EXAMPLE / "resources.yaml")
# 100 samples take a second of a unit, so throughput is 100 times the units.
ROW = {"cpu": cost(1.0), "v100": cost(0.1)}
FILES = workload(ROW), resources(cpu=(0.1, 4), v100=(2.0, 2))


def by_key(decision: Decision) -> dict[str, Relaxation]:
    return {change.key: change for change in decision.relaxations}


def test_a_limit_is_raised_by_the_fewest_units() -> None:
    decision = plan(*FILES, 5000.0, "exact")
    assert not decision.feasible
    changes = by_key(decision)
    assert set(changes) == {"min_throughput", "limit.cpu", "limit.v100"}
    assert changes["min_throughput"].needed == pytest.approx(2000.0)
    assert (changes["limit.cpu"].current, changes["limit.cpu"].needed) == (4, 50)
    assert (changes["limit.v100"].current, changes["limit.v100"].needed) == (2, 5)
    costs = [change.cost for change in decision.relaxations]
    assert costs == sorted(costs)
    assert "The limit of " in decision.plan.reason
    assert "highest throughput that can be is 2,000" in decision.plan.reason
    for key in ("limit.cpu", "limit.v100"):
        kind, needed = key.removeprefix("limit."), int(changes[key].needed)
        offer = Resources.parse(FILES[1])

        def with_limit(limit: int, kind: str = kind, offer: Resources = offer) -> Decision:
            types = [replace(t, limit=limit) if t.name == kind else t for t in offer.types]
            return plan(FILES[0], Resources(tuple(types)), 5000.0, "exact")

        enough = with_limit(needed)
        assert enough.feasible
        assert enough.cost == pytest.approx(changes[key].cost)
        assert not with_limit(needed - 1).feasible


def test_a_cap_is_raised_to_the_least_price() -> None:
    decision = plan(*FILES, 1500.0, "exact", max_price_per_hour=3.0)
    assert not decision.feasible
    change = by_key(decision)["max_price_per_hour"]
    assert (change.current, change.needed) == (3.0, pytest.approx(4.0))
    assert plan(*FILES, 1500.0, "exact", max_price_per_hour=change.needed).feasible
    assert "for at most $3.00 an hour" in decision.plan.reason
    assert "the floor takes at least $4.00 an hour" in decision.plan.reason
    assert "highest throughput that can be is 1,000" in decision.plan.reason
    assert by_key(decision)["min_throughput"].needed == pytest.approx(1000.0)


def test_a_cap_below_everything_names_the_least_price() -> None:
    decision = plan(*FILES, method="exact", max_price_per_hour=0.05)
    assert not decision.feasible
    assert decision.plan.reason == "no plan costs at most $0.050 an hour; the least is $0.10"
    assert decision.max_throughput == 0


def test_allowing_a_type_is_one_of_the_changes() -> None:
    decision = plan(*FILES, 1500.0, "exact", exclude=["v100"])
    changes = by_key(decision)
    assert changes["allow.v100"].cost == pytest.approx(plan(*FILES, 1500.0, "exact").cost)
    assert changes["limit.cpu"].needed == 15
    first = decision.relaxations[0]
    assert any("The cheapest change with which a plan exists" in s for s in decision.reasons)
    named = [s for s in decision.reasons if "The cheapest change" in s]
    assert f"${first.cost:,.2f}" in named[0]


def test_lowering_the_floor_is_always_offered() -> None:
    decision = plan(WORK, OFFER, 9e6, "exact")
    change = by_key(decision)["min_throughput"]
    assert change.needed == pytest.approx(decision.max_throughput)
    assert plan(WORK, OFFER, change.needed, "exact").feasible


def test_what_memory_forbids_no_change_allows() -> None:
    decision = plan(
        workload({"cpu": cost(1.0, memory_bytes=101)}), resources(cpu=(1, 9)), 1.0, "exact"
    )
    assert decision.relaxations == ()


def test_a_feasible_decision_and_a_weak_method_have_none() -> None:
    assert plan(WORK, OFFER, 600_000.0, "exact").relaxations == ()
    weak = plan(WORK, OFFER, 600_000.0, "all-cpu")
    assert not weak.feasible
    assert weak.relaxations == ()
