"""Which way a product goes is measured in turns, with a margin; small ones are torch's."""

import pytest

from workers.ops.linear import ONEDNN, TORCH
from workers.profiling import linear


@pytest.fixture
def seconds(monkeypatch):
    """What each product takes on oneDNN, where torch takes a second; in the order of products."""
    monkeypatch.setattr(linear.linear, "available", lambda: (TORCH, ONEDNN))
    told = []

    def in_turns(contestants):
        return {TORCH: 1.0, ONEDNN: told.pop(0)}

    monkeypatch.setattr(linear, "in_turns", in_turns)
    return told


def test_a_product_goes_where_it_takes_five_hundredths_less(seconds):
    seconds[:] = [0.94, 0.96, 1.3, 0.5, 0.5, 0.5]
    few, many = linear.choose("cpu-core", [(4096, 429, 400)], lambda text: None)
    assert (few.rows, few.forward, few.grad_input, few.grad_weight) == (
        *(512, ONEDNN, TORCH, TORCH),
    )
    assert (many.rows, many.type, many.threads > 0) == (4096, "cpu-core", True)
    assert {many.forward, many.grad_input, many.grad_weight} == {ONEDNN}


def test_small_products_are_not_measured(seconds):
    assert linear.choose("cpu", [(64, 16, 16), (4096, 400, 1)], lambda text: None) == []


def test_where_torch_has_nothing_else_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(linear.linear, "available", lambda: (TORCH,))
    assert linear.choose("cpu", [(4096, 429, 400)], lambda text: None) == []


def test_turns_give_a_time_for_each():
    calls = []
    taken = linear.in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")})
    assert set(taken) == {"a", "b"}
    assert all(one >= 0 for one in taken.values())
    assert calls[::2].count("a") == len(calls) // 2  # by turns
