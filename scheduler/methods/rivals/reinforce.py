"""HeterPS's own scheduler: a recurrent policy trained by REINFORCE for one workload.

After "HeterPS: Distributed Deep Learning With Reinforcement Learning Based Scheduling in
Heterogeneous Environments" (Liu et al., FGCS 2023): an LSTM (RL-LSTM) or an Elman network (RL-RNN)
takes one step a layer and gives a distribution over the types; N plans are drawn a round, and
    theta += lr / N * sum_n sum_l grad log P(a_l | a_<l) * (R_n - b),    b = (1 - g) b + g mean R.
What the paper leaves open is chosen here: sizes, rates, Adam for the step, a small weight of the
entropy, and R = -log(cost); a plan that misses a demand gets less than every plan so far that
meets all, by its shortfall.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from scheduler.methods.rivals.problem import Budget, Found, Problem
from scheduler.methods.rivals.search import MISSED, Search
from scheduler.problem.cost import Floats

if TYPE_CHECKING:
    from torch import Tensor

_EVALUATIONS = 6_000


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and rates.

    Attributes:
        samples: N, the plans of a round.
        decay: g, the weight of a round in the moving average.
        entropy: weight of the policy's entropy, which keeps it from settling at once.
    """

    hidden: int = 64
    samples: int = 16
    learning_rate: float = 5e-3
    decay: float = 0.2
    entropy: float = 0.01
    # Rounds that draw nothing new after which a new network starts.
    patience: int = 8


def lstm(problem: Problem, budget: Budget, seed: int) -> Found:
    """Train an LSTM for this problem alone (RL-LSTM); the best of all it drew."""
    return train(problem, budget, seed, "lstm")


def rnn(problem: Problem, budget: Budget, seed: int) -> Found:
    """Train an Elman network for this problem alone (RL-RNN); the best of all it drew."""
    return train(problem, budget, seed, "rnn")


def train(
    problem: Problem,
    budget: Budget,
    seed: int,
    cell: Literal["lstm", "rnn"],
    settings: Settings | None = None,
) -> Found:
    """Train networks, one after the other as each settles; the best of all they drew."""
    settings = settings or Settings()
    search = Search(problem, budget, _EVALUATIONS)
    with _torch(seed):
        while not search.over():
            _train(search, cell, settings)
    return search.found()


def _train(search: Search, cell: str, settings: Settings) -> None:
    """Train one network until it has settled or the budget is spent."""
    import torch

    policy = _Policy(search.problem, cell, settings.hidden)
    optimizer = torch.optim.Adam(policy.parameters(), settings.learning_rate, fused=True)
    baseline, stale, worst = None, 0, 0.0
    while stale < settings.patience and not search.over():
        before = search.evaluations
        actions = policy.draw(settings.samples)
        objective = search.score(actions.numpy().astype(np.int32))
        stale = stale + 1 if search.evaluations == before else 0
        if not np.isfinite(objective).all():
            return  # the budget is spent
        worst = max(worst, objective.max(where=objective < MISSED, initial=0.0))
        rewards = _rewards(objective, worst)
        mean = float(rewards.mean())
        baseline = mean if baseline is None else baseline
        advantage = torch.as_tensor(rewards - baseline, dtype=torch.float32)
        baseline += settings.decay * (mean - baseline)
        chances, entropy = policy.log_probability(actions)
        loss = -(chances * advantage).mean() - settings.entropy * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _rewards(objective: Floats, worst: float) -> Floats:
    """Return -log(cost), and less than -`worst` where a demand is missed, [n]."""
    missed = worst + 1.0 + 2.0 * (objective - MISSED)
    rewards: Floats = -np.where(objective < MISSED, objective, missed)
    return rewards


class _Policy:
    """The network: features of a layer and the type before it -> a distribution over types.

    The five features of the paper: the layer's index and kind, one-hot; the sizes of its input
    and weights, here the time to transfer the output before it and the memory it takes; and the
    time of its communication. All of these sizes are means over the types that can run it.
    """

    def __init__(self, problem: Problem, cell: str, hidden: int) -> None:
        import torch
        from torch import nn

        self.types = types = problem.usable.shape[1]
        self.features = torch.as_tensor(_features(problem), dtype=torch.float32)
        self.barred = torch.as_tensor(~problem.usable)
        kind = nn.LSTM if cell == "lstm" else nn.RNN
        self.body: nn.Module = kind(self.features.shape[1] + types, hidden, batch_first=True)
        self.head = nn.Linear(hidden, types)

    def parameters(self) -> "list[Tensor]":
        return [*self.body.parameters(), *self.head.parameters()]

    def draw(self, count: int) -> "Tensor":
        """Draw assignments, [count, L]."""
        import torch

        actions, state = [], None
        previous = torch.zeros(count, self.types)
        with torch.no_grad():
            for feature, barred in zip(self.features, self.barred, strict=True):
                step = torch.cat([feature.expand(count, -1), previous], dim=1)
                output, state = self.body(step[:, None], state)
                logits = self.head(output[:, 0]).masked_fill(barred, -torch.inf)
                action = torch.multinomial(logits.softmax(dim=1), 1)[:, 0]
                previous = torch.nn.functional.one_hot(action, self.types).float()
                actions.append(action)
        return torch.stack(actions, dim=1)

    def log_probability(self, actions: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return the log probability of each assignment, [n], and the mean entropy of a plan.

        Both are differentiable.
        """
        import torch

        count = len(actions)
        previous = torch.nn.functional.one_hot(actions, self.types).float()
        previous = torch.cat([torch.zeros(count, 1, self.types), previous[:, :-1]], dim=1)
        output, _ = self.body(torch.cat([self.features.expand(count, -1, -1), previous], dim=2))
        logits = self.head(output).masked_fill(self.barred, -torch.inf)
        logs = logits.log_softmax(dim=2)
        chosen = logs.gather(2, actions[..., None]).sum(dim=(1, 2))
        # Where a type is barred its probability is 0, and 0 * log 0 counts as 0.
        entropy = -(logs.exp() * logs.masked_fill(self.barred, 0.0)).sum(dim=(1, 2)).mean()
        return chosen, entropy


def _features(problem: Problem) -> Floats:
    """Return the features of each layer, [L, n], each of unit scale."""
    model = problem.model
    usable, layers = problem.usable, model.workload.layers
    number = usable.sum(axis=1)
    kinds = sorted({layer.kind for layer in layers})

    def mean(values: Floats) -> Floats:
        means: Floats = (values * usable).sum(axis=1) / number
        return means / max(float(means.max()), 1e-300)

    transfer = mean(model.transfer_serial + model.transfer_parallel)
    columns = [
        np.eye(len(layers)),
        np.array([[float(layer.kind == kind) for kind in kinds] for layer in layers]),
        np.append(0.0, transfer[:-1]),
        mean(model.memory),
        mean(model.sync_serial + model.sync_parallel),
    ]
    features: Floats = np.column_stack(columns)
    return features


@contextmanager
def _torch(seed: int) -> Iterator[None]:
    """Seed torch and use one thread (the networks are tiny); put both back afterwards."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
