"""The rivals: within their budget and the demands, repeatable, never better than the optimum."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from scheduler import InputError
from scheduler.methods.exact import solve
from scheduler.methods.rivals import RIVALS, Budget, Problem, brute, run
from scheduler.methods.rivals.moves import Moves
from scheduler.methods.rivals.search import MISSED, Search
from scheduler.methods.rivals.shortfall import shortfall
from scheduler.problem.cost import CostModel
from scheduler.problem.provision import provision
from scheduler.problem.workload import Resources, Workload
from tests.scheduler.instances import cost, model, problems, resources, workload

SEARCHERS = ("genetic", "annealing", "bayesian", "rl-lstm", "rl-rnn", "random")
OFFER = resources(cpu=(0.04, 400), t4=(0.4, 60), v100=(2.5, 40))
FLOOR = 2_000.0


def _rows(layers: int, seed: int = 0) -> list[dict[str, Any]]:
    """Layers whose best types differ, with transfers that make boundaries dear."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(layers):
        work, data = rng.lognormal(-1.0, 1.0), rng.lognormal(-3.0, 1.0)
        speeds = {"cpu": 1.0, "t4": rng.uniform(2, 20), "v100": rng.uniform(10, 90)}
        rows.append(
            {
                name: cost(
                    float(work / speed),
                    parallel_compute=0.98,
                    parallel_sync=0.9,
                    sync_s=float(data),
                    transfer_s=0.01,
                    memory_bytes=10.0,
                )
                for name, speed in speeds.items()
            }
        )
    return rows


def _problem(layers: int, floor: float = FLOOR, **options: Any) -> Problem:
    work = Workload.parse(workload(*_rows(layers), ps_core_s=1e-4))
    return Problem(CostModel(work, Resources.parse(OFFER), **options), floor)


@pytest.fixture(scope="module")
def eight() -> Problem:
    return _problem(8)


@pytest.fixture(scope="module")
def optimum(eight: Problem) -> float:
    """By brute force, which `test_brute_is_the_optimum` holds against the exact solver."""
    found = run("brute", eight)
    assert found.evaluations == 3**8
    return found.plan.cost


@settings(max_examples=40)
@given(problems(layers=4, limit=5))
def test_brute_is_the_optimum(drawn: tuple[CostModel, float]) -> None:
    problem, floor = drawn
    solution, found = solve(problem, floor, seconds=1.0), run("brute", Problem(problem, floor))
    if found.plan.feasible:
        assert solution.lower_bound <= found.plan.cost * (1 + 1e-9)
    if solution.proven and solution.plan is not None:
        assert found.plan.feasible == solution.plan.feasible
    if solution.proven and found.plan.feasible:
        assert found.plan.cost == pytest.approx(solution.lower_bound, rel=1e-9)
        assert found.plan.throughput >= floor


@settings(max_examples=25)
@given(problems(layers=4, limit=5))
def test_no_rival_beats_the_optimum_and_what_it_calls_feasible_is(
    drawn: tuple[CostModel, float],
) -> None:
    problem, floor = drawn
    optimum = run("brute", Problem(problem, floor)).plan
    for name in set(RIVALS) - {"bayesian", "rl-lstm", "rl-rnn"}:
        plan = run(name, Problem(problem, floor), Budget(evaluations=81)).plan
        if not plan.feasible:
            assert plan.reason
            continue
        assert optimum.feasible, name
        assert plan.cost >= optimum.cost * (1 - 1e-9), name
        kinds = [problem.types.index(kind) for kind in plan.assignment]
        assert problem.usable[np.arange(len(kinds)), kinds].all()
        units = [stage.units for stage in plan.stages]
        again = problem.evaluate(kinds, units, floor)
        assert again.feasible
        assert again.cost == pytest.approx(plan.cost)


@pytest.mark.parametrize("name", SEARCHERS)
def test_searchers_repeat_by_seed_within_the_budget(name: str, eight: Problem) -> None:
    if name == "bayesian":
        pytest.importorskip("optuna")
    budget = Budget(evaluations=100)
    one, two = (replace(run(name, eight, budget, seed=3), seconds=0.0) for _ in range(2))
    assert one == two
    assert one.evaluations == 100
    assert not one.timed_out
    # The draws differ from seed to seed, though the plan that they end in may not.
    plans = {run(name, eight, Budget(evaluations=20), seed=seed).plan for seed in range(3)}
    assert len(plans) > 1 or name in ("genetic", "annealing", "bayesian")


@pytest.mark.parametrize(
    ("name", "evaluations", "most"),
    [
        ("genetic", 1500, 1.0),
        ("annealing", 1500, 1.0),
        ("bayesian", 150, 1.5),
        ("rl-lstm", 500, 1.02),
        ("rl-rnn", 500, 1.02),
    ],
)
def test_searchers_come_near_the_optimum(
    name: str, evaluations: int, most: float, eight: Problem, optimum: float
) -> None:
    if name == "bayesian":
        pytest.importorskip("optuna")
    found = run(name, eight, Budget(evaluations=evaluations))
    assert found.plan.feasible
    assert optimum * (1 - 1e-9) <= found.plan.cost <= optimum * most * (1 + 1e-9)


def test_searchers_go_beyond_the_rules(eight: Problem) -> None:
    rules = min(
        run(name, eight).plan.rank for name in ("all-cpu", "all-gpu", "aibox", "byteps", "greedy")
    )
    for name in ("genetic", "annealing"):
        assert run(name, eight, Budget(evaluations=1500)).plan.rank <= rules


