"""Wide and deep with a mixture of experts: will a short video be watched?"""

import torch
from torch import Tensor, nn

from heterps import MoE, SparseEmbedding

# A row's gradient is divided by the batch, so Adagrad has to start from a small accumulator.
INITIAL_ACCUMULATOR = 1e-6
BINS = 21


class Numbers(nn.Module):
    """Counts, sizes and times on a log scale; the duration, first, also as overlapping bins.

    A click means play time beyond a threshold that depends on the duration, in steps no straight
    line follows. Bins are 0.25 apart from e^7.5 ms = 1.8 s to e^12.5 ms = 4.5 min.
    """

    centres: Tensor

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(7.5, 12.5, bins))

    def forward(self, dense: Tensor) -> Tensor:
        """[B, D] raw to [B, D + bins]."""
        logs = torch.log1p(dense.clamp(min=0))
        bins = torch.relu(1 - (logs[:, :1] - self.centres).abs() / 0.25)
        return torch.cat([(logs - 6) / 3, bins], 1)


class Tower(nn.Module):
    """Vectors of all slots and the numbers, side by side, to one vector of `width`.

    Rows start near zero and grow slowly under Adagrad. A layer norm over a sample's vectors makes
    them count from the first steps on, so that one epoch is enough; a second one overfits.
    """

    def __init__(self, slots: int, dense: int, dim: int, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(slots * dim)
        self.numbers = Numbers(BINS)
        self.layers = nn.Sequential(
            nn.Linear(slots * dim + dense + BINS, width), nn.ReLU(), nn.Dropout(dropout)
        )

    def forward(self, vectors: Tensor, dense: Tensor) -> Tensor:
        """[B, slots, dim] and [B, dense] to [B, width]."""
        known = self.norm(vectors.flatten(1))
        hidden: Tensor = self.layers(torch.cat([known, self.numbers(dense)], 1))
        return hidden


class KuaiRand(nn.Module):
    """Click or not, from `slots` keys and `dense` numbers an impression."""

    def __init__(
        self, slots: int, dense: int, dim: int, width: int, experts: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = SparseEmbedding(
            "deep", dim, learning_rate=0.01, initial_accumulator=INITIAL_ACCUMULATOR, scale=0.01
        )
        self.wide = SparseEmbedding(
            "wide",
            1,
            learning_rate=0.005,
            initial_accumulator=INITIAL_ACCUMULATOR,
            initializer="zeros",
        )
        self.tower = Tower(slots, dense, dim, width, dropout)
        self.experts = MoE(width, experts=experts, hidden=width, k=2)
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, sparse: Tensor, dense: Tensor) -> Tensor:
        """Logits [B] of keys [B, slots] and raw numbers [B, dense]."""
        vectors = self.embedding(sparse)
        weights = self.wide(sparse)
        hidden = self.tower(vectors, dense)
        hidden = hidden + self.experts(hidden)
        logits: Tensor = self.head(hidden).squeeze(1) + weights.sum((1, 2))
        return logits


def build(
    slots: int,
    dense: int,
    dim: int = 8,
    width: int = 64,
    experts: int = 4,
    dropout: float = 0.0,
) -> nn.Module:
    """Build the model; `slots` and `dense` are the lengths of `data.sparse` and `data.dense`."""
    return KuaiRand(slots, dense, dim, width, experts, dropout)
