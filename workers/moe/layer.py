"""Mixture of experts: each token goes through the k experts its gate prefers.

Shape suffixes: T tokens, D width, E experts, K choices, H hidden width of an expert, R rows in
expert order (T*K, less what a capacity drops).
"""
# ruff: noqa: N803, N806 (shape suffixes are capital letters)

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from workers import ops
from workers.learning.reduction import tag
from workers.moe.config import MoEConfig
from workers.moe.gate import require
from workers.moe.gates import Decision, make_gate
from workers.moe.gates_topk import TopK
from workers.moe.group import ExpertGroup
from workers.moe.made import empty_experts
from workers.moe.parallel import ExpertParallel, ParallelStats, Weights
from workers.ops.grouped_ffn import activate


@dataclass(frozen=True, slots=True)
class MoEStats:
    """How a layer spread its last batch.

    load: int64 [E], pairs the gate sent to each expert, before a capacity dropped any.
    dropped: share of these pairs that the capacity dropped.
    entropy: of the gate's mean probabilities, in nats; log(E) when even.
    imbalance: highest load divided by the mean load; 1 when even, or without tokens.
    parallel: loads of all processes, and what was shadowed; None without a group.
    """

    load: Tensor
    dropped: float
    entropy: float
    imbalance: float
    parallel: ParallelStats | None = None


class Outside(Protocol):
    """What has the experts of a layer that has none itself."""

    def run(self, rows_RD: Tensor, offsets: Tensor) -> Tensor:
        """Rows [R, D] in expert order, those of e from offsets[e] to offsets[e + 1], to [R, D]."""


