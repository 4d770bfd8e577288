"""64-bit feature hashing: key = hash(slot, value), the same on every machine and in every batch.

A value is known by its text, so `5`, `5.0`, `"5"` and `"5.0"` are one value, whether the column
comes from Parquet or CSV: a column of whole numbers that lacks some is floats to pandas, which
writes them to CSV as `5.0`. So are `1e-05` and `0.00001`, `True` of a CSV file and a boolean, and a
moment or a time of day in whatever unit: midnight is its date. Null and NaN are one value of their
own; the empty string is another.
A cross such as `origin*date` is one slot whose value is its columns' values in the order written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Hashes = npt.NDArray[np.uint64]
# Stands for no key, such as after a list that is short; the key of no value.
PAD: Final = -(2**63)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_INTEGER = np.uint64(0x2545F4914F6CDD1D)
_TEXT = np.uint64(0xD6E8FEB86659FD93)
_NULL = np.uint64(0xA0761D6478BD642F)
_SHORT = 10**18  # integers below it have at most 18 digits, so their text always fits an int64
_INTEGER_TEXT = r"^(0|-?[1-9][0-9]{0,17}|-?0\.0+|-?[1-9][0-9]{0,17}\.0+)$"
_FRACTION = r"\.0+$"
# As Python, NumPy, pandas and Arrow write very small and large numbers, each from other sizes on.
_SCIENTIFIC = r"^-?[0-9](\.[0-9]+)?e[+-][0-9]{1,3}$"
# What the text of a moment has because of its unit alone.
_OF_UNITS = (
    (r"\.0+(Z?)$", r"\1"),
    (r"(\.[0-9]*[1-9])0+(Z?)$", r"\1\2"),
    (r" 00:00:00$", ""),
)


def mix(values: Hashes) -> Hashes:
    """The splitmix64 finaliser, a bijection that spreads every input bit; changes its argument."""
    values += _GOLDEN
    scratch = values >> np.uint64(30)
    values ^= scratch
    values *= _MULTIPLY_1
    np.right_shift(values, np.uint64(27), out=scratch)
    values ^= scratch
    values *= _MULTIPLY_2
    np.right_shift(values, np.uint64(31), out=scratch)
    values ^= scratch
    return values


def hash_text(texts: Sequence[str]) -> Hashes:
    """Hashes of strings as bytes, `[n]`; numerals are bytes here too."""
    return _hash_bytes(pa.array(texts, pa.large_string()))


def _hash_bytes(texts: pa.Array) -> Hashes:
    """Hashes eight bytes of every string at a time; `texts` has no nulls."""
    texts = texts.cast(pa.large_binary())
    _, offsets_buffer, data = texts.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    start, length = offsets[:-1], np.diff(offsets)
    size = 0 if data is None else data.size
    padded = np.zeros(size + 8, np.uint8)
    if data is not None:
        padded[:size] = np.frombuffer(data, np.uint8)
    # A word at every byte offset, little-endian on every platform.
    words = np.ndarray((size + 1,), "<u8", padded, strides=(1,))
    hashes = mix(length.astype(np.uint64) ^ _TEXT)
    active = np.flatnonzero(length > 0)
    taken = 0
    while len(active):
        word = words[start[active] + taken].astype(np.uint64)
        left = length[active] - taken
        unused = ((8 - np.minimum(left, 8)) * 8).astype(np.uint64)
        word &= np.uint64(0xFFFFFFFFFFFFFFFF) >> unused
        hashes[active] = mix(hashes[active] ^ word)
        taken += 8
        active = active[left > 8]
    return hashes


def _hash_texts(texts: pa.Array) -> Hashes:
    """Value hashes of distinct non-null strings; whole numbers hash as integers."""
    texts = texts.cast(pa.large_string())
    for written, text in (("True", "true"), ("False", "false")):  # of pandas, and of Arrow
        texts = pc.if_else(pc.equal(texts, written), pa.scalar(text, pa.large_string()), texts)
    texts = _positional(texts)
    hashes = _hash_bytes(texts)
    integers = np.asarray(pc.match_substring_regex(texts, _INTEGER_TEXT))
    if integers.any():
        whole = texts.filter(pa.array(integers))
        if pc.any(pc.match_substring(whole, ".")).as_py():
            whole = pc.replace_substring_regex(whole, _FRACTION, "")
        numbers = np.asarray(whole.cast(pa.int64()))
        hashes[integers] = mix(numbers.view(np.uint64) ^ _INTEGER)
    return hashes


def _positional(texts: pa.Array) -> pa.Array:
    """Numbers with an exponent written without it; others as they are."""
    *_, data = texts.buffers()
    written = b"" if data is None else data.to_pybytes()
    if b"e-" not in written and b"e+" not in written:
        return texts
    scientific = pc.match_substring_regex(texts, _SCIENTIFIC)
    plain = [_without_exponent(text) for text in texts.filter(scientific).to_pylist()]
    return pc.replace_with_mask(texts, scientific, pa.array(plain, pa.large_string()))


def _without_exponent(number: str) -> str:
    value = float(number)
    whole = abs(value) < _SHORT and value == int(value)
    return str(int(value)) if whole else format(Decimal(number), "f")


def _hash_integers(column: pa.Array) -> Hashes:
    values = np.asarray(column)
    hashes = mix(values.astype(np.int64).view(np.uint64) ^ _INTEGER)
    if values.dtype.itemsize == 8:
        long = values >= _SHORT
        if values.dtype.kind == "i":
            long |= values <= -_SHORT
        if long.any():
            hashes[long] = _hash_bytes(pa.array(values[long]).cast(pa.large_string()))
    return hashes


@dataclass(frozen=True, slots=True)
class Column:
    """Value hashes of one column: `codes` index into `hashes`, or None where it has every row."""

    hashes: Hashes
    codes: npt.NDArray[np.int64] | None

    def rows(self) -> Hashes:
        """One hash a row, `[n]`."""
        return self.hashes if self.codes is None else self.hashes[self.codes]


def has_text(kind: pa.DataType) -> bool:
    """Whether values of a type have a single text, by which they are hashed."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    types = pa.types
    binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return not (types.is_nested(kind) or binary)


