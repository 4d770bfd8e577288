"""A Transformer language model over bytes whose feed-forward blocks are mixtures of experts."""

from typing import Any

import torch
from torch import Tensor, nn

from heterps import MoE

SCALE = 0.02  # of initial weights, as in GPT-2


class Embedding(nn.Module):
    """Tokens and their positions to vectors."""

    positions: Tensor

    def __init__(self, vocabulary: int, context: int, dim: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(context, dim)
        self.register_buffer("positions", torch.arange(context))
        nn.init.normal_(self.token.weight, std=SCALE)
        nn.init.normal_(self.position.weight, std=SCALE)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, L] to [B, L, dim]; L is at most the context."""
        return self.token(tokens) + self.position(self.positions[: tokens.shape[1]])


class Attention(nn.Module):
    """What causal self-attention adds to each vector."""

    mask: Tensor

    def __init__(self, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, bias=False)
        self.attention = nn.MultiheadAttention(dim, heads, bias=False, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, dim] to the same."""
        length = x.shape[1]
        h, mask = self.norm(x), self.mask[:length, :length]
        out, _ = self.attention(h, h, h, attn_mask=mask, need_weights=False, is_causal=True)
        return out


class Experts(nn.Module):
    """What a mixture of experts adds to each vector."""

    def __init__(self, dim: int, experts: int, hidden: int, k: int, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, bias=False)
        self.moe = MoE(dim, experts, hidden, k, **options)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, dim] to the same."""
        return self.moe(self.norm(x).flatten(0, 1)).view_as(x)


class LanguageModel(nn.Module):
    """Logits of the token that follows each; attention and experts alternate.

    Each is a layer that can be placed on its own: `attention0`, `experts0`, `attention1`, …
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        dim: int,
        layers: int,
        heads: int,
        experts: int,
        hidden: int,
        k: int,
        **options: Any,
    ) -> None:
        super().__init__()
        self.depth = layers
        self.embedding = Embedding(vocabulary, context, dim)
        for index in range(layers):
            self.add_module(f"attention{index}", Attention(dim, heads, context))
            self.add_module(f"experts{index}", Experts(dim, experts, hidden, k, **options))
        self.head = nn.Sequential(
            nn.LayerNorm(dim, bias=False), nn.Linear(dim, vocabulary, bias=False)
        )
        nn.init.normal_(self.head[1].weight, std=SCALE)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, L] to [B, L, vocabulary]."""
        x = self.embedding(tokens)
        for index in range(self.depth):
            x = x + getattr(self, f"attention{index}")(x)
            x = x + getattr(self, f"experts{index}")(x)
        return self.head(x)

    def active_parameters(self) -> int:
        """Parameters that a token meets: of each layer's experts, its k."""
        total = sum(p.numel() for p in self.parameters())
        for layer in self.modules():
            if isinstance(layer, MoE):
                of_all = layer.w1.numel() + layer.w2.numel()
                total -= of_all - of_all * layer.k // layer.num_experts
        return total


def build(
    vocabulary: int = 256,
    context: int = 64,
    dim: int = 128,
    layers: int = 4,
    heads: int = 4,
    experts: int = 8,
    hidden: int = 224,
    k: int = 2,
    **options: Any,
) -> nn.Module:
    """Build the model; `context` is the length of `data.tokens` less one, `options` are MoE's."""
    return LanguageModel(vocabulary, context, dim, layers, heads, experts, hidden, k, **options)
