"""PPO over the attention network, through sb3-contrib's MaskablePPO."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.buffers import (
    MaskableDictRolloutBuffer,
    MaskableDictRolloutBufferSamples,
)
from sb3_contrib.common.maskable.distributions import MaskableCategoricalDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.logger import Logger
from torch import Tensor

from scheduler.agent.training.network import Network, Size
from scheduler.agent.training.vector import PlacementVec


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyper-parameters of PPO; `steps` are layers placed, over all environments."""

    steps: int = 600_000
    environments: int = 48
    horizon: int = 96
    blocks: int = 6  # environments in a minibatch, with all their steps
    epochs: int = 2
    learning_rate: float = 1e-4
    clip: float = 0.15
    entropy: float = 0.0
    gae_lambda: float = 0.95
    value_weight: float = 0.5
    target_kl: float | None = 0.03
    seed: int = 21


class AttentionPolicy(MaskableActorCriticPolicy):
    """The network as a stable-baselines3 policy: a problem is encoded once for all its steps."""

    network: Network

    def __init__(self, *args: Any, size: Size | None = None, **kwargs: Any) -> None:
        self._size = size or Size()
        self._encoded: dict[int, Tensor] = {}
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Callable[[float], float]) -> None:
        self.network = Network(self._size)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr_schedule(1), (0.9, 0.99))

    def train(self, mode: bool = True) -> "AttentionPolicy":
        """Forget encodings made by other weights."""
        self._encoded = {}
        super().train(mode)
        return self

    def _scores(self, obs: dict[str, Tensor], masks: Any) -> tuple[Tensor, Tensor]:
        place = obs["place"].long()
        tags = obs["episode"].long()[:, 0]
        unique, inverse = torch.unique(tags, return_inverse=True)
        first = torch.zeros(len(unique), dtype=torch.long)
        first[inverse.flip(0)] = torch.arange(len(tags)).flip(0)
        encoded = self._encode(unique, obs["features"][first], place[first])
        at = place[:, 0].clamp(max=encoded.shape[1] - 1)
        mask = torch.as_tensor(masks, dtype=torch.bool).reshape(len(tags), -1)
        types = encoded.shape[2]
        logits, values = self.network.head(
            encoded[inverse, at], obs["state"][:, :types], mask[:, :types]
        )
        padding = mask.shape[1] - types
        return torch.nn.functional.pad(logits, (0, padding), value=-1e9), values

    def _encode(self, tags: Tensor, features: Tensor, place: Tensor) -> Tensor:
        layers, types = place[:, 1], place[:, 2]
        features = features[:, : int(layers.max()), : int(types.max())]
        if torch.is_grad_enabled():
            return self.network.encode(features, layers, types)
        # While playing, most episodes go on: only new ones are encoded.
        names = tags.tolist()
        fresh = [n for n, name in enumerate(names) if name not in self._encoded]
        if fresh:
            made = self.network.encode(features[fresh], layers[fresh], types[fresh])
            self._encoded.update(
                (names[n], row[: layers[n], : types[n]]) for n, row in zip(fresh, made, strict=True)
            )
        self._encoded = {name: self._encoded[name] for name in names}
        whole = torch.zeros(*features.shape[:3], self._size.width)
        for n, name in enumerate(names):
            row = self._encoded[name]
            whole[n, : row.shape[0], : row.shape[1]] = row
        return whole

    def _distribution(self, logits: Tensor, masks: Any) -> MaskableCategoricalDistribution:
        made = MaskableCategoricalDistribution(logits.shape[1]).proba_distribution(logits)
        made.apply_masking(masks)
        return made

    def forward(
        self, obs: Any, deterministic: bool = False, action_masks: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions, values [n, 1] and log probabilities [n]."""
        logits, values = self._scores(obs, action_masks)
        distribution = self._distribution(logits, action_masks)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values[:, None], distribution.log_prob(actions)

    def evaluate_actions(
        self, obs: Any, actions: Tensor, action_masks: Any = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return values [n, 1], log probabilities [n] and entropies [n]."""
        logits, values = self._scores(obs, action_masks)
        distribution = self._distribution(logits, action_masks)
        return values[:, None], distribution.log_prob(actions), distribution.entropy()

    def get_distribution(
        self, obs: Any, action_masks: Any = None
    ) -> MaskableCategoricalDistribution:
        """Return the distribution over the types."""
        return self._distribution(self._scores(obs, action_masks)[0], action_masks)

    def predict_values(self, obs: Any) -> Tensor:
        """Return the values [n, 1]; the mask is part of the state."""
        return self._scores(obs, obs["state"][..., 0] > 0)[1][:, None]


class EpisodeBuffer(MaskableDictRolloutBuffer):
    """Minibatches of whole environments, so that few problems are encoded in each."""

    def get(  # type: ignore[override]
        self, batch_size: int | None = None
    ) -> Generator[MaskableDictRolloutBufferSamples, None, None]:
        """Yield minibatches of `batch_size` steps."""
        if not self.generator_ready:
            for key, seen in self.observations.items():
                self.observations[key] = self.swap_and_flatten(seen)
            names = ("actions", "values", "log_probs", "advantages", "returns", "action_masks")
            for name in names:
                setattr(self, name, self.swap_and_flatten(getattr(self, name)))
            self.generator_ready = True
        size = self.buffer_size
        count = max(1, (batch_size or size * self.n_envs) // size)
        order = np.random.permutation(self.n_envs)
        for start in range(0, self.n_envs, count):
            chosen = order[start : start + count]
            yield self._get_samples((chosen[:, None] * size + np.arange(size)).ravel())


def make_agent(
    vector: PlacementVec, network: Network, settings: Settings, decay: bool = True
) -> MaskablePPO:
    """Return a MaskablePPO agent that goes on from `network`'s weights."""

    def rate(remaining: float) -> float:
        return settings.learning_rate * (0.05 + 0.95 * remaining if decay else 1.0)

    agent = MaskablePPO(
        AttentionPolicy,
        vector,
        learning_rate=rate,
        n_steps=settings.horizon,
        batch_size=settings.horizon * settings.blocks,
        n_epochs=settings.epochs,
        gamma=1.0,
        gae_lambda=settings.gae_lambda,
        clip_range=settings.clip,
        ent_coef=settings.entropy,
        vf_coef=settings.value_weight,
        target_kl=settings.target_kl,
        rollout_buffer_class=EpisodeBuffer,
        policy_kwargs={"size": network.size},
        seed=settings.seed,
        device="cpu",
    )
    policy = agent.policy
    assert isinstance(policy, AttentionPolicy)
    policy.network.load_state_dict(network.state_dict())
    agent.set_logger(Logger(None, []))  # its own would leave a folder where temporary files lie
    return agent
