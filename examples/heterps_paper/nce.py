"""NCE: a target told from noise by its context, by noise-contrastive estimation (5 layers).

Mnih and Teh, "A fast and simple algorithm for training neural probabilistic language models"
(2012). The last slot is the target, the others are its context; noise is drawn from the targets
of the same batch, that is, by how frequent they are.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from heterps import SparseEmbedding

NOISE = 20


class Context(nn.Module):
    """The mean of the context's vectors [B, slots - 1, dim], through one layer: [B, dim]."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, dim))

    def forward(self, vectors: Tensor) -> Tensor:
        x: Tensor = self.fc(vectors.mean(1))
        return x


class Candidates(nn.Module):
    """Each sample's target and `noise` targets of others, [B, dim] -> [B, 1 + noise, dim]."""

    def __init__(self, noise: int) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, targets: Tensor) -> Tensor:
        shifted = [targets.roll(shift, 0) for shift in range(1 + self.noise)]
        return torch.stack(shifted, 1)


class Score(nn.Module):
    """Inner products [B, n] of contexts [B, dim] and candidates [B, n, dim]."""

    def forward(self, context: Tensor, candidates: Tensor) -> Tensor:
        return torch.einsum("bd,bnd->bn", context, candidates)


class NoiseContrast(nn.Module):
    """Target against noise, kept in `aux_loss`; returns the target's logits [B]."""

    aux_loss: Tensor | None = None

    def __init__(self, noise: int) -> None:
        super().__init__()
        self.log_noise = math.log(noise)

    def forward(self, scores: Tensor) -> Tensor:
        target, noise = scores[:, 0] - self.log_noise, scores[:, 1:] - self.log_noise
        self.aux_loss = -(logsigmoid(target) + logsigmoid(-noise).sum(1)).mean()
        return scores[:, 0]


class NCE(nn.Module):
    """How well the last slot suits the others."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.embedding = SparseEmbedding(
            "nce", dim, optimizer="adam", learning_rate=1e-3, scale=0.1
        )
        self.context = Context(dim, width)
        self.candidates = Candidates(NOISE)
        self.score = Score()
        self.contrast = NoiseContrast(NOISE)

    def forward(self, sparse: Tensor) -> Tensor:
        """Logits [B] of keys [B, slots]."""
        vectors = self.embedding(sparse)
        scores = self.score(self.context(vectors[:, :-1]), self.candidates(vectors[:, -1]))
        logits: Tensor = self.contrast(scores)
        return logits


def build(dim: int = 10, width: int = 400) -> nn.Module:
    """Build the model; any number of slots."""
    return NCE(dim, width)
