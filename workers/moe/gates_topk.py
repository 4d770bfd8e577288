"""Gates by which each token takes the best of its experts.

Shape suffixes: T tokens, D width, E experts, K choices, Z groups of experts.
"""
# ruff: noqa: N803, N806 (shape suffixes are capital letters)

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from workers import ops
from workers.moe.gate import Decision, Gate, mean_over_tokens, share, switch_balance

Score = Literal["softmax", "sigmoid"]


class ScoreGate(Gate):
    """A gate whose score of an expert is a softmax over all experts, or a sigmoid of its own.

    Args:
        dim: width D of tokens.
        experts: number of experts E.
        k: choices of each token.
        score: softmax | sigmoid.
        renormalise: divide the scores of a token's choices by their sum.
        seed: of what it draws in training.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int | None = None,
        *,
        score: Score = "softmax",
        renormalise: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(dim, experts, k, seed=seed)
        self._require("score", score, score in ("softmax", "sigmoid"), "softmax or sigmoid")
        self.score, self.renormalise = score, renormalise

    def scores(self, logits_TE: Tensor) -> Tensor:
        """[T, E], each from 0 to 1."""
        return logits_TE.sigmoid() if self.score == "sigmoid" else logits_TE.softmax(dim=1)

    def shares(self, logits_TE: Tensor) -> Tensor:
        """The scores of each token divided by their sum [T, E]."""
        return self._logs(logits_TE).softmax(dim=1)

    def choice_weights(self, logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        """Scores of the choices [T, K], renormalised if so asked."""
        if not self.renormalise:
            return self.scores(logits_TE).gather(1, chosen_TK.long())
        # Softmax over the chosen logs: the chosen scores divided by their sum.
        return ops.choice_weights(self._logs(logits_TE), chosen_TK)

    def _logs(self, logits_TE: Tensor) -> Tensor:
        """Logarithms of the scores, but for a term that is equal in all of a token's."""
        return F.logsigmoid(logits_TE) if self.score == "sigmoid" else logits_TE

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{super().extra_repr()}, score={self.score}, renormalise={self.renormalise}"


class TopK(ScoreGate):
    """The k experts of highest score; the balance loss is Switch's over all k choices.

    Renormalised, with k=1, the gate learns from the balance loss alone.
    """

    def decide(self, x_TD: Tensor, balance_weight: float) -> Decision:
        """The rule."""
        logits_TE = self.logits(x_TD)
        routing = ops.route(logits_TE.detach().float(), self.k)
        weights_TK = self.choice_weights(logits_TE, routing.chosen)
        balance = self.balance(logits_TE, routing, balance_weight)
        return Decision(routing, weights_TK, logits_TE, *balance)

    @property
    def by_softmax(self) -> bool:
        """Whether it is what `ops.topk_ffn` has for a gate."""
        return type(self) is TopK and self.score == "softmax" and self.renormalise

    def balance(
        self, logits_TE: Tensor, routing: ops.Routing, balance_weight: float
    ) -> tuple[Tensor, Tensor]:
        """(mean probability [E], weighted balance loss)."""
        probability_E = mean_over_tokens(self.shares(logits_TE))
        share_E = share(routing, logits_TE.dtype)
        return probability_E, switch_balance(share_E, probability_E, balance_weight)


