"""The sentences that explain a decision carry the cost model's own figures."""

import pytest

from scheduler import load_resources, load_workload, plan, reasons
from scheduler.problem.wording import hours_text, money_text, rate_text
from tests.scheduler.instances import EXAMPLE, cost, resources, workload

WORK = load_workload(EXAMPLE / "workload.yaml")
OFFER = load_resources(EXAMPLE / "resources.yaml")


def test_example() -> None:
    decision = plan(WORK, OFFER, 600_000.0, "exact")
    text = "\n".join(decision.reasons)
    assert list(decision.reasons) == reasons(decision, WORK, OFFER)
    assert "4 stages train 1,000,000,000 samples at 1,092,979 samples/s" in text
    assert "The bottleneck is " in text
    assert "'user_embedding' may run nowhere else" in text
    assert "The parameter server needs 5 units of cpu" in text
    assert "No plan costs less: the lower bound is $2.41 too." in text
    assert "were measured" in text
    assert all(sentence.endswith(".") for sentence in decision.reasons)


def test_a_move_costs_what_planning_it_costs() -> None:
    row = {"cpu": cost(1.0, parallel_compute=0.99), "v100": cost(0.05, parallel_compute=0.99)}
    files = workload(row), resources(cpu=(0.04, 99), v100=(2.42, 9))
    decision = plan(*files, 500.0, "exact")
    other = plan(*files, 500.0, "exact", pin=["cpu" if decision.assignment[0] != "cpu" else "v100"])
    change = other.cost / decision.cost - 1
    assert any(
        f"would cost ${other.cost:.2f} instead of ${decision.cost:.2f} ({change:+.1%})" in line
        for line in decision.reasons
    )


def test_floor_that_binds_and_one_that_does_not() -> None:
    assert any("samples/s binds" in line for line in plan(WORK, OFFER, 2e6, "exact").reasons)
    slack = plan(WORK, OFFER, 1000.0, "exact").reasons
    assert any("does not bind" in line for line in slack)
    assert any("No floor was set" in line for line in plan(WORK, OFFER, None, "exact").reasons)


def test_communication_bottleneck_estimates_and_used_up_limits() -> None:
    row = {"cpu": {**cost(0.1, sync_s=0.4), "estimated": True}}
    decision = plan(workload(row), resources(cpu=(0.04, 2)), 500.0, "exact")
    text = "\n".join(decision.reasons)
    assert "of communication" in text
    assert "0 of 1 layers were measured on their types; estimated from data sheets: 'l0'" in text
    assert "All 2 units of cpu on offer are used." in text


def test_infeasible_starts_with_why() -> None:
    decision = plan(WORK, OFFER, 9e6, "exact")
    assert decision.reasons[0].startswith("no plan reaches 9,000,000 samples/s")


@pytest.mark.parametrize("method", ["all-gpu", "greedy"])
def test_what_would_be_cheaper_is_said(method: str) -> None:
    decision = plan(WORK, OFFER, 600_000.0, method)
    assert any("exact found $2.41" in line for line in decision.reasons)


def test_one_stage_trains_and_one_layer_is_measured() -> None:
    decision = plan(workload({"cpu": cost(1.0)}), resources(cpu=(0.04, 3)), 250.0, "exact")
    assert decision.reasons[0].startswith("1 stage trains 3,600,000 samples at 300 samples/s in ")
    assert "The figures of the only layer on its type were measured." in decision.reasons


def test_a_stage_that_can_move_nowhere_says_what_fails_on_each_type() -> None:
    kinds = ("cpu", "t4", "l4", "a10", "v100")
    row = {kind: cost(1.0) for kind in kinds}
    offer = resources(cpu=(0.04, 9), t4=(0.4, 1), l4=(0.7, 1), a10=(1.0, 1), v100=(2.4, 1))
    decision = plan(workload(row), offer, 900.0, "exact")
    said = next(line for line in decision.reasons if line.startswith("'l0' on cpu"))
    assert said.count("the plan fails") == 2
    assert said.endswith("so does it on a10, v100.")


def test_explaining_again_says_the_same_under_the_same_demands() -> None:
    demands = {"pin": {"loss": "t4"}, "exclude": ["v100"], "max_price_per_hour": 20.0}
    decision = plan(WORK, OFFER, 300_000.0, "exact", **demands)
    assert reasons(decision, WORK, OFFER) == list(decision.reasons)
    assert not any("to v100" in line for line in decision.reasons)


def test_figures_never_promise_too_much() -> None:
    assert rate_text(1999.99, down=True) == "1,999"
    assert rate_text(2000.0, down=True) == "2,000"
    assert rate_text(12.3456) == "12.35"
    assert rate_text(0.5) == "0.5"
    assert rate_text(1e9) == "1,000,000,000"
    assert money_text(7.751, up=True) == "$7.76"
    assert money_text(7.75, up=True) == "$7.75"
    assert money_text(0.0123) == "$0.012"
    assert hours_text(0.25) == "15 min"
    assert hours_text(2.0) == "2 h"
    assert hours_text(5000.0) == "5,000 h"
