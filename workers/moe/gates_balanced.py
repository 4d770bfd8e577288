"""Gates that keep the loads even by other means than Switch's loss.

Shape suffixes: T tokens, D width, E experts, K choices, C tokens that an expert takes.
"""
# ruff: noqa: N803, N806 (shape suffixes are capital letters)

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers import ops
from workers.moe.gate import Decision, Gate, mean_over_tokens
from workers.moe.gates_topk import Score, ScoreGate

_NOISE_FLOOR = 1e-2  # keeps the chance of being chosen smooth where the noise would vanish


class NoisyTopK(Gate):
    """Top-k of logits with noise whose size is learned; weights are renormalised.

    Shazeer et al. (arXiv 1701.06538): in training, logits + (softplus(x noise^T) + 0.01) * normal.
    The balance loss is CV^2 of the importance (an expert's sum of weights) plus CV^2 of the load
    (in training the sum over tokens of the chance, over its own noise, that it is chosen; else
    its pairs), CV being the standard deviation over experts divided by the mean.

    Attributes:
        noise: float [E, D], zeros at first.
    """

    def __init__(
        self, dim: int, experts: int, k: int | None = None, *, seed: int | None = None
    ) -> None:
        super().__init__(dim, experts, k, seed=seed)
        self.noise = nn.Parameter(torch.zeros(experts, dim))

    def decide(self, x_TD: Tensor, balance_weight: float) -> Decision:
        """The rule."""
        logits_TE = noisy_TE = self.logits(x_TD)
        if self.training:
            std_TE = F.softplus(ops.router_logits(x_TD, self.noise)) + _NOISE_FLOOR
            normal_TE = torch.empty_like(std_TE)
            normal_TE.normal_(generator=self.generator(x_TD.device))
            noisy_TE = logits_TE + std_TE * normal_TE
        routing = ops.route(noisy_TE.detach().float(), self.k)
        chosen_TK = routing.chosen.long()
        weights_TK = noisy_TE.gather(1, chosen_TK).softmax(dim=1)
        importance_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, weights_TK)
        if self.training and self.k < self.num_experts:
            load_E = _chances(logits_TE, noisy_TE, std_TE, chosen_TK).sum(dim=0)
        else:
            load_E = routing.counts.to(logits_TE.dtype)
        balance = balance_weight * (_cv2(importance_TE.sum(dim=0)) + _cv2(load_E))
        probability_E = mean_over_tokens(importance_TE)
        return Decision(routing, weights_TK, logits_TE, probability_E, balance)


