"""A model cut anywhere computes what the whole model computes."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from ps import LocalTable
from ps.engine import _native as native
from workers.embedding.sparse import SparseEmbedding, bind_rows
from workers.model.chain.lookups import embedding_at, keys_of, sources_by_table
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import ModelError


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
    lookups = [(lookup.embedding, lookup.keys.text) for lookup in traced.stage(0, 1).lookups]
    assert lookups == [("deep", "sparse"), ("wide", "sparse")]
    assert not any(traced.uncut)


class Branching(Tower):
    def forward(self, sparse, dense):
        if dense.sum() > 0:
            return self.head(dense)
        return self.head(-dense)


class Functional(Tower):
    def forward(self, sparse, dense):
        h = self.first(torch.cat([self.deep(sparse).flatten(1), dense], 1))
        return self.head(nn.functional.dropout(h, 0.5, self.training))


class InPlace(Tower):
    def forward(self, sparse, dense):
        h = self.first(torch.cat([self.deep(sparse).flatten(1), dense], 1))
        return self.head(self.second(h) + h.mul_(2))


class TiedByMemory(Tower):
    def __init__(self):
        super().__init__()
        self.second.weight = nn.Parameter(self.first[0].weight.data)


class TwoDescriptions(Tower):
    def __init__(self):
        super().__init__()
        self.wide = SparseEmbedding("deep", 4, seed=2)


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = SparseEmbedding("deep", 4)

    def forward(self, sparse):
        return self.embedding(sparse) if sparse.sum() > 0 else self.embedding(-sparse)


class HidesControlFlow(Tower):
    def __init__(self):
        super().__init__()
        self.deep = Untraceable()


class Doubled(nn.Module):
    def forward(self, sparse):
        return sparse * 2


class NestedDerivedKeys(Tower):
    def __init__(self):
        super().__init__()
        self.deep = nn.Sequential(Doubled(), SparseEmbedding("deep", 4))


class OtherInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = SparseEmbedding("deep", 4)

    def forward(self, sparse):
        return self.embedding(sparse if self.training else sparse[:, :1])


class HidesOtherInEvaluation(Tower):
    def __init__(self):
        super().__init__()
        self.deep = OtherInEvaluation()


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
        (Functional, r"depends on self.training at 'dropout'; .*self.drop = nn.Dropout"),
        (InPlace, r"'mul_' changes 'first' in place, which is used elsewhere; .*x = x.mul"),
        (TiedByMemory, r"'second.weight' has the memory of 'first.0.weight'"),
        (TwoDescriptions, "table 'deep' is described in two ways"),
        (HidesControlFlow, r"'deep' holds a SparseEmbedding, whose keys cannot be followed"),
        (NestedDerivedKeys, r"'deep.1' must be given a model input as it is, or a selection"),
        (HidesOtherInEvaluation, "which keys its SparseEmbeddings look up depends on"),
        (OwnParameter, "'bias' belongs to the model itself"),
        (DerivedKeys, "'deep' must be given a model input as it is"),
        (OtherInput, "forward takes 'image'; expected only sparse, dense, tokens"),
    ],
)
def test_a_model_that_cannot_be_cut_says_where_and_why(model, message):
    with pytest.raises(ModelError, match=f"(?s){message}"):
        TracedModel(model())


def cut_everywhere(model, values):
    """What the stages of one layer each give, or of as few as must stay together."""
    traced = TracedModel(model)
    first = 0
    for last, uncut in enumerate(traced.uncut):
        if uncut:
            continue
        graph = traced.stage(first, last)
        for table, sources in sources_by_table(graph.module, graph.lookups).items():
            keys = keys_of(sources, values).numpy()
            distinct, inverse = native.unique(keys)
            names = {lookup.embedding for lookup in graph.lookups}
            layers = [embedding_at(graph.module, name) for name in names]
            layers = [layer for layer in layers if layer.spec.table == table]
            store = LocalTable.create(table, **layers[0].spec.table_options())
            rows = torch.from_numpy(store.pull(distinct, True))
            bind_rows(layers, rows, torch.from_numpy(inverse), padded=False)
        results = graph.module(*(values[name] for name in graph.inputs))
        values = dict(zip(graph.outputs, results, strict=True))
        first = last + 1
    (result,) = values.values()
    return result


class Tied(nn.Module):
    """A decoder with the embedding's weights, by assignment or by reading them."""

    def __init__(self, reads):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 11, bias=False)
        self.scale = nn.Linear(11, 1)
        self.reads = reads
        if not reads:
            self.decoder.weight = self.embedding.weight

    def forward(self, sparse):
        h = self.body(self.embedding(sparse[:, 0].abs() % 11))
        h = nn.functional.linear(h, self.embedding.weight) if self.reads else self.decoder(h)
        return self.scale(h).squeeze(-1)


