"""The Gymnasium environment: valid, masked, and rewarding what costs less."""

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler import load_resources, load_workload
from scheduler.baselines import Evaluator, greedy
from scheduler.cost import CostModel
from scheduler.environment import PlacementEnv, reward
from tests.scheduler.instances import EXAMPLE, cost, model, problems, resources, workload


def example(floor: float = 600_000.0) -> PlacementEnv:
    problem = CostModel(
        load_workload(EXAMPLE / "workload.yaml"), load_resources(EXAMPLE / "resources.yaml")
    )
    evaluate = Evaluator(problem, floor)
    return PlacementEnv(evaluate, greedy(evaluate).cost)


def test_gymnasium_accepts_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(wrapp|spec|render).*")
        check_env(example(), skip_render_check=True)


def test_stable_baselines_accepts_it() -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(example())


def test_a_whole_episode() -> None:
    env = example()
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    layers = env.model.num_layers
    for row in range(layers):
        kind = int(np.flatnonzero(env.action_masks())[-1])
        observation, gain, done, truncated, info = env.step(np.int64(kind))
        assert env.observation_space.contains(observation)
        assert (done, truncated) == (row == layers - 1, False)
    assert gain == reward(info["plan"], env.reference, 600_000.0)
    assert len(info["assignment"]) == layers


@settings(max_examples=60, deadline=None)
@given(problems(layers=5), st.integers(0, 2**32 - 1))
def test_masks_never_allow_an_unusable_type(drawn: tuple[CostModel, float], seed: int) -> None:
    problem, floor = drawn
    assume(problem.usable.any(axis=1).all())
    env = PlacementEnv(Evaluator(problem, floor), 1.0)
    rng = np.random.default_rng(seed)
    env.reset()
    for row in range(problem.num_layers):
        mask = env.action_masks()
        assert mask.any()
        assert not (mask & ~problem.usable[row]).any()
        observation, _, _, _, info = env.step(np.int64(rng.choice(np.flatnonzero(mask))))
        assert env.observation_space.contains(observation)
        assert "unusable" not in info


def test_a_stage_that_would_not_fit_is_masked() -> None:
    row = {"cpu": cost(1.0, memory_bytes=60), "v100": cost(1.0, memory_bytes=60)}
    env = PlacementEnv(
        Evaluator(model(workload(row, row), resources(cpu=(0.04, 9), v100=(2.0, 9)))), 1.0
    )
    env.reset()
    assert env.action_masks().tolist() == [True, True]
    env.step(np.int64(0))
    assert env.action_masks().tolist() == [False, True]


def test_an_unusable_action_ends_the_episode_badly() -> None:
    env = example()
    env.reset()
    _, gain, done, _, info = env.step(np.int64(2))
    assert done
    assert info["unusable"]
    assert gain < reward(env.evaluate([0] * 10), env.reference, 600_000.0)


def test_rewards_order_plans() -> None:
    env = example()
    best = env.evaluate([0, 0, 0, 1, 1, 1, 2, 0, 0, 0])
    worse = env.evaluate([0, 2, 2, 2, 2, 2, 2, 0, 2, 2])
    missed = env.evaluate([0] * 10)
    gains = [reward(plan, env.reference, 600_000.0) for plan in (best, worse, missed)]
    assert gains == sorted(gains, reverse=True)
    assert gains[2] < -3 <= gains[1]


def test_observations_do_not_depend_on_scale() -> None:
    """Ten times slower machines and a floor ten times lower look the same."""
    row = {"cpu": cost(0.5, sync_s=0.1, transfer_s=0.2), "v100": cost(0.1, sync_s=0.1)}
    slow = {name: {**c, **{k: c[k] * 10 for k in c if k.endswith("_s")}} for name, c in row.items()}
    offer = resources(cpu=(0.04, 50), v100=(2.0, 8))
    one = PlacementEnv(Evaluator(model(workload(row, row), offer), 1000.0), 1.0)
    ten = PlacementEnv(Evaluator(model(workload(slow, slow), offer), 100.0), 1.0)
    np.testing.assert_allclose(one.reset()[0], ten.reset()[0], atol=1e-6)


def test_it_is_a_gymnasium_env() -> None:
    assert isinstance(example(), gymnasium.Env)
