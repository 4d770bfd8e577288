"""Many episodes of the placement environment at once, for stable-baselines3."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvStepReturn

from scheduler.agent.training.environment import Observation, observation_space, padded, reward
from scheduler.engine import _planner


class PlacementVec(VecEnv):
    """Environments like `PlacementEnv`, all stepped by one native call.

    Args:
        next_pace: the pace of the next episode.
        count: how many environments.
        layers, types: the largest problem.
        finished: told the assignment [L], pace and reward of each episode that ends.
    """

    def __init__(
        self,
        next_pace: Callable[[], _planner.Pace],
        count: int,
        layers: int,
        types: int,
        finished: Callable[[NDArray[np.int32], _planner.Pace, float], None] | None = None,
    ) -> None:
        space = observation_space(layers, types)
        super().__init__(count, space, spaces.Discrete(types))
        self._next = next_pace
        self._finished = finished
        self._layers, self._types = layers, types
        self._number = 0
        self._actions: NDArray[np.int64] = np.zeros(count, dtype=np.int64)

    def reset(self) -> Observation:
        """Start all episodes anew."""
        self._paces = [self._next() for _ in range(self.num_envs)]
        self._episodes = _planner.Episodes(self._paces, self._layers, self._types)
        self._features = np.stack([padded(p, self._layers, self._types) for p in self._paces])
        self._place = np.array([[0, p.layers, p.types] for p in self._paces], dtype=np.int32)
        self._tags = np.arange(self.num_envs, dtype=np.int32)[:, None] + self._number
        self._number += self.num_envs
        return self._observe()

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keep the actions for `step_wait`."""
        self._actions = actions.astype(np.int64)

    def step_wait(self) -> VecEnvStepReturn:
        """Place a layer in each episode; those that end start anew."""
        self._episodes.step(self._actions)
        self._place[:, 0] += 1
        done = self._episodes.done().astype(bool)
        rewards = np.zeros(self.num_envs, dtype=np.float32)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done.any():
            prices = self._episodes.prices()
            assignments = self._episodes.assignments()
            last = self._observe()
            for n in np.flatnonzero(done).tolist():
                pace = self._paces[n]
                rewards[n] = reward(float(prices[n]), pace)
                if self._finished:
                    self._finished(assignments[n, : pace.layers], pace, float(rewards[n]))
                infos[n] = {"terminal_observation": {key: last[key][n] for key in last}}
                infos[n]["episode"] = {"r": float(rewards[n]), "l": pace.layers, "t": 0.0}
                self._restart(n)
        return self._observe(), rewards, done, infos

    def _restart(self, n: int) -> None:
        pace = self._next()
        self._paces[n] = pace
        self._episodes.replace(n, pace)
        self._features[n] = padded(pace, self._layers, self._types)
        self._place[n] = (0, pace.layers, pace.types)
        self._tags[n] = self._number
        self._number += 1

    def _observe(self) -> Observation:
        return {
            "features": self._features.copy(),
            "state": self._episodes.observe(),
            "place": self._place.copy(),
            "episode": self._tags.copy(),
        }

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Answer `action_masks`, the one method that is asked for."""
        if method_name != "action_masks":
            raise AttributeError(method_name)
        return list(self._episodes.masks().astype(bool))

    def has_attr(self, attr_name: str) -> bool:
        """Whether the environments have an attribute: the masks, as `MaskablePPO` asks."""
        return attr_name == "action_masks"

    def close(self) -> None:
        """Nothing is held open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of the environments."""
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise AttributeError(attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refuse: there is nothing to set."""
        raise AttributeError(attr_name)

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: Any = None
    ) -> list[bool]:
        """No environment is wrapped."""
        return [False] * self.num_envs
