"""Wide and deep with a mixture of experts: will a flight arrive late?"""

import torch
from torch import Tensor, nn

from heterps import MoE, SparseEmbedding

# A row's gradient is divided by the batch, so Adagrad has to start from a small accumulator.
INITIAL_ACCUMULATOR = 1e-6


class Flights(nn.Module):
    """Late or not, from `slots` keys and `dense` numbers a flight.

    The wide part gives every key a weight, as logistic regression does; the deep part gives it
    a vector of `dim` and lets a tower and experts combine them.
    """

    def __init__(
        self, slots: int, dense: int, dim: int, width: int, experts: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = SparseEmbedding(
            "deep", dim, learning_rate=0.05, initial_accumulator=INITIAL_ACCUMULATOR, scale=0.01
        )
        self.wide = SparseEmbedding(
            "wide",
            1,
            learning_rate=0.1,
            initial_accumulator=INITIAL_ACCUMULATOR,
            initializer="zeros",
        )
        self.tower = nn.Sequential(
            nn.Linear(slots * dim + dense, width), nn.ReLU(), nn.Dropout(dropout)
        )
        self.experts = MoE(width, experts=experts, hidden=width, k=2)
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, sparse: Tensor, dense: Tensor) -> Tensor:
        """Logits [B] of keys [B, slots] and numbers [B, dense]."""
        vectors = self.embedding(sparse)
        weights = self.wide(sparse)
        hidden = self.tower(torch.cat([vectors.flatten(1), dense], 1))
        hidden = hidden + self.experts(hidden)
        logits: Tensor = self.head(hidden).squeeze(1) + weights.sum((1, 2))
        return logits


def build(
    slots: int,
    dense: int,
    dim: int = 8,
    width: int = 64,
    experts: int = 4,
    dropout: float = 0.2,
) -> nn.Module:
    """Build the model; `slots` and `dense` are the lengths of `data.sparse` and `data.dense`."""
    return Flights(slots, dense, dim, width, experts, dropout)
