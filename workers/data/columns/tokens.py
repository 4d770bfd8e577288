"""A column of token lists, such as windows of a text: whole numbers, equally many in each row."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from workers.data.columns.lists import as_lists, is_list
from workers.data.errors import DataError, column_hint
from workers.data.files import splits as files

_LARGEST = 2**31 - 1


class Tokens:
    """The column `data.tokens`.

    Attributes:
        name: of the column.
        width: tokens a row, known once a file with rows has been checked.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.width = 0

    def check_schema(self, path: Path, schema: pa.Schema) -> None:
        """Raises `DataError` unless the column is there, of lists of whole numbers."""
        if self.name not in schema.names:
            hint = column_hint(self.name, schema.names)
            raise DataError(str(path), "data.tokens", self.name, f"a column of the file; {hint}")
        kind = schema.field(self.name).type
        if not is_list(kind, pa.types.is_integer):
            expected = "a Parquet column of lists of whole numbers"
            raise DataError(str(path), f"data.tokens: {self.name}", str(kind), expected)

    def check_first(self, path: Path) -> None:
        """Raises `DataError` unless the file's first list is as long as other files'."""
        for unit in files.units(path)[:1]:
            for block in files.read(unit, [self.name], block_rows=1):
                self.encode(block.column(self.name), path)
                break

    def encode(self, column: pa.Array, path: Path, first: int = 0) -> npt.NDArray[np.int32]:
        """int32 `[n, width]`; `path` and `first`, rows before these, are for error messages."""
        column = as_lists(column)
        counts = np.asarray(pc.list_value_length(column).fill_null(-1))
        if not self.width and len(counts):
            self.width = max(0, int(counts[0]))
        fits = (counts == self.width) & (counts > 1)
        key = f"data.tokens: {self.name}"
        if not fits.all():
            row = int(np.argmin(fits))
            got = "no list" if counts[row] == -1 else f"{counts[row]} tokens"
            expected = f"{self.width}, as before" if self.width > 1 else "2 or more"
            raise DataError(str(path), key, got, f"{expected}, in every row", first + row)
        values = column.flatten()
        if values.null_count:
            row = int(np.argmax(np.asarray(values.is_null()))) // self.width
            expected = "whole numbers from 0"
            raise DataError(str(path), key, "a missing token", expected, first + row)
        numbers = values.to_numpy(zero_copy_only=False)
        outside = (numbers < 0) | (numbers > _LARGEST)
        if outside.any():
            at = int(np.argmax(outside))
            expected = f"whole numbers from 0 to {_LARGEST}"
            raise DataError(str(path), key, int(numbers[at]), expected, first + at // self.width)
        rows: npt.NDArray[np.int32] = numbers.astype(np.int32).reshape(len(column), self.width)
        return rows
