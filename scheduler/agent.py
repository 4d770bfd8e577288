"""The PPO agent: learns to place the layers of one instance.

What it returns comes from the policy's own samples alone: assignments drawn while it learns, the
greedy decoding of the trained policy, and draws from it; the best by the cost model. This module
alone imports torch, and late.
"""

import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler.baselines import Evaluator
from scheduler.cost import Plan
from scheduler.decision import TrainingPoint
from scheduler.environment import PlacementEnv


@dataclass(frozen=True, slots=True)
class Settings:
    """How long and how to train.

    Attributes:
        steps: most environment steps.
        seconds: a guard against a slow machine; results repeat only where it is not reached.
        patience: updates without a better plan after which a settled policy stops.
    """

    steps: int = 6144
    seconds: float = 60.0
    environments: int = 8
    learning_rate: float = 5e-3
    entropy: float = 0.01
    patience: int = 6
    draws: int = 256


@dataclass(frozen=True, slots=True)
class Trained:
    """The best plan of the policy's samples, its probabilities [layers][types], the curve."""

    plan: Plan
    probabilities: tuple[tuple[float, ...], ...]
    curve: tuple[TrainingPoint, ...]
    steps: int


def train(
    evaluate: Evaluator, reference: float, seed: int = 0, settings: Settings | None = None
) -> Trained:
    """Train a policy on one instance and return its best plan.

    Args:
        reference: the cost in dollars that rewards are relative to.

    Raises:
        ValueError: a layer has no type that can run it.
    """
    model = evaluate.model
    if not model.usable.any(axis=1).all():
        raise ValueError("a layer has no type that can run it")
    if (model.usable.sum(axis=1) == 1).all():
        only = model.usable.argmax(axis=1)
        certain = tuple(tuple(float(x) for x in row) for row in np.eye(model.num_types)[only])
        return Trained(evaluate([int(kind) for kind in only]), certain, (), 0)
    with _torch_settings(seed):
        return _train(evaluate, reference, seed, settings or Settings())


@contextmanager
def _torch_settings(seed: int) -> Iterator[None]:
    """One thread (the networks are tiny), and every random state put back afterwards."""
    import torch

    threads = torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads(threads)


def _train(evaluate: Evaluator, reference: float, seed: int, settings: Settings) -> Trained:
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv

    model = evaluate.model
    layers = model.num_layers
    # Whole episodes: at least 16, and enough steps for an update to mean something.
    episodes = max(2, -(-32 // layers))
    rollout = layers * episodes * settings.environments
    total = max(settings.steps, 4 * rollout)
    choices = float(np.prod(model.usable.sum(axis=1).astype(float)))
    deadline = time.monotonic() + settings.seconds
    seen: dict[tuple[int, ...], Plan] = {}
    curve: list[TrainingPoint] = []

    def best() -> Plan:
        return min(seen.values(), key=lambda plan: plan.rank)

    class Watch(BaseCallback):
        """Keeps what the policy sampled, and stops once it has settled."""

        def __init__(self) -> None:
            super().__init__()
            self.rewards: list[float] = []
            self.stale = 0
            self.rank: object = None

        def _on_step(self) -> bool:
            for n, done in enumerate(self.locals["dones"]):
                if done:
                    info = self.locals["infos"][n]
                    seen[info["assignment"]] = info["plan"]
                    self.rewards.append(float(self.locals["rewards"][n]))
            return time.monotonic() < deadline and len(seen) < choices

        def _on_rollout_end(self) -> None:
            mean = float(np.mean(self.rewards))
            rank = best().rank
            self.stale = self.stale + 1 if rank == self.rank else 0
            self.rank = rank
            # Settled: what the policy draws is nearly as good as the best it ever drew.
            top = max(self.rewards)
            self.settled = self.stale >= settings.patience and top - mean < 0.05
            curve.append(TrainingPoint(self.num_timesteps, mean, best().cost))
            self.rewards = []

        def _on_rollout_start(self) -> None:
            if getattr(self, "settled", False):
                raise _SettledError

    environments = DummyVecEnv(
        [lambda: PlacementEnv(evaluate, reference) for _ in range(settings.environments)]
    )
    agent = MaskablePPO(
        "MlpPolicy",
        environments,
        seed=seed,
        device="cpu",
        n_steps=layers * episodes,
        batch_size=64,
        n_epochs=6,
        gamma=1.0,
        gae_lambda=1.0,
        learning_rate=settings.learning_rate,
        ent_coef=settings.entropy,
        policy_kwargs={"net_arch": [48, 48], "optimizer_kwargs": {"fused": True}},
    )
    with suppress(_SettledError):
        agent.learn(total, callback=Watch())
    probabilities = _decode(agent, PlacementEnv(evaluate, reference), seen)
    if len(seen) < choices:
        _draw(agent, evaluate, reference, settings.draws, seed, seen)
    return Trained(best(), probabilities, tuple(curve), int(agent.num_timesteps))


class _SettledError(Exception):
    """Training has nothing more to gain."""


def _decode(
    agent: Any, env: PlacementEnv, seen: dict[tuple[int, ...], Plan]
) -> tuple[tuple[float, ...], ...]:
    """Take the likeliest type at each layer; return the probabilities met on the way."""
    rows = []
    observation, _ = env.reset()
    done = False
    while not done:
        chances = _chances(agent, observation[None], env.action_masks()[None])[0]
        rows.append(tuple(float(chance) for chance in chances))
        observation, _, done, _, _ = env.step(np.int64(chances.argmax()))
    assert env.plan is not None
    seen[tuple(env.assignment)] = env.plan
    return tuple(rows)


def _draw(
    agent: Any,
    evaluate: Evaluator,
    reference: float,
    draws: int,
    seed: int,
    seen: dict[tuple[int, ...], Plan],
) -> None:
    """Draw complete assignments from the policy, side by side."""
    rng = np.random.default_rng(seed)
    environments = [PlacementEnv(evaluate, reference) for _ in range(draws)]
    observations = np.stack([env.reset()[0] for env in environments])
    for _ in range(evaluate.model.num_layers):
        masks = np.stack([env.action_masks() for env in environments])
        chances = np.cumsum(_chances(agent, observations, masks), axis=1)
        picks = (rng.random((draws, 1)) * chances[:, -1:] >= chances).sum(axis=1)
        observations = np.stack(
            [env.step(np.int64(pick))[0] for env, pick in zip(environments, picks, strict=True)]
        )
    for env in environments:
        if env.plan is not None:
            seen[tuple(env.assignment)] = env.plan


def _chances(agent: Any, observations: Any, masks: Any) -> Any:
    """Probabilities of the types under the policy, [n, T] float64, exactly 0 where masked."""
    import torch

    with torch.no_grad():
        tensor = torch.as_tensor(observations)
        distribution = agent.policy.get_distribution(tensor, action_masks=masks)
        chances = distribution.distribution.probs.double().numpy()
    return np.where(masks, chances, 0.0)
