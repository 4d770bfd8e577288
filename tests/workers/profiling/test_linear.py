"""Which way a product goes is measured in turns, with a margin; small ones are torch's."""

from functools import partial

import pytest

from workers.ops.linear import NATIVE, ONEDNN, TORCH, Shape
from workers.profiling import linear


@pytest.fixture
def seconds(monkeypatch):
    """What each product takes on oneDNN, where torch takes a second; in the order of products."""
    monkeypatch.setattr(linear.linear, "available", lambda: (TORCH, ONEDNN))
    told = []

    def medians(contestants):
        return {TORCH: 1.0, ONEDNN: told.pop(0)}

    monkeypatch.setattr(linear, "_medians", medians)
    return told


def test_a_product_goes_where_it_takes_five_hundredths_less(seconds):
    seconds[:] = [0.94, 0.96, 1.3, 0.5, 0.5, 0.5]
    few, many = linear.choose("cpu-core", [{Shape(4096, 429, 400)}], lambda text: None)
    assert (few.rows, few.forward, few.grad_input, few.grad_weight) == (
        *(512, ONEDNN, TORCH, TORCH),
    )
    assert (many.rows, many.type, many.threads > 0) == (4096, "cpu-core", True)
    assert {many.forward, many.grad_input, many.grad_weight} == {ONEDNN}


def test_the_fastest_of_several_ways_is_taken(monkeypatch):
    monkeypatch.setattr(linear.linear, "available", lambda: (TORCH, ONEDNN, NATIVE))
    monkeypatch.setattr(linear, "_medians", lambda _: {TORCH: 1.0, ONEDNN: 0.9, NATIVE: 0.8})
    _, found = linear.choose("cpu", [{Shape(4096, 429, 400)}], lambda text: None)
    assert {found.forward, found.grad_input, found.grad_weight} == {NATIVE}


def test_small_products_are_not_measured(seconds):
    assert linear.choose("cpu", [{Shape(64, 16, 16), Shape(4096, 400, 1)}], lambda text: None) == []


def test_where_torch_has_nothing_else_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(linear.linear, "available", lambda: (TORCH,))
    assert linear.choose("cpu", [{Shape(4096, 429, 400)}], lambda text: None) == []


def test_turns_give_a_time_for_each():
    calls = []
    taken = linear.in_turns({name: partial(calls.append, name) for name in "ab"}, 3)
    assert {name: len(seconds) for name, seconds in taken.items()} == {"a": 3, "b": 3}
    assert min(map(min, taken.values())) >= 0
    assert calls == ["a", "b"] * 4  # by turns, the first of which is not told


def test_a_layer_whose_rows_differ_from_batch_to_batch_is_not_onednns(monkeypatch):
    asked = []

    def medians(contestants):
        asked.append(tuple(contestants))
        return {route: {TORCH: 1.0, ONEDNN: 0.5, NATIVE: 0.8}[route] for route in contestants}

    monkeypatch.setattr(linear.linear, "available", lambda: (TORCH, ONEDNN, NATIVE))
    monkeypatch.setattr(linear, "_medians", medians)
    fixed, more = Shape(4096, 429, 400), Shape(2048, 429, 429)
    batches = [{fixed, more, Shape(rows, 400, 400)} for rows in (4000, 4096, 4050)]
    batches[1].add(Shape(3000, 500, 400))
    found = linear.choose("cpu", batches, lambda text: None)
    assert {(one.rows, one.inputs, one.outputs): one.forward for one in found} == {
        (512, 429, 400): ONEDNN,
        (4096, 429, 400): ONEDNN,
        (256, 429, 429): ONEDNN,
        (2048, 429, 429): ONEDNN,
        (506, 400, 400): NATIVE,
        (4050, 400, 400): NATIVE,
        (375, 500, 400): NATIVE,
        (3000, 500, 400): NATIVE,
    }
    assert set(asked) == {(TORCH, NATIVE), (TORCH, ONEDNN, NATIVE)}
