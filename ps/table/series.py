"""How far the steps of a series are: which are over, and which of those were committed."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protos.parameter_server_pb2 import SeriesState
from ps.engine import _native
from ps.errors import TableError

LAST_STEP = (1 << 62) - 1  # that a series can have
_RECENT = 64  # committed steps that are remembered, for a commit whose answer was lost
Flags = NDArray[np.bool_]  # [1024], of buckets


def _nothing_over() -> NDArray[np.int64]:
    return np.zeros(_native.BUCKETS, np.int64)


@dataclass(slots=True)
class SeriesProgress:
    """Steps that are over.

    They are told apart by bucket, since buckets move: one whose rows have had a step may come to
    a shard that has still to commit it, and the other way round.

    Attributes:
        name: of the series.
        open_from: the first step that is open, of each bucket: int64 [1024].
        committed: the last steps that were not dropped.
        tables: names of all tables that its parts have named.
    """

    name: str
    open_from: NDArray[np.int64] = field(default_factory=_nothing_over)
    committed: tuple[int, ...] = ()
    tables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, message: SeriesState) -> "SeriesProgress":
        """As it came over the wire.

        Raises:
            TableError: it tells of another number of buckets.
        """
        told = np.array(message.open_from or [0], np.int64)
        if len(told) not in (1, _native.BUCKETS):
            raise TableError(
                f"series {message.series!r}: open_from of {len(told)} buckets; expected 1 or "
                f"{_native.BUCKETS}"
            )
        open_from = np.ascontiguousarray(np.broadcast_to(told, _native.BUCKETS))
        return cls(message.series, open_from, tuple(message.committed), frozenset(message.tables))

    @property
    def message(self) -> SeriesState:
        """As it goes over the wire."""
        alike = (self.open_from == self.open_from[0]).all()
        return SeriesState(
            series=self.name,
            open_from=self.open_from[:1] if alike else self.open_from,
            committed=self.committed,
            tables=sorted(self.tables),
        )

    @property
    def ended(self) -> bool:
        """Whether its last step is over, so that none can follow."""
        return bool((self.open_from > LAST_STEP).any())

    def open(self, step: int) -> Flags:
        """The buckets in which a step is not over."""
        return self.open_from <= step

    def committed_after(self, step: int) -> bool:
        """Whether one that follows it was not dropped."""
        return bool(self.committed) and self.committed[-1] > step

    def close(self, step: int, buckets: Flags, *, committed: bool) -> None:
        """A step is over in some buckets, and with it all before."""
        self.open_from[buckets] = np.maximum(self.open_from[buckets], step + 1)
        if committed:
            self._remember((step,))

    def name_tables(self, tables: Iterable[str]) -> None:
        """Its parts have named these tables."""
        named = frozenset(tables)
        if not named <= self.tables:
            self.tables |= named

    def merge(self, other: "SeriesProgress") -> None:
        """Add what another run, or another shard, knows of the same buckets."""
        np.maximum(self.open_from, other.open_from, out=self.open_from)
        self._remember(other.committed)
        self.tables |= other.tables

    def take(self, other: "SeriesProgress", buckets: Flags) -> None:
        """What another shard knows of buckets that it hands over."""
        self.open_from[buckets] = other.open_from[buckets]
        self._remember(other.committed)
        self.tables |= other.tables

    def _remember(self, steps: Iterable[int]) -> None:
        self.committed = tuple(sorted({*self.committed, *steps})[-_RECENT:])
