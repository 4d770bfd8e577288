"""The columns that losses read: labels of the types that these take, and what a sample counts."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from protos.job_pb2 import JobSpec
from protos.losses import CONTRASTIVE, may_lack_labels
from workers.data.columns.label_lists import LabelLists, check_lengths, label_lists
from workers.data.columns.lists import Lists, is_list
from workers.data.columns.named import INTS, Named, named_of
from workers.data.columns.numbers import LARGEST, is_number, narrow, numbers
from workers.data.errors import DataError

# Begins the names of what losses read: no value of a traced model has a dot in its name.
LABEL: Final = "label."
NEXT_TOKEN: Final = "next_token"  # the loss of lists
ONE: Final = "label"  # what the only label is called, whatever its column
WEIGHT: Final = "weight"
_NONE = -1  # where no token follows
_MOST_CLASS = 2**31 - 1
_EXACT = 2**24  # whole numbers up to here are themselves as float32


class Kind(Enum):
    """What values a label may have, and as what they are kept."""

    BINARY = auto()  # 0 or 1, float32
    CLASS = auto()  # whole, from 0, int32
    REAL = auto()  # finite, float32
    EXACT = auto()  # finite, float32, and whole ones as they are
    POSITIVE = auto()  # finite, above 0, float32
    WEIGHT = auto()  # finite, from 0, float32
    FOLLOWING = auto()  # lists of tokens: beside each the one that follows, below 0 for none; int32

    @property
    def expected(self) -> str:
        """In words."""
        return _EXPECTED[self]

    @property
    def dtype(self) -> type[np.float32] | type[np.int32]:
        """As what values are kept."""
        return np.int32 if self in (Kind.CLASS, Kind.FOLLOWING) else np.float32

    def fits(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Which values may be, NaN standing for a missing one; [n]."""
        found: npt.NDArray[np.bool_]
        if self is Kind.BINARY:
            found = (values == 0) | (values == 1)
        elif self is Kind.CLASS:
            found = (values >= 0) & (values <= _MOST_CLASS) & (values == np.floor(values))
        else:
            found = np.isfinite(narrow(values))
            if self is Kind.WEIGHT:
                found &= values >= 0
            elif self is Kind.POSITIVE:
                found &= narrow(values) > 0
            elif self is Kind.EXACT:
                found &= (np.abs(values) <= _EXACT) | (values != np.floor(values))
        return found


_EXPECTED: Final = {
    Kind.BINARY: "0 or 1",
    Kind.CLASS: "a whole number from 0, the number of a class",
    Kind.REAL: "a finite number",
    Kind.EXACT: f"a finite number, and a whole one up to {_EXACT}",
    Kind.POSITIVE: "a finite number above 0",
    Kind.WEIGHT: "a finite number of at least 0",
    Kind.FOLLOWING: f"whole numbers up to {_MOST_CLASS}",
}
KINDS: Final = {
    "bce_with_logits": Kind.BINARY,
    "cross_entropy": Kind.CLASS,
    "mse": Kind.REAL,
    "mae": Kind.REAL,
    "huber": Kind.REAL,
    NEXT_TOKEN: Kind.FOLLOWING,
    CONTRASTIVE: Kind.CLASS,
    "in_batch_softmax": Kind.CLASS,
    "pairwise": Kind.REAL,
}
# Of one label that several losses read: what the first of these may be, the others may.
_STRICTEST: Final = (
    *(Kind.FOLLOWING, Kind.BINARY, Kind.CLASS),
    *(Kind.POSITIVE, Kind.EXACT, Kind.REAL),
)


