"""What a forward does between its layers, and no graph has, is refused before it is trained."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from tests.workers.model.samples import job_of_samples
from tests.workers.reverse import Reverse
from workers.embedding.sparse import SparseEmbedding
from workers.model.chain.trace import TracedModel
from workers.model.checks.graph import check_graph
from workers.model.code.entry import ModelError
from workers.moe.layer import MoE


@pytest.fixture
def job(tmp_path):
    return job_of_samples(tmp_path)


class Net(nn.Module):
    """Layers, and what a test does between them."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = SparseEmbedding("rows", 4, initializer="zeros")
        self.bottom = nn.Linear(11, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6))
        self.top = nn.Linear(6, 1)
        self.calls = 0
        self.between = [between]
        nn.init.zeros_(self.top.weight)

    def forward(self, sparse, dense):
        x = torch.cat([self.embedding(sparse).flatten(1), dense], 1)
        return self.top(self.between[0](self, self.bottom(x))).squeeze(-1)


def without_gradient(net, x):
    with torch.no_grad():
        return net.middle(x)


def in_16_bits(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = net.middle(x)
    return x.float()


def annealed(net, x):
    net.calls += 1
    return net.middle(x) * min(1.0, net.calls / 100)


def without_gradient_of_an_operation(net, x):
    with torch.no_grad():
        gate = x.sigmoid()
    return net.middle(x * gate)


LOST = {
    "no_grad": (without_gradient, "calls 'middle' under torch.no_grad"),
    "autocast": (in_16_bits, r"calls 'middle' under torch.no_grad\(\) or torch.autocast"),
    "operation": (without_gradient_of_an_operation, "has 'bottom' learn otherwise"),
    "counted": (annealed, "gives 'top' something else"),
}
DRAWN = {
    "python": lambda net, x: net.middle(x) if random.random() < 2 else x,
    "torch": lambda net, x: net.middle(x * float(torch.rand(()))),
    "a constant": lambda net, x: net.middle(x) + torch.randn(6),
    "numpy": lambda net, x: net.middle(x) * float(np.random.rand()),
}
KEPT = {
    "plain": lambda net, x: net.middle(x),
    "own function": lambda net, x: net.middle(Reverse.apply(x, 0.5)),
    "detached": lambda net, x: net.middle(x).detach() + x,
    "draws": lambda net, x: net.middle(x) + torch.rand_like(x),
    "in place": lambda net, x: net.middle(x).mul_(2.0),
    "checkpoint": lambda net, x: torch.utils.checkpoint.checkpoint(
        net.middle, x, use_reentrant=False
    ),
    "twice": lambda net, x: net.middle(net.middle(x)),
    "not finite": lambda net, x: net.middle(x).sub(10).log(),
}


@pytest.mark.parametrize("name", LOST)
def test_what_no_graph_has_is_refused(job, name):
    between, message = LOST[name]
    with pytest.raises(ModelError, match=rf"Net: its forward {message}.* in a child"):
        check_graph(TracedModel(Net(between)), job)


@pytest.mark.parametrize("name", DRAWN)
def test_a_number_that_is_drawn_where_the_forward_is_traced_is_refused(name):
    with pytest.raises(ModelError, match=r"Net: forward draws a random number .*rand_like"):
        TracedModel(Net(DRAWN[name]))


def test_an_auxiliary_loss_of_the_model_itself_is_refused():
    def penalised(net, x):
        net.aux_loss = x.square().mean()
        return net.middle(x)

    with pytest.raises(ModelError, match="Net: forward sets an aux_loss of the model itself"):
        TracedModel(Net(penalised))


@pytest.mark.parametrize("name", KEPT)
def test_what_a_graph_has_is_taken_and_leaves_no_mark(job, name):
    model = Net(KEPT[name])
    traced = TracedModel(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state(), random.getstate(), str(np.random.get_state(legacy=False))
    check_graph(traced, job)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), str(np.random.get_state(legacy=False))) == drawn[1:]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.embedding.store is None


def test_a_hook_on_the_model_itself_is_refused_where_it_changes_something(job):
    model = Net(KEPT["plain"])
    model.register_forward_hook(lambda *_: None)
    check_graph(TracedModel(model), job)
    model.register_forward_hook(lambda module, given, result: result * 2)
    with pytest.raises(ModelError, match=r"returns something else .* no hooks on the model"):
        check_graph(TracedModel(model), job)


def test_experts_that_draw_are_taken(job):
    model = Net(KEPT["plain"])
    model.middle = MoE(6, experts=4, gate="noisy", seed=3)
    check_graph(TracedModel(model), job)


def test_a_model_that_cannot_be_tried_is_taken(job):
    class Fails(nn.Linear):
        def forward(self, x):
            raise RuntimeError("only on a GPU")

    model = Net(KEPT["plain"])
    model.middle = Fails(6, 6)
    check_graph(TracedModel(model), job)
