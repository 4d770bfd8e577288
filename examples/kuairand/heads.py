"""One tower, several outcomes: will a short video be clicked on, watched for long, liked?"""

from collections.abc import Sequence

from model import INITIAL_ACCUMULATOR, Tower
from torch import Tensor, nn

from heterps import SparseEmbedding


class Heads(nn.Module):
    """A logit for each outcome, from `slots` keys and `dense` numbers an impression."""

    def __init__(
        self, outcomes: Sequence[str], slots: int, dense: int, dim: int, width: int
    ) -> None:
        super().__init__()
        self.outcomes = tuple(outcomes)
        self.embedding = SparseEmbedding(
            "deep", dim, learning_rate=0.01, initial_accumulator=INITIAL_ACCUMULATOR, scale=0.01
        )
        self.wide = SparseEmbedding(
            "wide",
            len(self.outcomes),
            learning_rate=0.005,
            initial_accumulator=INITIAL_ACCUMULATOR,
            initializer="zeros",
        )
        self.tower = Tower(slots, dense, dim, width, dropout=0.0)
        self.heads = nn.ModuleDict({name: nn.Linear(width, 1) for name in self.outcomes})
        for head in self.heads.values():
            nn.init.zeros_(head.weight)

    def forward(self, sparse: Tensor, dense: Tensor) -> dict[str, Tensor]:
        """Logits [B] by outcome, of keys [B, slots] and raw numbers [B, dense]."""
        hidden = self.tower(self.embedding(sparse), dense)
        weights = self.wide(sparse).sum(1)
        return {
            name: self.heads[name](hidden).squeeze(1) + weights[:, place]
            for place, name in enumerate(self.outcomes)
        }


def build(
    outcomes: Sequence[str], slots: int, dense: int, dim: int = 8, width: int = 64
) -> nn.Module:
    """Build the model; `outcomes` are the heads of the job."""
    return Heads(outcomes, slots, dense, dim, width)
