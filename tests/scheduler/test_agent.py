"""The PPO agent: its own samples, feasible, repeatable, near the optimum on small problems."""

import random

import numpy as np
import pytest

from scheduler import load_resources, load_workload
from scheduler.baselines import Evaluator, greedy
from scheduler.cost import CostModel
from scheduler.exact import solve
from tests.scheduler.instances import EXAMPLE, cost, model, resources, workload

pytest.importorskip("sb3_contrib")

from scheduler import agent

FLOOR = 600_000.0


@pytest.fixture(scope="module")
def example() -> CostModel:
    return CostModel(
        load_workload(EXAMPLE / "workload.yaml"), load_resources(EXAMPLE / "resources.yaml")
    )


@pytest.fixture(scope="module")
def trained(example: CostModel) -> agent.Trained:
    return _train(example, FLOOR, seed=0)


def _train(problem: CostModel, floor: float, seed: int) -> agent.Trained:
    evaluate = Evaluator(problem, floor)
    return agent.train(evaluate, greedy(evaluate).cost, seed)


def test_feasible_and_near_the_optimum(example: CostModel, trained: agent.Trained) -> None:
    assert trained.plan.feasible
    assert trained.plan.throughput >= FLOOR
    assert trained.plan.cost <= solve(example, FLOOR).lower_bound * 1.05


def test_curve_rises(trained: agent.Trained) -> None:
    rewards = [point.mean_reward for point in trained.curve]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3])
    assert all(a.steps < b.steps for a, b in zip(trained.curve, trained.curve[1:], strict=False))


def test_probabilities_sum_to_one_and_respect_masks(
    example: CostModel, trained: agent.Trained
) -> None:
    rows = np.array(trained.probabilities)
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, rtol=1e-5)
    assert (rows[~example.usable] == 0).all()


def test_same_seed_same_plan_and_random_states_untouched(
    example: CostModel, trained: agent.Trained
) -> None:
    import torch

    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    expected = (random.random(), np.random.random(), torch.rand(1).item())
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    again = _train(example, FLOOR, seed=0)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected
    assert torch.get_num_threads() == threads
    assert again == trained


@pytest.mark.parametrize("seed", [0, 1])
def test_small_instances_within_a_few_percent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        {
            "cpu": cost(float(a), parallel_compute=0.98, sync_s=0.01, transfer_s=0.01),
            "v100": cost(float(b), parallel_compute=0.95, sync_s=0.01, transfer_s=0.01),
        }
        for a, b in rng.lognormal([-1.0, -4.0], 1.0, (5, 2))
    ]
    problem = model(workload(*rows), resources(cpu=(0.04, 200), v100=(2.42, 16)))
    plan = _train(problem, 1500.0, seed).plan
    best = solve(problem, 1500.0).plan
    assert best is not None
    assert plan.feasible == best.feasible
    assert plan.cost <= best.cost * 1.03


def test_one_choice_needs_no_training() -> None:
    problem = model(workload({"cpu": cost(1.0)}), resources(cpu=(0.04, 9), v100=(2.0, 1)))
    result = agent.train(Evaluator(problem), 1.0)
    assert (result.steps, result.probabilities) == (0, ((1.0, 0.0),))
    assert result.plan.feasible


def test_few_choices_stop_once_all_are_seen() -> None:
    row = {"cpu": cost(1.0), "v100": cost(0.1)}
    problem = model(workload(row, row), resources(cpu=(0.04, 9), v100=(2.0, 1)))
    assert _train(problem, 0.0, seed=0).steps < 500


def test_no_type_for_a_layer_is_an_error() -> None:
    problem = model(workload({"cpu": cost(1.0, memory_bytes=101)}), resources(cpu=(0.04, 9)))
    with pytest.raises(ValueError, match="no type that can run it"):
        agent.train(Evaluator(problem), 1.0)