class Switch(TopK):
    """One expert, weighted by its probability, so that the gate learns from the output too.

    Switch Transformer (arXiv 2101.03961): in training the gate sees its input times a factor that
    is uniform within 1 - jitter and 1 + jitter, drawn for each element.

    Args:
        dim: width D of tokens.
        experts: number of experts E.
        k: 1.
        jitter: 0 draws nothing.
        seed: of the jitter.
    """

    default_k = 1

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int | None = None,
        *,
        jitter: float = 0.01,
        seed: int | None = None,
    ) -> None:
        super().__init__(dim, experts, k, renormalise=False, seed=seed)
        self._require("k", self.k, self.k == 1, "1")
        self._require("jitter", jitter, 0 <= jitter < 1, "0 or more and less than 1")
        self.jitter = jitter

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, E] of tokens [T, D], jittered in training."""
        if self.training and self.jitter:
            x_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
            factor = torch.empty_like(x_TD)
            generator = self.generator(x_TD.device)
            x_TD = x_TD * factor.uniform_(1 - self.jitter, 1 + self.jitter, generator=generator)
        return super().logits(x_TD)


class GShard(ScoreGate):
    """Two experts; in training the second is taken with probability 2 g2, g2 its weight.

    GShard (arXiv 2006.16668): g1 + g2 = 1, and g1 stays when the second is not taken. Where a
    capacity is set, second choices give way to all first ones. The balance loss counts first
    choices: E * sum_e f_e P_e, f_e being their share.
    """

    def __init__(
        self, dim: int, experts: int, k: int | None = None, *, seed: int | None = None
    ) -> None:
        super().__init__(dim, experts, k, seed=seed)
        self._require("k", self.k, self.k == 2, "2")

    def decide(self, x_TD: Tensor, balance_weight: float) -> Decision:
        """The rule."""
        logits_TE = self.logits(x_TD)
        routing = ops.route(logits_TE.detach().float(), self.k)
        weights_TK = self.choice_weights(logits_TE, routing.chosen)
        probability_E = mean_over_tokens(self.shares(logits_TE))
        experts_E = torch.arange(self.num_experts, device=x_TD.device)
        first_E = mean_over_tokens((routing.chosen[:, :1] == experts_E).to(logits_TE.dtype))
        balance = switch_balance(first_E, probability_E, balance_weight)
        if self.training:
            second_T = weights_TK[:, 1].detach()
            drawn_T = torch.empty_like(second_T).uniform_(generator=self.generator(x_TD.device))
            taken_T = 2 * second_T > drawn_T
            routing = routing.only(torch.stack([torch.ones_like(taken_T), taken_T], dim=1))
        return Decision(routing, weights_TK, logits_TE, probability_E, balance)

    def limit(self, routing: ops.Routing, capacity: int) -> ops.Routing:
        """Drops what exceeds `capacity`: second choices before first ones, later before earlier."""
        return routing.limited(capacity, first_choices_first=True)


class Prototype(Gate):
    """The best expert of each of Z = k groups of E / Z experts, side by side.

    Expert prototyping of M6-T (arXiv 2105.15082). A choice's weight is its softmax probability
    inside its group, so weights sum to up to Z. k=1 chooses and weighs as Switch does. The
    balance loss is the mean of the groups' Switch losses; the paper does without.
    """

    def __init__(
        self, dim: int, experts: int, k: int | None = None, *, seed: int | None = None
    ) -> None:
        super().__init__(dim, experts, k, seed=seed)
        self._require("experts", experts, experts % self.k == 0, f"a multiple of {self.k} (k)")

    def decide(self, x_TD: Tensor, balance_weight: float) -> Decision:
        """The rule."""
        logits_TE = self.logits(x_TD)
        size = self.num_experts // self.k
        logits_of_groups = logits_TE.reshape(x_TD.shape[0] * self.k, size)
        best = ops.route(logits_of_groups.detach().float(), 1).chosen
        first_Z = torch.arange(self.k, device=x_TD.device, dtype=torch.int32) * size
        routing = ops.group(best.reshape(-1, self.k) + first_Z, self.num_experts)
        probabilities = logits_of_groups.softmax(dim=1)
        weights_TK = probabilities.gather(1, best.long()).reshape(-1, self.k)
        # Divided by Z, so that all groups together are one distribution.
        probability_E = mean_over_tokens(probabilities.reshape(logits_TE.shape)) / self.k
        share_E = share(routing, logits_TE.dtype)
        balance = switch_balance(share_E, probability_E, balance_weight)
        return Decision(routing, weights_TK, logits_TE, probability_E, balance)
