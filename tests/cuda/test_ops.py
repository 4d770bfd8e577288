"""Every op against plain torch, on each device that is present."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.ops import _ops
from workers.ops import routing as ops

SHAPES = [(0, 1, 1), (1, 1, 1), (1, 8, 8), (7, 3, 2), (100, 8, 2), (513, 33, 5), (2000, 128, 8)]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    return str(request.param)


def random_logits(tokens: int, experts: int, seed: int, distinct: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if distinct:  # few values, so that many tie
        return torch.randint(distinct, (tokens, experts), generator=generator).float()
    return torch.randn(tokens, experts, generator=generator)


def check_routing(logits: Tensor, routing: ops.Routing) -> None:
    """The definition, in NumPy: lexicographic choice, stable sort of pairs by expert."""
    values = logits.cpu().numpy()
    values = np.where(np.isnan(values), -np.inf, values)
    k = routing.k
    chosen = np.argsort(-values, axis=1, kind="stable")[:, :k]
    order = np.argsort(chosen.reshape(-1), kind="stable")
    counts = np.bincount(chosen.reshape(-1), minlength=values.shape[1])
    assert routing.chosen.dtype == torch.int32
    np.testing.assert_array_equal(routing.chosen.cpu(), chosen)
    np.testing.assert_array_equal(routing.order.cpu(), order)
    np.testing.assert_array_equal(routing.order[routing.inverse].cpu(), np.arange(len(order)))
    np.testing.assert_array_equal(routing.counts.cpu(), counts)
    assert routing.offsets[0] == 0
    assert routing.offsets[-1] == len(order)


@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
@pytest.mark.parametrize("distinct", [0, 1, 2])
def test_route(device: str, tokens: int, experts: int, k: int, distinct: int) -> None:
    logits = random_logits(tokens, experts, seed=tokens, distinct=distinct).to(device)
    check_routing(logits, ops.route(logits, k))


@given(st.integers(0, 70), st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_route_any_shape(tokens: int, experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    logits = random_logits(tokens, experts, data.draw(st.integers(0, 99)), distinct=3)
    check_routing(logits, ops.route(logits, k))


def test_route_orders_what_is_not_a_number(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 4, [nan, -inf, 1, inf], [-0.0, 0.0, -0.0, 0.0], [-inf, nan, -inf, -inf]]
    logits = torch.tensor(rows, device=device)
    routing = ops.route(logits, 3)
    assert routing.chosen.tolist() == [[0, 1, 2], [3, 2, 0], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("distinct", [0, 2])
def test_route_equals_its_torch_form(distinct: int) -> None:
    logits = random_logits(257, 9, seed=1, distinct=distinct)
    logits[5:9, ::2] = float("nan")
    logits[20:30] *= -0.0
    for native, plain in zip(ops._route(logits, 4), ops._route_torch(logits, 4), strict=True):
        assert native.dtype == plain.dtype
        assert torch.equal(native, plain)


@pytest.mark.parametrize("k", [0, 4])
def test_route_refuses_k(k: int) -> None:
    with pytest.raises(ValueError, match=f"k: expected 1 to 3 .*got {k}"):
        ops.route(torch.zeros(2, 3), k)


def test_route_refuses_other_logits() -> None:
    with pytest.raises(ValueError, match=r"logits: expected float32 .*float64 \[2, 3\]"):
        ops.route(torch.zeros(2, 3, dtype=torch.float64), 1)


def test_limited_drops_later_tokens() -> None:
    routing = ops.route(torch.tensor([[9.0, 0, 5], [9, 5, 0], [9, 0, 5]]), 2).limited(2)
    assert routing.offsets.tolist() == [0, 2, 3, 5]
    assert routing.order.tolist() == [0, 2, 3, 1, 5]
    assert routing.inverse.tolist() == [0, 3, 1, 2, -1, 4]


def gather_case(
    tokens: int, experts: int, k: int, dim: int, dtype: torch.dtype, device: str, dropped: bool
) -> tuple[ops.Routing, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim)
    routing = ops.route(random_logits(tokens, experts, seed=dim).to(device), k)
    if dropped:
        routing = routing.limited(max(1, tokens * k // experts))

    def random(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(device, dtype)

    return routing, random(tokens, dim), random(len(routing.order), dim), random(tokens, k)


def pair_rows(rows: Tensor, routing: ops.Routing) -> Tensor:
    """The row of each pair, [T, K, D] float64, built pair by pair."""
    pairs = torch.zeros(routing.chosen.numel(), rows.shape[1], dtype=torch.float64)
    for row, pair in enumerate(routing.order.tolist()):
        pairs[pair] = rows[row].double().cpu()
    return pairs.reshape(-1, routing.k, rows.shape[1])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 6e-2)],
)
@pytest.mark.parametrize("dim", [1, 7, 8, 129])
@pytest.mark.parametrize("dropped", [False, True])
def test_gathers(
    device: str, dtype: torch.dtype, tolerance: float, dim: int, dropped: bool
) -> None:
    routing, x, rows, weights = gather_case(37, 5, 3, dim, dtype, device, dropped)
    weights = weights.to(ops._weights_dtype(rows))
    wide_x, wide_w = x.double().cpu(), weights.double().cpu()
    pairs, order = pair_rows(rows, routing), routing.order.cpu()

    def check(got: Tensor, expected: Tensor, kind: torch.dtype = dtype) -> None:
        assert got.dtype == kind
        torch.testing.assert_close(
            got.double().cpu(), expected, rtol=tolerance, atol=tolerance * max(1, dim**0.5)
        )

    copied = wide_x[order // routing.k]
    check(ops.gather_rows(x, routing), copied)
    check(ops.gather_rows(x, routing, weights), copied * wide_w.flatten()[order, None])
    check(ops.gather_sum(rows, routing), pairs.sum(1))
    check(ops.gather_sum(rows, routing, weights), (pairs * wide_w[..., None]).sum(1))
    dots = ops._gather_dot(x, rows, routing.inverse, routing.order, routing.k)
    check(dots, (wide_x[:, None] * pairs).sum(2), weights.dtype)


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_gather_gradients(device: str, tokens: int) -> None:
    routing, x, rows, weights = gather_case(tokens, 4, 2, 3, torch.float64, device, tokens > 1)
    index = (routing.inverse, routing.order, routing.k)
    for tensor in (x, rows, weights):
        tensor.requires_grad_()
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda x: ops.gather_rows(x, routing), (x,)),
        (lambda x, w: ops.gather_rows(x, routing, w), (x, weights)),
        (lambda rows: ops.gather_sum(rows, routing), (rows,)),
        (lambda rows, w: ops.gather_sum(rows, routing, w), (rows, weights)),
        (lambda x, rows: ops._gather_dot(x, rows, *index), (x, rows)),
    ]
    for function, inputs in cases:
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device: str, dtype: torch.dtype) -> None:
    routing, x, rows, weights = gather_case(5, 3, 2, 4, dtype, device, True)
    weights = weights.to(ops._weights_dtype(rows))
    index = (routing.inverse, routing.order, routing.k)
    for tensor in (x, rows, weights):
        tensor.requires_grad_()
    torch.library.opcheck(ops._route, (random_logits(5, 3, seed=0).to(device), 2))
    torch.library.opcheck(ops._gather_rows, (x, weights, *index))
    torch.library.opcheck(ops._gather_rows, (x, None, *index))
    torch.library.opcheck(ops._gather_sum, (rows, weights, *index))
    torch.library.opcheck(ops._gather_sum, (rows, None, *index))
    torch.library.opcheck(ops._gather_dot, (x, rows, *index))


def test_equal_bits_on_every_run(device: str) -> None:
    routing, x, rows, weights = gather_case(999, 8, 2, 65, torch.float32, device, False)
    index = (routing.inverse, routing.order, routing.k)

    def run() -> tuple[Tensor, ...]:
        return (
            *ops._route(random_logits(999, 8, seed=3).to(device), 2),
            ops.gather_sum(rows, routing, weights),
            ops._gather_dot(x, rows, *index),
        )

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_strided_inputs_are_read_by_their_strides(device: str) -> None:
    routing, x, rows, weights = gather_case(12, 4, 2, 6, torch.float32, device, False)
    strided = ops.gather_sum(rows.T.contiguous().T, routing, weights.T.contiguous().T)
    assert torch.equal(strided, ops.gather_sum(rows, routing, weights))
    expected = ops.gather_rows(x, routing)
    assert torch.equal(ops.gather_rows(x.T.contiguous().T, routing), expected)


# --- the native module itself --------------------------------------------------------------------

CANARY = 77


def guarded(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A buffer of canaries, and the view of `size` elements in its middle."""
    buffer = torch.full((size + 16,), CANARY, dtype=dtype)
    return buffer, buffer[8 : 8 + size]


