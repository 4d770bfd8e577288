"""Trains the shipped policy: a warm start from the teacher, then PPO on random problems.

Everything that shapes the result is in `Recipe`; the same recipe on the same machine and versions
gives the same policy, but for the order in which lessons from the student arrive.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback

from scheduler.agent.training import imitate
from scheduler.agent.training.files import load, save
from scheduler.agent.training.network import Network, Size
from scheduler.agent.training.ppo import AttentionPolicy, Settings, make_agent
from scheduler.agent.training.vector import PlacementVec
from scheduler.agent.training.workloads import Shape, draw, paces
from scheduler.engine import _planner


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of PPO on random problems of up to so many layers and types."""

    ppo: Settings
    layers: int
    types: int = 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a policy is made by: a network, its warm start, and stages of PPO."""

    size: Size = field(default_factory=Size)
    teacher: imitate.Settings = field(default_factory=imitate.Settings)
    stages: tuple[Stage, ...] = (
        Stage(Settings(steps=400_000), layers=48),
        # Larger problems, and some entropy, so that draws stay different from each other.
        Stage(Settings(steps=330_000, entropy=0.003, learning_rate=8e-5, seed=22), layers=64),
    )
    seed: int = 1
    threads: int = 1

    def scaled(self, share: float) -> "Recipe":
        """The same with fewer steps, for trying out."""

        def few(steps: int) -> int:
            return max(1, round(steps * share))

        teacher = replace(
            self.teacher, steps=few(self.teacher.steps), alone=few(self.teacher.alone)
        )
        stages = tuple(
            replace(stage, ppo=replace(stage.ppo, steps=few(stage.ppo.steps)))
            for stage in self.stages
        )
        return replace(self, teacher=teacher, stages=stages)


def train(
    recipe: Recipe,
    output: Path,
    directory: Path,
    report: Callable[[str], None],
    start: Path | None = None,
) -> None:
    """Train a policy and write it to `output`; curves and checkpoints go to `directory`.

    Args:
        start: a policy whose weights replace the warm start.
    """
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    started = time.monotonic()
    if start is None:
        network = Network(recipe.size)
        imitate.imitate(network, recipe.teacher, directory, report)
    else:
        network = load(start)
    for number, stage in enumerate(recipe.stages, 1):
        network = improve(network, stage, directory / f"ppo-{number}.jsonl", report)
        save(network, directory / f"ppo-{number}.safetensors", {})
    save(network, output, note(recipe, time.monotonic() - started, directory))


def note(recipe: Recipe, seconds: float, directory: Path) -> dict[str, str]:
    """What a policy file says of its training: recipe, versions, curves, seconds, date."""
    import sb3_contrib

    day = datetime.now(UTC).date().isoformat()
    return {
        "version": day,
        "recipe": json.dumps(asdict(recipe)),
        "seconds": f"{seconds:.0f}",
        "torch": torch.__version__,
        "sb3_contrib": sb3_contrib.__version__,
        "curve": json.dumps(read_curve(directory)),
    }


def read_curve(directory: Path) -> dict[str, list[dict[str, float]]]:
    """Return the curves that training left in `directory`, by stage."""
    paths = [directory / "imitation.jsonl", *sorted(directory.glob("ppo-*.jsonl"))]
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in paths
        if path.exists()
    }


def improve(
    network: Network, stage: Stage, curve_file: Path, report: Callable[[str], None]
) -> Network:
    """Run a stage of PPO from `network`'s weights, and write its curve."""
    settings = stage.ppo
    rng = np.random.default_rng(settings.seed)
    waiting: list[_planner.Pace] = []

    def next_pace() -> _planner.Pace:
        while not waiting:
            layers = int(np.exp(rng.uniform(np.log(5), np.log(stage.layers + 0.99))))
            types = int(rng.integers(2, stage.types + 1))
            waiting.extend(paces(rng, draw(rng, Shape(layers, types)), 3))
        return waiting.pop()

    rewards: list[float] = []
    vector = PlacementVec(
        next_pace,
        settings.environments,
        stage.layers,
        stage.types,
        lambda _assignment, _pace, reward: rewards.append(reward),
    )
    agent = make_agent(vector, network, settings)
    assert isinstance(agent.policy, AttentionPolicy)
    policy = agent.policy
    started = time.monotonic()
    with curve_file.open("w") as curve:

        class Watch(BaseCallback):
            rollouts = 0

            def _on_step(self) -> bool:
                return True

            def _on_rollout_end(self) -> None:
                self.rollouts += 1
                mean = float(np.mean(rewards)) if rewards else 0.0
                point = {"step": self.num_timesteps, "reward": mean, "episodes": len(rewards)}
                point["seconds"] = time.monotonic() - started
                curve.write(json.dumps(point) + "\n")
                curve.flush()
                rewards.clear()
                if self.rollouts % 10 == 0:
                    report(f"PPO {self.num_timesteps}/{settings.steps}: mean reward {mean:.4f}")
                    save(policy.network, curve_file.with_suffix(".safetensors"), {})

        agent.learn(settings.steps, callback=Watch())
    return policy.network
