"""What the policy itself is worth: the search around it finds good plans with any policy."""

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from bench.scheduler.workloads import problem
from scheduler.agent import draw as agent
from scheduler.agent import paces
from scheduler.agent.policy import SHIPPED, Policy, shipped
from scheduler.engine import _planner
from scheduler.methods.exact import solve
from scheduler.problem.cost import CostModel

_PROBLEMS = range(24)  # every family with every demand
_PACES = 20


@cache
def uniform() -> Policy:
    """The shipped policy with its score head zeroed: equal chances for what the masks allow."""
    with safe_open(SHIPPED, "np") as file:
        note = json.loads(file.metadata()["config"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in ("score.weight", "score.bias"):
        weights[name] = np.zeros_like(weights[name])
    network = _planner.Network(weights, note["distances"], note["heads"], note["blocks"])
    return Policy(network, {}, SHIPPED)


@cache
def problems() -> list[tuple[CostModel, float, float]]:
    """(problem, floor, the least cost in dollars)."""
    drawn = (problem(number, seed=5, layers=(6, 24)) for number in _PROBLEMS)
    return [
        (p.model(), p.min_throughput, solve(p.model(), p.min_throughput).lower_bound) for p in drawn
    ]


def fixed_paces(model: CostModel, floor: float) -> list[_planner.Pace]:
    low = floor or paces.slowest(model)
    top, _ = paces.fastest(model.native, low)
    rates = np.geomspace(low, max(top, low), _PACES) * (1 - 1e-9)
    return _planner.paces(model.native, rates.tolist(), 20_000)


def gap(
    model: CostModel, floor: float, least: float, assignments: list[NDArray[np.int32]]
) -> float:
    """How far the best of the assignments is above the least cost."""
    values, _ = _planner.provision(model.native, np.concatenate(assignments), floor, math.inf, 1e-4)
    return float(values.min()) * model.samples / 3600 / least - 1


def test_the_likeliest_choices_are_near_the_cheapest() -> None:
    """One assignment at each of 20 paces, the best of them; nothing is drawn or revised."""
    likeliest, even = [], []
    for model, floor, least in problems():
        kept = fixed_paces(model, floor)
        network, chance = shipped().network, uniform().network
        rows = [network.sample([pace], 1, 1.0, 0) for pace in kept]
        likeliest.append(gap(model, floor, least, rows))
        # Of two the first is the likeliest, which says nothing where all are equal.
        rows = [chance.sample([pace], 2, 1.0, number)[1:] for number, pace in enumerate(kept)]
        even.append(gap(model, floor, least, rows))
    assert np.mean(likeliest) <= 0.08
    assert np.median(likeliest) <= 0.02
    assert np.median(even) >= 0.2
    assert sum(a <= b + 1e-9 for a, b in zip(likeliest, even, strict=True)) >= len(even) - 2


def searched(passes: int, policy: Policy) -> tuple[NDArray[np.float64], int]:
    """(how far each plan is above the least cost, assignments that were provisioned)."""
    gaps, evaluations = [], 0
    for model, floor, least in problems():
        effort = replace(agent.Effort.of(model), passes=passes)
        drawn = agent.draw(model, floor, effort=effort, policy=policy)
        assert drawn.plan.feasible
        gaps.append(drawn.plan.cost / least - 1)
        evaluations += drawn.evaluations
    return np.array(gaps), evaluations


def test_drawing_finds_more_by_the_policy_than_by_equal_chances() -> None:
    mine, evaluations = searched(0, shipped())
    even, more = searched(0, uniform())
    assert mine.mean() <= 0.01
    assert even.mean() >= 0.05
    assert evaluations <= 0.7 * more


@pytest.mark.exhaustive
def test_the_whole_search_needs_fewer_plans_with_the_policy_and_misses_fewer() -> None:
    mine, evaluations = searched(8, shipped())
    even, more = searched(8, uniform())
    assert mine.mean() <= 0.01
    assert (mine > 1e-3).sum() <= (even > 1e-3).sum()
    assert evaluations <= 0.6 * more
