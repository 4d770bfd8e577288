"""The gathers against plain torch, on each device that is present."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cuda.guarded import Guarded
from workers import ops
from workers.ops import _ops
from workers.ops import gather as module

SHAPES = [(0, 1, 1), (1, 1, 1), (1, 8, 8), (7, 3, 2), (100, 8, 2), (513, 33, 5), (2000, 128, 8)]


def gather_case(
    tokens: int, experts: int, k: int, dim: int, dtype: torch.dtype, device: str, dropped: bool
) -> tuple[ops.Routing, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dim)
    routing = ops.route(torch.randn(tokens, experts, generator=generator).to(device), k)
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
    weights = weights.to(module._weights_dtype(rows))
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
    dots = module._gather_dot(x, rows, routing.inverse, routing.order, routing.k)
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
        (lambda x, rows: module._gather_dot(x, rows, *index), (x, rows)),
    ]
    for function, inputs in cases:
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(native_device: str, dtype: torch.dtype) -> None:
    routing, x, rows, weights = gather_case(5, 3, 2, 4, dtype, native_device, True)
    weights = weights.to(module._weights_dtype(rows))
    index = (routing.inverse, routing.order, routing.k)
    for tensor in (x, rows, weights):
        tensor.requires_grad_()
    torch.library.opcheck(module._gather_rows.op, (x, weights, *index))
    torch.library.opcheck(module._gather_rows.op, (x, None, *index))
    torch.library.opcheck(module._gather_sum.op, (rows, weights, *index))
    torch.library.opcheck(module._gather_sum.op, (rows, None, *index))
    torch.library.opcheck(module._gather_dot.op, (x, rows, *index))


def test_equal_bits_on_every_run(device: str) -> None:
    routing, x, rows, weights = gather_case(999, 8, 2, 65, torch.float32, device, False)
    index = (routing.inverse, routing.order, routing.k)

    def run() -> tuple[Tensor, ...]:
        return (
            ops.gather_sum(rows, routing, weights),
            module._gather_dot(x, rows, *index),
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


@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
@pytest.mark.parametrize("dim", [1, 9])
def test_writes_its_outputs_alone(tokens: int, experts: int, k: int, dim: int) -> None:
    routing, guarded = ops.route(torch.randn(tokens, experts), k), Guarded()
    rows, x = guarded.output(tokens * k, dim), guarded.output(tokens, dim)
    weights = guarded.output(tokens, k)
    _ops.gather_rows(torch.ones(tokens, dim), None, routing.order, k, rows)
    _ops.gather_sum(rows, None, routing.inverse, k, x)
    _ops.gather_dot(x, rows, routing.inverse, k, weights)
    assert torch.equal(x, torch.full_like(x, k))
    assert torch.equal(weights, torch.full_like(weights, k * dim))
    guarded.check()


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