def hash_column(column: pa.Array) -> Column:
    """Hashes a column of integers, floats, booleans, dates, decimals or strings.

    Raises:
        TypeError: the column holds lists, structs or other values without a single text.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return Column(np.array([_NULL]), np.zeros(len(column), np.int64))
    if pa.types.is_integer(kind) and not column.null_count:
        return Column(_hash_integers(column), None)
    if not has_text(kind):
        raise TypeError(str(kind))
    column = _known(column)
    encoded = column if pa.types.is_dictionary(kind) else column.dictionary_encode()
    distinct, codes = encoded.dictionary, encoded.indices
    missing = np.asarray(distinct.is_null(nan_is_null=True))
    hashes = np.full(len(distinct) + 1, _NULL, np.uint64)  # the last one is for null rows
    if not missing.all():
        hashes[:-1][~missing] = _hash_distinct(distinct.drop_null().filter(_present(distinct)))
    rows = np.asarray(codes.fill_null(len(distinct)) if codes.null_count else codes)
    return Column(hashes, rows.astype(np.int64, copy=False))


def _known(column: pa.Array) -> pa.Array:
    """A column as functions of Arrow take it: views, as Polars has them, are not known to all."""
    if pa.types.is_decimal(column.type) and column.type.bit_width < 128:
        return column.cast(pa.decimal128(column.type.precision, column.type.scale))
    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    if pa.types.is_dictionary(column.type) and pa.types.is_string_view(column.type.value_type):
        distinct = column.dictionary.cast(pa.large_string())
        return pa.DictionaryArray.from_arrays(column.indices, distinct)
    return column


def _present(distinct: pa.Array) -> pa.Array:
    present = distinct.drop_null()
    return pc.invert(present.is_null(nan_is_null=True))


def _hash_distinct(values: pa.Array) -> Hashes:
    if pa.types.is_integer(values.type):
        return _hash_integers(values)
    if pa.types.is_floating(values.type):
        if pa.types.is_float32(values.type):  # in their text large ones end in zeros
            values = values.cast(pa.large_string()).cast(pa.float64())
        floats = np.asarray(values).astype(np.float64)
        whole = (np.floor(floats) == floats) & (np.abs(floats) < _SHORT)
        hashes = _hash_bytes(_positional(values.cast(pa.large_string())))
        hashes[whole] = mix(floats[whole].astype(np.int64).view(np.uint64) ^ _INTEGER)
        return hashes
    texts = values.cast(pa.large_string())
    if pa.types.is_timestamp(values.type) or pa.types.is_time(values.type):
        for more, less in _OF_UNITS:
            texts = pc.replace_substring_regex(texts, more, less)
    return _hash_texts(texts)


@dataclass(frozen=True, slots=True)
class Slot:
    """One sparse input: a column, or a cross of columns."""

    name: str
    columns: tuple[str, ...]
    seed: np.uint64

    @classmethod
    def parse(cls, written: str) -> "Slot":
        """`"origin*date"` → the cross of origin and date; blanks around names do not count."""
        columns = tuple(part.strip() for part in written.split("*"))
        if not all(columns):
            raise ValueError(written)
        name = "*".join(columns)
        return cls(name, columns, hash_text([name])[0])

    def keys(self, hashed: dict[str, Column]) -> Hashes:
        """Keys of this slot, `[n]`, from the hashed columns of a batch."""
        first = hashed[self.columns[0]]
        if len(self.columns) == 1 and first.codes is not None:
            return mix(first.hashes ^ self.seed)[first.codes]
        keys = mix(first.rows() ^ self.seed)
        for name in self.columns[1:]:
            keys ^= hashed[name].rows()
            mix(keys)
        return keys


def hash_slots(
    slots: Sequence[Slot], hashed: dict[str, Column], rows: int
) -> npt.NDArray[np.int64]:
    """Keys of all slots, `[rows, F]` int64, in the order of `slots`."""
    keys = np.empty((rows, len(slots)), np.uint64)
    for index, slot in enumerate(slots):
        keys[:, index] = slot.keys(hashed)
    found = keys.view(np.int64)
    found[found == PAD] = PAD + 1
    return found
