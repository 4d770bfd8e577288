"""The placement problem as a Gymnasium environment: one step places one layer.

The state and its features are native code (`engine/policy/episode.h`); this is the environment
around one episode. Training steps many at once, in `training/vector.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from scheduler.engine import _planner

MOST_LAYERS = 128
MOST_TYPES = 16

Observation = dict[str, NDArray[Any]]


def observation_space(layers: int, types: int) -> Any:
    """What is seen, padded to `layers` and `types`: F `LAYER_FEATURES` and S `STATE_FEATURES`.

    features: of each layer on each type at this pace, without scale, [layers, types, F].
    state: what depends on the layers placed before, [types, S].
    place: the layer to be placed, the number of layers, and of types.
    episode: a number that only this episode has, so that its features are encoded once.
    """
    features, state = len(_planner.LAYER_FEATURES), len(_planner.STATE_FEATURES)
    return spaces.Dict(
        {
            "features": spaces.Box(-10, 10, (layers, types, features), np.float32),
            "state": spaces.Box(-10, 10, (types, state), np.float32),
            "place": spaces.Box(0, max(layers, types), (3,), np.int32),
            "episode": spaces.Box(0, 2**31 - 1, (1,), np.int32),
        }
    )


def reward(price: float, pace: _planner.Pace) -> float:
    """Return the reward of a complete plan: log of how much cheaper than the reference, -1 to 1.

    `price` is that of the fewest units that keep the pace, dollars an hour. The reference is the
    cheapest price that the chain's dynamic program finds with the limits priced in.
    """
    reference = pace.guided_price if math.isfinite(pace.guided_price) else pace.least_price
    if price <= 0 or reference <= 0:
        return 0.0 if price <= reference else -1.0
    return float(np.clip(-math.log(price / reference), -1.0, 1.0))


class PlacementEnv(gymnasium.Env[Observation, np.int64]):
    """Places the layers of one problem in order, at a pace to keep.

    The throughput to keep is a constraint, not a penalty: `action_masks` allows exactly the types
    from which the rest can still be placed within memory and limits at that pace, so every episode
    that follows the mask ends with a plan that keeps it. A masked action ends the episode with
    reward -2. The reward comes with the last layer, from provisioning (see `reward`).

    Args:
        draw: makes the pace of an episode, from the environment's random generator.
        layers, types: the largest problem that it may make.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        draw: Callable[[np.random.Generator], _planner.Pace],
        layers: int = MOST_LAYERS,
        types: int = MOST_TYPES,
    ) -> None:
        self.draw = draw
        self.layers, self.types = layers, types
        self.observation_space: spaces.Space[Observation] = observation_space(layers, types)
        self.action_space = spaces.Discrete(types)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a pace, or take `options["pace"]`, and start with no layer placed."""
        super().reset(seed=seed)
        self.pace: _planner.Pace = (options or {}).get("pace") or self.draw(self.np_random)
        self._episode = _planner.Episodes([self.pace], self.layers, self.types)
        self._features = padded(self.pace, self.layers, self.types)
        self._tag = int(self.np_random.integers(2**31 - 1))
        self._layer = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Place the current layer on type `action`."""
        if not self.action_masks()[int(action)]:
            return self._observe(), -2.0, True, False, {"masked": True}
        self._episode.step(np.array([action], dtype=np.int64))
        self._layer += 1
        if self._layer < self.pace.layers:
            return self._observe(), 0.0, False, False, {}
        price = float(self._episode.prices()[0])
        assignment = tuple(int(t) for t in self._episode.assignments()[0, : self.pace.layers])
        info = {"price_per_hour": price, "assignment": assignment}
        return self._observe(), reward(price, self.pace), True, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which types the current layer may go to, [types]."""
        masks: NDArray[np.bool_] = self._episode.masks()[0].astype(bool)
        return masks

    def _observe(self) -> Observation:
        return {
            "features": self._features.copy(),
            "state": self._episode.observe()[0],
            "place": np.array([self._layer, self.pace.layers, self.pace.types], dtype=np.int32),
            "episode": np.array([self._tag], dtype=np.int32),
        }


def padded(pace: _planner.Pace, layers: int, types: int) -> NDArray[np.float32]:
    """Return the pace's features with zeros beyond its size, [layers, types, F]."""
    features = np.zeros((layers, types, len(_planner.LAYER_FEATURES)), dtype=np.float32)
    features[: pace.layers, : pace.types] = pace.features()
    return features
