"""The CTR network: an embedding for every slot, and three dense layers."""

import torch
from torch import Tensor, nn

from heterps import SparseEmbedding


class Ctr(nn.Module):
    """Logits of keys and numbers."""

    def __init__(
        self, slots: int, dense: int, dim: int, widths: list[int], rows: dict[str, float]
    ) -> None:
        super().__init__()
        self.embedding = SparseEmbedding("rows", int(dim), **rows)
        layers: list[nn.Module] = []
        ends = [int(width) for width in widths]
        for inputs, outputs in zip([int(slots * dim + dense), *ends[:-1]], ends, strict=True):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.tower = nn.Sequential(*layers[:-1])

    def forward(self, sparse: Tensor, dense: Tensor) -> Tensor:
        """Logits [B] of keys [B, slots] and numbers [B, dense]."""
        vectors = self.embedding(sparse).flatten(1)
        logits: Tensor = self.tower(torch.cat([vectors, dense], 1)).squeeze(1)
        return logits
