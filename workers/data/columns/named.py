"""The inputs of `data.columns`: a tensor each, by a name of the job's choosing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from protos.job_pb2 import DataSpec
from workers.data.columns import images
from workers.data.columns.images import Images
from workers.data.columns.lists import Lists, innermost, is_list
from workers.data.columns.numbers import is_number, narrow, numbers, whole
from workers.data.errors import DataError, column_hint
from workers.data.keys import PAD, Slot, hash_column, hash_slots

KEY, KEYS, FLOAT, FLOATS, INT = "key", "keys", "float", "floats", "int"
INTS, MASK, IMAGE = "ints", "mask", "image"
LISTS: Final = (KEYS, FLOATS, INTS, MASK)
FIRST, LAST = "first", "last"


@dataclass(frozen=True, slots=True)
class Named:
    """One input.

    Args:
        name: of the tensor.
        of: the file's column; for keys also a cross of several.
        kind: key, int64 [B]; keys, int64 [B, length]; float, float32 [B]; floats, float32
            [B, length]; int, int64 [B]; ints, int64 [B, length]; mask, int64 [B, length], 1 where
            a list has a value; image, uint8 [B, C, H, W], which models get as float32 from 0 to 1.
        length: of lists.
        slot: that keys are hashed for: inputs of one slot have the same key for the same value.
        keep: first or last, which values of a longer list stay; empty: none may be longer.
        padding: of ints, what fills up short lists.
        shape: of floats and ints that all have it, [B, *shape]; of an image.
        fit: of images, as `Images` has it.
    """

    name: str
    of: str
    kind: str
    length: int
    slot: Slot
    keep: str = LAST
    padding: int = 0
    shape: tuple[int, ...] = ()
    fit: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of the file."""
        return Slot.parse(self.of).columns if self.kind == KEY else (self.of,)

    @property
    def nothing(self) -> npt.NDArray[Any]:
        """No rows of it."""
        width = self.shape or ((self.length,) if self.kind in LISTS else ())
        kinds = {FLOAT: np.float32, FLOATS: np.float32, IMAGE: np.uint8}
        return np.zeros((0, *width), kinds.get(self.kind, np.int64))

    @property
    def _key(self) -> str:
        return f"data.columns.{self.name}.of"

    def check(self, path: Path, schema: pa.Schema, *, typed: bool) -> None:
        """Raises `DataError` unless the file has the column in a type that fits.

        Args:
            typed: whether types are those of the values; text files have strings only.
        """
        for column in self.columns:
            if column not in schema.names:
                hint = column_hint(column, schema.names)
                raise DataError(str(path), self._key, column, f"a column of the file; {hint}")
            kind = schema.field(column).type
            fits, expected = True, ""
            if self.kind == IMAGE:
                images.check(kind, f"{self._key}: {column}", path)
            elif self.shape:
                inside = innermost(kind)
                whole = self.kind == INTS
                fits = is_list(kind) and (pa.types.is_integer if whole else is_number)(inside)
                fits = fits or pa.types.is_null(inside)
                expected = f"a column of lists of {'whole ' if whole else ''}numbers"
            elif self.kind in LISTS:
                fits, expected = is_list(kind), "a Parquet column of lists"
                if fits and self.kind == FLOATS:
                    fits, expected = is_list(kind, is_number), "a column of lists of numbers"
                if fits and self.kind == INTS:
                    fits = is_list(kind, pa.types.is_integer)
                    expected = "a column of lists of whole numbers"
            elif typed and self.kind in (FLOAT, INT):
                fits, expected = is_number(kind), "a numeric column"
            if not fits:
                raise DataError(str(path), f"{self._key}: {column}", str(kind), expected)

    def encode(self, block: pa.RecordBatch, path: Path, first: int) -> npt.NDArray[Any]:
        """Its rows, `[n]` or `[n, length]`.

        Args:
            first: rows of the file before these.

        Raises:
            DataError: a value does not fit.
        """
        if self.kind == KEY:
            return self._hashed({name: block.column(name) for name in self.columns}, path)
        column = block.column(self.of)
        if self.kind == IMAGE:
            return Images(self.shape, self.fit).decode(
                column, f"{self._key}: {self.of}", path, first
            )
        if self.shape:
            return self._shaped(column, path, first)
        if self.kind in LISTS:
            return self._lists(column, path, first)
        key = f"{self._key}: {self.of}"
        if self.kind == INT:
            return whole(column, key, path, first)
        values = numbers(column, key, path, first)
        return self._floats(values, path, lambda at: first + at)

    def _hashed(self, columns: Mapping[str, pa.Array], path: Path) -> npt.NDArray[np.int64]:
        rows = len(next(iter(columns.values())))
        if not rows:
            return np.zeros(0, np.int64)
        try:
            hashed = [hash_column(column) for column in columns.values()]
        except TypeError as error:
            expected = "numbers, strings, dates or booleans"
            raise DataError(str(path), f"{self._key}: {self.of}", str(error), expected) from error
        by_name = dict(zip(self.slot.columns, hashed, strict=True))
        return hash_slots([self.slot], by_name, rows)[:, 0].copy()

    def _shaped(self, column: pa.Array, path: Path, first: int) -> npt.NDArray[Any]:
        key = f"{self._key}: {self.of}"
        lists = Lists.shaped(column, self.shape, key, path, first)
        if self.kind == INTS:
            return lists.whole().reshape(len(column), *self.shape)
        values = self._floats(numbers(lists.flat, key, path, first), path, lists.row)
        return values.reshape(len(column), *self.shape)

    def _lists(self, column: pa.Array, path: Path, first: int) -> npt.NDArray[Any]:
        """As many values of each list as are kept, filled up behind; of a missing one none."""
        lists = Lists.of(column, self.length, self.keep, f"{self._key}: {self.of}", path, first)
        if self.kind == MASK:
            return lists.placed(np.ones(lists.size, np.int64), 0)
        if self.kind == INTS:
            return lists.placed(lists.whole(), self.padding)
        if self.kind == KEYS:
            return lists.placed(self._hashed({self.of: lists.flat}, path), PAD)
        values = numbers(lists.flat, f"{self._key}: {self.of}", path, first)
        return lists.placed(self._floats(values, path, lists.row), 0)

    def _floats(
        self, values: npt.NDArray[np.float64], path: Path, row_of: Callable[[int], int]
    ) -> npt.NDArray[np.float32]:
        found = narrow(values)
        if np.isinf(found).any():
            at = int(np.argmax(np.isinf(found)))
            expected = "finite numbers, as float32"
            key = f"{self._key}: {self.of}"
            raise DataError(str(path), key, float(values[at]), expected, row_of(at))
        found[np.isnan(found)] = 0
        return found


def named_of(spec: DataSpec) -> tuple[Named, ...]:
    """The inputs of a job by name, in the order of their names.

    Raises:
        DataError: a cross without a column; a slot of another number of columns.
    """
    found = []
    for name in sorted(spec.columns):
        one = spec.columns[name]
        of = one.of or name
        try:
            slot = Slot.parse(one.slot or of)
        except ValueError:
            expected = "a column, or columns joined by *, such as origin*date"
            raise DataError("job", f"data.columns.{name}.of", of, expected) from None
        width = len(Slot.parse(of).columns) if one.type == KEY else 1
        if len(slot.columns) != width:
            raise DataError(
                "job", f"data.columns.{name}.slot", one.slot, f"a cross of {width} columns"
            )
        keep = one.keep or ("" if one.type == INTS else LAST)
        shape = tuple(one.shape)
        found.append(Named(name, of, one.type, one.length, slot, keep, one.padding, shape, one.fit))
    return tuple(found)
