"""Dense optimizers are torch's own, to the bit, and import no compiler; nor do operations."""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from protos.job_pb2 import DenseOptimizer
from workers.learning.optimizers import make_optimizer
from workers.ops.route import route

KINDS = {
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.99), "eps": 1e-6}),
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def trained(make: Make) -> Iterator[torch.Tensor]:
    """Weights after each of some steps, in the midst of which the state goes into another one."""
    torch.random.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    optimizer = make(list(model.parameters()))
    for step in range(6):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = make(list(model.parameters()))
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        yield torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", KINDS)
def test_they_are_torchs_without_its_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options = KINDS[name]
    own = {"lr": 0.03, "weight_decay": 0.01, "foreach": True} | options
    expected = list(trained(lambda parameters: kind(parameters, **own)))
    spec = DenseOptimizer(name=name, learning_rate=0.03, weight_decay=0.01, **options)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = make_optimizer(spec, parameters)
        assert isinstance(made, kind)
        return made

    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it is an error
    found = list(trained(make))
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_an_operation_of_ours_imports_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    routing = route(torch.eye(4), 2)
    assert (routing.chosen[:, 0] == torch.arange(4)).all()
