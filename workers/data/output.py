"""Predictions as a file: written as they come, and there under its name once all are."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from workers.data.errors import DataError

STDOUT: Final = "-"
_GROUP_ROWS = 1 << 16
_GROUP_BYTES = 64 << 20
_MOST_COLUMNS = 1000  # of an output in text
_SEPARATORS: Final = {".csv": ",", ".tsv": "\t", STDOUT: ","}
_PARQUET: Final = (".parquet", ".pq")


def ending_of(target: str) -> str:
    """What kind of file that is to be.

    Raises:
        DataError: none that can be written.
    """
    ending = STDOUT if target == STDOUT else Path(target).suffix
    if ending not in _SEPARATORS and ending not in _PARQUET:
        raise DataError(target, "--output", ending, "a file ending in .parquet, .csv or .tsv, or -")
    if ending != STDOUT and (Path(target).is_dir() or not Path(target).absolute().parent.is_dir()):
        raise DataError(target, "--output", target, "a file in a folder that is there")
    return ending


class OutputFile:
    """The file being written: beside its place until it is complete.

    Args:
        target: a path, by whose ending it is Parquet or text; `-` for CSV on standard output.
    """

    def __init__(self, target: str) -> None:
        self._ending = ending_of(target)
        self._target = Path(target)
        self._partial = self._target.with_name(f".{self._target.name}.partial-{os.getpid()}")
        self._writer: Any = None
        self._waiting: list[pa.Table] = []
        self.rows = 0

    @property
    def text(self) -> bool:
        """Whether it is CSV or TSV."""
        return self._ending in _SEPARATORS

    def check(self, kept: pa.Schema) -> None:
        """Look at the columns that are carried over.

        Raises:
            DataError: one cannot be written to text, such as lists.
        """
        for field in kept if self.text else ():
            try:
                pa.csv.write_csv(pa.schema([field]).empty_table(), pa.BufferOutputStream())
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                expected = "plain values in text, or a .parquet file"
                key = f"--keep {field.name}"
                raise DataError(str(self._target), key, str(field.type), expected) from None

    def write(self, table: pa.Table) -> None:
        """Add rows; all tables have the same columns."""
        if self._writer is None:
            self._open(table.schema)
        self._waiting.append(table)
        self.rows += table.num_rows
        rows = sum(one.num_rows for one in self._waiting)
        if rows >= _GROUP_ROWS or sum(one.nbytes for one in self._waiting) >= _GROUP_BYTES:
            self._flush()

    def finish(self) -> None:
        """Give the file its name."""
        self._flush()
        self._writer.close()
        if self._ending == STDOUT:
            sys.stdout.flush()
            return
        with self._partial.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(self._partial, self._target)

    def abandon(self) -> None:
        """Leave nothing of it."""
        if self._ending != STDOUT:
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)

    def _open(self, schema: pa.Schema) -> None:
        if not self.text:
            self._writer = pa.parquet.ParquetWriter(self._partial, schema)
            return
        options = pa.csv.WriteOptions(delimiter=_SEPARATORS[self._ending])
        place: Any = sys.stdout.buffer if self._ending == STDOUT else str(self._partial)
        self._writer = pa.csv.CSVWriter(place, schema, write_options=options)

    def _flush(self) -> None:
        if self._waiting:
            whole = pa.concat_tables(self._waiting)
            self._writer.write_table(whole, _GROUP_ROWS)  # rows at a time
            self._waiting = []


def columns_of(name: str, values: NDArray[Any], *, flat: bool) -> dict[str, pa.Array]:
    """An output as columns: one of numbers, or of lists where rows have several values.

    Args:
        values: [n, …].
        flat: a column for each value, `NAME_0` and on, in place of lists.
    """
    if values.ndim > 1 and int(np.prod(values.shape[1:])) == 1:
        values = values.reshape(len(values))
    if values.ndim == 1:
        return {name: pa.array(values)}
    if flat:
        if int(np.prod(values.shape[1:])) > _MOST_COLUMNS:
            got, expected = list(values.shape), f"at most {_MOST_COLUMNS} values a row in text"
            raise DataError("job", f"output {name}", got, f"{expected}, or a .parquet file")
        wide = values.reshape(len(values), int(np.prod(values.shape[1:])))
        return {
            f"{name}_{index}": pa.array(np.ascontiguousarray(column))
            for index, column in enumerate(wide.T)
        }
    found = pa.array(np.ascontiguousarray(values).reshape(-1))
    for width in reversed(values.shape[1:]):
        found = pa.FixedSizeListArray.from_arrays(found, width)
    return {name: found}
