"""Will a short video be watched, by what its user was shown before? Attention as in HSTU."""

import torch
from model import INITIAL_ACCUMULATOR, Tower
from torch import Tensor, nn
from torch.nn.functional import silu

import heterps
from heterps import SparseEmbedding

OUTCOMES = 5  # not known, seen, clicked on, watched for long, liked
MOST = 24  # impressions of a history
AGES = 24  # powers of two of seconds: half a year


class Attention(nn.Module):
    """A layer of HSTU (Zhai et al., 2024): pointwise aggregated attention, gated.

    Scores are SiLU of products and of what is learned for distances, in places and in time; they
    are not normalised over the history, so that its length and strength count.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.projections = nn.Linear(dim, 4 * dim)
        self.output = nn.Linear(dim, dim)
        self.places = nn.Parameter(torch.zeros(MOST + 1, heads))
        self.times = nn.Parameter(torch.zeros(AGES, heads))

    def forward(self, x: Tensor, there: Tensor, places: Tensor, ages: Tensor) -> Tensor:
        """[B, N, D] to the same.

        Args:
            there: bool [B, N, N], what each may attend to.
            places, ages: int64 [B, N, N], distances.
        """
        gate, *parts = silu(self.projections(self.before(x))).chunk(4, dim=2)
        value, query, key = (part.unflatten(2, (self.heads, -1)) for part in parts)
        bias = self.places[places] + self.times[ages]
        scores = silu(torch.einsum("bihd,bjhd->bijh", query, key) + bias) / x.shape[1]
        found = torch.einsum("bijh,bjhd->bihd", scores * there.unsqueeze(3), value).flatten(2)
        return x + self.output(self.after(found) * gate)


class History(nn.Module):
    """The history and the video itself, last of all, to one vector of the video."""

    def __init__(self, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.items = SparseEmbedding(
            "items", dim, learning_rate=0.01, initial_accumulator=INITIAL_ACCUMULATOR, scale=0.1
        )
        self.outcome = nn.Embedding(OUTCOMES, dim)
        nn.init.normal_(self.outcome.weight, std=0.1)
        self.layers = nn.ModuleList(Attention(dim, heads) for _ in range(layers))

    def forward(self, video: Tensor, history: Tensor, outcomes: Tensor, ages: Tensor) -> Tensor:
        """Keys [B], and keys, outcomes and ages [B, L], to [B, D]."""
        past, own = self.items(history), self.items(video)
        return self.attend(past, own, history, outcomes, ages)

    def attend(
        self, past: Tensor, video: Tensor, history: Tensor, outcomes: Tensor, ages: Tensor
    ) -> Tensor:
        """[B, L, D], [B, D] and keys, outcomes and ages [B, L] to [B, D]."""
        x = torch.cat([past, video.unsqueeze(1)], 1)
        one = torch.ones_like(history[:, :1])
        x = x + self.outcome(torch.cat([outcomes, 0 * one], 1))
        real = torch.cat([history != heterps.PAD, one == 1], 1)
        place = real.cumsum(1)
        age = torch.cat([ages, 0 * one], 1)
        # A video attends to those before it and to itself; what fills up comes behind the history.
        earlier = place.unsqueeze(2) >= place.unsqueeze(1)
        there = earlier & real.unsqueeze(1) & real.unsqueeze(2)
        places = (place.unsqueeze(2) - place.unsqueeze(1)).clamp(0, MOST)
        seconds = (age.unsqueeze(1) - age.unsqueeze(2)).clamp(min=0)
        ages = torch.log2(1.0 + seconds).long().clamp(max=AGES - 1)
        for layer in self.layers:
            x = layer(x, there, places, ages)
        return x[:, -1]


class Clicks(nn.Module):
    """Click or not; without `layers` from the impression alone."""

    def __init__(
        self, slots: int, dense: int, dim: int, width: int, layers: int, heads: int, items: int
    ) -> None:
        super().__init__()
        self.embedding = SparseEmbedding(
            "deep", dim, learning_rate=0.01, initial_accumulator=INITIAL_ACCUMULATOR, scale=0.01
        )
        self.tower = Tower(slots, dense, dim, width, dropout=0.0)
        self.history: History | None = None
        if layers:
            self.history = History(items, layers, heads)
        inputs = width + items * bool(layers)
        self.head = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))
        nn.init.zeros_(self.head[-1].weight)

    def forward(
        self,
        sparse: Tensor,
        dense: Tensor,
        video: Tensor,
        history: Tensor,
        outcomes: Tensor,
        ages: Tensor,
    ) -> Tensor:
        """Logits [B]."""
        hidden = self.tower(self.embedding(sparse), dense)
        if self.history is not None:
            interest = self.history(video, history, outcomes, ages)
            hidden = torch.cat([hidden, interest], 1)
        return self.head(hidden).squeeze(1)


def build(
    slots: int,
    dense: int,
    dim: int = 8,
    width: int = 64,
    layers: int = 2,
    heads: int = 2,
    items: int = 16,
) -> nn.Module:
    """Build the model; with no `layers` the baseline, which does not see histories."""
    return Clicks(slots, dense, dim, width, layers, heads, items)
