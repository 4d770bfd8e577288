"""The policy: C++ and torch networks agree, samples keep the pace, files are checked."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from scheduler.agent.policy import SHIPPED, load, shipped
from scheduler.agent.training import files
from scheduler.agent.training.network import DISTANCES, Size
from scheduler.agent.training.network import Network as TorchNetwork
from scheduler.agent.training.teacher import features_of
from scheduler.agent.training.workloads import Shape, draw, paces
from scheduler.engine._planner import Episodes, Network, Pace


def some_paces(seed: int, layers: int, types: int, count: int = 3) -> list[Pace]:
    rng = np.random.default_rng(seed)
    made: list[Pace] = []
    while len(made) < count:
        made += paces(rng, draw(rng, Shape(layers, types)), count)[: count - len(made)]
    return made


@pytest.mark.parametrize(("layers", "types"), [(1, 1), (2, 3), (17, 5), (60, 9), (130, 2)])
def test_native_equals_torch(layers: int, types: int) -> None:
    torch.manual_seed(0)
    reference = TorchNetwork(Size(width=48, heads=3, blocks=2))
    for parameter in reference.parameters():  # biases and distances too, which start at zero
        torch.nn.init.normal_(parameter, std=0.15)
    weights = {name: value.numpy() for name, value in reference.state_dict().items()}
    native = Network(weights, list(DISTANCES), 3, 2)
    for pace in some_paces(1, layers, types, 2):
        with torch.no_grad():
            sizes = torch.tensor([layers]), torch.tensor([types])
            encoded = reference.encode(features_of([pace], layers, types), *sizes)
            np.testing.assert_allclose(native.encode(pace), encoded[0], rtol=2e-3, atol=2e-4)
            episode = Episodes([pace], layers, types)
            masks, state = episode.masks(), episode.observe()
            logits, value = reference.head(
                encoded[:, 0], torch.from_numpy(state), torch.from_numpy(masks.astype(bool))
            )
        scored, judged = native.score(encoded[0, 0].numpy(), state[0], masks[0])
        np.testing.assert_allclose(scored, logits[0], rtol=1e-3, atol=1e-3)
        assert judged == pytest.approx(float(value[0]), abs=1e-3)


def test_padding_changes_nothing() -> None:
    network = files.load(SHIPPED)
    pace = some_paces(3, 9, 4, 1)[0]
    with torch.no_grad():
        alone = network.encode(features_of([pace], 9, 4), torch.tensor([9]), torch.tensor([4]))
        wide = network.encode(features_of([pace], 20, 7), torch.tensor([9]), torch.tensor([4]))
    np.testing.assert_allclose(wide[:, :9, :4], alone, atol=1e-5)


def test_samples_repeat_and_keep_the_pace() -> None:
    network = shipped().network
    pace = some_paces(4, 12, 5, 1)[0]
    one, two = (network.sample([pace], 8, 1.0, 7) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, network.sample([pace], 8, 1.0, 8))
    episodes = Episodes([pace] * len(one), 12, 5)
    for layer in range(12):
        episodes.step(one[:, layer].astype(np.int64))  # refuses what the mask excludes
    assert np.isfinite(episodes.prices()).all()


@pytest.mark.parametrize("slack", [1.0, 1.5])
def test_revised_plans_only_get_cheaper(slack: float) -> None:
    network = shipped().network
    pace = some_paces(6, 24, 6, 1)[0]
    start = network.sample([pace], 4, 3.0, 1)[-1]

    def revise(seed: int) -> NDArray[np.int32]:
        return network.revise([pace], start[None], 400, 8, 1.8, 0.003, slack, seed)

    found = revise(9)
    np.testing.assert_array_equal(found, revise(9))
    assert len(found)
    plans = np.concatenate([start[None], found])
    episodes = Episodes([pace] * len(plans), 24, 6)
    for layer in range(24):
        episodes.step(plans[:, layer].astype(np.int64))
    assert (np.diff(episodes.prices()) < 0).all()


def test_replay_gives_chances_of_allowed_types() -> None:
    policy = shipped()
    pace = some_paces(8, 10, 4, 1)[0]
    assignment = policy.network.sample([pace], 1, 1.0, 0)[0]
    chances, values = policy.network.replay(pace, assignment)
    np.testing.assert_allclose(chances.sum(axis=1), 1.0, atol=1e-5)
    assert (chances[np.arange(10), assignment] == chances.max(axis=1)).all()
    assert values.shape == (10,)


def test_shipped_policy_says_how_it_was_made() -> None:
    assert {"version", "recipe", "curve", "config"} <= set(shipped().note)
    assert SHIPPED.stat().st_size < 4e6


def test_what_is_no_policy_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "other.safetensors"
    save_file({"x": np.zeros(3, np.float32)}, path)
    with pytest.raises(ValueError, match=r"other\.safetensors: expected a policy"):
        load(path)
