"""The warm start: the policy learns from what each choice would cost with the best finish.

At one pace the cheapest way to finish from any state is a dynamic program over a chain
(`scheduler/engine/policy/pace.cc`). Its values teach the network before PPO takes over; they are
used in training only, and never when a plan is made.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scheduler.agent.policy import load
from scheduler.agent.training import network as torch_network
from scheduler.agent.training.workloads import Shape, draw, paces
from scheduler.engine import _planner


@dataclass(frozen=True, slots=True)
class Lesson:
    """Episodes of a batch: features, true sizes, states, masks and values of each choice.

    `regret` is what a choice costs beyond the best one, relative to the whole plan.
    """

    features: Tensor  # float32 [B, L, T, F]
    layers: Tensor  # int64 [B]
    types: Tensor  # int64 [B]
    states: Tensor  # float32 [B, L, T, S]
    masks: Tensor  # bool [B, L, T]
    regret: Tensor  # float32 [B, L, T], infinite where masked
    value: Tensor  # float32 [B, L], -log of the best cost from here relative to the best plan


def features_of(some: list[_planner.Pace], layers: int, types: int) -> Tensor:
    """Stack the paces' features, padded, [n, layers, types, F]."""
    stacked = np.zeros((len(some), layers, types, len(_planner.LAYER_FEATURES)), dtype=np.float32)
    for n, pace in enumerate(some):
        stacked[n, : pace.layers, : pace.types] = pace.features()
    return torch.from_numpy(stacked)


def lessons(
    seed: int, tokens: int, most_layers: int, most_types: int, student: Callable[[], Path | None]
) -> Iterator[Lesson]:
    """Yield batches of about `tokens` (layer, type) pairs without end.

    Where `student` names a policy file, every other episode is played by that policy, so that the
    teacher corrects the states that it gets into by itself (DAgger, Ross et al. 2011).
    """
    rng = np.random.default_rng(seed)
    playing: _planner.Network | None = None
    number = 0
    while True:
        if number % 50 == 0:
            path = student()
            playing = load(path).network if path else None
        number += 1
        types = int(rng.integers(2, most_types + 1))
        if rng.random() < 0.08:
            types = int(rng.integers(most_types + 1, 2 * most_types + 1))
        longest = int(np.exp(rng.uniform(np.log(5), np.log(most_layers + 0.99))))
        batch: list[_planner.Pace] = []
        wanted = max(8, tokens // (longest * types))
        while len(batch) < wanted:
            layers = int(rng.integers(max(3, int(0.7 * longest)), longest + 1))
            batch += paces(rng, draw(rng, Shape(layers, types)), 3)
        yield _lesson(rng, batch[:wanted], longest, types, playing)


def _lesson(
    rng: np.random.Generator,
    batch: list[_planner.Pace],
    layers: int,
    types: int,
    student: _planner.Network | None,
) -> Lesson:
    temperature = float(10 ** rng.uniform(-4, -1)) / layers
    seed = int(rng.integers(2**62))
    states, masks, values, _ = _planner.demonstrate(
        batch, layers, types, temperature, 0.5 / layers, seed, student
    )
    best = values.min(axis=2, keepdims=True)
    root = best[:, :1]
    with np.errstate(invalid="ignore"):
        regret = np.where(masks.astype(bool), (values - best) / root, np.inf)
        value = -np.log(best / root)[..., 0]
    return Lesson(
        features_of(batch, layers, types),
        torch.tensor([pace.layers for pace in batch]),
        torch.tensor([pace.types for pace in batch]),
        torch.from_numpy(states),
        torch.from_numpy(masks.astype(bool)),
        torch.from_numpy(np.nan_to_num(regret, nan=np.inf, posinf=np.inf).astype(np.float32)),
        torch.from_numpy(np.nan_to_num(value, nan=0.0, posinf=0.0, neginf=-2.0).astype(np.float32)),
    )


def loss_of(
    network: torch_network.Network, lesson: Lesson, softness: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the imitation loss, the value loss and the mean one-step regret of the policy."""
    encoded = network.encode(lesson.features, lesson.layers, lesson.types)
    # States with a choice alone: the others teach nothing.
    open_ = (lesson.masks.sum(-1) > 1) & torch.isfinite(lesson.regret).any(-1)
    mask = lesson.masks[open_]
    logits, value = network.head(encoded[open_], lesson.states[open_], mask)
    regret = lesson.regret[open_]
    target = torch.softmax(-regret.clamp(max=10.0) / softness + torch.where(mask, 0.0, -1e9), -1)
    log = torch.log_softmax(logits, -1)
    imitation = -(target * log).sum(-1).mean()
    chosen = log.exp()
    missed = (chosen * torch.where(mask, regret.clamp(max=1.0), 0.0)).sum(-1)
    judged = torch.nn.functional.smooth_l1_loss(value, lesson.value[open_].clamp(-2, 0.5))
    return imitation, judged, missed.mean()
