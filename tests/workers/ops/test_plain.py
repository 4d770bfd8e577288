"""What ops are written as in programs that run without us, against the ops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.ops import (
    choice_weights,
    gather_rows,
    gather_sum,
    grouped_ffn,
    route,
    routed_ffn,
    router_logits,
)
from workers.ops.grouped_ffn import ACTIVATIONS
from workers.ops.plain import decompositions

PLAIN = {str(op): plain for op, plain in decompositions().items()}


def plainly(name, *arguments):
    return PLAIN[f"heterps.{name}.default"](*arguments)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**31), st.data())
def test_experts_are_chosen_alike_equal_and_missing_numbers_too(tokens, experts, seed, data):
    k = data.draw(st.integers(1, experts))
    random = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (tokens, experts), generator=random).float()
    odd = torch.rand(tokens, experts, generator=random)
    logits[odd < 0.1], logits[odd > 0.9] = float("nan"), -0.0
    logits[(odd > 0.4) & (odd < 0.5)] = float("inf")
    logits[(odd > 0.5) & (odd < 0.6)] = -float("inf")
    own = route(logits, k)
    found = plainly("route", logits, k)
    for one, other in zip((own.chosen, own.order, own.inverse, own.offsets), found, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(found[1:], plainly("group", own.chosen, experts), strict=True):
        assert torch.equal(one, other)


def test_logits_of_a_router_are_the_same() -> None:
    random = torch.Generator().manual_seed(5)
    x, weight = torch.randn(7, 6, generator=random), torch.randn(4, 6, generator=random)
    found = plainly("router_logits", x.bfloat16(), weight)
    torch.testing.assert_close(found, router_logits(x.bfloat16(), weight))


def test_weights_of_choices_are_the_same() -> None:
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(6))
    chosen = route(logits, 3).chosen
    found = plainly("choice_weights", logits, chosen)
    torch.testing.assert_close(found, choice_weights(logits, chosen))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_experts_compute_is_the_same(activation, capacity, weighted):
    random = torch.Generator().manual_seed(3)
    tokens, dim, hidden, experts, k = 13, 5, 7, 4, 2
    x = torch.randn(tokens, dim, generator=random)
    routing = route(torch.randn(tokens, experts, generator=random), k)
    if capacity:
        routing = routing.limited(capacity)
    inner = 2 * hidden if activation == "swiglu" else hidden
    w1 = torch.randn(experts, dim, inner, generator=random)
    w2 = torch.randn(experts, hidden, dim, generator=random)
    weights = torch.rand(tokens, k, generator=random) if weighted else None
    rows = gather_rows(x, routing, weights)
    found = plainly("gather_rows", x, weights, routing.inverse, routing.order, k)
    torch.testing.assert_close(found, rows)
    out = grouped_ffn(rows, routing.offsets, w1, w2, activation)
    found, _ = plainly("grouped_ffn", rows, routing.offsets, w1, w2, activation, False)
    torch.testing.assert_close(found, out)
    total = gather_sum(out, routing, weights)
    found = plainly("gather_sum", out, weights, routing.inverse, routing.order, k)
    torch.testing.assert_close(found, total)
    if weights is not None:
        total = routed_ffn(x, routing, weights, w1, w2, activation)
        routed = routing.order, routing.inverse, routing.offsets
        found, *_ = plainly("routed_ffn", x, weights, *routed, w1, w2, activation, False)
        torch.testing.assert_close(found, total)
