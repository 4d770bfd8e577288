"""Stages side by side on one type, and layers that stay together, against trying everything."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler import plan
from scheduler.methods import rivals
from scheduler.methods.exact import solve
from scheduler.methods.rivals import Problem
from scheduler.problem.cost import CostModel
from scheduler.problem.plan import Plan
from scheduler.problem.steps import Steps
from tests.scheduler.instances import cost, problems, resources, workload

Stages = list[tuple[int, int, int]]


def _every_split(model: CostModel) -> Iterator[Stages]:
    """All runs of layers on types: cut on one type only where memory asks for it."""
    layers = model.num_layers
    for borders in product([False, True], repeat=layers - 1):
        if any(border and model.joined[at + 1] for at, border in enumerate(borders)):
            continue
        ends = [at for at, border in enumerate(borders) if border] + [layers - 1]
        starts = [0, *(end + 1 for end in ends[:-1])]
        for kinds in product(range(model.num_types), repeat=len(ends)):
            stages = list(zip(starts, ends, kinds, strict=True))
            if all(_fits(model, *stage) for stage in stages) and not any(
                a[2] == b[2] and _fits(model, a[0], b[1], a[2]) for a, b in pairwise(stages)
            ):
                yield stages


def _fits(model: CostModel, first: int, last: int, kind: int) -> bool:
    rows = slice(first, last + 1)
    able = all(model.allowed[rows, kind])
    return bool(able and model.memory[rows, kind].sum() <= model.capacity[kind])


def _codes(model: CostModel, stages: Stages) -> list[int]:
    codes: list[int] = []
    for first, last, kind in stages:
        again = bool(codes) and codes[-1] == kind
        codes += [kind + model.num_types * again] * (last - first + 1)
    return codes


def _brute(model: CostModel, floor: float) -> list[Plan]:
    plans = []
    for stages in _every_split(model):
        codes = _codes(model, stages)
        assert [(r.first, r.last, r.type) for r in model.runs(codes)] == stages
        ranges = [range(1, int(model.limit[kind]) + 1) for _, _, kind in stages]
        plans += [model.evaluate(codes, units, floor) for units in product(*ranges)]
    return [plan for plan in plans if plan.feasible]


def _cut(drawn: CostModel, uncut: list[bool]) -> CostModel:
    """The same problem with cuts, layers of a third of the memory, and some kept together."""
    layers = [
        replace(layer, uncut=together)
        for layer, together in zip(drawn.workload.layers[:-1], uncut, strict=False)
    ]
    work = replace(drawn.workload, layers=(*layers, drawn.workload.layers[-1]))
    return CostModel(work, drawn.resources, cuts=True)


@settings(max_examples=100)
@given(problems(layers=4, limit=3), st.lists(st.sampled_from([False, False, True]), max_size=3))
def test_exact_is_the_best_of_all_cuts(drawn: tuple[CostModel, float], uncut: list[bool]) -> None:
    model, floor = _cut(drawn[0], uncut), drawn[1]
    best = min((plan.cost for plan in _brute(model, floor)), default=np.inf)
    solution = solve(model, floor, seconds=10.0)
    found = solution.plan.cost if solution.plan and solution.plan.feasible else np.inf
    assert solution.lower_bound <= best * (1 + 1e-9)
    assert found >= best * (1 - 1e-9)
    if solution.proven:
        assert found == pytest.approx(best, rel=1e-9)
    if model.usable.any(axis=1).all():
        tried = rivals.run("brute", Problem(model, floor)).plan
        assert tried.feasible == np.isfinite(best)
        assert not tried.feasible or tried.cost == pytest.approx(best, rel=1e-9)


def _sized(drawn: CostModel, sizes: list[float]) -> CostModel:
    """The same problem with cuts, and layers of so many bytes."""
    layers = [
        replace(
            layer, cost={name: replace(one, memory_bytes=size) for name, one in layer.cost.items()}
        )
        for layer, size in zip(drawn.workload.layers, sizes, strict=False)
    ]
    work = replace(drawn.workload, layers=tuple(layers))
    return CostModel(work, drawn.resources, cuts=True)


@settings(max_examples=60)
@given(
    problems(layers=4, limit=3),
    st.lists(st.sampled_from([10.0, 40.0, 60.0]), min_size=4, max_size=4),
    st.sampled_from([0.98, 0.8, 0.5]),
    st.sampled_from([None, (4, 0), (2, 1)]),
)
def test_what_is_the_fastest_and_the_cheapest_close_to_it(
    drawn: tuple[CostModel, float],
    sizes: list[float],
    share: float,
    stepped: tuple[int, int] | None,
) -> None:
    """Neighbours on one type that together fit are no plan, and others are not lost to them."""
    model = _sized(drawn[0], sizes)
    if stepped is not None:
        parts, staleness = stepped
        steps = Steps(staleness, parts, 100, simulated=True)
        model = CostModel(model.workload, model.resources, cuts=True, steps=steps)
    plans = _brute(model, 0.0)
    assume(plans)
    top = max(plan.throughput for plan in plans)
    least = min(plan.cost for plan in plans if plan.throughput >= share * top * (1 - 1e-9))
    solution = solve(model, share * top, seconds=5.0)
    assert solution.plan is not None
    assert solution.plan.feasible
    assert solution.plan.cost == pytest.approx(least, rel=1e-9)
    assert solution.max_throughput == pytest.approx(top, rel=1e-6)
    beyond = solve(model, 1.02 * top, seconds=5.0)
    assert beyond.plan is None or not beyond.plan.feasible
    assert beyond.max_throughput == pytest.approx(top, rel=1e-6)


def _blocks(count: int, **other: float) -> dict[str, object]:
    row = {"gpu": cost(1.0, memory_bytes=50.0, transfer_s=0.1, **other)}
    return workload(*[row] * count, ps_type="")


@pytest.mark.parametrize("method", ["ppo", "exact", "auto", "greedy", "genetic", "brute"])
def test_what_no_unit_holds_whole_is_cut(method: str) -> None:
    """Four layers of half a unit's memory make two stages of one type."""
    decision = plan(_blocks(4), resources(gpu=(1.0, 8)), method=method)
    assert decision.feasible
    assert [(s.first, s.last, s.type) for s in decision.stages] == [(0, 1, "gpu"), (2, 3, "gpu")]
    assert decision.assignment == ("gpu",) * 4
    assert type(decision).from_json(decision.to_json(inputs=True)) == decision


