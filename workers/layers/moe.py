"""Mixture of experts: each token goes through the k experts its gate prefers.

Shape suffixes: T tokens, D width, E experts, K choices, H hidden width of an expert, R rows in
expert order (T*K, less what a capacity drops).
"""
# ruff: noqa: N803, N806 (shape suffixes are capital letters)

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers import ops


class MoE(nn.Module):
    """Softmax top-k gate over experts; x_TD -> out_TD.

    The weights of a token's k experts are renormalised to sum to one, so with k=1 the gate learns
    from the balance loss alone. Experts are GELU networks of two layers without bias, stacked in
    `w1` [E, D, H] and `w2` [E, H, D], unless `expert` makes others. Tokens are grouped by expert,
    so each expert runs once on a contiguous slice; one without tokens does not run. Sums run in a
    fixed order: equal inputs give equal bits. On a CUDA device a pass waits once, for the loads.

    Args:
        dim: width D of tokens.
        experts: number of experts E.
        hidden: hidden width H of an expert; 4 * dim unless given. Not with `expert`.
        k: experts for each token.
        expert: makes one expert, any module [n, D] -> [n, D]; called E times.
        capacity_factor: an expert takes at most ceil(capacity_factor * T * k / E) tokens, the
            later ones lose that choice (contributing zero). None: nothing is dropped.
        balance_weight: factor of `aux_loss`.
        seed: of the initial weights; None takes torch's generator.

    Raises:
        ValueError: an argument out of range, or an input that is not [T, D].

    After a forward pass:
        aux_loss: scalar to add to the loss, balance_weight * E * sum_e f_e P_e, where f_e is the
            share of pairs sent to e and P_e its mean probability; balance_weight when even.
            Differentiable through the gate; zero for T=0.
        load: int64 [E], pairs the gate sent to each expert, before any were dropped.
    """

    aux_loss: Tensor
    load: Tensor

    def __init__(
        self,
        dim: int,
        experts: int = 8,
        hidden: int | None = None,
        k: int = 2,
        expert: Callable[[], nn.Module] | None = None,
        capacity_factor: float | None = None,
        balance_weight: float = 0.01,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _require("dim", dim, dim >= 1, "at least 1")
        _require("experts", experts, experts >= 1, "at least 1")
        _require("k", k, 1 <= k <= experts, f"1 to {experts} (experts)")
        _require("hidden", hidden, hidden is None or hidden >= 1, "at least 1")
        _require("hidden", hidden, hidden is None or expert is None, "None together with expert")
        _require(
            "capacity_factor",
            capacity_factor,
            capacity_factor is None or 0 < capacity_factor < math.inf,
            "None or a number above 0",
        )
        _require("balance_weight", balance_weight, balance_weight >= 0, "at least 0")
        self.dim, self.num_experts, self.k = dim, experts, k
        self.capacity_factor, self.balance_weight = capacity_factor, balance_weight
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            self.gate = nn.Linear(dim, experts, bias=False)
            if expert is None:
                hidden = 4 * dim if hidden is None else hidden
                self.w1 = nn.Parameter(_uniform(experts, dim, hidden))
                self.w2 = nn.Parameter(_uniform(experts, hidden, dim))
                self.experts = None
            else:
                self.experts = nn.ModuleList(expert() for _ in range(experts))
        self.aux_loss = torch.zeros(())
        self.load = torch.zeros(experts, dtype=torch.int64)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Tokens [T, D] -> [T, D] of the same type; sets `aux_loss` and `load`."""
        if x_TD.dim() != 2 or x_TD.shape[1] != self.dim:
            raise ValueError(f"MoE: x: expected [tokens, {self.dim}], got {list(x_TD.shape)}")
        logits_TE = self._logits(x_TD)
        routing = ops.route(logits_TE.detach().float(), self.k)
        # Softmax over the chosen logits: the chosen probabilities divided by their sum.
        weights_TK = logits_TE.gather(1, routing.chosen.long()).softmax(dim=1)
        self._balance(logits_TE, routing)
        if self.capacity_factor is not None:
            share = len(x_TD) * self.k / self.num_experts
            routing = routing.limited(math.ceil(self.capacity_factor * share))
        rows_RD = ops.gather_rows(x_TD, routing)
        rows_RD = self._run_experts(rows_RD, routing.counts.tolist())
        return ops.gather_sum(rows_RD, routing, weights_TK)

    def _logits(self, x_TD: Tensor) -> Tensor:
        # At least float32, also under autocast: rounding would reorder close experts.
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            return F.linear(x_TD.to(dtype), self.gate.weight.to(dtype))

    def _balance(self, logits_TE: Tensor, routing: ops.Routing) -> None:
        self.load = routing.counts
        share_E = self.load.to(logits_TE.dtype) / max(1, len(routing.order))
        # A sum, not a mean: no tokens then give zero rather than NaN.
        probability_E = logits_TE.softmax(dim=1).sum(dim=0) / max(1, len(logits_TE))
        scale = self.balance_weight * self.num_experts
        self.aux_loss = scale * (share_E * probability_E).sum()

    def _run_experts(self, rows_RD: Tensor, counts: list[int]) -> Tensor:
        inputs = rows_RD.split(counts)
        if self.experts is not None:
            outputs = [
                module(rows) for module, rows in zip(self.experts, inputs, strict=True) if len(rows)
            ]
        else:
            # Unbound once: the gradient of an index would be a zero tensor of all experts each.
            weights = zip(self.w1.unbind(), self.w2.unbind(), inputs, strict=True)
            outputs = [F.gelu(rows @ w1) @ w2 for w1, w2, rows in weights if len(rows)]
        return torch.cat(outputs) if outputs else rows_RD

    def __getstate__(self) -> dict[str, Any]:
        # A graph neither copies nor pickles.
        return self.__dict__ | {"aux_loss": self.aux_loss.detach()}

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"dim={self.dim}, experts={self.num_experts}, k={self.k}"


def _require(key: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"MoE: {key}: expected {expected}, got {value}")


def _uniform(experts: int, inputs: int, outputs: int) -> Tensor:
    """The initial weights of nn.Linear, for each expert: uniform within 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(inputs)
    return torch.empty(experts, inputs, outputs).uniform_(-bound, bound)
