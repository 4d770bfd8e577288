"""A ReLU that is computed with the layers beside it is the one that torch computes by itself."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from protos.decision_pb2 import LinearRoute
from workers.ops import linear, routed_linear
from workers.ops.linear import NATIVE, ONEDNN, TORCH, Routes
from workers.ops.routed_linear import RoutedSequential, route

needs_onednn = pytest.mark.skipif(ONEDNN not in linear.available(), reason="torch without oneDNN")
PRODUCTS = ("forward", "grad_input", "grad_weight")
ALL = dict.fromkeys(PRODUCTS, ONEDNN)
WAYS = [
    dict.fromkeys(PRODUCTS, NATIVE),
    pytest.param(ALL, marks=needs_onednn),
    dict.fromkeys(PRODUCTS, TORCH) | {"forward": NATIVE},
    dict.fromkeys(PRODUCTS, TORCH) | {"grad_input": NATIVE},
    dict.fromkeys(PRODUCTS, TORCH) | {"grad_weight": NATIVE},
]


def perceptron(*widths, bias=True, end=False, inplace=False):
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU(inplace=inplace)]
    return nn.Sequential(*(layers if end else layers[:-1]))


def all_routed(model, rows, ways=WAYS[0]):
    made = copy.deepcopy(model)
    sizes = {(one.in_features, one.out_features) for one in model.modules() if is_linear(one)}
    route(
        made,
        Routes(LinearRoute(type="cpu", rows=rows, inputs=i, outputs=o, **ways) for i, o in sizes),
    )
    return made


def is_linear(module):
    return isinstance(module, nn.Linear)


def gradients(model, given, grad):
    """What comes out, and the gradients of the input and of all parameters."""
    given = given.detach().clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    out = model(given)
    out.backward(grad)
    return [out.detach(), given.grad, *(one.grad for one in model.parameters())]


def near_float64(model, made, given, grad, share=2e-5):
    """Each is within a share of the largest number of it in double precision."""
    exact = gradients(copy.deepcopy(model).double(), given.double(), grad.double())
    for got, wanted in zip(gradients(made, given, grad), exact, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert (got.double() - wanted).abs().max() <= share * max(wanted.abs().max(), 1e-3)


@pytest.fixture
def in_one(monkeypatch):
    """How many layers were computed as one with the ReLUs between them."""
    found, own = [], routed_linear._chain

    def told(linears, chosen, input):
        found.append(len(linears))
        return own(linears, chosen, input)

    monkeypatch.setattr(routed_linear, "_chain", told)
    return found


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize(
    ("shape", "widths"),
    [((600,), (140, 150, 130, 1)), ((9, 5), (33, 20, 40, 7)), ((300,), (16, 200, 3, 200))],
)
def test_layers_with_relus_between_are_those_of_float64(in_one, shape, widths, end, bias, ways):
    torch.manual_seed(1)
    model = perceptron(*widths, bias=bias, end=end)
    given, grad = torch.randn(*shape, widths[0]), torch.randn(*shape, widths[-1])
    made = all_routed(model, given.numel() // widths[0], ways)
    near_float64(model, made, given, grad)
    assert in_one == [3]


def test_relus_between_layers_are_torchs_to_the_bit():
    # Sums of few whole numbers have no rounding: every zero, negative zero and kept number shows.
    draw = torch.Generator().manual_seed(2)
    model = perceptron(6, 20, 9, 1)
    for one in model.parameters():
        one.data = torch.randint(-2, 3, one.shape, generator=draw).float()
    given = torch.randint(-2, 3, (300, 6), generator=draw).float()
    grad = torch.randint(-2, 3, (300, 1), generator=draw).float()
    wanted = gradients(model, given, grad)
    assert (model[:2](given) == 0).float().mean() > 0.3
    for ways in WAYS[0], *WAYS[2:]:
        for got, one in zip(
            gradients(all_routed(model, 300, ways), given, grad), wanted, strict=True
        ):
            assert torch.equal(got, one)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_goes_through_relus_as_through_torchs(number):
    torch.manual_seed(3)
    model = perceptron(8, 150, 140, 2)
    given, grad = torch.randn(200, 8), torch.randn(200, 2)
    given[5, 7] = number
    made = all_routed(model, 200)
    for got, wanted in zip(
        gradients(made, given, grad), gradients(model, given, grad), strict=True
    ):
        assert torch.equal(got.isfinite(), wanted.isfinite())
        assert torch.equal(got.isnan(), wanted.isnan())


def test_what_is_between_layers_but_relus_is_left_as_it_is(in_one):
    torch.manual_seed(4)
    model = nn.Sequential(
        *(nn.Linear(12, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh()),
        *(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU()),
        nn.Sequential(nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU()),
    )
    made = all_routed(model, 40)
    near_float64(model, made, torch.randn(40, 12), torch.randn(40, 3))
    assert in_one == [2, 1, 1, 2]
    assert repr(made) == repr(model)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    "looks",
    [
        lambda one, told: one.register_forward_hook(lambda m, given, out: told.append(out)),
        lambda one, told: one.register_forward_pre_hook(lambda m, given: told.append(given[0])),
        lambda one, told: one.register_full_backward_hook(lambda m, i, o: told.append(o[0])),
        lambda one, told: one.register_full_backward_pre_hook(lambda m, o: told.append(o[0])),
    ],
)
def test_who_looks_at_a_module_sees_what_torch_has_there(looks, place):
    torch.manual_seed(5)
    model = perceptron(12, 140, 130)
    made = all_routed(model, 200)
    given, grad = torch.randn(200, 12), torch.randn(200, 130)
    seen = []
    for one in (model, made):
        told = []
        looks(one[place], told)
        gradients(one, given, grad)
        seen.append(told)
    assert len(seen[0]) == len(seen[1]) == 1
    torch.testing.assert_close(seen[1][0], seen[0][0])


def test_a_module_with_a_forward_of_its_own_has_it_called(in_one):
    made = all_routed(perceptron(12, 16, 4), 20)
    made[1].forward = lambda rows: rows * 0 + 1
    given = torch.randn(20, 12)
    torch.testing.assert_close(made(given), made[2](torch.ones(20, 16)))
    made[1] = nn.ReLU()
    made[2].eval()
    in_one.clear()
    torch.testing.assert_close(made(given), made[2](made[1](made[0](given))))
    assert set(in_one) == {1}


def test_a_parametrized_weight_is_read_as_often_as_torch_reads_it(in_one):
    torch.manual_seed(9)
    model, given = perceptron(12, 140, 130), torch.randn(200, 12)
    made = all_routed(model, 200)
    for one in (model, made):
        torch.manual_seed(10)
        torch.nn.utils.parametrizations.spectral_norm(one[2])
    for _ in range(3):
        torch.testing.assert_close(made(given), model(given))
    state = made[2].state_dict()
    for name, wanted in model[2].state_dict().items():
        assert torch.equal(state[name], wanted), name
    assert set(in_one) == {1}  # the layer before it


@pytest.mark.parametrize("frozen", [0, 2, 4])
@pytest.mark.parametrize("of_input", [True, False])
def test_layers_that_are_not_trained_have_no_gradients(frozen, of_input):
    torch.manual_seed(6)
    model = perceptron(12, 140, 130, 4)
    model[frozen].requires_grad_(False)
    given, grad, found = torch.randn(200, 12), torch.randn(200, 4), []
    for one in (model, all_routed(model, 200)):
        rows = given.clone().requires_grad_(of_input)
        one(rows).backward(grad)
        found.append([rows.grad, *(each.grad for each in one.parameters())])
    for got, wanted in zip(*found, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_chain_is_differentiated_twice_as_torchs_is():
    torch.manual_seed(7)
    model = perceptron(6, 20, 9, 1).double()
    given = torch.randn(30, 6, dtype=torch.float64)
    made = all_routed(model.float(), 30)
    found = []
    for one in (made, copy.deepcopy(model).double()):
        rows = given.to(one[0].weight.dtype).requires_grad_()
        (first,) = torch.autograd.grad(one(rows).pow(3).sum(), rows, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), [rows, *one.parameters()])
        found.append([first.detach(), *second])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ways", WAYS)
def test_gradients_of_weights_are_differentiated_as_torchs_are(in_one, ways):
    torch.manual_seed(7)
    model, given = perceptron(6, 20, 9, 2), torch.randn(30, 6)
    found = []
    for one in (all_routed(model, 30, ways), copy.deepcopy(model).double()):
        rows = given.to(one[0].weight.dtype, copy=True).requires_grad_()
        sources = [rows, *one.parameters()]
        firsts = torch.autograd.grad(one(rows).square().mean(), sources, create_graph=True)
        penalty = sum(first.square().sum() for first in firsts)
        found.append([*firsts, *torch.autograd.grad(penalty, sources)])
    assert in_one == [3]
    for got, wanted in zip(*found, strict=True):
        assert (got.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_backwards_of_many_gradients_at_once_are_those_of_each(in_one):
    torch.manual_seed(7)
    model, given = perceptron(6, 20, 9, 2), torch.randn(30, 6)
    found = []
    for one in (all_routed(model, 30), model):
        out, many = one(given).sum(0), torch.eye(2)
        found.append(torch.autograd.grad(out, list(one.parameters()), many, is_grads_batched=True))
    assert in_one == [3]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_derivatives_in_forward_mode_are_torchs():
    torch.manual_seed(7)
    model, given = perceptron(6, 20, 9, 2), torch.randn(30, 6)
    found = []
    for one in (all_routed(model, 30), model):
        with torch.autograd.forward_ad.dual_level():
            rows = torch.autograd.forward_ad.make_dual(given, torch.ones_like(given))
            found.append(torch.autograd.forward_ad.unpack_dual(one(rows)).tangent)
    assert torch.equal(*found)


def test_a_chain_recomputed_in_backward_is_the_same():
    torch.manual_seed(8)
    made = all_routed(perceptron(12, 140, 130), 200)
    given, grad = torch.randn(200, 12), torch.randn(200, 130)
    wanted = gradients(made, given, grad)

    def again(rows):
        return torch.utils.checkpoint.checkpoint(made, rows, use_reentrant=False)

    rows = given.clone().requires_grad_()
    made.zero_grad()
    again(rows).backward(grad)
    for got, one in zip([rows.grad, *(p.grad for p in made.parameters())], wanted[1:], strict=True):
        assert torch.equal(got, one)


def test_a_copied_or_exported_or_compiled_sequential_is_a_plain_one(in_one):
    made = all_routed(perceptron(12, 16, 4), 20)
    assert type(made) is RoutedSequential
    given = torch.randn(20, 12)
    for one in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(one) is nn.Sequential
        assert {type(each) for each in one} == {nn.Linear, nn.ReLU}
        assert torch.equal(one(given), made.eval()(given))
    made.train()
    text = str(torch.export.export(made, (given,)).graph)
    assert "heterps" not in text
    assert not in_one
    assert type(made[:2]) is RoutedSequential
    torch.testing.assert_close(made[:2](given), made[0](given).relu())


@pytest.mark.parametrize("part", [lambda made: made, lambda made: made[0]])
def test_a_compiler_sees_what_torch_computes_in_one_graph(in_one, part):
    made, graphs = part(all_routed(perceptron(12, 16, 4), 20)), []
    given = torch.randn(20, 12)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    found = torch.compile(made, backend=backend, fullgraph=True)(given)
    assert torch.equal(found, made.eval()(given))
    assert len(graphs) == 1
    assert not in_one


def test_a_layer_that_is_compiled_by_itself_is_called_as_it_is(in_one):
    made, graphs = all_routed(perceptron(12, 16, 4), 20), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    made[2].compile(backend=backend)
    made(torch.randn(20, 12))
    assert len(graphs) == 1
    assert in_one == [1]


def test_a_chain_that_does_not_fit_fails_as_torchs_does():
    made = all_routed(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(17, 4)), 20)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        made(torch.randn(20, 12))
