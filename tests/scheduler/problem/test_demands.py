"""Demands on a plan: floor, deadline, cap, pins, exclusions, and what is refused."""

from typing import Any

import pytest

from scheduler import InputError, load_resources, load_workload, plan
from scheduler.decision.provenance import input_hash
from scheduler.problem.demands import Demands, hours_of
from tests.scheduler.instances import EXAMPLE, cost, resources, workload

WORK = load_workload(EXAMPLE / "workload.yaml")
OFFER = load_resources(EXAMPLE / "resources.yaml")
FLOOR = 600_000.0


@pytest.mark.parametrize(
    ("text", "hours"),
    [("90m", 1.5), ("2h", 2), ("1.5d", 36), ("45s", 0.0125), ("30 min", 0.5), ("3", 3), (2.5, 2.5)],
)
def test_times(text: str | float, hours: float) -> None:
    assert hours_of("finish_by", text) == pytest.approx(hours)


@pytest.mark.parametrize("text", ["0h", "0", "soon", "-2h", "1e3h", "h", "", "2 weeks", 0, -1])
def test_times_that_are_none(text: str | float) -> None:
    with pytest.raises(InputError, match=r"finish_by: .* expected hours, a finite number above 0"):
        hours_of("finish_by", text)


def test_a_deadline_is_a_floor() -> None:
    decision = plan(WORK, OFFER, method="exact", finish_by="20m")
    assert decision.min_throughput == pytest.approx(WORK.samples / 1200)
    assert WORK.samples / decision.throughput <= 1200 * (1 + 1e-9)
    assert any("(to finish in 20 min)" in line for line in decision.reasons)
    # The stricter of the two holds.
    slower = plan(WORK, OFFER, FLOOR * 2, "exact", finish_by=10)
    assert slower.min_throughput == FLOOR * 2


def test_a_cap_that_does_not_bind_changes_nothing() -> None:
    free = plan(WORK, OFFER, FLOOR, "exact")
    capped = plan(WORK, OFFER, FLOOR, "exact", max_price_per_hour=free.plan.price_per_hour + 1)
    assert capped.stages == free.stages
    assert capped.max_price_per_hour == free.plan.price_per_hour + 1
    assert any("an hour is kept with $1.00 to spare" in line for line in capped.reasons)


def test_a_cap_that_binds_makes_a_plan_under_it() -> None:
    free = plan(WORK, OFFER, FLOOR, "exact")
    cap = free.plan.price_per_hour - 0.5
    capped = plan(WORK, OFFER, FLOOR, "exact", max_price_per_hour=cap)
    assert capped.feasible
    assert capped.plan.price_per_hour <= cap
    assert capped.cost > free.cost
    assert capped.throughput >= FLOOR


def test_excluded_types_run_no_layer_but_may_serve_parameters() -> None:
    decision = plan(WORK, OFFER, FLOOR, "exact", exclude=["t4", "t4"])
    assert "t4" not in decision.assignment
    assert decision.excluded == ("t4",)
    row = {"cpu": cost(1.0), "v100": cost(0.1)}
    files = workload(row, ps_core_s=1e-3), resources(cpu=(0.04, 9), v100=(2.42, 9))
    served = plan(*files, method="exact", exclude=["cpu"])
    assert served.assignment == ("v100",)
    assert served.plan.ps_units >= 1


@pytest.mark.parametrize("method", ["exact", "greedy", "all-cpu", "best"])
def test_a_layer_that_all_is_excluded_for_is_named(method: str) -> None:
    decision = plan(WORK, OFFER, FLOOR, method, exclude=["cpu"])
    assert not decision.feasible
    assert "'user_embedding', 'item_embedding' may run on cpu alone, which is excluded" in (
        decision.plan.reason
    )
    assert [change.key for change in decision.relaxations] == ["allow.cpu"]
    assert len(decision.assignment) == len(WORK.layers)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"min_throughput": float("inf")}, "min_throughput: inf: expected samples/s, a finite"),
        ({"min_throughput": 1e300}, "min_throughput: 1e+300: expected samples/s, a finite number"),
        ({"max_price_per_hour": 0}, "max_price_per_hour: 0: expected dollars an hour, a finite"),
        ({"max_price_per_hour": -2.0}, "max_price_per_hour: -2.0: expected dollars an hour"),
        ({"max_price_per_hour": float("nan")}, "max_price_per_hour: nan: expected dollars"),
        ({"max_price_per_hour": float("inf")}, "max_price_per_hour: inf: expected dollars"),
        ({"max_price_per_hour": True}, "max_price_per_hour: True: expected dollars"),
        ({"finish_by": 0}, "finish_by: 0: expected hours"),
        ({"finish_by": "tomorrow"}, "finish_by: 'tomorrow': expected hours"),
        ({"finish_by": 1e-320}, "finish_by: 1e-320: expected a time"),
        ({"finish_by": 1e-200}, "finish_by: 1e-200: expected a time"),
        ({"exclude": ["t5"]}, "exclude: 't5': expected a type on offer; did you mean 't4'?"),
        ({"exclude": "t4"}, "exclude: 't4': expected a list of types"),
        ({"pin": ["cpu"]}, "pin: ['cpu']: expected one type for each of the 10 layers"),
        ({"pin": {"loss": "t4"}, "exclude": ["t4"]}, "pin.loss: 't4': expected a type that may"),
        ({"finetune": -1}, "finetune: -1: expected a finite number of at least 0"),
        ({"finetune": float("inf")}, "finetune: inf: expected a finite number"),
    ],
)
def test_bad_demands_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        plan(WORK, OFFER, **{"method": "greedy", **arguments})
    assert says in str(error.value)


def test_a_decision_gives_its_demands_back() -> None:
    decision = plan(
        WORK,
        OFFER,
        FLOOR,
        "exact",
        pin={"loss": "cpu"},
        exclude=["t4"],
        max_price_per_hour=30,
        finish_by=1,
    )
    kept = decision.demands
    assert kept == Demands(FLOOR, 30.0, {"loss": "cpu"}, ("t4",), finish_by=1.0)
    again = kept.model(WORK, OFFER)
    assert again.max_price == 30.0
    assert input_hash(WORK, OFFER, kept) == decision.input_hash


def test_the_hash_is_of_the_question_alone() -> None:
    first = plan(WORK, OFFER, FLOOR, "exact")
    same = plan(WORK.to_json(), OFFER.to_message(), FLOOR, "greedy", seed=3)
    assert first.input_hash == same.input_hash
    assert len(first.input_hash) == 64
    others = [
        plan(WORK, OFFER, FLOOR + 1, "greedy"),
        plan(WORK, OFFER, FLOOR, "greedy", max_price_per_hour=99),
        plan(WORK, OFFER, FLOOR, "greedy", exclude=["t4"]),
        plan(WORK, OFFER, FLOOR, "greedy", pin={"loss": "cpu"}),
    ]
    assert len({first.input_hash, *(other.input_hash for other in others)}) == 5
    assert {"heterps", "python", "numpy"} <= first.versions.keys()
    assert first.created_at > 1.7e9