class MoE(nn.Module):
    """A gate over experts; x_TD -> out_TD.

    By default a softmax top-k gate whose weights of a token's k experts are renormalised to sum to
    one, so with k=1 the gate learns from the balance loss alone; the other gates are in
    `workers.moe.gates`. Experts are GELU networks of two layers without bias, stacked in `w1`
    [E, D, H] and `w2` [E, H, D], which one op runs, unless `expert` makes others. Tokens are
    grouped by expert, so each expert runs once on a contiguous slice; one without tokens does not
    run. Sums run in a fixed order: equal inputs give equal bits. On a CUDA device a pass waits
    where `expert` made the experts, for their loads, and where pairs are dropped.

    Args:
        dim, experts, hidden, k: the first fields of `MoEConfig`.
        group: the processes that share out the experts, as `split` does later; all of them make
            the layer and call it together.
        options: further fields of `MoEConfig`, and options of the gate, such as score="sigmoid" of
            topk; see its class.

    Raises:
        ValueError: an argument out of range, or an input that is not [T, D].
        TypeError: an option that the gate does not have.

    After a forward pass:
        aux_loss: scalar to add to the loss: balance_weight times the gate's balance loss, plus
            z_weight times the mean above. The balance loss of topk is E * sum_e f_e P_e, where
            f_e is the share of pairs sent to e and P_e its mean probability; 1 when even.
            Differentiable through the gate; zero for T=0.
        load: int64 [E], pairs the gate sent to each expert, before any were dropped.
    """

    aux_loss: Tensor
    load: Tensor
    experts: nn.ModuleList | None
    shared: nn.ModuleList | None
    outside: Outside | None = None  # set where experts are out of memory, see workers/offload

    Config = MoEConfig

    def __init__(
        self,
        dim: int,
        experts: int = 8,
        hidden: int | None = None,
        k: int | None = None,
        *,
        group: ExpertGroup | ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        config = MoEConfig.of(dim=dim, experts=experts, hidden=hidden, k=k, **options)
        self.dim, self.num_experts, self.activation = dim, experts, config.activation
        self.capacity_factor, self.balance_weight = config.capacity_factor, config.balance_weight
        self.shared_experts, self.z_weight = config.shared_experts, config.z_weight
        self._chunks, self._shadow = config.chunks, config.shadow
        with torch.random.fork_rng(devices=[], enabled=config.seed is not None):
            if config.seed is not None:
                torch.random.manual_seed(config.seed)
            self.gate = make_gate(config)
            self._make_experts(config)
        self.k = self.gate.k
        unlimited = self.capacity_factor is None or not self.gate.sets_capacity
        require(
            "MoE", "capacity_factor", self.capacity_factor, unlimited, "None: this gate's k sets it"
        )
        self.parallel: ExpertParallel | None = None
        if group is not None:
            self.split(group)
        self.aux_loss = torch.zeros(())
        self.load = torch.zeros(experts, dtype=torch.int64)
        self._probability = torch.zeros(experts)
        self._dropped = 0.0

    @classmethod
    def from_config(
        cls, config: MoEConfig, group: ExpertGroup | ProcessGroup | None = None
    ) -> Self:
        """The layer of a configuration."""
        return cls(**config.options(), group=group)

    def _make_experts(self, config: MoEConfig) -> None:
        expert, shared = config.expert, config.shared_experts
        hidden = 4 * self.dim if config.hidden is None else config.hidden
        self.experts = self.shared = None
        if expert is not None:
            self.experts = nn.ModuleList(expert() for _ in range(self.num_experts))
            if shared:
                self.shared = nn.ModuleList(expert() for _ in range(shared))
            return
        inner = 2 * hidden if self.activation == "swiglu" else hidden
        self.w1 = nn.Parameter(_uniform(self.num_experts, self.dim, inner, empty_experts))
        self.w2 = nn.Parameter(_uniform(self.num_experts, hidden, self.dim, empty_experts))
        if shared:
            self.shared_w1 = nn.Parameter(_uniform(shared, self.dim, inner))
            self.shared_w2 = nn.Parameter(_uniform(shared, hidden, self.dim))

    def split(self, group: ExpertGroup | ProcessGroup) -> None:
        """Keeps this process's share of the experts, and from now on computes with the others'.

        All processes of the group call it, with equal weights, and from then on forward and
        backward together. Each passes its own tokens, and has `w1` and `w2`, or `experts`, of its
        experts alone; load, losses and capacity are those of its own tokens. Parameters of the
        experts are new: make optimizers afterwards.

        Raises:
            ValueError: it is split already, or there are fewer experts than processes.
        """
        if not isinstance(group, ExpertGroup):
            group = ExpertGroup(group)
        if self.parallel is not None:
            raise ValueError("MoE: split: expected a layer with all experts, got one that is split")
        if self.outside is not None:
            raise ValueError("MoE: split: expected a layer whose experts are in memory")
        chunks, shadow = self._chunks, self._shadow
        fits = self.num_experts >= group.size
        require("MoE", "experts", self.num_experts, fits, f"at least {group.size} (processes)")
        self.parallel = ExpertParallel(group, self.num_experts, chunks, shadow)
        self.gate.group = group
        own = self.parallel.own
        if self.experts is not None:
            self.experts = nn.ModuleList(self.experts[e] for e in own)
            plain = not any(True for _ in self.experts.buffers())
            require(
                "MoE", "shadow", shadow, plain or not shadow, "False: these experts have buffers"
            )
            experts = list(self.experts.parameters())
        else:
            self.w1 = nn.Parameter(self.w1.detach()[own.start : own.stop].clone())
            self.w2 = nn.Parameter(self.w2.detach()[own.start : own.stop].clone())
            experts = [self.w1, self.w2]
        tag(experts, "expert")
        split = set(map(id, experts))
        replicas = [p for p in self.parameters() if id(p) not in split]
        tag(replicas, "replica")
        self.parallel.same_everywhere(replicas)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Tokens [T, D] -> [T, D] of the same type; sets `aux_loss` and `load`."""
        if x_TD.dim() != 2 or x_TD.shape[1] != self.dim:
            raise ValueError(f"MoE: x: expected [tokens, {self.dim}], got {list(x_TD.shape)}")
        out_TD = self._run_whole(x_TD) if self._is_whole(x_TD) else self._run(x_TD)
        for output in self._run_shared(x_TD):
            out_TD = out_TD + output
        return out_TD

    def stats(self) -> MoEStats:
        """How the last forward pass spread its tokens; on a CUDA device this waits for it."""
        entropy = torch.special.entr(self._probability.double()).sum().item()
        total, highest = int(self.load.sum()), int(self.load.max())
        imbalance = highest * self.num_experts / total if total else 1.0
        parallel = self.parallel.stats if self.parallel else None
        return MoEStats(self.load, self._dropped, entropy, imbalance, parallel)

    def _is_whole(self, x_TD: Tensor) -> bool:
        """Whether gate and experts are what one op computes, with nobody looking in between."""
        return (
            isinstance(self.gate, TopK)
            and self.gate.by_softmax
            and not (self.gate._forward_hooks or self.gate._forward_pre_hooks)
            and self._has_stacked
            and self.capacity_factor is None
            and x_TD.dtype == torch.float32
            and not torch.is_autocast_enabled(x_TD.device.type)
        )

    @property
    def _has_stacked(self) -> bool:
        """Whether all experts are here, in `w1` and `w2`."""
        return self.parallel is None and self.outside is None and self.experts is None

    def _run_whole(self, x_TD: Tensor) -> Tensor:
        """To the bit what `_run` gives, of whose ops each takes as long as some experts."""
        gate, experts = cast(TopK, self.gate), (self.w1, self.w2, self.activation)
        out_TD, logits_TE, routing = ops.topk_ffn(x_TD, gate.weight, self.k, *experts)
        about = gate.balance(logits_TE, routing, self.balance_weight)
        self._note(routing, routing, logits_TE, *about)
        return out_TD

    def _run(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD.view_as(x_TD)  # its gradients of here are summed before those of elsewhere
        decision: Decision = self.gate(x_TD, self.balance_weight)
        routing = decision.routing
        if self.capacity_factor is not None:
            share = x_TD.shape[0] * self.k / self.num_experts
            routing = self.gate.limit(routing, math.ceil(self.capacity_factor * share))
        about = decision.logits, decision.probability, decision.balance
        self._note(decision.routing, routing, *about)
        if self._has_stacked:
            experts = self.w1, self.w2, self.activation
            return ops.routed_ffn(x_TD, routing, decision.weights, *experts)
        rows_RD = ops.gather_rows(x_TD, routing)
        rows_RD = self._run_rows(rows_RD, routing)
        return ops.gather_sum(rows_RD, routing, decision.weights)

    def _note(
        self,
        sent: ops.Routing,
        kept: ops.Routing,
        logits_TE: Tensor,
        probability_E: Tensor,
        balance: Tensor,
    ) -> None:
        self.load = sent.counts
        self.aux_loss = balance
        if self.z_weight:
            squares_T = logits_TE.logsumexp(dim=1).square()
            self.aux_loss = self.aux_loss + self.z_weight * squares_T.sum() / max(
                1, squares_T.shape[0]
            )
        self._probability = probability_E.detach()
        pairs = sent.order.shape[0]
        self._dropped = (pairs - kept.order.shape[0]) / max(1, pairs)

    def _run_rows(self, rows_RD: Tensor, routing: ops.Routing) -> Tensor:
        if self.parallel is None:
            return self._run_experts(rows_RD, routing.offsets)
        weights = self._weights() if self.parallel.shadow else []
        counts = routing.counts
        return self.parallel.run(rows_RD, counts, self._run_counted, self._run_one, weights)

    def _run_experts(self, rows_RD: Tensor, offsets: Tensor) -> Tensor:
        if self.outside is not None:
            return self.outside.run(rows_RD, offsets)
        if self.experts is None:
            return ops.grouped_ffn(rows_RD, offsets, self.w1, self.w2, self.activation)
        inputs = rows_RD.split(offsets.diff().tolist())
        outputs = [
            module(rows) for module, rows in zip(self.experts, inputs, strict=True) if len(rows)
        ]
        return torch.cat(outputs) if outputs else rows_RD

    def _run_counted(self, rows_RD: Tensor, counts: list[int]) -> Tensor:
        offsets = torch.tensor([0, *accumulate(counts)], device=rows_RD.device)
        return self._run_experts(rows_RD, offsets)

    def _run_one(self, rows_RD: Tensor, weights: Weights) -> Tensor:
        if self.experts is not None:
            out: Tensor = torch.func.functional_call(self.experts[0], weights, (rows_RD,))
            return out
        return activate(rows_RD @ weights["w1"], self.activation) @ weights["w2"]

    def _weights(self) -> list[Weights]:
        if self.experts is not None:
            return [dict(module.named_parameters()) for module in self.experts]
        pairs = zip(self.w1.unbind(), self.w2.unbind(), strict=True)
        return [{"w1": w1, "w2": w2} for w1, w2 in pairs]

    def _run_shared(self, x_TD: Tensor) -> list[Tensor]:
        if not self.shared_experts:
            return []
        if self.shared is not None:
            return [module(x_TD) for module in self.shared]
        weights = zip(self.shared_w1.unbind(), self.shared_w2.unbind(), strict=True)
        return [activate(x_TD @ w1, self.activation) @ w2 for w1, w2 in weights]

    def __getstate__(self) -> dict[str, Any]:
        # A graph neither copies nor pickles.
        return self.__dict__ | {"aux_loss": self.aux_loss.detach()}

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"dim={self.dim}, experts={self.num_experts}, k={self.k}"


def aux_loss(model: nn.Module) -> Tensor:
    """The sum of `aux_loss` over the MoE layers of a model, to add to its loss; else zero."""
    losses = [module.aux_loss for module in model.modules() if isinstance(module, MoE)]
    if not losses:
        return torch.zeros(())
    return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()


def _uniform(
    experts: int, inputs: int, outputs: int, empty: Callable[..., Tensor] = torch.empty
) -> Tensor:
    """The initial weights of nn.Linear, for each expert: uniform within 1 / sqrt(inputs)."""
    bound = 1 / math.sqrt(inputs)
    return empty(experts, inputs, outputs).uniform_(-bound, bound)
