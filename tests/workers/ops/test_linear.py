"""Layers whose products run elsewhere give what plain ones give, whatever they meet."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from protos.decision_pb2 import LinearRoute
from workers.errors import RouteError
from workers.ops import _ops, linear
from workers.ops.linear import (
    NATIVE,
    ONEDNN,
    TORCH,
    Products,
    RoutedLinear,
    RoutedSequential,
    Routes,
    Shape,
    of_type,
    route,
)

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
    found, own = [], linear._chain

    def told(linears, chosen, input):
        found.append(len(linears))
        return own(linears, chosen, input)

    monkeypatch.setattr(linear, "_chain", told)
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


def test_a_chain_that_does_not_fit_fails_as_torchs_does():
    made = all_routed(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(17, 4)), 20)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        made(torch.randn(20, 12))
