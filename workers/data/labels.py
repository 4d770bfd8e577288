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
from workers.data.errors import DataError
from workers.data.numbers import LARGEST, narrow, numbers

# Begins the names of what losses read: no value of a traced model has a dot in its name.
LABEL: Final = "label."
ONE: Final = "label"  # what the only label is called, whatever its column
WEIGHT: Final = "weight"
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

    @property
    def expected(self) -> str:
        """In words."""
        return _EXPECTED[self]

    @property
    def dtype(self) -> type[np.float32] | type[np.int32]:
        """As what values are kept."""
        return np.int32 if self is Kind.CLASS else np.float32

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
}
KINDS: Final = {
    "bce_with_logits": Kind.BINARY,
    "cross_entropy": Kind.CLASS,
    "mse": Kind.REAL,
    "mae": Kind.REAL,
    "huber": Kind.REAL,
    CONTRASTIVE: Kind.CLASS,
    "in_batch_softmax": Kind.CLASS,
    "pairwise": Kind.REAL,
}
# Of one label that several losses read: what the first of these may be, the others may.
_STRICTEST: Final = (Kind.BINARY, Kind.CLASS, Kind.POSITIVE, Kind.EXACT, Kind.REAL)


@dataclass(frozen=True, slots=True)
class Label:
    """A column that losses read.

    Args:
        name: by which they do.
        key: of the job file, that names the column.
    """

    name: str
    column: str
    kind: Kind
    key: str = "data.label"

    def encode(self, column: pa.Array, path: Path, first: int) -> npt.NDArray[Any]:
        """Its values [n], of the kind's dtype.

        Args:
            first: rows of the file before these.

        Raises:
            DataError: one does not fit.
        """
        key = f"{self.key}: {self.column}"
        values = numbers(column, key, path, first)
        fits = self.kind.fits(values)
        if not fits.all():
            row = int(np.argmin(fits))
            value = "missing" if np.isnan(values[row]) else float(values[row])
            raise DataError(
                str(path), key, value, f"{self.kind.expected} in every row", first + row
            )
        found: npt.NDArray[Any] = values.astype(self.kind.dtype)
        return found

    def may_hold(self, least: float, most: float, missing: int) -> bool:
        """Whether the values of a column may fit, as far as their range tells."""
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
    kinds: dict[str, set[Kind]] = {}
    for name, read_as in _read(job):
        kinds.setdefault(name, set()).add(read_as)

    def kind(name: str) -> Kind:
        found = kinds.get(name, {Kind.EXACT})
        return next(one for one in _STRICTEST if one in found)

    if data.label:
        return Label(ONE, data.label, kind(ONE)), *weight
    several = (Label(name, name, kind(name), "data.labels") for name in data.labels)
    return *several, *weight


def label_of(job: JobSpec, head: str) -> str:
    """The label that a head is held against; "": none, of one that needs none."""
    spec = job.train.heads[head]
    told: str = spec.label
    return told or (ONE if job.data.label else "" if spec.loss == CONTRASTIVE else head)


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
