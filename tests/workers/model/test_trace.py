"""A model cut anywhere computes what the whole model computes."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from workers.embedding.sparse import SparseEmbedding
from workers.model.entry import ModelError
from workers.model.trace import TracedModel


class Tower(nn.Module):
    """Wide and deep, with a skip that crosses several layers."""

    def __init__(self):
        super().__init__()
        self.deep = SparseEmbedding("deep", 4, seed=1)
        self.wide = SparseEmbedding("wide", 1, seed=2)
        self.first = nn.Sequential(nn.Linear(3 * 4 + 2, 8), nn.ReLU())
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, sparse, dense):
        scaled = torch.log1p(dense.abs())
        x = torch.cat([self.deep(sparse).flatten(1), scaled], dim=1)
        wide = self.wide(sparse).sum(dim=(1, 2))
        h = self.first(x)
        return self.head(self.second(h) + h).squeeze(-1) + wide


def inputs():
    torch.manual_seed(0)
    return {"sparse": torch.randint(-(2**62), 2**62, (6, 3)), "dense": torch.randn(6, 2)}


def test_layers_are_the_direct_children_in_order():
    layers = [(layer.name, layer.kind) for layer in TracedModel(Tower()).layers]
    assert layers == [
        ("deep", "embedding"),
        ("wide", "embedding"),
        ("first", "dense"),
        ("second", "dense"),
        ("head", "dense"),
    ]


@pytest.mark.parametrize("cuts", [[], [0], [1], [2], [3], [0, 1], [1, 2], [0, 2, 3], [0, 1, 2, 3]])
def test_stages_together_equal_the_model(cuts):
    model = Tower().eval()  # in training mode the tables would learn in between
    values = inputs()
    expected = model(**values)
    expected.sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    traced = TracedModel(model)
    bounds = [0, *(c + 1 for c in cuts), len(traced.layers)]
    for first, end in pairwise(bounds):
        graph = traced.stage(first, end - 1)
        assert set(graph.inputs) <= set(values)
        results = graph.module(*(values[n] for n in graph.inputs))
        values = dict(zip(graph.outputs, results, strict=True))
    (result,) = values.values()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    result.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def test_only_what_is_used_later_crosses_a_cut():
    traced = TracedModel(Tower())
    assert traced.crossing(-1) == ("sparse", "dense")
    assert traced.crossing(0) == ("sparse", "cat")
    assert traced.crossing(1) == ("cat", "sum_1")
    assert traced.stage(0, 1).keys_of == {"deep": "sparse", "wide": "sparse"}


class Branching(Tower):
    def forward(self, sparse, dense):
        if dense.sum() > 0:
            return self.head(dense)
        return self.head(-dense)


class TwiceCalled(Tower):
    def forward(self, sparse, dense):
        h = self.first(torch.cat([self.deep(sparse).flatten(1), dense], 1))
        return self.head(self.second(self.second(h)))


class OwnParameter(Tower):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, sparse, dense):
        return super().forward(sparse, dense) + self.bias


class DerivedKeys(Tower):
    def forward(self, sparse, dense):
        return self.deep(sparse % 10).sum((1, 2))


class OtherInput(Tower):
    def forward(self, sparse, image):
        return self.head(image)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branching, r"cannot be traced at .*test_trace.py:\d+: if dense.sum\(\) > 0"),
        (TwiceCalled, "'second' is called twice"),
        (OwnParameter, "'bias' belongs to the model itself"),
        (DerivedKeys, "'deep' must be given a model input as it is"),
        (OtherInput, "forward takes 'image'; expected only sparse, dense, tokens"),
    ],
)
def test_a_model_that_cannot_be_cut_says_where_and_why(model, message):
    with pytest.raises(ModelError, match=message):
        TracedModel(model())
