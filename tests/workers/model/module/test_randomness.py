"""What a model draws at random, wherever it is cut and whoever computes a micro-batch."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from workers.model.chain.trace import TracedModel
from workers.model.code.entry import ModelError
from workers.model.module.randomness import Randomness
from workers.moe.layer import MoE


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        self.drop = nn.Dropout(0.3)
        self.experts = MoE(8, experts=4, gate="noisy", seed=3)
        self.switch = MoE(8, experts=4, gate="switch", jitter=0.2)
        self.head = nn.Linear(8, 1)

    def forward(self, dense):
        x = self.first(nn.functional.dropout(dense, 0.2))
        h = self.drop(x) + torch.rand_like(x)
        return self.head(self.switch(self.experts(h)) * h).squeeze(-1)


def run(graphs, generators, values, step, index):
    for graph, generator in zip(graphs, generators, strict=True):
        torch.rand(3)  # something else draws in between
        with generator.drawing(step, index):
            results = graph.module(*(values[name] for name in graph.inputs))
        values = dict(zip(graph.outputs, results, strict=True))
    (result,) = values.values()
    return result


def stages(cuts, seed=7):
    traced = TracedModel(Random().train())
    bounds = [0, *(c + 1 for c in cuts), len(traced.layers)]
    graphs = [traced.stage(first, end - 1) for first, end in pairwise(bounds)]
    return graphs, [Randomness(graph.module, seed, fixed=True) for graph in graphs]


def test_draws_follow_from_seed_step_micro_batch_and_layer_alone():
    torch.manual_seed(0)
    values = {"dense": torch.randn(16, 4)}
    order = [(0, 0), (0, 1), (5, 1)]
    whole = [run(*stages([]), values, *at) for at in order]
    for cuts in ([0], [1, 2], [0, 1, 2, 3]):
        made = stages(cuts)
        for at, expected in zip(reversed(order), reversed(whole), strict=True):
            assert torch.equal(run(*made, values, *at), expected)
    assert len({tuple(result.tolist()) for result in whole}) == 3
    other = stages([], seed=8)
    assert not torch.equal(run(*other, values, 0, 0), whole[0])


def forward_of(draw):
    class Drawing(nn.Module):
        def forward(self, x):
            return x + draw()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.drawing = Drawing()

        def forward(self, dense):
            return self.drawing(dense)

    graph = TracedModel(Model()).stage(0, 0)
    return lambda fixed: run(
        [graph], [Randomness(graph.module, 0, fixed=fixed)], {"dense": torch.ones(2)}, 0, 0
    )


@pytest.mark.parametrize(
    ("draw", "fixed", "message"),
    [
        (lambda: torch.rand(()), False, "train.micro_batches: 4"),
        (lambda: float(np.random.rand()), True, "from NumPy"),
        (random.random, True, "from Python's random"),
    ],
)
def test_what_would_depend_on_plan_or_worker_is_refused(draw, fixed, message):
    with pytest.raises(ModelError, match=message):
        forward_of(draw)(fixed)
    forward_of(lambda: 1.0)(fixed)
