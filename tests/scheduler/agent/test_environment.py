"""The environment: Gymnasium's own rules, masks that are exact, features without scale."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from scheduler.agent.training.environment import PlacementEnv
from scheduler.agent.training.workloads import Shape, draw, paces
from scheduler.engine._planner import LAYER_FEATURES, STATE_FEATURES, Episodes, Pace
from scheduler.problem.cost import CostModel
from tests.scheduler.instances import cost, model, problems, resources, workload

SLOW = settings(max_examples=120, suppress_health_check=list(HealthCheck))


def environment(problem: CostModel, floor: float) -> PlacementEnv:
    return PlacementEnv(lambda _rng: Pace(problem.native, floor), problem.num_layers, 3)


def ends(problem: CostModel, floor: float) -> set[tuple[int, ...]]:
    """Every assignment whose fewest units keep the floor within memory and limits."""
    found = set()
    ps_units = np.ceil(floor * problem.ps_unit_s)
    for assignment in product(range(problem.num_types), repeat=problem.num_layers):
        runs = problem.runs(assignment)
        if not all(problem.allowed[row, kind] for row, kind in enumerate(assignment)):
            continue
        used = np.zeros(problem.num_types)
        used[problem.ps_type] += ps_units
        fits = True
        for run in runs:
            busy = run.busy_s(int(problem.limit[run.type]))
            able = np.flatnonzero(busy <= 1 / (floor * (1 - 1e-9)))
            fits &= able.size > 0 and run.memory_bytes <= problem.capacity[run.type]
            used[run.type] += able[0] + 1 if able.size else 0
        if fits and (used <= problem.limit).all():
            found.add(assignment)
    return found


@SLOW
@given(problems(), st.floats(1.0, 2000.0))
def test_masks_allow_exactly_the_feasible_ends(
    drawn: tuple[CostModel, float], floor: float
) -> None:
    problem, _ = drawn
    wanted = ends(problem, floor)
    pace = Pace(problem.native, floor)
    assert pace.feasible == bool(wanted)
    assume(wanted)
    env = environment(problem, floor)
    reached: set[tuple[int, ...]] = set()

    def walk(prefix: tuple[int, ...]) -> None:
        env.reset(options={"pace": pace})
        info: dict[str, Any] = {}
        for kind in prefix:
            _, _, _, _, info = env.step(np.int64(kind))
        if len(prefix) == problem.num_layers:
            reached.add(info["assignment"])
            return
        masks = env.action_masks()
        assert masks.any()
        for kind in np.flatnonzero(masks):
            walk((*prefix, int(kind)))

    walk(())
    assert reached == wanted


def test_gymnasium_accepts_it() -> None:
    def some(rng: np.random.Generator) -> Pace:
        while not (made := paces(rng, draw(rng, Shape(6, 3)), 3)):
            pass
        return made[0]

    check_env(PlacementEnv(some, 8, 4), skip_render_check=True)


def test_scale_and_order_of_types_do_not_matter() -> None:
    rows = [
        {"cpu": cost(0.2, transfer_s=0.1), "gpu": cost(0.01, sync_s=0.02)},
        {"cpu": cost(0.9), "gpu": cost(0.02, transfer_s=0.3)},
    ]
    base = model(workload(*rows), resources(cpu=(0.04, 50), gpu=(2.0, 8)))
    turned = model(workload(*rows), resources(gpu=(2.0, 8), cpu=(0.04, 50)))
    scaled_rows = [
        {
            name: {**each, **{key: each[key] * 7 for key in ("compute_s", "sync_s", "transfer_s")}}
            for name, each in row.items()
        }
        for row in rows
    ]
    scaled = model(workload(*scaled_rows), resources(cpu=(0.12, 50), gpu=(6.0, 8)))
    floor = 400.0
    features = Pace(base.native, floor).features()
    np.testing.assert_allclose(Pace(scaled.native, floor / 7).features(), features, atol=1e-5)
    flipped = Pace(turned.native, floor).features()[:, ::-1]
    # Only which type the parameter server is on depends on the order: it is the same here.
    np.testing.assert_allclose(flipped, features, atol=1e-6)


def test_a_masked_action_ends_the_episode() -> None:
    problem = model(
        workload({"cpu": cost(1.0)}, {"gpu": cost(1.0)}), resources(cpu=(1.0, 9), gpu=(1.0, 9))
    )
    env = environment(problem, 1.0)
    env.reset(seed=0)
    assert env.action_masks().tolist() == [True, False, False]
    _, reward, terminated, truncated, info = env.step(np.int64(1))
    assert terminated
    assert not truncated
    assert reward == -2.0
    assert info == {"masked": True}


def test_the_reward_is_the_log_of_the_price() -> None:
    problem = model(
        workload({"cpu": cost(1.0), "gpu": cost(1.0)}), resources(cpu=(1.0, 9), gpu=(2.0, 9))
    )
    env = environment(problem, 100.0)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(np.int64(1))
    assert terminated
    assert info["price_per_hour"] == 2.0
    assert reward == pytest.approx(-np.log(2.0))


def test_random_episodes_never_get_stuck() -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        shape = Shape(int(rng.integers(5, 30)), int(rng.integers(2, 9)))
        for pace in paces(rng, draw(rng, shape), 2):
            env = PlacementEnv(lambda _rng, pace=pace: pace, 30, 9)  # type: ignore[misc]
            env.reset()
            terminated, info = False, {}
            while not terminated:
                masks = env.action_masks()
                assert masks.any()
                _, _, terminated, _, info = env.step(rng.choice(np.flatnonzero(masks)))
            assert np.isfinite(info["price_per_hour"])


@SLOW
@given(problems(), st.floats(1.0, 2000.0))
def test_features_stand_at_the_places_of_their_names(
    drawn: tuple[CostModel, float], floor: float
) -> None:
    problem, _ = drawn
    pace = Pace(problem.native, floor)
    features = pace.features()
    layers = np.arange(problem.num_layers)[:, None]
    assert features.shape == (problem.num_layers, problem.num_types, len(LAYER_FEATURES))
    assert len(set(LAYER_FEATURES)) == len(LAYER_FEATURES)
    usable = features[..., LAYER_FEATURES.index("usable")] == 1  # at this pace
    assert not (usable & ~problem.usable).any()
    slow = Pace(problem.native, 1e-9).features()[..., LAYER_FEATURES.index("usable")]
    np.testing.assert_array_equal(slow, problem.usable)
    at_ps = np.arange(problem.num_types) == problem.ps_type
    assert (features[..., LAYER_FEATURES.index("parameter_server")] == at_ps).all()
    position = (layers / problem.num_layers).astype(np.float32)
    assert (features[..., LAYER_FEATURES.index("position")] == position).all()
    episodes = Episodes([pace], problem.num_layers, problem.num_types)
    state, masks = episodes.observe(), episodes.masks().astype(bool)
    assert state.shape == (1, problem.num_types, len(STATE_FEATURES))
    assert len(set(STATE_FEATURES)) == len(STATE_FEATURES)
    np.testing.assert_array_equal(state[..., STATE_FEATURES.index("allowed")] == 1, masks)
