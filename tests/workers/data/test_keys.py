"""Feature hashing: stable, by text, nulls apart, crosses ordered."""

import datetime
import decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.data.keys import Slot, hash_column, hash_slots

GOLDEN = [
    -2764899343415922184,
    7260288890373534906,
    -182955197782043472,
    7095238720682515071,
    1927371529210268025,
]
GOLDEN_CROSS = [-3412335475834112710]
INTEGERS = st.integers(-(2**63), 2**63 - 1)


def keys_of(slot: str, **columns: pa.Array) -> list[int]:
    hashed = {name: hash_column(column) for name, column in columns.items()}
    rows = len(next(iter(columns.values())))
    keys: list[int] = hash_slots([Slot.parse(slot)], hashed, rows)[:, 0].tolist()
    return keys


def test_golden_values_never_change() -> None:
    assert keys_of("a", a=pa.array(["x", "", None, "42", "a longer text, 26 bytes …"])) == GOLDEN
    assert keys_of("a*b", a=pa.array([1]), b=pa.array(["x"])) == GOLDEN_CROSS


@given(st.lists(INTEGERS | st.none(), min_size=1, max_size=20))
def test_integers_hash_as_their_text(values: list[int | None]) -> None:
    texts = [None if value is None else str(value) for value in values]
    as_integers = keys_of("a", a=pa.array(values, pa.int64()))
    assert as_integers == keys_of("a", a=pa.array(texts, pa.string()))


@given(st.lists(st.floats() | st.none(), min_size=1, max_size=20))
def test_whole_floats_hash_as_integers_and_nan_as_null(values: list[float | None]) -> None:
    keys = keys_of("a", a=pa.array(values, pa.float64()))
    for key, value in zip(keys, values, strict=True):
        if value is None or value != value:
            assert [key] == keys_of("a", a=pa.array([None], pa.string()))
        elif abs(value) < 10**18 and value == int(value):
            assert [key] == keys_of("a", a=pa.array([int(value)], pa.int64()))


@given(st.lists(st.text(max_size=40) | st.none(), min_size=1, max_size=20), st.integers(0, 19))
def test_a_key_does_not_depend_on_the_batch(values: list[str | None], at: int) -> None:
    at %= len(values)
    column = pa.array(values, pa.string())
    keys = keys_of("a", a=column)
    assert keys_of("a", a=column.slice(at)) == keys[at:]
    assert keys_of("a", a=column.dictionary_encode()) == keys
    assert len(set(keys)) == len(set(values))


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.large_string(), pa.string_view()),
        *(pa.dictionary(pa.int32(), kind) for kind in (pa.large_string(), pa.string_view())),
    ],
)
def test_how_text_is_kept_does_not_matter(kind: pa.DataType) -> None:
    texts = pa.array(["x", "", None, "42", "longer than what a view has in place", "x"])
    if pa.types.is_dictionary(kind):
        coded = texts.dictionary_encode()
        distinct = coded.dictionary.cast(kind.value_type)
        column: pa.Array = pa.DictionaryArray.from_arrays(coded.indices, distinct)
    else:
        column = texts.cast(kind)
    assert keys_of("a", a=column) == keys_of("a", a=texts)
    assert keys_of("a", a=column.slice(2)) == keys_of("a", a=texts)[2:]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int32(), pa.uint64(), pa.float32()])
def test_the_type_of_a_number_does_not_matter(kind: pa.DataType) -> None:
    numbers = keys_of("a", a=pa.array([0, 5, 100], kind))
    assert numbers == keys_of("a", a=pa.array(["0", "5", "100"]))


def test_large_unsigned_integers_hash_as_their_text() -> None:
    value = 2**64 - 1
    integers = keys_of("a", a=pa.array([value], pa.uint64()))
    assert integers == keys_of("a", a=pa.array([str(value)]))


def test_dates_and_booleans_hash_as_their_text() -> None:
    assert keys_of("a", a=pa.array([datetime.date(2013, 1, 2)])) == keys_of(
        "a", a=pa.array(["2013-01-02"])
    )
    assert keys_of("a", a=pa.array([True])) == keys_of("a", a=pa.array(["true"]))


def test_booleans_and_moments_are_the_same_in_csv_as_pandas_writes_it_and_in_any_unit() -> None:
    frame = pd.DataFrame(
        {
            "flag": [True, False, True],
            "day": pd.to_datetime(["2013-01-02", "2013-01-03", "2014-12-31"]),
            "moment": pd.to_datetime(
                ["2013-01-02 10:30:00", "2013-01-03 00:00:01", "2014-12-31 23:59:59"]
            ),
        }
    )
    lines = [line.split(",") for line in frame.to_csv(index=False).splitlines()[1:]]
    for number, name in enumerate(frame):
        texts = pa.array([line[number] for line in lines])
        assert keys_of("a", a=texts) == keys_of("a", a=pa.array(frame[name])), name
    for name in ("day", "moment"):
        for unit in ("s", "ms", "us", "ns"):
            column = pa.array(frame[name]).cast(pa.timestamp(unit))
            assert keys_of("a", a=column) == keys_of("a", a=pa.array(frame[name])), (name, unit)
    halves = pa.array(pd.to_datetime(["2013-01-02 10:30:00.5", "2013-01-02 10:30:00.05"]))
    assert len({*keys_of("a", a=halves), *keys_of("a", a=halves.cast(pa.timestamp("ms")))}) == 2


