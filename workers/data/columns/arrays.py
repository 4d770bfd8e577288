"""The columns of a job: checked against each file, and turned into the arrays of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from protos.job_pb2 import DataSpec
from workers.data.columns.labels import LABEL, ONE, Kind, Label
from workers.data.columns.named import named_of
from workers.data.columns.numbers import LARGEST, is_number, narrow, numbers
from workers.data.columns.tokens import Tokens
from workers.data.errors import DataError, column_hint
from workers.data.files import splits as files
from workers.data.files.unit import Unit
from workers.data.keys import Slot, has_text, hash_column, hash_slots

_HASHED = "a column of numbers, strings, dates or booleans"
_CHECKED_ROWS = 16384  # at a time
_BLOCK_BYTES = 64 << 20  # encoded at a time, about
TEXT: Final = b"text"  # in a field's metadata: a column of text in a schema of other types
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples side by side, as arrays by name.

    Attributes:
        arrays: of as many rows each, at least one:
            `sparse`, int64 `[B, F]`, one key for every slot of `data.sparse`;
            `dense`, float32 `[B, D]`, the columns of `data.dense`, where missing values are 0;
            `tokens`, int32 `[B, L]`, the lists of `data.tokens`, without a label but for the last
            of each; L is 0 where there are none;
            those of `data.columns`, as `Named` says;
            `label.NAME` `[B]` of each label and weight, `[B, …]` of lists, as `labels_of` says;
            without a label
            `label.label`, int32 `[B, L]`, the token that follows each; of lists that are a label
            -1 where none does.
    """

    arrays: Mapping[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.arrays[name]

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def labels(self) -> "Batch":
        """What losses read alone, without a copy."""
        return Batch({name: self.arrays[name] for name in self.arrays if name.startswith(LABEL)})

    def slice(self, start: int, stop: int) -> "Batch":
        """Rows `start` to `stop`, without a copy."""
        return Batch({name: array[start:stop] for name, array in self.arrays.items()})

    def take(self, rows: npt.NDArray[np.int64]) -> "Batch":
        """A copy of these rows, in this order."""
        return Batch({name: array.take(rows, axis=0) for name, array in self.arrays.items()})

    def copy(self) -> "Batch":
        """The same rows in memory of their own, which may be written to."""
        return Batch({name: array.copy() for name, array in self.arrays.items()})


def concatenate(batches: Sequence[Batch]) -> Batch:
    """One batch of all rows, in order; at least one batch is needed."""
    if len(batches) == 1:
        return batches[0]
    return Batch({name: np.concatenate([b[name] for b in batches]) for name in batches[0].arrays})


def labels_in(values: Mapping[str, T]) -> dict[str, T]:
    """Of values by name those that losses read, by the names that these have for them."""
    return {n.removeprefix(LABEL): value for n, value in values.items() if n.startswith(LABEL)}


class Encoder:
    """Turns record batches into `Batch`es as `spec` says.

    Args:
        labels: what losses read.
        inputs_only: of rows to predict, which need no labels.

    Raises:
        DataError: the columns that it names do not go together.
    """

    def __init__(
        self, spec: DataSpec, labels: Sequence[Label], *, inputs_only: bool = False
    ) -> None:
        outcomes = [label for label in labels if label.kind is not Kind.WEIGHT]
        if not spec.sparse and not spec.dense and not spec.tokens and not spec.columns:
            raise DataError("job", "data.sparse", [], "at least one sparse or dense column")
        self.named = named_of(spec)
        self.labels = [] if inputs_only else list(labels)
        self._predicts_tokens = bool(spec.tokens) and not outcomes
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
            inputs += [column for one in self.named for column in one.columns]
            given = [(o.column, o.key) for o in outcomes if o.kind is not Kind.FOLLOWING]
            for taken, by in (*given, (spec.tokens, "data.tokens")):
                if taken and taken in inputs:
                    raise DataError("job", key, taken, f"other columns: it is {by}")
        self.sparse = list(dict.fromkeys(name for slot in self.slots for name in slot.columns))
        every = [*(label.column for label in self.labels), *self.dense, *self.sparse, spec.tokens]
        every += [column for one in self.named for column in one.columns]
        self.columns = [name for name in dict.fromkeys(every) if name]

    @property
    def row_bytes(self) -> int:
        """Memory of one encoded row."""
        arrays = self.nothing.arrays.values()
        return sum(array.itemsize * int(np.prod(array.shape[1:])) for array in arrays)

    def block_rows(self, most: int) -> int:
        """Rows to encode at a time: pictures are large."""
        return max(1, min(most, _BLOCK_BYTES // max(1, self.row_bytes)))

    @property
    def meaning(self) -> str:
        """Differs where the same files would be encoded differently."""
        slots = [slot.name for slot in self.slots]
        tokens = self.tokens.name if self.tokens else ""
        return repr((self.labels, self.dense, slots, tokens, self.named))

    @property
    def nothing(self) -> Batch:
        """A batch of no rows, with types and widths."""
        sparse = np.zeros((0, len(self.slots)), np.int64)
        dense = np.zeros((0, len(self.dense)), np.float32)
        tokens = np.zeros((0, self.tokens.width if self.tokens else 0), np.int32)
        labels = {LABEL + label.name: label.nothing for label in self.labels}
        return self._batch(
            sparse, {one.name: one.nothing for one in self.named}, dense, tokens, labels
        )

    def _batch(
        self,
        sparse: npt.NDArray[np.int64],
        named: Mapping[str, npt.NDArray[Any]],
        dense: npt.NDArray[np.float32],
        tokens: npt.NDArray[np.int32],
        labels: Mapping[str, npt.NDArray[Any]],
    ) -> Batch:
        """A batch of these, where tokens that are to be predicted part with their last one."""
        if self._predicts_tokens:
            labels = {LABEL + ONE: tokens[:, 1:], **labels}
            tokens = tokens[:, :-1]
        # Where they are stored one behind the other, wide values come first.
        first = sorted(named, key=lambda name: -named[name].itemsize)
        wide = {name: named[name] for name in first if named[name].itemsize > 1}
        pictures = {name: named[name] for name in first if name not in wide}
        return Batch(
            {"sparse": sparse, **wide, "dense": dense, "tokens": tokens, **labels, **pictures}
        )

    def check(
        self,
        path: Path,
        extended: Callable[[Path, pa.Schema], pa.Schema] = lambda path, schema: schema,
    ) -> None:
        """Raises `DataError` unless the file has every column in a type that fits.

        Args:
            extended: what becomes of its schema where other files are joined to it.
        """
        schema = extended(path, files.schema(path))
        self.check_schema(path, schema, typed=not files.is_text(path))
        if self.tokens:
            self.tokens.check_first(path)

    def check_schema(self, path: Path, schema: pa.Schema, *, typed: bool) -> None:
        """Raises `DataError` unless every column is there in a type that fits.

        Args:
            path: where, for the error.
            typed: whether types are those of the values; text files have strings only.
        """
        twice = [name for name in self.columns if schema.names.count(name) > 1]
        if twice:
            raise DataError(str(path), "columns", f"{twice[0]!r} twice", "each name once")
        texts = {f.name for f in schema if not typed or TEXT in (f.metadata or {})}
        for key, names in (
            *((label.key, [label.column]) for label in self.labels),
            ("data.dense", self.dense),
            ("data.sparse", self.sparse),
        ):
            for name in names:
                if name not in schema.names:
                    hint = column_hint(name, schema.names)
                    raise DataError(str(path), key, name, f"a column of the file; {hint}")
                kind = schema.field(name).type
                if key == "data.dense" and name not in texts and not is_number(kind):
                    raise DataError(str(path), f"{key}: {name}", str(kind), "a numeric column")
                if key == "data.sparse" and not has_text(kind):
                    raise DataError(str(path), f"{key}: {name}", str(kind), _HASHED)
        for label in self.labels:
            typed = label.column not in texts
            label.check(path, schema.field(label.column).type, typed=typed)
        for one in self.named:
            one.check(path, schema, typed=texts.isdisjoint(one.columns))
        if self.tokens:
            self.tokens.check_schema(path, schema)

    def check_statistics(self, path: Path) -> None:
        """Raises `DataError` where a Parquet file says of its values that they do not fit."""
        if not files.is_parquet(path):
            return
        units = files.units(path)
        alone = [one for one in self.labels if one.beside is None and one.lists is None]
        columns = {*(one.column for one in alone), *self.dense}
        for group, name, said in files.values(path, columns):
            labels = [label for label in alone if label.column == name]
            if name in self.dense and max(abs(said.least), abs(said.most)) > LARGEST:
                self._check_column(units[group], name, [])
            unfit = [one for one in labels if not one.may_hold(said.least, said.most, said.missing)]
            if unfit:  # which value
                self._check_column(units[group], name, unfit)

    def _check_column(self, unit: Unit, name: str, labels: Sequence[Label]) -> None:
        first = unit.first
        for block in files.read(unit, [name], _CHECKED_ROWS):
            for label in labels:
                label.encode(block, unit.path, first)
            if not labels:
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
                where = f"data.sparse: {name}"
                raise DataError(str(path), where, str(error), _HASHED) from error
        sparse = hash_slots(self.slots, hashed, rows)
        tokens = np.zeros((rows, 0), np.int32)
        if self.tokens:
            tokens = self.tokens.encode(block.column(self.tokens.name), path, first)
        labels = {LABEL + label.name: label.encode(block, path, first) for label in self.labels}
        named = {one.name: one.encode(block, path, first) for one in self.named}
        return self._batch(sparse, named, dense, tokens, labels)


def _dense(column: pa.Array, name: str, path: Path, first: int) -> npt.NDArray[np.float32]:
    values = numbers(column, f"data.dense: {name}", path, first)
    found = narrow(values)
    if not np.isfinite(found).all():
        infinite = np.isinf(found)
        if infinite.any():
            row = int(np.argmax(infinite))
            expected = "finite numbers, as float32"
            raise DataError(
                str(path), f"data.dense: {name}", float(values[row]), expected, first + row
            )
        found[np.isnan(found)] = 0
    return found


def _slot(written: str) -> Slot:
    try:
        return Slot.parse(written)
    except ValueError:
        expected = "a column, or columns joined by *, such as origin*date"
        raise DataError("job", "data.sparse", written, expected) from None
