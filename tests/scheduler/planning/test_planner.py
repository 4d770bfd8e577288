"""`plan`: the contract's decision, from files, dataclasses and messages."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest

import scheduler
from scheduler import METHODS, Decision, InputError, load_resources, load_workload, plan
from scheduler.decision.record import Measured
from tests.scheduler.instances import EXAMPLE, cost, resources, workload

WORK = load_workload(EXAMPLE / "workload.yaml")
OFFER = load_resources(EXAMPLE / "resources.yaml")
FLOOR = 600_000.0
CONTRACT = {
    *("method", "feasible", "reason", "assignment", "stages", "ps_units", "throughput"),
    *("price_per_hour", "cost", "lower_bound", "gap", "seconds", "alternatives", "seed"),
}


@pytest.mark.parametrize("method", ["best", "exact", "greedy", "all-gpu", "random"])
def test_methods_meet_the_floor(method: str) -> None:
    decision = plan(WORK, OFFER, FLOOR, method)
    assert decision.feasible
    assert decision.throughput >= FLOOR
    assert decision.lower_bound <= decision.cost
    assert decision.gap == pytest.approx(decision.cost / decision.lower_bound - 1)
    considered = {decision.method, *(other.method for other in decision.alternatives)}
    assert considered >= {"exact", "greedy", "all-cpu", "all-gpu"}
    _check_totals(decision)


def _check_totals(decision: Decision) -> None:
    """Price, cost, parameter-server cores, stages: as the contract's formulas have them."""
    price = {kind.name: kind.price_per_hour for kind in OFFER.types}
    assert decision.plan.ps_units == math.ceil(decision.throughput * WORK.ps_core_s)
    total = sum(price[stage.type] * stage.units for stage in decision.stages)
    total += price[WORK.ps_type] * decision.plan.ps_units
    assert decision.plan.price_per_hour == pytest.approx(total)
    assert decision.cost == pytest.approx(WORK.samples / decision.throughput / 3600 * total)
    spread = [stage.type for stage in decision.stages for _ in range(stage.first, stage.last + 1)]
    assert tuple(spread) == decision.assignment
    for before, after in zip(decision.stages, decision.stages[1:], strict=False):
        assert before.last + 1 == after.first
        assert before.type != after.type


def test_proven_says_that_nothing_costs_less() -> None:
    assert plan(WORK, OFFER, FLOOR, "exact").proven
    worse = plan(WORK, OFFER, FLOOR, "greedy")
    assert worse.gap > 0.1
    assert not worse.proven
    assert not plan(WORK, OFFER, 9e6, "exact").proven


def test_exact_has_no_gap_and_best_is_the_best() -> None:
    exact, best = plan(WORK, OFFER, FLOOR, "exact"), plan(WORK, OFFER, FLOOR, "best")
    assert exact.gap == 0
    assert best.cost == exact.cost
    assert all(other.plan.cost >= best.cost for other in best.alternatives if other.plan.feasible)


def test_ppo_is_the_default_and_all_has_every_method() -> None:
    pytest.importorskip("sb3_contrib")
    decision = plan(WORK, OFFER, FLOOR)
    assert decision.method == "ppo"
    assert decision.feasible
    assert set(decision.probabilities) == {layer.name for layer in WORK.layers}
    assert decision.versions["policy"]
    everything = plan(WORK, OFFER, FLOOR, "all")
    methods = {everything.method, *(other.method for other in everything.alternatives)}
    assert methods == set(METHODS) - {"auto", "best", "all"}
    assert everything.gap == 0
    _check_totals(decision)
    assert Decision.from_message(decision.to_message()) == decision


def test_dicts_messages_and_dataclasses_agree() -> None:
    one = plan(WORK, OFFER, FLOOR, "exact")
    two = plan(WORK.to_json(), OFFER.to_json(), FLOOR, "exact")
    three = plan(WORK.to_message(), OFFER.to_message(), FLOOR, "exact")
    assert one.stages == two.stages == three.stages
    assert one.cost == two.cost == three.cost