def _chances(logits_TE: Tensor, noisy_TE: Tensor, std_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """The chance of each expert to be among the k best if its own noise were drawn again."""
    k = chosen_TK.shape[1]
    best = noisy_TE.topk(k + 1, dim=1).values
    chosen_TE = torch.zeros_like(noisy_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
    # The k-th best of the other experts: one further down for those that are among the best.
    bar_TE = torch.where(chosen_TE, best[:, k:], best[:, k - 1 : k])
    chances_TE: Tensor = torch.special.ndtr((logits_TE - bar_TE) / std_TE)
    return chances_TE


def _cv2(values_E: Tensor) -> Tensor:
    """The squared coefficient of variation; zero for zeros."""
    mean = values_E.mean()
    return (values_E - mean).square().mean() / (mean.square() + 1e-10)


class ExpertChoice(Gate):
    """Each expert takes the C = ceil(k T / E) tokens that prefer it most: even by construction.

    Zhou et al. (arXiv 2202.09368). A token goes to any number of experts, none included, k on
    average; weights are softmax probabilities. There is no balance loss. What a token gets
    depends on the others of its batch, in evaluation too.
    """

    sets_capacity = True

    def decide(self, x_TD: Tensor, balance_weight: float) -> Decision:
        """The rule."""
        logits_TE = self.logits(x_TD)
        probabilities = logits_TE.softmax(dim=1)
        capacity = min(len(x_TD), math.ceil(self.k * len(x_TD) / self.num_experts))
        routing = _taken(probabilities.detach(), capacity)
        probability_E = mean_over_tokens(probabilities)
        none = logits_TE.new_zeros(())
        return Decision(routing, probabilities, logits_TE, probability_E, none)


def _taken(scores_TE: Tensor, capacity: int) -> ops.Routing:
    """The routing of each expert's best tokens; equal ones go by their position.

    Every expert is a choice of every token, K = E, and those that did not take it are dropped.
    """
    tokens, experts = scores_TE.shape
    keys_ET = scores_TE.nan_to_num(nan=-torch.inf).T
    best_EC = keys_ET.sort(dim=1, descending=True, stable=True).indices[:, :capacity]
    experts_E = torch.arange(experts, device=scores_TE.device)
    order = (best_EC.sort(dim=1).values * experts + experts_E.unsqueeze(1)).flatten()
    inverse = torch.full((tokens * experts,), -1, device=order.device)
    inverse[order] = torch.arange(len(order), device=order.device)
    offsets = torch.arange(experts + 1, device=order.device) * capacity
    chosen_TE = experts_E.int().expand(tokens, experts).contiguous()
    return ops.Routing(chosen_TE, order, inverse, offsets)


class Bias(ScoreGate):
    """Top-k of score + bias, weighted by the scores alone; the bias evens the loads.

    DeepSeek's balancing without a loss (arXiv 2408.15664). Each backward in training moves the
    bias of an expert by `rate`, up if it got less than the mean load and else down; so the
    gradients are those of the task. There is no balance loss. The load is that of all processes
    where experts are split over a group.

    Args:
        dim: width D of tokens.
        experts: number of experts E.
        k: choices of each token.
        score: softmax | sigmoid.
        renormalise: divide the scores of a token's choices by their sum.
        rate: by which the bias moves.
        seed: unused; it draws nothing.

    Attributes:
        bias: float32 [E], a buffer; float32 whatever type the module is cast to, since a step
            would be lost in the rounding of narrower ones.
        deferred: whether a backward only adds to `pending`, and `step` moves the bias; then the
            loads of several processes, or of several micro-batches, can be summed in between.
        pending: float32 [E], load since the last `step`.
    """

    bias: Tensor
    pending: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int | None = None,
        *,
        score: Score = "sigmoid",
        renormalise: bool = True,
        rate: float = 0.001,
        seed: int | None = None,
    ) -> None:
        super().__init__(dim, experts, k, score=score, renormalise=renormalise, seed=seed)
        self._require("rate", rate, 0 <= rate < math.inf, "at least 0")
        self.rate = rate
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("pending", torch.zeros(experts), persistent=False)
        self.deferred = False

    def decide(self, x_TD: Tensor, balance_weight: float) -> Decision:
        """The rule."""
        logits_TE = self.logits(x_TD)
        keys_TE = self.scores(logits_TE.detach()).float() + self.bias
        routing = ops.route(keys_TE, self.k)
        weights_TK = self.choice_weights(logits_TE, routing.chosen)
        if self.training and weights_TK.requires_grad:
            # In the backward, not here: a forward that is run again to save memory moves nothing.
            # The group's sum is made here, where all processes are at the same place.
            load_E = self.group.total(routing.counts) if self.group else routing.counts
            weights_TK.register_hook(lambda _: self._count(load_E))
        probability_E = mean_over_tokens(self.shares(logits_TE.detach()))
        none = logits_TE.new_zeros(())
        return Decision(routing, weights_TK, logits_TE, probability_E, none)

    def step(self) -> None:
        """Moves the bias by the pending load, and forgets it."""
        self.bias += self.rate * (self.pending.mean() - self.pending).sign()
        self.pending.zero_()

    def _count(self, load_E: Tensor) -> None:
        self.pending += load_E
        if not self.deferred:
            self.step()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Bias":
        kept = self.bias, self.pending
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bias.dtype != kept[0].dtype:
            self.bias, self.pending = (buffer.to(self.bias.device) for buffer in kept)
        return self
