"""Layers whose products run elsewhere give what plain ones give, whatever they meet."""

import copy
import pickle

import pytest
import torch
from torch import nn

from protos.decision_pb2 import LinearRoute
from workers.errors import RouteError
from workers.ops import _ops, linear, product
from workers.ops.linear import (
    NATIVE,
    ONEDNN,
    TORCH,
    Products,
    Routes,
    Shape,
    of_type,
)
from workers.ops.routed_linear import RoutedLinear, route

needs_onednn = pytest.mark.skipif(ONEDNN not in linear.available(), reason="torch without oneDNN")
PRODUCTS = ("forward", "grad_input", "grad_weight")
ALL = dict.fromkeys(PRODUCTS, ONEDNN)


def routes_for(layer, rows, **products):
    size = {"inputs": layer.in_features, "outputs": layer.out_features}
    return Routes([LinearRoute(type="cpu", rows=rows, **size, **(products or ALL))])


def routed(layer, rows, **products):
    made = copy.deepcopy(layer)
    route(made, routes_for(made, rows, **products))
    return made


@pytest.fixture
def asked(monkeypatch):
    """What oneDNN was asked for: the shapes of its operands."""
    found, own = [], linear._onednn

    def told(rows, weight, bias):
        found.append((tuple(rows.shape), tuple(weight.shape), bias is not None))
        return own(rows, weight, bias)

    monkeypatch.setattr(linear, "_onednn", told)
    return found


def passed(layer, given, grad):
    given = given.detach().clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    out = layer(given)
    out.backward(grad)
    found = {"out": out.detach(), "input": given.grad, "weight": layer.weight.grad}
    return found | ({"bias": layer.bias.grad} if layer.bias is not None else {})


@pytest.mark.parametrize("way", [pytest.param(ONEDNN, marks=needs_onednn), NATIVE])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "inputs", "outputs"),
    [
        ((512,), 429, 400),
        ((1031,), 300, 140),
        ((64, 7), 33, 17),
        ((3, 5, 11), 16, 1),
        ((100,), 1, 8),
        ((1,), 64, 64),
        ((257,), 128, 3),
    ],
)
def test_products_are_those_of_float64_within_what_float32_rounds(
    asked, shape, inputs, outputs, bias, way
):
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias)
    given, grad = torch.randn(*shape, inputs), torch.randn(*shape, outputs)
    rows = given.numel() // inputs
    exact = passed(copy.deepcopy(plain).double(), given.double(), grad.double())
    sizes = {"out": inputs, "input": outputs, "weight": rows, "bias": rows}
    layer = routed(plain, rows, **dict.fromkeys(PRODUCTS, way))
    for name, one in passed(layer, given, grad).items():
        # Sums of n products, each of numbers of some units: n roundings at the most.
        bound = torch.finfo(torch.float32).eps * sizes[name] * 16
        assert (one.double() - exact[name]).abs().max() <= bound, name
    through_onednn = [
        ((rows, inputs), (outputs, inputs), bias),
        ((rows, outputs), (inputs, outputs), False),
        ((outputs, rows), (inputs, rows), False),
    ]
    assert asked == (through_onednn if way == ONEDNN else [])


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(600, 129, 70), (700, 300, 200), (300, 200, 150), (260, 200, 600), (40, 3, 2)],
)
def test_a_product_of_ours_is_the_kernels_whatever_the_threads(
    product, rows, inputs, outputs, monkeypatch
):
    torch.manual_seed(0)
    ways = dict.fromkeys(PRODUCTS, TORCH) | {product: NATIVE}
    layer = routed(nn.Linear(inputs, outputs), rows, **ways)
    given, grad, called = torch.randn(rows, inputs), torch.randn(rows, outputs), []
    kernel = getattr(_ops, f"linear_{product}")

    def told(*arguments, **named):
        called.append(product)
        return kernel(*arguments, **named)

    monkeypatch.setattr(_ops, f"linear_{product}", told)
    found = []
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(passed(layer, given, grad))
    name = {"forward": "out", "grad_input": "input", "grad_weight": "weight"}[product]
    assert called == [product] * 4
    assert all(torch.equal(found[0][name], one[name]) for one in found)


def test_a_row_of_ours_is_the_same_whatever_is_computed_with_it():
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(700, 300), torch.randn(150, 300), torch.randn(150)
    grad = torch.randn(700, 150)
    out, of_rows = product.forward(rows, weight, bias), product.grad_input(grad, weight)
    for count in (16, 60, 100, 130, 600):
        assert torch.equal(product.forward(rows[:count], weight, bias), out[:count])
        assert torch.equal(product.grad_input(grad[:count], weight), of_rows[:count])
    added = torch.zeros(700, 300)
    _ops.linear_grad_input(grad, weight, added, add=True, threads=2)
    assert torch.equal(added, of_rows)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_a_product_of_ours(product, number):
    layer = routed(nn.Linear(40, 40), 64, **dict.fromkeys(PRODUCTS, NATIVE))
    given, grad = torch.ones(64, 40), torch.ones(64, 40)
    (given if product == "forward" else grad)[5, 7] = number
    name = {"forward": "out", "grad_input": "input", "grad_weight": "weight"}[product]
    assert not passed(layer, given, grad)[name].isfinite().all()