@pytest.mark.parametrize("reads", [False, True])
def test_layers_that_share_a_parameter_stay_in_one_stage(reads):
    model, values = Tied(reads), {"sparse": inputs()["sparse"]}
    traced = TracedModel(model)
    assert traced.uncut == ((True, False, False) if reads else (True, True, False, False))
    assert [shared.what for shared in traced.sharing] == ["embedding.weight"]
    torch.testing.assert_close(cut_everywhere(model, values), model(**values))
    with pytest.raises(ModelError, match=r"share 'embedding.weight'; expected a plan"):
        traced.stage(0, 0)


class Halves(nn.Module):
    def forward(self, x):
        x *= 0.5
        return x


class Sized(nn.Module):
    """Sizes of early tensors that later layers use, and layers that change what they are given."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(2, 8), nn.Linear(4, 4), nn.Linear(8, 1)
        self.act, self.halves = nn.ReLU(inplace=True), Halves()

    def forward(self, sparse, dense):
        samples = dense.size(0)
        h = self.first(dense)
        count, width = h.shape
        h = self.act(self.halves(h)).view(count, 2, width // 2)
        h = self.act(self.second(h)).reshape(h.shape[0], width)
        bias = torch.ones(samples, 1, device=dense.device, dtype=h.dtype)
        return (self.head(h) + bias).view(samples)


def test_sizes_and_changes_in_place_are_cut_anywhere():
    model, values = Sized(), inputs()
    expected = model(**values)
    expected.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    traced, leaves = TracedModel(model), []
    assert not any(traced.uncut)
    for layer in range(len(traced.layers)):
        graph = traced.stage(layer, layer)
        given = [values[name].detach() for name in graph.inputs]
        came = dict(zip(graph.inputs, given, strict=True))
        leaves.append(
            (values, {n: t.requires_grad_(t.is_floating_point()) for n, t in came.items()})
        )
        values = dict(zip(graph.outputs, graph.module(*came.values()), strict=True))
    (result,) = values.values()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    result.sum().backward()
    for sent, came in reversed(leaves[1:]):
        some = [n for n, own in came.items() if own.grad is not None and sent[n].requires_grad]
        torch.autograd.backward([sent[name] for name in some], [came[name].grad for name in some])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


class NestedPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = SparseEmbedding("b", 4)
        self.other = SparseEmbedding("d", 4, seed=9)

    def forward(self, keys, key):
        return torch.cat([self.own(keys).sum(1) - self.own(keys[:, 0]), self.other(key)], dim=1)


class Nested(nn.Module):
    """Embeddings in a child, in containers, called twice, and two layers on one table."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(SparseEmbedding("a", 4, seed=1), nn.Flatten(1), nn.Linear(12, 8))
        self.users = nn.ModuleDict({"left": SparseEmbedding("b", 4), "right": NestedPair()})
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.graph = nn.Linear(8, 8)
        self.item = SparseEmbedding("c", 4, seed=5)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 1)

    def forward(self, sparse, dense):
        h = self.tower(sparse)
        first, second = sparse[:, :2].chunk(2, dim=1)
        h = h + self.users["right"](sparse[:, ::2], sparse[:, 1]) + self.users["left"](first).sum()
        h = h + self.item(second).sum() + self.graph(h)
        for block in self.blocks:
            h = block(h)
        return self.head(h).squeeze(-1) + self.item(sparse.t()[2]).sum(1)


def test_embeddings_anywhere_in_the_module_tree():
    model, values = Nested().eval(), inputs()
    traced = TracedModel(model)
    names = [layer.name for layer in traced.layers]
    assert names == [
        *("tower", "users.right", "users.left", "item", "graph", "blocks.0", "blocks.1"),
        *("head", "item#2"),
    ]
    assert traced.uncut == (False, True, False, True, True, True, True, True, False)
    looked_up = [
        (lookup.embedding, lookup.keys.input)
        for first, last in [(0, 0), (1, 2), (3, 8)]
        for lookup in traced.stage(first, last).lookups
    ]
    assert looked_up == [
        *(("tower.0", "sparse"), ("users.right.own", "sparse"), ("users.right.own", "sparse")),
        *(("users.right.other", "sparse"), ("users.left", "sparse")),
        *(("item", "sparse"), ("item", "sparse")),
    ]
    assert set(traced.stage(0, 0).uncalled) == {"unused.weight", "unused.bias"}
    assert not traced.stage(1, 2).uncalled
    expected = model(**values)
    torch.testing.assert_close(cut_everywhere(model, values), expected)


def test_tracing_leaves_no_mark():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = SparseEmbedding("a", 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, sparse):
            self.calls += 1
            self.last = sparse
            return self.embedding(sparse)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.counting = Counting().eval()

        def forward(self, sparse):
            return self.counting(sparse).sum((1, 2))

    model = Model()
    TracedModel(model)
    assert not model.counting.calls
    assert not hasattr(model.counting, "last")
    assert (model.training, model.counting.training) == (True, False)
