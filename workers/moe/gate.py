"""What every gate of a mixture of experts is: tokens in, a decision out.

Shape suffixes: T tokens, D width, E experts, K choices.
"""
# ruff: noqa: N803 (shape suffixes are capital letters)

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers import ops
from workers.moe.group import ExpertGroup
from workers.ops import Routing

_STRIDE = 0x9E3779B97F4A7C15  # odd and without pattern, so seeds side by side share no draws


@dataclass(frozen=True, slots=True)
class Decision:
    """What a gate decided for a batch.

    routing: which experts each token goes to, before a capacity drops any.
    weights: [T, K], of each choice in the output.
    logits: [T, E], by which it was decided, without added noise.
    probability: [E], mean share that the gate gives each expert; sums to one unless T=0.
    balance: scalar, the weighted balance loss.
    """

    routing: Routing
    weights: Tensor
    logits: Tensor
    probability: Tensor
    balance: Tensor


class Gate(nn.Module):
    """A linear map of tokens to logits, and a rule that makes a decision of them.

    Subclasses implement `decide`. A rule that draws at random does so in training only.

    Args:
        dim: width D of tokens.
        experts: number of experts E.
        k: choices of each token; `default_k` unless given.
        seed: of what it draws in training; None takes torch's generator.

    Raises:
        ValueError: an argument out of range.
    """

    default_k = 2
    sets_capacity = False  # whether the rule itself limits what an expert takes
    group: ExpertGroup | None = None  # of processes that route to the same experts

    def __init__(
        self, dim: int, experts: int, k: int | None = None, *, seed: int | None = None
    ) -> None:
        super().__init__()
        k = self.default_k if k is None else k
        self.dim, self.num_experts, self.k = dim, experts, k
        self._require("k", k, 1 <= k <= experts, f"1 to {experts} (experts)")
        self.weight = nn.Parameter(nn.Linear(dim, experts, bias=False).weight.detach())
        self.seed, self.draws = seed, 0

    def forward(self, x_TD: Tensor, balance_weight: float) -> Decision:
        """Decides for tokens [T, D]; its balance loss is multiplied by `balance_weight`."""
        with torch.autocast(x_TD.device.type, enabled=False):
            return self.decide(x_TD, balance_weight)

    def decide(self, x_TD: Tensor, balance_weight: float) -> Decision:
        """The rule, for tokens of any floating type; autocast is off, and `logits` are wider."""
        raise NotImplementedError(f"{type(self).__name__}: expected a decide method")

    def limit(self, routing: Routing, capacity: int) -> Routing:
        """Drops what exceeds `capacity` rows of an expert: its later tokens."""
        return routing.limited(capacity)

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, E] of tokens [T, D], in float32 at least: rounding would reorder close experts."""
        return ops.router_logits(x_TD, self.weight)

    def guess(self, x_TD: Tensor) -> Tensor:
        """[T, E], the higher the likelier that tokens which are like these will go to an expert.

        By the linear map alone: it draws nothing, and nothing follows of it but what is read ahead.
        """
        with torch.autocast(x_TD.device.type, enabled=False):
            return ops.router_logits(x_TD, self.weight).softmax(dim=1)

    def generator(self, device: torch.device) -> torch.Generator | None:
        """What to draw the next numbers from: its own, by `seed`, or None for torch's.

        Made anew each time, so that copies and pickles of a gate go on with the same draws.
        """
        if self.seed is None:
            return None
        self.draws += 1
        return torch.Generator(device).manual_seed((self.seed + self.draws * _STRIDE) % 2**63)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"dim={self.dim}, experts={self.num_experts}, k={self.k}"

    def _require(self, key: str, value: object, holds: bool, expected: str) -> None:
        require(type(self).__name__, key, value, holds, expected)


def require(what: str, key: str, value: object, holds: bool, expected: str) -> None:
    """Refuse an argument of a layer or gate unless it `holds`.

    Raises:
        ValueError: names both, the value and what was expected.
    """
    if not holds:
        raise ValueError(f"{what}: {key}: expected {expected}, got {value}")


def mean_over_tokens(values_TE: Tensor) -> Tensor:
    """[T, E] to [E]; zero for T=0."""
    # A sum, not a mean: no tokens then give zero rather than NaN.
    return values_TE.sum(dim=0) / max(1, values_TE.shape[0])


def share(routing: Routing, dtype: torch.dtype) -> Tensor:
    """Share of the pairs that each expert gets [E]; zeros for T=0."""
    return routing.counts.to(dtype) / max(1, routing.order.shape[0])


def switch_balance(share_E: Tensor, probability_E: Tensor, weight: float) -> Tensor:
    """Switch Transformer's, weight * E * sum_e share_e probability_e: `weight` when even."""
    return weight * len(share_E) * (share_E * probability_E).sum()