@pytest.mark.parametrize(
    "kind", [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")], ids=str
)
def test_times_of_day_are_the_same_in_any_unit(kind: pa.DataType) -> None:
    times = [datetime.time(3, 4, 5), datetime.time(0), None]
    texts = pa.array(["03:04:05", "00:00:00", None])
    assert keys_of("a", a=pa.array(times, kind)) == keys_of("a", a=texts)


@pytest.mark.parametrize("bits", [32, 64, 128, 256])
def test_decimals_hash_as_their_text(bits: int) -> None:
    if not hasattr(pa, f"decimal{bits}"):
        pytest.skip(f"this pyarrow has no decimals of {bits} bits")
    kind = getattr(pa, f"decimal{bits}")(5, 2)
    column = pa.array([decimal.Decimal("1.5"), None, decimal.Decimal("2")], kind)
    assert keys_of("a", a=column) == keys_of("a", a=pa.array(["1.50", None, "2.00"]))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numbers_are_the_same_in_csv_as_pandas_writes_it(kind: type) -> None:
    sizes = 10.0 ** np.arange(-20, 30)
    numbers = np.concatenate([sign * part * sizes for sign in (1, -1) for part in (1, 1.5, 1 / 3)])
    column = numbers.astype(kind)
    written = pd.DataFrame({"a": column}).to_csv(index=False, header=False).split()
    assert any("e" in text for text in written)
    assert keys_of("a", a=pa.array(column)) == keys_of("a", a=pa.array(written))
    assert len(set(keys_of("a", a=pa.array(written)))) == len(column)


def test_numbers_with_an_exponent_are_those_without() -> None:
    short = ["1e-05", "-1.25e+03", "4e+17", "1e+18", "1.5e-7", "3e+2"]
    long = ["0.00001", "-1250", "400000000000000000", "1" + 18 * "0", "0.00000015", "300"]
    assert keys_of("a", a=pa.array(short)) == keys_of("a", a=pa.array(long))
    ids = ["1e5", "e-05", "1e-", "12e-05", "1e+1000", "1E+05", "1e+0005"]
    assert len(set(keys_of("a", a=pa.array([*ids, "100000", "0.00012", "0.00001"])))) == 10


def test_text_that_is_no_canonical_number_is_a_value_of_its_own() -> None:
    column = pa.array(["5", "05", "+5", "5.", " 5", "5.01", "05.0", "5.0.0", ".0", "-0", "", None])
    assert len(set(keys_of("a", a=column))) == 12


@given(st.lists(st.integers(-(10**15), 10**15) | st.none(), min_size=1, max_size=20))
def test_whole_numbers_beside_missing_ones_are_the_same_in_csv_as_pandas_writes_it(
    values: list[int | None],
) -> None:
    frame = pd.DataFrame({"a": pd.Series(values, dtype="float64")})
    texts = frame.to_csv(index=False, na_rep="missing").splitlines()[1:]
    column = pa.array([None if text == "missing" else text for text in texts], pa.string())
    assert keys_of("a", a=column) == keys_of("a", a=pa.array(values, pa.int64()))


def test_slots_and_orders_are_kept_apart() -> None:
    x, y = pa.array(["x"]), pa.array(["y"])
    slots = ["a", "b", "a*b", "b*a", "a*a"]
    keys = [keys_of(slot, a=x, b=y)[0] for slot in slots]
    swapped = [keys_of(slot, a=y, b=x)[0] for slot in slots]
    assert len({*keys, *swapped}) == 10
    assert keys_of(" a * b ", a=x, b=y) == keys_of("a*b", a=x, b=y)


def test_crosses_tell_pairs_apart() -> None:
    a, b = np.divmod(np.arange(200_000), 400)
    assert len(set(keys_of("a*b", a=pa.array(a), b=pa.array(b)))) == 200_000


def test_low_bits_are_spread_evenly() -> None:
    keys = np.array(keys_of("a", a=pa.array(np.arange(64_000))))
    counts = np.bincount(keys & 63, minlength=64)
    assert abs(counts - 1000).max() < 200


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.binary(), pa.binary_view()])
def test_what_has_no_text_is_refused(kind: pa.DataType) -> None:
    for column in (pa.nulls(2, kind), pa.nulls(2, pa.dictionary(pa.int32(), kind))):
        with pytest.raises(TypeError, match=str(kind).split("<")[0]):
            hash_column(column)