@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
@pytest.mark.parametrize("dim", [1, 9])
def test_writes_its_outputs_alone(tokens: int, experts: int, k: int, dim: int) -> None:
    pairs, floats = tokens * k, torch.float32
    buffers = [guarded(pairs, torch.int32)]
    buffers += [guarded(size, torch.int64) for size in (pairs, pairs, experts + 1)]
    buffers += [guarded(size, floats) for size in (pairs * dim, tokens * dim, pairs)]
    chosen, order, inverse, offsets, rows, x, weights = (view for _, view in buffers)
    rows, x = rows.view(pairs, dim), x.view(tokens, dim)
    logits = random_logits(tokens, experts, seed=0)
    _ops.route(logits, k, chosen.view(tokens, k), order, inverse, offsets)
    _ops.gather_rows(torch.ones(tokens, dim), None, order, k, rows)
    _ops.gather_sum(rows, None, inverse, k, x)
    _ops.gather_dot(x, rows, inverse, k, weights.view(tokens, k))
    assert torch.equal(x, torch.full_like(x, k))
    assert torch.equal(weights, torch.full_like(weights, k * dim))
    for buffer, view in buffers:
        assert (buffer[:8] == CANARY).all()
        assert (buffer[8 + len(view) :] == CANARY).all()


def test_native_refuses_arrays_that_do_not_fit() -> None:
    rows, inverse, out = torch.zeros(4, 3), torch.arange(4), torch.zeros(2, 3)
    _ops.gather_sum(rows, None, inverse, 2, out)
    with pytest.raises(ValueError, match=r"x: expected shape \[2, 3\]"):
        _ops.gather_sum(rows, None, inverse, 2, torch.zeros(3, 3))
    with pytest.raises(ValueError, match="x: expected a contiguous array"):
        _ops.gather_sum(rows, None, inverse, 2, torch.zeros(3, 2).T)
    with pytest.raises(ValueError, match="x: expected element type code 2 of 32 bits"):
        _ops.gather_sum(rows, None, inverse, 2, out.double())
    with pytest.raises(ValueError, match="rows: expected float16, bfloat16, float32 or float64"):
        _ops.gather_sum(rows.int(), None, inverse, 2, out.int())
    with pytest.raises(IndexError, match="inverse holds 4, expected less than 4"):
        _ops.gather_sum(rows, None, inverse + 1, 2, out)
    with pytest.raises(IndexError, match="order holds 4"):
        _ops.gather_rows(torch.zeros(2, 3), None, inverse + 1, 2, rows)
    with pytest.raises(ValueError, match="k: expected 1 to the number of experts, 3, got 4"):
        _ops.route(rows, 4, torch.zeros(4, 4), inverse, inverse, inverse)