@needs_onednn
def test_each_product_goes_its_own_way(asked):
    plain = nn.Linear(8, 4)
    given, grad = torch.randn(32, 8), torch.randn(32, 4)
    for name, shapes in (
        ("forward", [((32, 8), (4, 8), True)]),
        ("grad_input", [((32, 4), (8, 4), False)]),
        ("grad_weight", [((4, 32), (8, 32), False)]),
    ):
        ways = dict.fromkeys(ALL, TORCH) | {name: ONEDNN}
        passed(routed(plain, 32, **ways), given, grad)
        assert asked == shapes
        asked.clear()


@needs_onednn
def test_equal_inputs_give_equal_bits(asked):
    layer = routed(nn.Linear(429, 400), 512)
    given, grad = torch.randn(512, 429), torch.randn(512, 400)
    first, second = (passed(layer, given.clone(), grad.clone()) for _ in range(2))
    assert all(torch.equal(one, second[name]) for name, one in first.items())
    assert len(asked) == 6


@needs_onednn
def test_what_a_route_does_not_fit_is_torchs(asked):
    plain = nn.Linear(16, 8)
    layer = routed(plain, 32)
    given = torch.randn(32, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(given).dtype == torch.bfloat16
    assert torch.equal(layer(given.t().contiguous().t()), plain(given.t().contiguous().t()))
    assert torch.equal(
        copy.deepcopy(layer).double()(given.double()), plain.double()(given.double())
    )
    assert layer(torch.empty(0, 16)).shape == (0, 8)
    squared = torch.func.vmap(torch.func.grad(lambda row: layer(row).square().sum()))(given)
    assert squared.shape == given.shape
    layer.eval()
    layer(given)
    assert asked == []


@needs_onednn
def test_evaluation_predicts_to_the_bit_what_a_plain_model_does(asked):
    plain = nn.Sequential(nn.Linear(429, 400), nn.ReLU(), nn.Linear(400, 1)).eval()
    made = copy.deepcopy(plain)
    chosen = [
        LinearRoute(type="cpu", rows=512, inputs=i, outputs=o, **ALL)
        for i, o in ((429, 400), (400, 1))
    ]
    route(made, Routes(chosen))
    given = torch.randn(512, 429)
    assert torch.equal(made(given), plain(given))
    assert not asked
    made.train()(given)
    assert len(asked) == 2


@needs_onednn
def test_gradients_that_are_expanded_or_differentiated_again_are_right(asked):
    plain = nn.Linear(16, 8)
    layer = routed(plain, 32)
    given = torch.randn(32, 16, requires_grad=True)
    found = []
    for one in (layer, plain):
        one.zero_grad()
        one(given).sum().backward()
        (first,) = torch.autograd.grad(one(given).pow(3).sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        found.append([one.weight.grad, first.detach(), second])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
    assert asked  # forwards are routed all the same


@needs_onednn
def test_shared_weights_collect_the_gradients_of_all_that_share_them():
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    plain = nn.Sequential(first, nn.ReLU(inplace=True), second)
    given, grad = torch.randn(32, 16), torch.randn(32, 16)
    made = copy.deepcopy(plain)
    route(made, routes_for(first, 32))
    assert made[0].weight is made[2].weight
    for one in (plain, made):
        one(given).backward(grad)
    torch.testing.assert_close(made[0].weight.grad, plain[0].weight.grad)


def test_a_copy_and_a_pickle_are_plain_and_their_own():
    layer = nn.Linear(8, 4)
    route(layer, Routes())
    assert type(layer) is RoutedLinear
    assert repr(layer) == repr(nn.Linear(8, 4))
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(made) is nn.Linear
        assert "routes" not in vars(made)
        assert torch.equal(made.weight, layer.weight)
        with torch.no_grad():
            made.weight.zero_()
        assert layer.weight.any()


@needs_onednn
def test_an_exported_model_has_torchs_own_products():
    layer = routed(nn.Linear(16, 8), 32)
    text = str(torch.export.export(layer, (torch.randn(32, 16),)).graph)
    assert "linear" in text
    assert "mkldnn" not in text


def test_layers_of_another_class_are_left_alone():
    class Own(nn.Linear):
        def forward(self, input):
            return super().forward(input) + 1

    made = nn.ModuleList([Own(4, 4), nn.Linear(4, 4)])
    route(made, Routes())
    assert [type(one) for one in made] == [Own, RoutedLinear]


@needs_onednn
def test_the_nearest_number_of_rows_says_and_nothing_of_other_sizes():
    ways = {"few": dict.fromkeys(ALL, TORCH), "many": ALL}
    chosen = [
        LinearRoute(type="cpu", rows=rows, inputs=8, outputs=4, **ways[name])
        for name, rows in (("few", 16), ("many", 1024))
    ]
    seen = set()
    routes = Routes(chosen, seen)
    assert [routes.of(rows, 8, 4).plain for rows in (1, 16, 120, 130, 4096)] == [
        *(True, True, True, False, False)
    ]
    assert routes.of(1024, 4, 8) == Products()
    assert Shape(1024, 4, 8) in seen
    assert len(seen) == 6
    assert of_type(chosen, "cpu") == chosen
    assert of_type(chosen, "other") == []


def test_a_route_that_is_not_here_is_told_and_not_replaced(monkeypatch):
    monkeypatch.setattr(linear, "available", lambda: (TORCH,))
    with pytest.raises(RouteError, match=r"'onednn'.* expected one of torch"):
        routes_for(nn.Linear(8, 4), 32)
