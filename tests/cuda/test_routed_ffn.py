"""routed_ffn against a loop over tokens in float64, and to the bit against the ops one by one."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.guarded import Guarded
from workers import ops
from workers.ops import _ops
from workers.ops.grouped_ffn import ACTIVATIONS, activate

# The package has a function of the same name.
module = importlib.import_module("workers.ops.routed_ffn")

# Tokens, experts, choices; what is added to the logits of the first expert.
SMALL = [(0, 1, 1, 0), (1, 1, 1, 0), (7, 3, 2, 0), (30, 8, 3, 1)]
CASES = [*SMALL, (90, 16, 3, 0), (300, 12, 2, 20), (900, 24, 4, 1)]
Case = tuple[Tensor, ops.Routing, Tensor, Tensor, Tensor]


def case(
    tokens: int,
    experts: int,
    k: int,
    hot: float,
    dim: int = 24,
    hidden: int = 20,
    activation: str = "swiglu",
    dtype: torch.dtype = torch.float32,
    capacity: int | None = None,
    device: str = "cpu",
) -> Case:
    """(x, routing, weights, w1, w2), those of floats to be differentiated."""
    generator = torch.Generator().manual_seed(tokens + dim)

    def random(*shape: int, scale: float = 1.0, of: torch.dtype = dtype) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.to(device, of).requires_grad_()

    logits = random(tokens, experts, of=torch.float32).detach()
    logits[:, 0] += hot
    routing = ops.route(logits, k)
    if capacity is not None:
        routing = routing.limited(capacity)
    inner = 2 * hidden if activation == "swiglu" else hidden
    weights = random(tokens, k, of=torch.promote_types(dtype, torch.float32))
    return (
        random(tokens, dim),
        routing,
        weights,
        random(experts, dim, inner, scale=dim**-0.5),
        random(experts, hidden, dim, scale=hidden**-0.5),
    )


def separately(
    x: Tensor, routing: ops.Routing, weights: Tensor, w1: Tensor, w2: Tensor, activation: str
) -> Tensor:
    rows = ops.gather_rows(x, routing)
    rows = ops.grouped_ffn(rows, routing.offsets, w1, w2, activation)
    return ops.gather_sum(rows, routing, weights)


def loop(
    x: Tensor, routing: ops.Routing, weights: Tensor, w1: Tensor, w2: Tensor, activation: str
) -> Tensor:
    """Token by token, by torch's operators."""
    kept = (routing.inverse >= 0).reshape(routing.chosen.shape)
    out = []
    for t, token in enumerate(x):
        total = token * 0
        for j, e in enumerate(routing.chosen[t].tolist()):
            if kept[t, j]:
                total = total + weights[t, j] * (activate(token @ w1[e], activation) @ w2[e])
        out.append(total)
    nothing = 0 * (weights.sum() + w1.sum() + w2.sum())
    return torch.stack(out) + nothing if out else x * nothing


