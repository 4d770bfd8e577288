"""A column of token lists, such as windows of a text: whole numbers, equally many in each row."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from workers.data import files
from workers.data.errors import DataError, column_hint

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

    def check(self, path: Path, schema: pa.Schema) -> None:
        """Raises `DataError` unless the file has the column, of lists as long as other files'."""
        if self.name not in schema.names:
            hint = column_hint(self.name, schema.names)
            raise DataError(str(path), "data.tokens", self.name, f"a column of the file; {hint}")
        kind = schema.field(self.name).type
        if not _is_list(kind) or not pa.types.is_integer(kind.value_type):
            expected = "a Parquet column of lists of whole numbers"
            raise DataError(str(path), f"data.tokens: {self.name}", str(kind), expected)
        for unit in files.units(path)[:1]:
            for block in files.read(unit, [self.name], block_rows=1):
                self.encode(block.column(self.name), path)
                break

    def encode(self, column: pa.Array, path: Path) -> npt.NDArray[np.int32]:
        """int32 `[n, width]`; `path` is for error messages."""
        lengths = pc.unique(pc.list_value_length(column).fill_null(-1)).to_pylist()
        if not self.width and lengths:
            self.width = lengths[0]
        wrong = [length for length in lengths if length != self.width or length < 2]
        key = f"data.tokens: {self.name}"
        if wrong:
            got = "no list" if wrong[0] == -1 else f"{wrong[0]} tokens"
            expected = f"{self.width}, as before" if self.width > 1 else "2 or more"
            raise DataError(str(path), key, got, f"{expected}, in every row")
        values = column.flatten()
        if values.null_count:
            raise DataError(str(path), key, "a missing token", "whole numbers from 0")
        numbers = values.to_numpy(zero_copy_only=False)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= _LARGEST:
            outside = numbers.min() if numbers.min() < 0 else numbers.max()
            raise DataError(str(path), key, int(outside), f"whole numbers from 0 to {_LARGEST}")
        rows: npt.NDArray[np.int32] = numbers.astype(np.int32).reshape(len(column), self.width)
        return rows


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