@dataclass(frozen=True, slots=True)
class Label:
    """A column that losses read.

    Args:
        name: by which they do.
        key: of the job file, that names the column.
        beside: of tokens that follow, the input that they are as long as.
        lists: how others are, where a row has several values. What does not count is NaN; of
            classes it is -1.
    """

    name: str
    column: str
    kind: Kind
    key: str = "data.label"
    beside: Named | None = None
    lists: LabelLists | None = None

    @property
    def nothing(self) -> npt.NDArray[Any]:
        """No rows of it."""
        width: tuple[int, ...] = ()
        if self.beside is not None:
            width = (self.beside.length,)
        elif self.lists is not None:
            width = self.lists.shape
        return np.zeros((0, *width), self.kind.dtype)

    def check(self, path: Path, kind: pa.DataType, *, typed: bool) -> None:
        """Raises `DataError` unless a column of that type fits; text has none but strings."""
        fits, expected = not typed or is_number(kind), "a numeric column"
        if is_list(kind) and not is_number(kind):
            expected = "a numeric column, or what its lists are in data.label_lists"
        if self.kind is Kind.FOLLOWING:
            fits = is_list(kind, pa.types.is_integer)
            expected = "a Parquet column of lists of whole numbers"
        elif self.lists is not None:
            fits, expected = typed and self.lists.fit(kind), "a column of lists of numbers"
        if not fits:
            raise DataError(str(path), f"{self.key}: {self.column}", str(kind), expected)

    def encode(self, block: pa.RecordBatch, path: Path, first: int) -> npt.NDArray[Any]:
        """Its values [n], of the kind's dtype; of lists [n, length] or [n, *shape].

        Args:
            first: rows of the file before these.

        Raises:
            DataError: one does not fit.
        """
        key, column = f"{self.key}: {self.column}", block.column(self.column)
        if self.beside is not None:
            check_lengths(block, self.column, self.beside.of, key, path, first)
            return _following(self.beside, column, key, path, first)
        if self.lists is not None:
            return self._several(self.lists, block, key, path, first)
        values = numbers(column, key, path, first)
        fits = self.kind.fits(values)
        if not fits.all():
            row = int(np.argmin(fits))
            raise self._unfit(float(values[row]), "in every row", key, path, first + row)
        found: npt.NDArray[Any] = values.astype(self.kind.dtype)
        return found

    def _several(
        self, lists: LabelLists, block: pa.RecordBatch, key: str, path: Path, first: int
    ) -> npt.NDArray[Any]:
        found = lists.of(block, self.column, key, path, first)
        values = numbers(found.flat, key, path, first)
        missing = np.isnan(values)
        fits = self.kind.fits(values)
        if self.kind is Kind.CLASS:
            fits |= np.isfinite(values) & (values < 0) & (values == np.floor(values))
        if lists.skips_missing:
            fits |= missing
        if not fits.all():
            at = int(np.argmin(fits))
            raise self._unfit(float(values[at]), "in every list", key, path, found.row(at))
        if self.kind is Kind.CLASS:
            values = np.where(missing | (values < 0), _NONE, values)
        filling = _NONE if self.kind is Kind.CLASS else np.nan
        placed = found.placed(values.astype(self.kind.dtype), filling)
        return placed.reshape(block.num_rows, *lists.shape)

    def _unfit(self, value: float, where: str, key: str, path: Path, row: int) -> DataError:
        got = "missing" if np.isnan(value) else value
        return DataError(str(path), key, got, f"{self.kind.expected} {where}", row)

    def may_hold(self, least: float, most: float, missing: int) -> bool:
        """Whether the values of a column of numbers may fit, as far as their range tells."""
        if missing or max(abs(least), abs(most)) > LARGEST:
            return False
        if self.kind is Kind.BINARY:
            return 0 <= least <= most <= 1
        if self.kind is Kind.POSITIVE:
            return least > 0
        return least >= 0 or self.kind not in (Kind.CLASS, Kind.WEIGHT)