def test_nothing_is_cut_where_an_uncut_plan_will_do() -> None:
    """A pipeline on one type would save serial time here, yet memory does not ask for it."""
    decision = plan(
        workload(*[{"gpu": cost(1.0, parallel_compute=0.5)}] * 2),
        resources(gpu=(1.0, 8), cpu=(1, 1)),
    )
    assert [(s.first, s.last) for s in decision.stages] == [(0, 1)]


@pytest.mark.parametrize("method", ["ppo", "exact", "greedy", "annealing"])
def test_layers_that_share_stay_in_one_stage(method: str) -> None:
    """Each alone would be cheapest elsewhere; together they run on the type that both may use."""
    rows = [{"cpu": cost(0.1), "t4": cost(9.0)}, {"cpu": cost(9.0), "t4": cost(0.1)}]
    work = workload(*rows, *rows)
    work["layers"][0]["uncut"] = True
    decision = plan(work, resources(cpu=(1.0, 9), t4=(1.0, 9)), method=method)
    assert decision.feasible
    assert decision.assignment[0] == decision.assignment[1]
    free = plan(workload(*rows, *rows), resources(cpu=(1.0, 9), t4=(1.0, 9)), method="exact")
    assert free.assignment[0] != free.assignment[1]


def test_layers_that_share_no_type_are_named() -> None:
    work = workload({"cpu": cost(0.1)}, {"t4": cost(0.1)})
    work["layers"][0]["uncut"] = True
    decision = plan(work, resources(cpu=(1.0, 9), t4=(1.0, 9)))
    assert not decision.feasible
    assert "'l0', 'l1' stay in one stage" in decision.plan.reason
