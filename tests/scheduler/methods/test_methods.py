"""The methods side by side: what is considered, what is chosen, what is refused."""

import subprocess
import sys

import pytest

from heterps.job.file import METHODS as JOB_METHODS
from scheduler import InputError, load_resources, load_workload
from scheduler.methods.bench import Bench, Budget, Found, compare, methods_for
from scheduler.methods.names import METHODS, SINGLE
from scheduler.problem.cost import CostModel
from tests.scheduler.instances import EXAMPLE, cost, resources, workload

WORK = load_workload(EXAMPLE / "workload.yaml")
OFFER = load_resources(EXAMPLE / "resources.yaml")
FLOOR = 600_000.0
CHEAP = ("exact", "greedy", "genetic", "aibox", "byteps", "all-cpu", "all-gpu", "random")
SMALL = Budget(evaluations=300)


def test_compare_keeps_order_budget_and_the_bound() -> None:
    outcomes = compare(WORK, OFFER, FLOOR, CHEAP, SMALL)
    assert tuple(outcome.method for outcome in outcomes) == CHEAP
    exact = outcomes[0].cost
    for outcome in outcomes:
        assert outcome.found is not None
        assert outcome.found.evaluations <= 300
        assert outcome.cost >= exact * (1 - 1e-9)
    again = compare(WORK, OFFER, FLOOR, CHEAP, SMALL)
    assert [outcome.cost for outcome in again] == [outcome.cost for outcome in outcomes]


def test_compare_records_a_refusal_and_goes_on() -> None:
    refused, greedy = compare(WORK, OFFER, FLOOR, ("brute", "greedy"), SMALL)
    assert refused.found is None
    assert "expected at most 300 assignments" in refused.refusal
    assert refused.cost == float("inf")
    assert greedy.found is not None


def test_compare_refuses_an_unknown_method() -> None:
    with pytest.raises(InputError, match="methods: 'auto': expected one of ppo, exact"):
        compare(WORK, OFFER, methods=("auto",))


def test_a_single_method_is_compared_with_the_cheap_ones() -> None:
    assert methods_for("genetic") == ("genetic", "exact", "greedy", "all-cpu", "all-gpu")
    assert methods_for("greedy") == ("exact", "greedy", "all-cpu", "all-gpu")
    bench = Bench(CostModel(WORK, OFFER), FLOOR, 0, SMALL)
    results = bench.consider("aibox")
    assert set(results) == {"aibox", "exact", "greedy", "all-cpu", "all-gpu"}
    assert bench.choose("aibox", results) == "aibox"
    assert bench.solution is not None


def test_auto_takes_the_best_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent stands in for any method here: where its plan is the cheapest it is taken."""
    bench = Bench(CostModel(WORK, OFFER), FLOOR, 0, SMALL)
    monkeypatch.setattr(Bench, "_ppo", lambda self: self.run("greedy"))
    results = bench.consider("auto")
    assert {"exact", "ppo", "greedy", "aibox", "byteps", "all-cpu", "all-gpu"} <= set(results)
    assert bench.choose("auto", results) == "exact"
    assert bench.solution is not None
    # Proven: nothing can be cheaper, so the searches are left out.
    assert bench.solution.proven
    assert "genetic" not in results
    cheaper = results | {"ppo": _with_cost(results["exact"], 0.5)}
    assert bench.choose("auto", cheaper) == "ppo"


def _with_cost(found: Found, factor: float) -> Found:
    from dataclasses import replace

    return replace(found, plan=replace(found.plan, cost=found.plan.cost * factor))


def test_all_runs_every_method_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"cpu": cost(1.0), "v100": cost(0.1)}
    work = workload(row, row, row)
    monkeypatch.setattr(Bench, "_ppo", lambda self: self.run("greedy"))
    monkeypatch.setitem(sys.modules, "optuna", None)
    outcomes = {o.method: o for o in compare(work, resources(cpu=(0.04, 9), v100=(2.0, 3)))}
    assert set(outcomes) == set(SINGLE)
    assert outcomes["bayesian"].found is None
    assert outcomes["brute"].found is not None
    assert outcomes["brute"].found.evaluations == 8
    bench = Bench(CostModel(WORK, OFFER), FLOOR, 0, SMALL)
    assert set(SINGLE) - set(bench.consider("all")) == {"bayesian", "brute"}


def test_the_names_are_light_and_one_list() -> None:
    assert set(JOB_METHODS) <= set(METHODS)
    code = (
        "import sys; import scheduler.methods.names; "
        "assert not {'numpy', 'torch', 'scheduler.engine._planner'} & set(sys.modules); "
        "import scheduler.methods.bench; "
        "assert not {'torch', 'optuna', 'gymnasium'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
