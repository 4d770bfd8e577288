"""Weights kept as fewer bits: how they are rounded, and that nothing else loses any."""

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ps import LocalTable
from ps.engine import _native
from ps.table.spec import make_spec, make_table

Floats = NDArray[np.float32]
HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
STEP = 2.0**-13
HIGHEST = {"float16": 65504.0, "bfloat16": float(torch.finfo(torch.bfloat16).max)}


def kept(values: Floats, dtype: str, **options: Any) -> Floats:
    """What a table of that dtype reads once these rows are written to it."""
    table = LocalTable.create("t", values.shape[1], dtype=dtype, **options)
    keys = np.arange(len(values))
    table.push(keys, values, kind="assign")
    return table.pull(keys)


def rounded(values: Floats, dtype: str) -> Floats:
    """By torch, to nearest even; beyond the highest it stays there, as a row must be finite."""
    out = torch.from_numpy(values).to(HALF[dtype]).float().numpy()
    return np.clip(out, -HIGHEST[dtype], HIGHEST[dtype])


def every_float16() -> Floats:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    return values[np.isfinite(values)]


@pytest.mark.parametrize("dtype", HALF)
def test_every_float16_and_what_lies_between(dtype: str) -> None:
    exact = np.unique(every_float16())
    between = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)  # the ties
    near = [np.nextafter(between, np.float32(s * np.inf)) for s in (-1, 1)]
    values = np.concatenate([exact, between, *near]).astype(np.float32).reshape(1, -1)
    values = np.ascontiguousarray(values[:, : values.shape[1] // 16 * 16].reshape(-1, 16))
    np.testing.assert_array_equal(kept(values, dtype), rounded(values, dtype))
    if dtype == "float16":
        table = np.ascontiguousarray(exact[: len(exact) // 16 * 16].reshape(-1, 16))
        np.testing.assert_array_equal(kept(table, dtype), table)


@pytest.mark.parametrize("dtype", HALF)
@settings(max_examples=100)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
)
def test_any_float_is_rounded_to_nearest_even(dtype: str, values: list[float]) -> None:
    row = np.float32([values])
    got = kept(row, dtype)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, rounded(row, dtype))
    assert (np.signbit(got) == np.signbit(row)).all()


@pytest.mark.parametrize("dtype", HALF)
def test_many_bits_at_random(dtype: str) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.ascontiguousarray(values[np.isfinite(values)][:96_000].reshape(-1, 32))
    np.testing.assert_array_equal(kept(values, dtype), rounded(values, dtype))
    # The wire decodes with the same code.
    sent = torch.from_numpy(values).to(HALF[dtype]).view(torch.int16).numpy()
    decoded = _native.decode_values(sent, dtype).reshape(values.shape)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            decoded, torch.from_numpy(values).to(HALF[dtype]).float().numpy()
        )


def test_bytes_are_scaled_by_the_largest() -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((500, 24)) * 10.0 ** rng.integers(-30, 30, (500, 1))).astype(
        np.float32
    )
    got = kept(values, "int8")
    scale = (abs(values).max(axis=1, keepdims=True) / np.float32(127)).astype(np.float32)
    steps = np.rint(values.astype(np.float64) / scale)
    # Within a step's last digit of half a step: a quotient close to a tie may go either way.
    assert (abs(got - values) <= scale * 0.5001).all()
    assert ((got / scale).round() == steps).mean() > 0.9999
    np.testing.assert_allclose(abs(got).max(axis=1), abs(values).max(axis=1), rtol=1e-6)


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, 1e-37, 1e-30, 3e38])
def test_bytes_of_any_size(largest: float) -> None:
    values = np.float32([[0, largest, -largest / 3, largest / 2]])
    got = kept(values, "int8")
    assert np.isfinite(got).all()
    assert got[0, 0] == 0
    # Steps below the least normal float are not told apart.
    np.testing.assert_allclose(got, values, atol=max(largest / 250, 1.5e-36))


def test_a_row_of_bytes_that_holds_no_number_never_reads_as_one() -> None:
    """Such a row can come from elsewhere alone: what is pushed is finite."""
    made, other = (make_table(make_spec("t", 4, dtype="int8", learning_rate=0.1)) for _ in "ab")
    key, ones = np.uint64([7]), np.ones((1, 4), np.float32)

    def push(table: _native.Table, kind: str) -> None:
        table.push(key, 8, ones, kind=kind, rate=1.0, nonce=0, time_s=0, step=0, usage=None)

    push(made, "assign")
    snapshot = made.snapshot(since=0, values=False, min_score=0.0, buckets=None)
    block = snapshot.next()
    assert block is not None
    scale = block.index(struct.pack("<f", np.float32(1) / np.float32(127)))
    other.absorb(block[:scale] + struct.pack("<f", math.nan) + block[scale + 4 :], None)
    assert np.isnan(other.pull(key, False)).all()
    push(other, "")
    assert np.isnan(other.pull(key, False)).all()


