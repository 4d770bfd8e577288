"""Numbers of a column, whatever its type."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from workers.data.errors import DataError

LARGEST = float(np.finfo(np.float32).max)
_MISSING = pa.array(["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"])


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