def labels_of(job: JobSpec) -> tuple[Label, ...]:
    """What a job's losses read, each of the type that they take; none: the tokens that follow.

    Raises:
        DataError: they need a label, and there is none.
    """
    data = job.data
    if not (data.label or data.labels or data.tokens or may_lack_labels(job)):
        raise DataError("job", "data.label", data.label, "the column to be predicted")
    weight = [Label(WEIGHT, data.weight, Kind.WEIGHT, "data.weight")] if data.weight else []
    lists = label_lists(data)
    kinds: dict[str, set[Kind]] = {}
    for name, read_as in _read(job):
        kinds.setdefault(name, set()).add(read_as)

    def kind(name: str) -> Kind:
        found = kinds.get(name, {Kind.EXACT})
        return next(one for one in _STRICTEST if one in found)

    if data.label:
        beside = _beside(job) if kind(ONE) is Kind.FOLLOWING else None
        one = lists.get(data.label)
        return Label(ONE, data.label, kind(ONE), beside=beside, lists=one), *weight
    several = (
        Label(name, name, kind(name), "data.labels", lists=lists.get(name)) for name in data.labels
    )
    return *several, *weight


def _beside(job: JobSpec) -> Named:
    """The input that lists of labels are beside: of the same column, or the first one of lists."""
    lists = [one for one in named_of(job.data) if one.kind == INTS]
    if not lists:
        expected = "an input of type ints in data.columns, beside whose values labels stand"
        raise DataError("job", "data.label", job.data.label, expected)
    return next((one for one in lists if one.of == job.data.label), lists[0])


def _following(
    beside: Named, column: pa.Array, key: str, path: Path, first: int
) -> npt.NDArray[np.int32]:
    lists = Lists.of(column, beside.length, beside.keep, key, path, first)
    values = lists.whole()
    if len(values) and int(values.max()) > _MOST_CLASS:
        raise DataError(str(path), key, int(values.max()), Kind.FOLLOWING.expected)
    found = np.full((len(column), beside.length), _NONE, np.int32)
    found[:, :-1] = lists.placed(np.maximum(values, _NONE).astype(np.int32), _NONE)[:, 1:]
    return found


def in_lists(job: JobSpec, label: str) -> LabelLists | None:
    """What the lists are of a label that losses read by this name; None: it has one value a row."""
    column = job.data.label if label == ONE and job.data.label else label
    return label_lists(job.data).get(column)


def label_of(job: JobSpec, head: str) -> str:
    """The label that a head is held against; "": none, of one that needs none."""
    spec = job.train.heads[head]
    told: str = spec.label
    return told or (ONE if job.data.label else "" if spec.loss == CONTRASTIVE else head)


def click_label(job: JobSpec, table: str, named: str | None) -> str:
    """By which name losses read the label that is 1 where a sample was clicked; "": none is.

    Args:
        table: whose keys' clicks are counted.
        named: its column, as the table has it; None: the only label of 0 or 1.

    Raises:
        DataError: there is no such label, or several that may be meant.
    """
    labels = [one for one in labels_of(job) if one.kind not in (Kind.WEIGHT, Kind.FOLLOWING)]
    if named is None:
        found = [one for one in labels if one.kind is Kind.BINARY]
        if not found:
            return ""
    else:
        found = [one for one in labels if one.column == named]
    if len(found) != 1:
        names = ", ".join(one.column for one in labels) or "which there is none of"
        expected = f"the label that says what was clicked, one of {names}"
        raise DataError("job", f"tables.{table}.clicks", named or "nothing", expected)
    return found[0].name


def _read(job: JobSpec) -> Iterator[tuple[str, Kind]]:
    """Labels, and as what built-in losses read them."""
    if job.model.loss:
        return
    for name, head in sorted(job.train.heads.items()):
        others = (head.frequency, Kind.POSITIVE), (head.group, Kind.CLASS)
        for label, kind in ((label_of(job, name), KINDS.get(head.loss, Kind.BINARY)), *others):
            if label:
                yield label, kind
    if not job.train.heads:
        label = job.data.labels[0] if len(job.data.labels) == 1 else ONE
        yield label, KINDS.get(job.train.loss, Kind.BINARY)