def results(function: object, inputs: Case, activation: str) -> list[Tensor]:
    """The output and every gradient."""
    assert callable(function)
    x, _, weights, w1, w2 = inputs
    out: Tensor = function(*inputs, activation)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    direction = direction.to(out.device, out.dtype)
    return [out, *torch.autograd.grad(out, (x, weights, w1, w2), direction)]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(inputs: Case, activation: str, tolerance: float) -> None:
    mine = results(ops.routed_ffn, inputs, activation)
    for got, same in zip(mine, results(separately, inputs, activation), strict=True):
        assert got.dtype == same.dtype
        assert torch.equal(got, same)
    x, routing, *rest = inputs
    wide = [t.detach().cpu().double().requires_grad_() for t in (x, *rest)]
    parts = routing.chosen, routing.order, routing.inverse, routing.offsets
    routing = ops.Routing(*(part.cpu() for part in parts))
    exact = results(loop, (wide[0], routing, wide[1], wide[2], wide[3]), activation)
    for got, right in zip(mine, exact, strict=True):
        scale = max(1.0, right.abs().max().item() if right.numel() else 1.0)
        torch.testing.assert_close(got.cpu().double(), right, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_is_the_same_on_every_device(
    device: str, shape: tuple[int, int, int, float], capacity: int | None
) -> None:
    check(case(*shape, capacity=capacity, device=device), "swiglu", 1e-5)


@pytest.mark.parametrize("capacity", [None, 30])
@pytest.mark.parametrize("shape", CASES, ids=str)
def test_equals_the_ops_one_by_one_and_a_loop(
    shape: tuple[int, int, int, float], capacity: int | None
) -> None:
    inputs = case(*shape, capacity=capacity)
    for count in (1, 2, 3):
        with threads(count):
            check(inputs, "swiglu", 1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_types_and_activations(activation: str, dtype: torch.dtype, tolerance: float) -> None:
    check(case(90, 16, 3, 0, activation=activation, dtype=dtype), activation, tolerance)
    check(case(40, 3, 2, 5, 9, 11, activation, dtype), activation, tolerance)


def test_experts_of_more_rows_than_a_block_and_wider_than_a_panel() -> None:
    for count in (1, 2):
        with threads(count):
            check(case(700, 6, 2, 3, dim=300, hidden=270, activation="gelu"), "gelu", 1e-5)


@given(
    st.integers(0, 60),
    st.integers(1, 9),
    st.integers(1, 30),
    st.integers(1, 30),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from([None, 1, 5]),
    st.integers(1, 3),
    st.data(),
)
@settings(max_examples=40)
def test_any_shape(
    tokens: int,
    experts: int,
    dim: int,
    hidden: int,
    activation: str,
    capacity: int | None,
    count: int,
    data: st.DataObject,
) -> None:
    k = data.draw(st.integers(1, experts))
    inputs = case(tokens, experts, k, 0, dim, hidden, activation=activation, capacity=capacity)
    with threads(count):
        check(inputs, activation, 1e-5)


def test_more_scratch_than_a_thread_keeps() -> None:
    # One expert has all rows: 2 x 3,000 x 900 numbers of 4 bytes, and what is gathered.
    inputs = case(3000, 2, 1, 50, dim=16, hidden=900, activation="relu")
    for count in (1, 2):
        with threads(count):
            mine, same = (results(f, inputs, "relu") for f in (ops.routed_ffn, separately))
            assert all(map(torch.equal, mine, same))


@pytest.mark.parametrize(("dim", "hidden"), [(256, 128), (250, 131)])
def test_gradients_too_large_for_a_cache_are_those_of_experts_alone(dim: int, hidden: int) -> None:
    inputs = case(400, 32, 2, 20, dim, hidden)  # w1 has 8 MiB, the first expert all tokens
    x, routing, _, w1, w2 = inputs
    for count in (1, 2):
        with threads(count):
            mine = results(ops.routed_ffn, inputs, "swiglu")
            assert all(map(torch.equal, mine, results(separately, inputs, "swiglu")))
    rows, grad = ops.gather_rows(x, routing), torch.randn(800, dim)
    out = ops.grouped_ffn(rows, routing.offsets, w1, w2, "swiglu")
    together = torch.autograd.grad(out, (w1, w2), grad)
    bounds = routing.offsets.tolist()
    for e in range(len(w1)):
        part = slice(bounds[e], bounds[e + 1])
        ends = torch.tensor([0, bounds[e + 1] - bounds[e]])
        own = [w[e : e + 1].detach().requires_grad_() for w in (w1, w2)]
        out = ops.grouped_ffn(rows[part].detach(), ends, *own, "swiglu")
        alone = torch.autograd.grad(out, own, grad[part])
        assert all(torch.equal(a[e], b[0]) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("dim", [512, 500])
def test_rows_too_many_for_a_cache_are_those_of_some(dim: int) -> None:
    tokens, k = 4200, 2  # of which rows have 16 MiB
    inputs = case(tokens, 16, k, 0, dim, 16)
    x, routing, weights, w1, w2 = inputs
    for count in (1, 2):
        with threads(count):
            mine = results(ops.routed_ffn, inputs, "swiglu")
            assert all(map(torch.equal, mine, results(separately, inputs, "swiglu")))
    some = ops.group(routing.chosen[:900], 16)
    part = [t[:900].detach().requires_grad_() for t in (x, weights)]
    out = ops.routed_ffn(part[0], some, part[1], w1, w2, "swiglu")
    assert torch.equal(out, mine[0][:900])
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(tokens, dim, generator=generator, dtype=torch.float64).float()
    of_some = torch.autograd.grad(out, part, grad[:900])
    assert torch.equal(of_some[0], mine[1][:900])
    assert torch.equal(of_some[1], mine[2][:900])


@pytest.mark.parametrize("only", range(4))
def test_gradients_of_some_inputs(only: int) -> None:
    inputs = case(40, 5, 2, 0)
    x, routing, weights, w1, w2 = inputs
    every = results(ops.routed_ffn, inputs, "swiglu")[1:]
    tensors = (x, weights, w1, w2)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i == only)
    out = ops.routed_ffn(x, routing, weights, w1, w2, "swiglu")
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).float()
    (got,) = torch.autograd.grad(out, tensors[only], direction)
    assert torch.equal(got, every[only])


def test_gradcheck() -> None:
    x, routing, *rest = case(5, 4, 2, 0, 3, 4, dtype=torch.float64)

    def function(x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return ops.routed_ffn(x, routing, weights, w1, w2, "swiglu")

    assert torch.autograd.gradcheck(function, (x, *rest))


@pytest.mark.parametrize("capacity", [None, 9])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(capacity: int | None) -> None:
    """What the forward gave is written over by the last to differentiate alone."""
    x, routing, weights, w1, w2 = case(90, 8, 3, 1, capacity=capacity)
    out = ops.routed_ffn(x, routing, weights, w1, w2, "swiglu")
    inputs, direction = (x, weights, w1, w2), torch.linspace(-1, 1, out.numel()).view_as(out)
    found = [
        torch.autograd.grad(out, inputs, direction, retain_graph=keep)
        for keep in (True, True, False)
    ]
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


def test_what_an_op_gave_is_not_written_over() -> None:
    x, routing, weights, w1, w2 = case(30, 4, 2, 0)
    routed = routing.order, routing.inverse, routing.offsets
    out, rows, *_ = module._routed_ffn.op(x, weights, *routed, w1, w2, "swiglu", True)
    before = rows.clone()
    torch.autograd.grad(out, (x, weights, w1, w2), torch.ones_like(out))
    assert torch.equal(rows, before)


def test_opcheck_and_one_graph() -> None:
    x, routing, weights, w1, w2 = inputs = case(9, 4, 2, 0)
    routed = routing.order, routing.inverse, routing.offsets
    torch.library.opcheck(module._routed_ffn.op, (x, weights, *routed, w1, w2, "swiglu", True))
    plain = [t.detach() for t in (x, weights, *routed, w1, w2)]
    torch.library.opcheck(module._routed_ffn.op, (*plain, "swiglu", False))
    _, rows, pre = module._routed_ffn(*plain, "swiglu", True)
    backward = (torch.ones_like(x), *plain[:5], rows, pre, *plain[5:], "swiglu", True, True, True)
    torch.library.opcheck(module._routed_ffn_backward.op, backward)
    compiled = torch.compile(ops.routed_ffn, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs, "swiglu"), ops.routed_ffn(*inputs, "swiglu"))


def test_what_the_kernel_does_not_serve_goes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case(40, 5, 2, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, same = (results(f, inputs, "swiglu") for f in (ops.routed_ffn, separately))
    assert got[0].dtype == torch.bfloat16
    assert all(map(torch.equal, got, same))
    monkeypatch.setenv("HETERPS_GROUPED_FFN", "loop")
    check(inputs, "swiglu", 1e-5)
    x, routing, weights, w1, w2 = inputs
    with pytest.raises(ValueError, match=r"activation: expected one of gelu, .*got tanh"):
        ops.routed_ffn(x, routing, weights, w1, w2, "tanh")
    with pytest.raises(ValueError, match="expected rows, w1 and w2 of one dtype"):
        ops.routed_ffn(x, routing, weights, w1.double(), w2, "swiglu")


def test_writes_its_outputs_alone_and_refuses_what_does_not_fit() -> None:
    tokens, k, dim, hidden, experts = 6, 2, 5, 7, 4
    x, routing, weights, w1, w2 = (
        t.detach() if isinstance(t, Tensor) else t for t in case(tokens, experts, k, 0, dim, hidden)
    )
    rows_of = routing.order.shape[0]
    shapes = [(tokens, dim), (rows_of, dim), (rows_of, 2 * hidden), (rows_of, dim), (tokens, dim)]
    shapes += [(tokens, k), tuple(w1.shape), tuple(w2.shape)]
    guarded = Guarded()
    out, rows, pre, grad_rows, grad_x, of_weights, of_w1, of_w2 = (
        guarded.output(*shape) for shape in shapes
    )
    routed = routing.order, routing.inverse, routing.offsets
    _ops.routed_ffn(x, weights, *routed, w1, w2, 3, out, rows, pre)
    _ops.routed_ffn_backward(
        out, x, weights, *routed, rows, pre, w1, w2, 3, grad_rows, grad_x, of_weights, of_w1, of_w2
    )
    guarded.check(all_written=True)
    order, inverse, offsets = routed
    for wrong, name in (
        ((order + 1, inverse, offsets), "order holds 12"),
        ((order - 1, inverse, offsets), "order holds a negative index"),
        ((order, inverse + 1, offsets), "inverse holds 12"),
        ((order, inverse, offsets + 1), "offsets: expected to ascend"),
    ):
        with pytest.raises(IndexError, match=name):
            _ops.routed_ffn(x, weights, *wrong, w1, w2, 3, out, rows, pre)
    with pytest.raises(ValueError, match=r"inverse: expected shape \[12\]"):
        _ops.routed_ffn(x, weights, order, inverse[1:], offsets, w1, w2, 3, out, rows, pre)
    with pytest.raises(ValueError, match="grad_rows: expected an array together with grad_x"):
        _ops.routed_ffn_backward(
            out, x, weights, *routed, rows, pre, w1, w2, 3, grad_rows, None, None, None, None
        )