@pytest.mark.parametrize("floor", [FLOOR, 9e6])
def test_json_and_message(floor: float) -> None:
    decision = plan(WORK, OFFER, floor, "exact", seed=7)
    value = json.loads(json.dumps(decision.to_json(), allow_nan=False))
    assert set(value) >= CONTRACT
    assert value["seed"] == 7
    assert {"first", "last", "type", "units"} <= set(value["stages"][0])
    assert Decision.from_message(decision.to_message()) == decision


def test_measured_survives_the_wire() -> None:
    from dataclasses import replace

    measured = Measured(1.0, 2.0, 3.0, 4.0, True, (0.1, 0.2))
    decision = replace(plan(WORK, OFFER, FLOOR, "greedy"), measured=measured)
    assert Decision.from_message(decision.to_message()) == decision
    assert decision.to_json()["measured"]["stage_s"] == [0.1, 0.2]


def test_a_floor_that_cannot_be_met_names_the_highest_throughput() -> None:
    decision = plan(WORK, OFFER, 9e6, "exact")
    assert not decision.feasible
    assert decision.throughput == decision.max_throughput
    assert (
        f"highest throughput that can be is {decision.max_throughput:,.0f}" in decision.plan.reason
    )
    assert plan(WORK, OFFER, decision.max_throughput, "exact").feasible
    assert not plan(WORK, OFFER, decision.max_throughput * 1.001, "exact").feasible


@pytest.mark.parametrize("steps", [{}, {"batch": 96, "micro_batches": 4, "staleness": 0}])
def test_layers_that_have_one_unit_are_named_where_they_are_in_the_way(
    steps: dict[str, Any],
) -> None:
    work = workload({"cpu": cost(2.0)}, {"cpu": cost(1.0)}, **steps)
    work["layers"][1]["alone"] = True
    decision = plan(work, resources(cpu=(0.05, 8)), 3000.0, method="exact")
    assert not decision.feasible
    assert "The fastest plan reaches " in decision.plan.reason
    assert decision.plan.reason.endswith(
        "; 'l1' changes a buffer in forward, for which a stage has one unit"
    )


def test_a_method_that_misses_the_floor_names_one_that_reaches_it() -> None:
    decision = plan(WORK, OFFER, FLOOR, "all-cpu")
    assert not decision.feasible
    assert "exact meets the demands for $2.41" in decision.plan.reason


@pytest.mark.parametrize("method", ["exact", "ppo", "best", "greedy"])
def test_what_cannot_run_at_all_says_so(method: str) -> None:
    work = workload({"cpu": cost(1.0, memory_bytes=101)})
    decision = plan(work, resources(cpu=(0.04, 9)), method=method)
    assert not decision.feasible
    assert decision.stages == ()
    assert "need 101 bytes, a unit of cpu has 100" in decision.plan.reason
    assert decision.to_json()["cost"] is None
    assert Decision.from_message(decision.to_message()) == decision


def test_pins_hold() -> None:
    decision = plan(WORK, OFFER, FLOOR, "exact", pin={"pooling": "v100", "loss": "t4"})
    assert (decision.assignment[2], decision.assignment[9]) == ("v100", "t4")
    manual = ["cpu"] * 3 + ["t4"] * 3 + ["v100"] + ["cpu"] * 3
    assert plan(WORK, OFFER, FLOOR, "ppo", pin=manual).assignment == tuple(manual)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"method": "exakt"}, "method: 'exakt': expected a planning method; did you mean 'exact'"),
        ({"min_throughput": -1}, "min_throughput: -1: expected samples/s"),
        ({"min_throughput": float("nan")}, "min_throughput: nan"),
        ({"min_throughput": "fast"}, "min_throughput: 'fast'"),
        ({"seed": -1}, "seed: -1"),
        ({"pin": {"lose": "cpu"}}, "pin: 'lose': expected a layer; did you mean 'loss'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        plan(WORK, OFFER, **{"method": "greedy", **arguments})
    assert says in str(error.value)


def test_importing_is_cheap() -> None:
    code = (
        "import sys, scheduler; "
        "assert not {'numpy', 'yaml', 'torch'} & set(sys.modules); "
        "from scheduler import plan, pareto, what_if; "
        "assert not {'torch', 'scipy', 'gymnasium', 'stable_baselines3'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_what_they_say() -> None:
    assert callable(scheduler.plan)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = scheduler.nothing
