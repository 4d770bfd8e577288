"""Wide and deep: by how many minutes will a flight arrive late?"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from heterps import SparseEmbedding

# A row's gradient is divided by the batch, so Adagrad has to start from a small accumulator.
INITIAL_ACCUMULATOR = 1e-6
MINUTES = 40.0  # about the deviation of delays: the layers give numbers near 1


class Delay(nn.Module):
    """Minutes, below 0 for early, from `slots` keys and `dense` numbers a flight."""

    def __init__(self, slots: int, dense: int, dim: int, width: int) -> None:
        super().__init__()
        self.embedding = SparseEmbedding(
            "deep", dim, learning_rate=0.02, initial_accumulator=INITIAL_ACCUMULATOR, scale=0.01
        )
        self.wide = SparseEmbedding(
            "wide",
            1,
            learning_rate=0.02,
            initial_accumulator=INITIAL_ACCUMULATOR,
            initializer="zeros",
        )
        self.tower = nn.Sequential(nn.Linear(slots * dim + dense, width), nn.ReLU())
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, sparse: Tensor, dense: Tensor) -> Tensor:
        """Minutes [B] of keys [B, slots] and numbers [B, dense]."""
        vectors = self.embedding(sparse).flatten(1)
        weights = self.wide(sparse).sum((1, 2))
        hidden = self.tower(torch.cat([vectors, dense], 1))
        return MINUTES * (self.head(hidden).squeeze(1) + weights)


def build(slots: int, dense: int, dim: int = 8, width: int = 64) -> nn.Module:
    """Build the model; `slots` and `dense` are the lengths of `data.sparse` and `data.dense`."""
    return Delay(slots, dense, dim, width)


def minutes(outputs: Tensor, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """How far predictions are off, in minutes."""
    off = (outputs - batch["label"]).double()
    return {"rmse": float(off.square().mean().sqrt()), "mae": float(off.abs().mean())}
