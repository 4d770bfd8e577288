"""Routing against its definition in NumPy, on each device that is present."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.guarded import Guarded
from workers.ops import _ops
from workers.ops.route import (
    Routing,
    _group,
    _group_torch,
    _route,
    _route_torch,
    group,
    route,
)

SHAPES = [(0, 1, 1), (1, 1, 1), (1, 8, 8), (7, 3, 2), (100, 8, 2), (513, 33, 5), (2000, 128, 8)]


def random_logits(tokens: int, experts: int, seed: int, distinct: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if distinct:  # few values, so that many tie
        return torch.randint(distinct, (tokens, experts), generator=generator).float()
    return torch.randn(tokens, experts, generator=generator)


def check_routing(logits: Tensor, routing: Routing) -> None:
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
    check_routing(logits, route(logits, k))


@given(st.integers(0, 70), st.integers(1, 40), st.data())
@settings(max_examples=60)
def test_route_any_shape(tokens: int, experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    logits = random_logits(tokens, experts, data.draw(st.integers(0, 99)), distinct=3)
    check_routing(logits, route(logits, k))


def test_route_orders_what_is_not_a_number(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[nan] * 4, [nan, -inf, 1, inf], [-0.0, 0.0, -0.0, 0.0], [-inf, nan, -inf, -inf]]
    logits = torch.tensor(rows, device=device)
    routing = route(logits, 3)
    assert routing.chosen.tolist() == [[0, 1, 2], [3, 2, 0], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("distinct", [0, 2])
def test_route_equals_its_torch_form(distinct: int) -> None:
    logits = random_logits(257, 9, seed=1, distinct=distinct)
    logits[5:9, ::2] = float("nan")
    logits[20:30] *= -0.0
    for native, plain in zip(_route(logits, 4), _route_torch(logits, 4), strict=True):
        assert native.dtype == plain.dtype
        assert torch.equal(native, plain)


@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
def test_group(device: str, tokens: int, experts: int, k: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(experts, (tokens, k), generator=generator, dtype=torch.int32)
    chosen[: tokens // 2] = chosen[0] if tokens else chosen[:0]  # experts without tokens
    routing = group(chosen.to(device), experts)
    expected = _group_torch(chosen, experts)
    for mine, theirs in zip(
        (routing.order, routing.inverse, routing.offsets), expected, strict=True
    ):
        assert mine.dtype == torch.int64
        assert torch.equal(mine.cpu(), theirs)


def test_group_of_columns_that_lie_apart(device: str) -> None:
    chosen = torch.tensor([[2, 0, 1], [1, 1, 0]], dtype=torch.int32, device=device)
    routing = group(chosen.t(), 3)
    assert routing.order.tolist() == [2, 5, 1, 3, 4, 0]


def test_group_refuses_what_is_no_expert() -> None:
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match=f"chosen holds {wrong}, expected 0 to 2"):
            group(torch.tensor([[0, wrong]], dtype=torch.int32), 3)
    with pytest.raises(ValueError, match=r"chosen: expected int32 .*int64 \[1, 1\]"):
        group(torch.zeros(1, 1, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match="experts: expected at least 1, got 0"):
        group(torch.zeros(0, 1, dtype=torch.int32), 0)


@pytest.mark.parametrize("k", [0, 4])
def test_route_refuses_k(k: int) -> None:
    with pytest.raises(ValueError, match=f"k: expected 1 to 3 .*got {k}"):
        route(torch.zeros(2, 3), k)


def test_route_refuses_other_logits() -> None:
    with pytest.raises(ValueError, match=r"logits: expected float32 .*float64 \[2, 3\]"):
        route(torch.zeros(2, 3, dtype=torch.float64), 1)


def test_limited_drops_later_tokens() -> None:
    routing = route(torch.tensor([[9.0, 0, 5], [9, 5, 0], [9, 0, 5]]), 2).limited(2)
    assert routing.offsets.tolist() == [0, 2, 3, 5]
    assert routing.order.tolist() == [0, 2, 3, 1, 5]
    assert routing.inverse.tolist() == [0, 3, 1, 2, -1, 4]


def test_opcheck(native_device: str) -> None:
    logits = random_logits(5, 3, seed=0).to(native_device)
    torch.library.opcheck(_route.op, (logits, 2))
    torch.library.opcheck(_group.op, (route(logits, 2).chosen, 3))


def test_equal_bits_on_every_run(device: str) -> None:
    logits = random_logits(999, 8, seed=3).to(device)
    first = _route(logits, 2)
    for _ in range(5):
        assert all(map(torch.equal, first, _route(logits, 2)))


@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
def test_writes_its_outputs_alone(tokens: int, experts: int, k: int) -> None:
    guarded, int64 = Guarded(), torch.int64
    chosen = guarded.output(tokens, k, dtype=torch.int32)
    order, inverse = (guarded.output(tokens * k, dtype=int64) for _ in range(2))
    offsets = guarded.output(experts + 1, dtype=int64)
    logits = random_logits(tokens, experts, seed=0)
    _ops.route(logits, k, chosen, order, inverse, offsets)
    check_routing(logits, Routing(chosen, order, inverse, offsets))
    guarded.check()


def test_native_refuses_k() -> None:
    pairs = torch.arange(4)
    with pytest.raises(ValueError, match="k: expected 1 to the number of experts, 3, got 4"):
        _ops.route(torch.zeros(4, 3), 4, torch.zeros(4, 4), pairs, pairs, pairs)
