"""Times of rows, compared exactly: numbers, dates, or moments with a zone or without."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from workers.data.columns.numbers import EXACT

# Of key, value, what was expected and the row among those that were read.
Error = Callable[[str, object, str, int], Exception]


class Kind(Enum):
    """What can be compared: times of one kind."""

    NUMBER = "numbers"
    DATE = "dates"
    MOMENT = "timestamps without a zone"
    INSTANT = "timestamps with a zone"


@dataclass(frozen=True, slots=True)
class Times:
    """Times, one a row.

    Attributes:
        values: int64 or float64 [n]: days of dates, nanoseconds of timestamps.
        error, key: for what cannot be compared.
    """

    kind: Kind
    values: npt.NDArray[Any]
    key: str
    error: Error

    def __len__(self) -> int:
        return len(self.values)

    def distinct(self) -> "Times":
        """Each once, in order."""
        return Times(self.kind, np.unique(self.values), self.key, self.error)

    def not_later(self, others: "Times") -> npt.NDArray[np.int64]:
        """How many of these, which are distinct, are not later than each of the others; [n].

        Raises:
            Whatever `error` makes: whole numbers that have no float64 meet fractions.
        """
        own, theirs = self.values, others.values
        if own.dtype != theirs.dtype:
            own, theirs = self._as_floats(), others._as_floats()
        return np.searchsorted(own, theirs, side="right").astype(np.int64)

    def _as_floats(self) -> npt.NDArray[np.float64]:
        if self.values.dtype != np.float64 and len(self.values):
            largest = np.abs(self.values).argmax()
            if not -EXACT <= self.values[largest] <= EXACT:
                expected = "whole numbers up to 2^53, where the other file has fractions"
                raise self.error(self.key, int(self.values[largest]), expected, int(largest))
        return self.values.astype(np.float64)


def read(column: pa.Array, like: Times | None, key: str, error: Error) -> Times:
    """The times of a column.

    Args:
        like: those that they will be compared with, which say what text means; None: text that is
            numbers throughout is numbers, else timestamps.
        key, error: for errors.

    Raises:
        Whatever `error` makes: one is missing, infinite, out of range or of another kind.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        row = int(np.argmax(np.asarray(column.is_null())))
        raise error(key, "missing", "a time in every row", row)
    text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    try:
        kind, values = _parsed(column, like) if text else _typed(column)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as failed:
        raise error(key, str(failed).splitlines()[0][:200], _expected(like), 0) from failed
    if like is not None and kind is not like.kind:
        raise error(key, kind.value, _expected(like), 0)
    if values.dtype == np.float64 and not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise error(key, float(values[row]), "a time in every row", row)
    return Times(kind, values, key, error)


def _expected(like: Times | None) -> str:
    if like is not None:
        return f"{like.kind.value}, as in the other file"
    return "numbers, dates or timestamps, from 1677 to 2262 of the latter"


def _typed(column: pa.Array) -> tuple[Kind, npt.NDArray[Any]]:
    kind = column.type
    if pa.types.is_timestamp(kind):
        # Nothing is rounded: a moment that was would be equal to one before it.
        moments = column.cast(pa.timestamp("ns", kind.tz)).cast(pa.int64())
        return (Kind.MOMENT if kind.tz is None else Kind.INSTANT), np.asarray(moments)
    if pa.types.is_date(kind):
        days = column.cast(pa.date32()).cast(pa.int32())
        return Kind.DATE, np.asarray(days).astype(np.int64)
    if pa.types.is_floating(kind):
        return Kind.NUMBER, np.asarray(column.cast(pa.float64()))
    if pa.types.is_integer(kind):
        return Kind.NUMBER, np.asarray(column.cast(pa.int64()))
    raise pa.ArrowInvalid(str(kind))


def _parsed(column: pa.Array, like: Times | None) -> tuple[Kind, npt.NDArray[Any]]:
    kinds: dict[Kind, tuple[pa.DataType, ...]] = {
        Kind.NUMBER: (pa.int64(), pa.float64()),
        Kind.DATE: (pa.date32(),),
        Kind.MOMENT: (pa.timestamp("ns"),),
        Kind.INSTANT: (pa.timestamp("ns", "UTC"),),
    }
    tried = [like.kind] if like is not None else [Kind.NUMBER, Kind.MOMENT, Kind.INSTANT]
    for kind in tried:
        for wanted in kinds[kind]:
            try:
                return _typed(column.cast(wanted))
            except pa.ArrowInvalid as failed:
                last = failed
    raise last
