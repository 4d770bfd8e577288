"""The policy's network in torch, for training; engine/policy/network.h is the same for planning.

An encoder attends along the layers of each type and across the types of each layer (axial
attention), so neither their number nor, among types, their order matters. A small head then reads
one layer's encoding together with the state of the episode, and scores the types. The encoder runs
once a problem and pace, the head once a layer.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from scheduler.engine import _planner

# Distances between two layers that have a bias of their own; beyond the last all are alike.
DISTANCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


@dataclass(frozen=True, slots=True)
class Size:
    """Width of the encoding, heads of attention, blocks of the encoder."""

    width: int = 64
    heads: int = 4
    blocks: int = 2


def distance_buckets(layers: int) -> Tensor:
    """Bucket of the signed distance between each two layers, [L, L] int64."""
    edges = torch.tensor(DISTANCES)
    ahead = torch.arange(layers)[None, :] - torch.arange(layers)[:, None]
    size = torch.bucketize(ahead.abs(), edges, right=True)
    return torch.where(ahead < 0, size + len(DISTANCES), size)


class Attention(nn.Module):
    """Self-attention over the last but one dimension, with a bias for each pair or none."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm = nn.LayerNorm(size.width)
        self.mix = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return x plus what it attends to; x [N, S, width], bias [N or 1, heads, S, S]."""
        count, length, width = x.shape
        mixed = self.mix(self.norm(x)).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        seen = seen.transpose(1, 2).reshape(count, length, width)
        out: Tensor = x + self.out(seen)
        return out


class Block(nn.Module):
    """Attention along layers, attention across types, and a feed-forward part."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = Attention(size)
        self.types = Attention(size)
        self.distance = nn.Parameter(torch.zeros(size.heads, 2 * len(DISTANCES) + 1))
        self.norm = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 2 * size.width)
        self.down = nn.Linear(2 * size.width, size.width)

    def forward(self, x: Tensor, along: Tensor, across: Tensor, buckets: Tensor) -> Tensor:
        """Return the next encoding, [B, L, T, width].

        `along` [B, 1, 1, L] and `across` [B, 1, 1, T] are -inf where padded, else 0.
        """
        batch, layers, types, width = x.shape
        bias = self.distance[:, buckets][None] + along
        bias = bias.repeat_interleave(types, dim=0)
        columns = x.transpose(1, 2).reshape(batch * types, layers, width)
        columns = self.layers(columns, bias)
        x = columns.view(batch, types, layers, width).transpose(1, 2)
        rows = x.reshape(batch * layers, types, width)
        rows = self.types(rows, across.repeat_interleave(layers, dim=0))
        x = rows.view(batch, layers, types, width)
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Network(nn.Module):
    """Scores the types for a layer, and estimates the reward to come."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        width = size.width
        self.enter = nn.Linear(len(_planner.LAYER_FEATURES), width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(width)
        self.encoded = nn.Linear(width, width)
        self.state = nn.Linear(len(_planner.STATE_FEATURES), width, bias=False)
        self.own = nn.Linear(width, width)
        self.others = nn.Linear(2 * width, width, bias=False)
        self.score = nn.Linear(width, 1)
        self.judge = nn.Linear(width, width)
        self.value = nn.Linear(width, 1)

    def config(self) -> dict[str, int]:
        """What a network of the same shape is made from."""
        return asdict(self.size)

    def encode(self, features: Tensor, layers: Tensor, types: Tensor) -> Tensor:
        """Encode problems, [B, L, T, F] -> [B, L, T, width], given their true sizes [B]."""
        count, most = features.shape[1:3]
        off = float("-inf")
        along = torch.zeros(len(features), 1, 1, count)
        along.masked_fill_((torch.arange(count) >= layers[:, None])[:, None, None], off)
        across = torch.zeros(len(features), 1, 1, most)
        across.masked_fill_((torch.arange(most) >= types[:, None])[:, None, None], off)
        buckets = distance_buckets(count)
        x = self.enter(features)
        for block in self.blocks:
            x = block(x, along, across, buckets)
        encoded: Tensor = self.encoded(self.norm(x))
        return encoded

    def head(self, encoded: Tensor, state: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Score the types of one layer each.

        Args:
            encoded: [N, T, width], of that layer.
            state: [N, T, S].
            mask: [N, T] bool.

        Returns:
            logits [N, T], -1e9 where masked, and values [N].
        """
        z = torch.relu(encoded + self.state(state))
        there = mask[..., None]
        count = there.sum(-2).clamp(min=1)
        mean = (z * there).sum(-2) / count
        most = torch.where(there, z, 0.0).amax(-2)
        y = torch.relu(self.own(z) + self.others(torch.cat([mean, most], -1))[..., None, :])
        logits = self.score(y)[..., 0].masked_fill(~mask, -1e9)
        pooled = (y * there).sum(-2) / count
        return logits, self.value(torch.relu(self.judge(pooled)))[..., 0]
