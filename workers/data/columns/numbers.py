"""Numbers of a column, whatever its type."""

from decimal import Decimal, InvalidOperation
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from workers.data.errors import DataError

LARGEST = float(np.finfo(np.float32).max)
_MISSING_TEXTS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
_MISSING = pa.array(_MISSING_TEXTS)
EXACT = 2**53  # whole numbers up to here are themselves as float64


def is_number(kind: pa.DataType) -> bool:
    """Whether a column of that type has numbers."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    )


def numbers(column: pa.Array, key: str, path: Path, first: int) -> npt.NDArray[np.float64]:
    """float64 `[n]` with NaN for what is missing, also from text.

    Args:
        key: of the job file; `path` and `first`, rows before these, are for error messages, too.

    Raises:
        DataError: a text is none.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type):
        column = pc.if_else(pc.is_in(column, _MISSING), pa.scalar(None, pa.string()), column)
        try:
            column = column.cast(pa.float64())
        except pa.ArrowInvalid:
            texts = column.to_pylist()
            row = next(i for i, text in enumerate(texts) if not _parses(text))
            raise DataError(str(path), key, texts[row], "a number", first + row) from None
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    return np.asarray(column.cast(pa.float64(), safe=False).fill_null(np.nan))


def whole(column: pa.Array, key: str, path: Path, first: int) -> npt.NDArray[np.int64]:
    """int64 `[n]`, each exactly what the file says, also from text such as 5.0 or 1e3.

    Args:
        key: of the job file; `path` and `first`, rows before these, are for error messages, too.

    Raises:
        DataError: one is missing, has a fraction, or is too large: of floats, which may have been
            rounded when they were written, above 2^53.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        values = np.asarray(column.cast(pa.float64()).fill_null(np.nan))
        fits = (values == np.floor(values)) & (np.abs(values) <= EXACT)
        if fits.all():
            return values.astype(np.int64)
        row = int(np.argmin(fits))
        got = "missing" if np.isnan(values[row]) else float(values[row])
        expected = "a whole number of at most 2^53, as a float, in every row"
        raise DataError(str(path), key, got, expected, first + row)
    try:
        if not column.null_count:
            return np.asarray(column.cast(pa.int64()))
    except pa.ArrowInvalid:
        pass  # one by one, to find it; or text that is whole numbers in another form
    found = np.zeros(len(column), np.int64)
    for row, value in enumerate(column.to_pylist()):
        exact = None if value in (None, *_MISSING_TEXTS) else _decimal(value)
        if exact is None or exact != exact.to_integral_value() or abs(exact) >= 2**63:
            got = "missing" if exact is None and not isinstance(value, str) else value
            expected = "a whole number of 64 bits in every row"
            raise DataError(str(path), key, got, expected, first + row)
        found[row] = int(exact)
    return found


def _decimal(value: object) -> Decimal | None:
    """Exactly what a value says; None where it is no finite number."""
    try:
        exact = Decimal(str(value).strip())
    except InvalidOperation:
        return None
    return exact if exact.is_finite() else None


def narrow(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """As float32; infinite where that is too narrow."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _parses(text: str | None) -> bool:
    try:
        pa.array([text]).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True
