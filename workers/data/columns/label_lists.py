"""Labels that are lists: vectors of one length, or lists of any length beside what they label."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from protos.job_pb2 import DataSpec
from workers.data.columns.lists import Lists, as_lists, innermost, is_list, lengths
from workers.data.columns.named import Named, named_of
from workers.data.columns.numbers import is_number
from workers.data.errors import DataError


@dataclass(frozen=True, slots=True)
class LabelLists:
    """How the lists of a label are cut and filled up.

    Args:
        shape: of the values of a row.
        ragged: whether lists may be shorter; what fills them up does not count.
        keep: first or last, which values of a longer list stay; empty: none may be longer.
        beside: the column whose lists are as long in every row; empty: none.
        skips_missing: whether missing values do not count, in place of being errors.
    """

    shape: tuple[int, ...]
    ragged: bool = False
    keep: str = ""
    beside: str = ""
    skips_missing: bool = False

    def fit(self, kind: pa.DataType) -> bool:
        """Whether a column of that type has such lists."""
        inside = innermost(kind)
        numbers = is_number(inside) or pa.types.is_null(inside)
        return numbers and (is_list(kind, is_number) if self.ragged else is_list(kind))

    def of(self, block: pa.RecordBatch, name: str, key: str, path: Path, first: int) -> Lists:
        """The lists of a column of these rows.

        Raises:
            DataError: one is missing, of another shape, or not as long as the one beside it.
        """
        column = block.column(name)
        if not self.ragged:
            column = self._filled(column) if self.skips_missing else column
            return Lists.shaped(column, self.shape, key, path, first)
        (length,) = self.shape
        if column.null_count and not self.skips_missing:
            row = int(np.argmax(np.asarray(column.is_null())))
            raise DataError(str(path), key, "missing", "a list in every row", first + row)
        if self.beside:
            check_lengths(block, name, self.beside, key, path, first)
        return Lists.of(column, length, self.keep, key, path, first)

    def _filled(self, column: pa.Array) -> pa.Array:
        """Missing lists as lists of missing values."""
        if not column.null_count:
            return column
        column = as_lists(column)
        nested = is_list(column.type.value_type)
        nothing = np.full(self.shape if nested else int(np.prod(self.shape)), None).tolist()
        rows = np.where(np.asarray(column.is_null()), len(column), np.arange(len(column)))
        try:
            filling = pa.array([nothing], column.type)
        except pa.ArrowInvalid:  # of lists of a fixed size that is another one, as will be said
            return column
        return pa.concat_arrays([column, filling]).take(pa.array(rows))


def label_lists(data: DataSpec) -> dict[str, LabelLists]:
    """The labels that are lists, by column.

    Raises:
        DataError: one is beside an input that there is not.
    """
    found = {}
    for column, one in data.label_lists.items():
        skips = one.missing == "skip"
        if one.beside:
            input_ = _input(data, one.beside, column)
            shape = (input_.length,)
            found[column] = LabelLists(shape, True, input_.keep, input_.of, skips)
        elif one.shape:
            found[column] = LabelLists(tuple(one.shape), skips_missing=skips)
        else:
            found[column] = LabelLists((one.length,), True, one.keep, "", skips)
    return found


def check_lengths(
    block: pa.RecordBatch, name: str, beside: str, key: str, path: Path, first: int
) -> None:
    """Refuse lists of another length than those that they are beside, before these are cut."""
    own, other = (lengths(block.column(column)) for column in (name, beside))
    if (own != other).any():
        row = int(np.argmax(own != other))
        expected = f"{other[row]}, as {beside} has: a label for each of its values"
        raise DataError(str(path), key, f"{own[row]} values", expected, first + row)


def _input(data: DataSpec, name: str, column: str) -> Named:
    for one in named_of(data):
        if one.name == name and one.length:
            return one
    key = f"data.label_lists.{column}.beside"
    raise DataError("job", key, name, "an input of data.columns of lists, with a length")
