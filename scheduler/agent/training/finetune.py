"""Fine-tuning: the shipped policy learns one problem for some seconds before it is asked again."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback

from scheduler.agent.policy import Policy
from scheduler.agent.training.files import load
from scheduler.agent.training.network import DISTANCES
from scheduler.agent.training.ppo import AttentionPolicy, Settings, make_agent
from scheduler.agent.training.vector import PlacementVec
from scheduler.decision.record import TrainingPoint
from scheduler.engine import _planner


@dataclass(frozen=True, slots=True)
class Tuned:
    """The network as it came out, and its learning curve."""

    network: _planner.Network
    curve: tuple[TrainingPoint, ...]


def tune(
    policy: Policy,
    rates: Callable[[], list[float]],
    make_pace: Callable[[float], _planner.Pace],
    drawn: Callable[[NDArray[np.int32]], float],
    deadline: float,
    seed: int,
) -> Tuned:
    """Train on one problem with PPO until `deadline` (time.monotonic).

    Args:
        policy: what to start from.
        rates: paces worth learning, samples/s, the best first; asked before each update.
        make_pace: makes one.
        drawn: told the assignments [n, L] that were drawn; returns the best cost so far, dollars.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    wanted = [pace for pace in map(make_pace, rates()) if pace.feasible]
    collected: list[NDArray[np.int32]] = []
    rewards: list[float] = []
    curve: list[TrainingPoint] = []

    def finished(assignment: NDArray[np.int32], pace: _planner.Pace, reward: float) -> None:
        collected.append(assignment)
        rewards.append(reward)

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return time.monotonic() < deadline

        def _on_rollout_end(self) -> None:
            if not collected:
                return
            best = drawn(np.stack(collected).astype(np.int32))
            curve.append(TrainingPoint(self.num_timesteps, float(np.mean(rewards)), best))
            collected.clear()
            rewards.clear()
            wanted[:] = [pace for pace in map(make_pace, rates()) if pace.feasible] or wanted

    settings = replace(
        Settings(), environments=24, epochs=3, learning_rate=2e-4, entropy=0.003, seed=seed % 2**31
    )
    layers, types = wanted[0].layers, wanted[0].types
    settings = replace(settings, horizon=layers, blocks=12)
    try:
        vector = PlacementVec(
            lambda: wanted[int(rng.integers(len(wanted)))],
            settings.environments,
            layers,
            types,
            finished,
        )
        agent = make_agent(vector, load(policy.path), settings, decay=False)
        agent.learn(10**9, callback=Watch())
        assert isinstance(agent.policy, AttentionPolicy)
        weights = {
            name: value.detach().numpy().copy()
            for name, value in agent.policy.network.state_dict().items()
        }
        size = agent.policy.network.size
        return Tuned(
            _planner.Network(weights, list(DISTANCES), size.heads, size.blocks), tuple(curve)
        )
    finally:
        torch.set_num_threads(threads)