def test_a_row_of_bytes_has_a_scale_for_each_segment() -> None:
    from ps.table.rules import Segment

    table = LocalTable.create("t", 6, dtype="int8", segments=[Segment(dim=2), Segment(dim=4)])
    values = np.float32([[1e-6, -5e-7, 100, 50, -100, 25]])
    table.push([1], values, kind="assign")
    np.testing.assert_allclose(table.pull([1]), values, rtol=0.02)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_first_values_are_those_of_the_row_to_come(dtype: str) -> None:
    table = LocalTable.create("t", 8, dtype=dtype, initializer="normal", seed=3)
    exact = LocalTable.create("t", 8, initializer="normal", seed=3).pull(np.arange(100))
    first = table.pull(np.arange(100))
    assert (first != exact).any()
    np.testing.assert_array_equal(first, kept(exact, dtype))
    table.push(np.arange(100), np.zeros((100, 8), np.float32))
    if dtype != "int8":  # whose scale may move by a last digit when encoded again
        np.testing.assert_array_equal(table.pull(np.arange(100)), first)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_short_rows_are_short(dtype: str) -> None:
    def size(**options: Any) -> int:
        return LocalTable.create("t", 64, **options)._table.row_bytes

    width = 64 + 4 if dtype == "int8" else 128
    assert size(optimizer="sgd", dtype=dtype) == width
    assert size(optimizer="adagrad", dtype=dtype) == width + 256  # its state is float32
    assert size(optimizer="adam", dtype=dtype) == width + 2 * 256 + 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_the_state_stays_float32(dtype: str) -> None:
    """Squares far below what the weights could hold still add up."""
    options: dict[str, Any] = {"optimizer": "adagrad", "learning_rate": 1.0, "dtype": dtype}
    table = LocalTable.create("t", 1, initializer="zeros", **options)
    table.push([1], np.ones((1, 1), np.float32))
    for _ in range(300):  # 1 + 300 * 0.01: no bfloat16 would leave 1
        table.push([1], np.full((1, 1), 0.1, np.float32))
    table.push([1], np.zeros((1, 1), np.float32), kind="assign")
    table.push([1], np.full((1, 1), 2.0, np.float32))
    expected = -2 / np.sqrt(1 + 300 * 0.01 + 4)
    np.testing.assert_allclose(table.pull([1]), [[expected]], rtol=0.005)


def steps_of(dtype: str, stochastic: bool, kind: str) -> Floats:
    """How far 2,000 rows of 3 come in 200 steps that are each far below their last digit."""
    table = LocalTable.create(
        "t",
        4,
        dtype=dtype,
        stochastic_rounding=stochastic,
        optimizer="sgd",
        learning_rate=1.0,
    )
    keys = np.arange(2000)
    start = np.random.default_rng(0).uniform(1.0, 1.5, (2000, 4)).astype(np.float32)
    start[:, 0] = 2.0  # it stays, and with it the scale of a row of bytes
    table.push(keys, start, kind="assign")
    before = table.pull(keys)
    step = np.full((2000, 4), STEP, np.float32)
    step[:, 0] = 0
    for _ in range(200):
        table.push(keys, step if kind == "add" else -step, kind=kind)
    after = table.pull(keys)
    np.testing.assert_allclose(after[:, 0], 2.0, rtol=1e-5)
    return (after - before)[:, 1:]


@pytest.mark.parametrize("kind", ["", "add"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_stochastic_rounding_loses_no_small_steps(dtype: str, kind: str) -> None:
    assert abs(steps_of(dtype, False, kind)).max() < 1e-5  # all lost
    moved = steps_of(dtype, True, kind)
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "int8": 2.0 / 127}[dtype]
    # A step rounds up with probability step / unit; all 6,000 columns do so on their own.
    deviation = (200 * STEP * (unit - STEP)) ** 0.5
    assert abs(moved.mean() - 200 * STEP) < 5 * deviation / 6000**0.5
    assert 0.9 < moved.std() / deviation < 1.1


def test_the_same_push_rounds_alike() -> None:
    """A log or a replica that repeats it ends in the same row; the next push rounds anew."""
    from ps.table.spec import make_spec, make_table

    spec = make_spec("t", 8, dtype="bfloat16", stochastic_rounding=True, optimizer="sgd")
    keys = np.arange(500, dtype=np.uint64)
    grads = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)

    def rows(nonces: list[int]) -> Floats:
        table = make_table(spec)
        for nonce in nonces:
            table.push(keys, 8, grads, kind="", rate=1.0, nonce=nonce, time_s=0, step=0, usage=None)
        return table.pull(keys, True)

    np.testing.assert_array_equal(rows([1, 2]), rows([1, 2]))
    assert (rows([1]) != rows([2])).any(axis=1).mean() > 0.9


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_huge_steps_leave_a_row_finite(dtype: str, stochastic: bool) -> None:
    table = LocalTable.create(
        "t", 2, dtype=dtype, stochastic_rounding=stochastic, optimizer="sgd", learning_rate=1.0
    )
    for kind in ("assign", "add", "add"):
        table.push([1, 2], np.float32([[3.4e38, -3.4e38], [7e4, 1]]), kind=kind)
    assert np.isfinite(table.pull([1, 2])).all()
