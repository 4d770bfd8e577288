"""The columns of a job: checked against each file, and turned into the arrays of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from protos.job_pb2 import DataSpec
from workers.data import files
from workers.data.errors import DataError, column_hint
from workers.data.keys import Slot, hash_column, hash_slots
from workers.data.tokens import Tokens

_CHECKED_ROWS = 16384  # at a time
_LARGEST = float(np.finfo(np.float32).max)
_MISSING = pa.array(["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"])


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples side by side.

    Attributes:
        sparse: int64 `[B, F]`, one key for every slot of `data.sparse`.
        dense: float32 `[B, D]`, the columns of `data.dense`; missing values are 0.
        label: float32 `[B]`, finite, where it is to be a class 0 or 1; without `data.label` int32
            `[B, L]`, the token that follows each.
        tokens: int32 `[B, L]`, the lists of `data.tokens`; without `data.label` but for the last
            of each; L is 0 where there are none.
    """

    sparse: npt.NDArray[np.int64]
    dense: npt.NDArray[np.float32]
    label: npt.NDArray[np.float32] | npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.label)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Its arrays, of as many rows each."""
        return self.sparse, self.dense, self.label, self.tokens

    def slice(self, start: int, stop: int) -> "Batch":
        """Rows `start` to `stop`, without a copy."""
        return Batch(*(array[start:stop] for array in self.arrays))

    def take(self, rows: npt.NDArray[np.int64]) -> "Batch":
        """A copy of these rows, in this order."""
        return Batch(*(array.take(rows, axis=0) for array in self.arrays))

    def copy(self) -> "Batch":
        """The same rows in memory of their own, which may be written to."""
        return Batch(*(array.copy() for array in self.arrays))


def concatenate(batches: Sequence[Batch]) -> Batch:
    """One batch of all rows, in order; at least one batch is needed."""
    if len(batches) == 1:
        return batches[0]
    return Batch(
        *(np.concatenate(parts) for parts in zip(*(b.arrays for b in batches), strict=True))
    )


class Encoder:
    """Turns record batches into `Batch`es as `spec` says.

    Args:
        binary: labels are classes, 0 or 1; else any finite numbers.

    Raises:
        DataError: the columns that it names do not go together.
    """

    def __init__(self, spec: DataSpec, binary: bool = True) -> None:
        if not spec.label and not spec.tokens:
            raise DataError("job", "data.label", spec.label, "the column with 0 or 1")
        if not spec.sparse and not spec.dense and not spec.tokens:
            raise DataError("job", "data.sparse", [], "at least one sparse or dense column")
        self.label = spec.label
        self.binary = binary
        self.tokens = Tokens(spec.tokens) if spec.tokens else None
        self.dense = list(spec.dense)
        self.slots = [_slot(written) for written in spec.sparse]
        for key, names in (
            ("data.sparse", [slot.name for slot in self.slots]),
            ("data.dense", self.dense),
        ):
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise DataError("job", key, repeated[0], "each entry once")
            inputs = [column for name in names for column in name.split("*")]
            for taken, by in ((self.label, "data.label"), (spec.tokens, "data.tokens")):
                if taken and taken in inputs:
                    raise DataError("job", key, taken, f"other columns: it is {by}")
        self.sparse = list(dict.fromkeys(name for slot in self.slots for name in slot.columns))
        named = [self.label, *self.dense, *self.sparse, spec.tokens]
        self.columns = [name for name in dict.fromkeys(named) if name]

    @property
    def row_bytes(self) -> int:
        """Memory of one encoded row."""
        tokens = 8 * self.tokens.width if self.tokens else 0
        return 8 * len(self.slots) + 4 * len(self.dense) + 4 + tokens

    @property
    def meaning(self) -> str:
        """Differs where the same files would be encoded differently."""
        slots = [slot.name for slot in self.slots]
        tokens = self.tokens.name if self.tokens else ""
        return repr((self.label, self.binary, self.dense, slots, tokens))

    @property
    def nothing(self) -> Batch:
        """A batch of no rows, with types and widths."""
        sparse = np.zeros((0, len(self.slots)), np.int64)
        dense = np.zeros((0, len(self.dense)), np.float32)
        tokens = np.zeros((0, self.tokens.width if self.tokens else 0), np.int32)
        if not self.label:
            return Batch(sparse, dense, tokens[:, 1:], tokens[:, :-1])
        return Batch(sparse, dense, np.zeros(0, np.float32), tokens)

    def check(self, path: Path) -> None:
        """Raises `DataError` unless the file has every column in a type that fits."""
        schema = files.schema(path)
        for key, names in (
            ("data.label", [self.label] if self.label else []),
            ("data.dense", self.dense),
            ("data.sparse", self.sparse),
        ):
            for name in names:
                if name not in schema.names:
                    hint = column_hint(name, schema.names)
                    raise DataError(str(path), key, name, f"a column of the file; {hint}")
                kind = schema.field(name).type
                if files.is_parquet(path) and key != "data.sparse" and not _is_number(kind):
                    raise DataError(str(path), f"{key}: {name}", str(kind), "a numeric column")
        if self.tokens:
            self.tokens.check(path, schema)

    def check_statistics(self, path: Path) -> None:
        """Raises `DataError` where a Parquet file says of its values that they do not fit."""
        if not files.is_parquet(path):
            return
        units = files.units(path)
        for group, name, said in files.values(path, {self.label, *self.dense}):
            wrong = max(abs(said.least), abs(said.most)) > _LARGEST
            if name == self.label:
                wrong = wrong or said.missing > 0
                wrong = wrong or (self.binary and not 0 <= said.least <= said.most <= 1)
            if wrong:  # which one
                self._check_column(units[group], name)

    def _check_column(self, unit: files.Unit, name: str) -> None:
        first = unit.first
        for block in files.read(unit, [name], _CHECKED_ROWS):
            if name == self.label:
                self._label(block.column(name), unit.path, first)
            else:
                _dense(block.column(name), name, unit.path, first)
            first += block.num_rows

    def encode(self, block: pa.RecordBatch, path: Path, first: int = 0) -> Batch:
        """Hashes and converts one record batch.

        Args:
            path: of the file that it comes from, for errors.
            first: rows of the file before it.

        Raises:
            DataError: a value that does not fit, with its row, counted from 1.
        """
        rows = block.num_rows
        dense = np.zeros((rows, len(self.dense)), np.float32)
        for index, name in enumerate(self.dense):
            dense[:, index] = _dense(block.column(name), name, path, first)
        hashed = {}
        for name in self.sparse:
            try:
                hashed[name] = hash_column(block.column(name))
            except TypeError as error:
                expected = "a column of numbers, strings, dates or booleans"
                where = f"data.sparse: {name}"
                raise DataError(str(path), where, str(error), expected) from error
        sparse = hash_slots(self.slots, hashed, rows)
        tokens = np.zeros((rows, 0), np.int32)
        if self.tokens:
            tokens = self.tokens.encode(block.column(self.tokens.name), path, first)
        if not self.label:
            return Batch(sparse, dense, tokens[:, 1:], tokens[:, :-1])
        label = self._label(block.column(self.label), path, first)
        return Batch(sparse, dense, label, tokens)

    def _label(self, column: pa.Array, path: Path, first: int) -> npt.NDArray[np.float32]:
        key = f"data.label: {self.label}"
        values = _numbers(column, key, path, first)
        labels = _narrow(values)
        fits = (values == 0) | (values == 1) if self.binary else np.isfinite(labels)
        if not fits.all():
            row = int(np.argmin(fits))
            value = "missing" if np.isnan(values[row]) else float(values[row])
            expected = "0 or 1" if self.binary else "a finite number"
            raise DataError(str(path), key, value, f"{expected} in every row", first + row)
        return labels


def _dense(column: pa.Array, name: str, path: Path, first: int) -> npt.NDArray[np.float32]:
    values = _numbers(column, f"data.dense: {name}", path, first)
    numbers = _narrow(values)
    if not np.isfinite(numbers).all():
        infinite = np.isinf(numbers)
        if infinite.any():
            row = int(np.argmax(infinite))
            expected = "finite numbers, as float32"
            raise DataError(
                str(path), f"data.dense: {name}", float(values[row]), expected, first + row
            )
        numbers[np.isnan(numbers)] = 0
    return numbers


def _narrow(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """As float32; infinite where that is too narrow."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _slot(written: str) -> Slot:
    try:
        return Slot.parse(written)
    except ValueError:
        expected = "a column, or columns joined by *, such as origin*date"
        raise DataError("job", "data.sparse", written, expected) from None


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    )


def _numbers(column: pa.Array, key: str, path: Path, first: int) -> npt.NDArray[np.float64]:
    """float64 `[n]` with NaN for what is missing, also from text."""
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


def _parses(text: str | None) -> bool:
    try:
        pa.array([text]).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True
