"""Columns of lists, which are cut and filled up to one length."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from workers.data.errors import DataError


def is_list(kind: pa.DataType, fits: Callable[[pa.DataType], bool] = lambda values: True) -> bool:
    """Whether a type is one of lists, or of nothing but missing ones.

    Args:
        fits: whether their values may have a type.
    """
    if pa.types.is_null(kind):
        return True
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(one(kind) for one in lists):
        return False
    return bool(pa.types.is_null(kind.value_type) or fits(kind.value_type))


def innermost(kind: pa.DataType) -> pa.DataType:
    """The type of what lists hold in the end."""
    while is_list(kind) and not pa.types.is_null(kind):
        kind = kind.value_type
    return kind


def as_lists(column: pa.Array) -> pa.Array:
    """The same, where lists that are all missing or empty have a type, too."""
    if pa.types.is_null(column.type) or pa.types.is_null(column.type.value_type):
        return column.cast(pa.list_(pa.int64()))
    return column


def lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    """Values of each list of a column, int64 [n]; a missing one has none."""
    counts = pc.list_value_length(as_lists(column)).fill_null(0)
    found: npt.NDArray[np.int64] = np.asarray(counts).astype(np.int64)
    return found


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists of some rows.

    Attributes:
        flat: their values, one list behind the other.
        counts: int64 [n], values of each.
        length: that they are cut or filled up to.
        keep: first or last, which values of a longer list stay.
        key, path, first: of the job file, and where these rows are, for errors.
    """

    flat: pa.Array
    counts: npt.NDArray[np.int64]
    length: int
    keep: str
    key: str
    path: Path
    first: int

    @staticmethod
    def of(column: pa.Array, length: int, keep: str, key: str, path: Path, first: int) -> "Lists":
        """The lists of a column; a missing one has no values.

        Args:
            keep: empty where none may be longer.

        Raises:
            DataError: one is.
        """
        column = as_lists(column)
        counts = lengths(column)
        if not keep and (counts > length).any():
            row = int(np.argmax(counts > length))
            expected = f"at most length: {length} in every row, or keep: first, or last"
            raise DataError(str(path), key, f"{counts[row]} values", expected, first + row)
        flat = column.flatten()  # without the values of missing lists
        return Lists(flat, counts, length, keep, key, path, first)

    @classmethod
    def shaped(
        cls, column: pa.Array, shape: tuple[int, ...], key: str, path: Path, first: int
    ) -> "Lists":
        """The values of lists of just that shape, flat or in lists of lists.

        Raises:
            DataError: one is missing, or of another shape.
        """
        size = int(np.prod(shape))
        flat = pa.types.is_null(column.type) or not is_list(column.type.value_type)
        level, above = column, 1
        for width in (size,) if flat else shape:
            level = as_lists(level)
            counts = np.asarray(pc.list_value_length(level).fill_null(-1))
            if not (counts == width).all():
                at = int(np.argmin(counts == width))
                got = "missing" if counts[at] < 0 else f"a list of {counts[at]}"
                expected = f"lists of shape {list(shape)}"
                raise DataError(
                    str(path), key, got, f"{expected} in every row", first + at // above
                )
            level, above = level.flatten(), above * width
        return cls(level, np.full(len(column), size), size, "", key, path, first)

    @property
    def size(self) -> int:
        """Values of all."""
        return len(self.flat)

    def whole(self) -> npt.NDArray[np.int64]:
        """The values where they are whole numbers, int64.

        Raises:
            DataError: one is missing or too large.
        """
        expected = "whole numbers of 64 bits"
        if self.flat.null_count:
            at = int(np.argmax(np.asarray(self.flat.is_null())))
            raise DataError(str(self.path), self.key, "missing", expected, self.row(at))
        values = self.flat.to_numpy(zero_copy_only=False)
        if values.dtype == np.uint64 and len(values) and int(values.max()) > 2**63 - 1:
            at = int(np.argmax(values))
            raise DataError(str(self.path), self.key, int(values[at]), expected, self.row(at))
        found: npt.NDArray[np.int64] = values.astype(np.int64)
        return found

    def placed(self, values: npt.NDArray[Any], filling: float) -> npt.NDArray[Any]:
        """[n, length] of the values of all lists."""
        kept = np.minimum(self.counts, self.length)
        found = np.full((len(self.counts), self.length), filling, values.dtype)
        place = np.arange(self.length) < kept[:, None]
        starts = np.cumsum(self.counts) - self.counts
        if self.keep != "first":
            starts = starts + self.counts - kept
        found[place] = values[(starts[:, None] + np.arange(self.length))[place]]
        return found

    def row(self, at: int) -> int:
        """The row of a value."""
        return self.first + int(np.searchsorted(np.cumsum(self.counts), at, side="right"))