@pytest.mark.parametrize("name", [name for name in RIVALS if name != "bayesian"])
def test_pins_and_exclusions_hold(name: str) -> None:
    problem = _problem(5, pin={"l1": "t4", "l3": "cpu"}, exclude=["v100"])
    plan = run(name, problem, Budget(evaluations=40)).plan
    assert (plan.assignment[1], plan.assignment[3]) == ("t4", "cpu")
    assert "v100" not in plan.assignment


def test_a_small_space_ends_before_the_budget() -> None:
    problem = _problem(2)
    for name in ("random", "genetic", "annealing", "rl-rnn"):
        found = run(name, problem, Budget(evaluations=10_000))
        assert found.evaluations == 9, name
        assert found.plan.cost == run("brute", problem).plan.cost


def test_seconds_end_a_search(eight: Problem) -> None:
    found = run("random", _problem(40), Budget(evaluations=10**9, seconds=0.05))
    assert found.timed_out
    assert 0 < found.evaluations < 10**9


def test_brute_refuses_what_is_too_much(eight: Problem) -> None:
    with pytest.raises(
        InputError, match="at most 2,000,000 assignments, these layers and types make 14,348"
    ):
        run("brute", _problem(15))
    with pytest.raises(InputError, match="at most 100 assignments, these layers and types make 6,"):
        run("brute", eight, Budget(evaluations=100))
    assert brute.MAX_ASSIGNMENTS == 2_000_000


def test_bayesian_says_what_to_install(monkeypatch: pytest.MonkeyPatch, eight: Problem) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(InputError, match="'bayesian': expected the package optuna"):
        run("bayesian", eight)


@pytest.mark.parametrize("name", RIVALS)
def test_what_no_type_can_run_is_said(name: str) -> None:
    problem = Problem(
        model(workload({"cpu": cost(1.0, memory_bytes=101)}), resources(cpu=(0.04, 9)))
    )
    found = run(name, problem)
    assert not found.plan.feasible
    assert "need 101 bytes, a unit of cpu has 100" in found.plan.reason


def test_a_budget_is_positive() -> None:
    with pytest.raises(ValueError, match="evaluations: 0: expected at least 1"):
        Budget(evaluations=0)
    with pytest.raises(ValueError, match=r"seconds: 0\.0: expected more than 0"):
        Budget(seconds=0.0)


def _kinds(*kinds: str) -> CostModel:
    """Layers of given kinds: `busy` ones synchronise longer than they compute, on the CPU."""
    rows = [
        {
            name: cost(0.1 / speed, sync_s=0.5 if kind == "busy" else 0.01, parallel_compute=1.0)
            for name, speed in (("cpu", 1.0), ("t4", 9.0), ("v100", 30.0))
        }
        for kind in kinds
    ]
    work = workload(*rows)
    for layer, kind in zip(work["layers"], kinds, strict=True):
        layer["kind"] = kind
    return model(work, resources(cpu=(0.04, 99), t4=(0.3, 9), v100=(9, 9)))


def test_the_rules_place_as_defined() -> None:
    problem = Problem(_kinds("embedding", "dense", "busy", "dense"), 100.0)
    assert run("all-cpu", problem).plan.assignment == ("cpu",) * 4
    # Of two GPU types the cheaper plan is taken.
    assert run("all-gpu", problem).plan.assignment == ("t4",) * 4
    assert run("aibox", problem).plan.assignment == ("cpu", "t4", "cpu", "t4")
    assert run("byteps", problem).plan.assignment == ("cpu", "t4", "t4", "t4")


def test_a_rule_without_its_device_says_so() -> None:
    lone = Problem(model(workload({"cpu": cost(0.1)}), resources(cpu=(0.04, 99))))
    for name in ("all-gpu", "aibox", "byteps"):
        assert run(name, lone).plan.reason == "no GPU type is on offer"


def test_greedy_takes_the_cheapest_type_layer_by_layer(eight: Problem) -> None:
    """Against the definition, provisioned one by one."""
    held = eight.alone.tolist()
    for layer in range(8):
        plans = [
            provision(eight.model, [*held[:layer], kind, *held[layer + 1 :]], FLOOR)
            for kind in range(3)
        ]
        held[layer] = min(range(3), key=lambda kind: plans[kind].rank)
    found = run("greedy", eight)
    assert found.plan.cost == pytest.approx(provision(eight.model, held, FLOOR).cost)
    assert found.evaluations <= 8 * 2 + 1


@settings(max_examples=40)
@given(problems(layers=4, limit=5))
def test_shortfall_is_zero_where_the_demands_are_met(drawn: tuple[CostModel, float]) -> None:
    problem = Problem(*drawn)
    rows = Moves(problem, np.random.default_rng(0)).uniform(20)
    missed = shortfall(problem, rows)
    assert (missed >= 0).all()
    for row, short in zip(rows, missed, strict=True):
        if problem.plan(row).feasible:
            assert short == pytest.approx(0.0, abs=1e-6)


def test_shortfall_grows_with_what_is_missed(eight: Problem) -> None:
    rows = np.full((1, 8), 2, dtype=np.int32)
    floors = [1e4, 1e5, 1e6, 1e7]
    missed = [float(shortfall(Problem(eight.model, floor), rows)[0]) for floor in floors]
    assert missed == sorted(missed)
    assert missed[0] < missed[-1]


def test_an_assignment_is_provisioned_once(eight: Problem) -> None:
    search = Search(eight, Budget(evaluations=3), 1)
    rows = np.array([[0] * 8, [1] * 8, [0] * 8, [2] * 8, [0, *[1] * 7]], dtype=np.int32)
    values = search.score(rows)
    assert search.evaluations == 3
    assert values[0] == values[2]
    assert values[4] == np.inf  # beyond the budget
    assert search.over()
    best = rows[values.argmin()]
    if values.min() < MISSED:
        assert search.found().plan == eight.plan(best)
