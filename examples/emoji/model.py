"""Towers for pictures and for words: what belongs together gets vectors that are near."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from heterps import SparseEmbedding

SIDE = 32  # pixels


class Picture(nn.Module):
    """Pixels [B, SIDE * SIDE * 3] from 0 to 255, row by row, to a unit vector [B, dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        channels = (3, 16, 32, 64)
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in pairwise(channels)
        )
        self.head = nn.Linear(channels[-1] * (SIDE // 8) ** 2, dim)

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.view(-1, SIDE, SIDE, 3).permute(0, 3, 1, 2) / 127.5 - 1
        for layer in self.layers:
            x = layer(x).relu()
        return normalize(self.head(x.flatten(1)), dim=1)


class Caption(nn.Module):
    """The mean of a caption's words [B, dim] to a unit vector [B, dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())
        self.head = nn.Linear(dim, dim)

    def forward(self, mean: Tensor) -> Tensor:
        return normalize(self.head(self.layers(mean)), dim=1)


class Scale(nn.Module):
    """What cosines are multiplied by, [], learned from 1 / 0.07 on as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self) -> Tensor:
        return self.logarithm.clamp(max=math.log(100.0)).exp()


class Emoji(nn.Module):
    """Vectors of pictures and of captions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embedding = SparseEmbedding(
            "words", dim, pooling="mean", learning_rate=0.05, initial_accumulator=1e-6, scale=0.1
        )
        self.picture, self.caption, self.scale = Picture(dim), Caption(dim), Scale()

    def forward(self, pixels: Tensor, words: Tensor) -> dict[str, Tensor]:
        return {
            "image": self.picture(pixels),
            "text": self.caption(self.embedding(words)),
            "scale": self.scale(),
        }


def build(dim: int = 64) -> nn.Module:
    """Build the model."""
    return Emoji(dim)
