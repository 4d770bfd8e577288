"""Following a Publisher in a process that serves: weights in memory, kept up to date."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chassis.near import did_you_mean
from protos.parameter_server_pb2 import (
    AdmissionSpec,
    InitializerSpec,
    OptimizerSpec,
    SegmentSpec,
    TableSpec,
)
from ps.checkpoint.manifest import verify
from ps.checkpoint.places import open_store
from ps.checkpoint.rowfile import spec_of
from ps.engine import _native
from ps.errors import CheckpointError, TableError
from ps.serving import feed
from ps.serving.feed import Entry, Feed
from ps.serving.weights import Link, read_weights
from ps.table.arrays import as_keys
from ps.table.spec import describe_difference, make_table, segments_of

_ATTEMPTS = 5
_LOOK_S = 0.1
_GONE_HEAD = b"HPB2" + bytes([3, 0, 0, 0])  # see engine/table/block.h


@dataclass(frozen=True, slots=True)
class Applied:
    """What a poll has done.

    Attributes:
        base: the base that was loaded; empty when the deltas went on.
        deltas: that were applied, oldest first.
        rows: written.
        removed: keys that vanished.
        number: of the newest delta that is in.
        updated: Unix time up to which the publisher's changes are in.
        seconds: it took.
    """

    base: str
    deltas: tuple[str, ...]
    rows: int
    removed: int
    number: int
    updated: float
    seconds: float

    def __bool__(self) -> bool:
        """Whether there was anything new."""
        return bool(self.base or self.deltas)


class Follower:
    """Tables as they were last published: weights alone, without the optimizer's state.

    Each follower reads at its own pace and keeps its place by itself; nothing is written where
    the publisher writes. Lookups may go on in other threads during a poll: each row is then of
    before or after a delta, while a base comes into use in one step.

        follower = Follower("s3://bucket/ads")
        rows = follower.lookup("user", keys)
        follower.poll()  # now and then

    Args:
        place: where a Publisher writes.
        tables: only these; all unless given.
        wait_s: how long to wait for the first base.

    Attributes:
        loaded: what the first poll has taken in.

    Raises:
        CheckpointError: nothing is published there, or it is damaged.
    """

    def __init__(
        self, place: str | Path, *, tables: Sequence[str] | None = None, wait_s: float = 0.0
    ) -> None:
        self._store = open_store(place)
        self._only = None if tables is None else frozenset(tables)
        self._tables: dict[str, _Served] = {}
        self._stream = ""
        self._number = -1
        self._updated = 0.0
        self._lock = threading.Lock()
        limit = time.monotonic() + wait_s
        while feed.read_feed(self._store) is None and time.monotonic() < limit:
            time.sleep(min(_LOOK_S, wait_s))
        self.loaded = self.poll()

    @property
    def tables(self) -> list[str]:
        """Names."""
        return sorted(self._tables)

    @property
    def number(self) -> int:
        """Of the newest delta that is in."""
        return self._number

    @property
    def updated(self) -> float:
        """Unix time up to which the publisher's changes are in."""
        return self._updated

    @property
    def nbytes(self) -> int:
        """Memory held by rows and their index."""
        return sum(t.native.counters()["bytes"] for t in self._tables.values())

    def rows(self, table: str) -> int:
        """How many rows a table has."""
        return int(self._find(table).native.counters()["rows"])

    def spec(self, table: str) -> TableSpec:
        """What a table is where it is trained."""
        return self._find(table).spec

    def lookup(self, table: str, keys: Any) -> NDArray[np.float32]:
        """Rows of `keys` (integers of any shape): float32 [*keys.shape, dim].

        A key without a row reads what it would read from the shards: its first value, or zeros
        in a table whose admission says so.

        Raises:
            TableError: wrong keys, or no such table.
        """
        flat, shape = as_keys(keys)
        found = self._find(table)
        return found.native.pull(flat, read_only=True).reshape(*shape, found.spec.dim)

    def poll(self) -> Applied:
        """Take in what was published since the last time.

        Raises:
            CheckpointError: nothing is published, or it is damaged; all stays as it was, but for
                deltas that were in order.
        """
        with self._lock:
            for attempt in range(_ATTEMPTS):
                current = feed.read_feed(self._store)
                if current is None:
                    raise CheckpointError(
                        f"{self._store.url}/{feed.LATEST}: not found; expected a place that a "
                        "Publisher writes to"
                    )
                try:
                    return self._advance(current)
                except (CheckpointError, OSError) as error:
                    # What we were reading may just have been replaced.
                    if feed.read_feed(self._store) == current or attempt == _ATTEMPTS - 1:
                        raise CheckpointError(str(error)) from None
        raise AssertionError

    def run(
        self,
        interval_s: float,
        stop: threading.Event,
        report: Callable[[Applied | CheckpointError], None] | None = None,
    ) -> None:
        """Poll until told to stop, for a thread of the caller's.

        Args:
            interval_s: seconds between polls.
            stop: ends it.
            report: is told of every poll that took something in, or failed.
        """
        while not stop.wait(interval_s):
            outcome: Applied | CheckpointError
            try:
                outcome = self.poll()
            except CheckpointError as error:
                outcome = error
            if report is not None and outcome:
                report(outcome)

    def _advance(self, current: Feed) -> Applied:
        began = time.monotonic()
        deltas = current.since(self._number) if current.stream == self._stream else None
        base: Entry | None = None
        if deltas is None:
            base = current.bases[-1]
            deltas = current.since(base.number)
            if deltas is None:
                raise CheckpointError(f"{self._store.url}: deltas after {base.name} are missing")
            tables: dict[str, _Served] = {}
            rows, removed = self._load_entry(base, tables)
        else:
            tables, rows, removed = dict(self._tables), 0, 0
        for delta in deltas:
            changed = self._load_entry(delta, tables)
            rows, removed = rows + changed[0], removed + changed[1]
            if base is None:
                self._tables, self._number = tables, delta.number
        self._tables, self._stream = tables, current.stream
        self._number, self._updated = current.number, current.updated
        return Applied(
            base.name if base else "",
            tuple(d.name for d in deltas),
            rows,
            removed,
            self._number,
            self._updated,
            time.monotonic() - began,
        )

    def _load_entry(self, entry: Entry, tables: dict[str, "_Served"]) -> tuple[int, int]:
        link = feed.open_entry(self._store, entry)
        store, manifest = link
        files = [f for f in manifest.files if self._only is None or f.table in self._only]
        verify(store, files)
        rows = removed = 0
        for name in sorted({f.table for f in files}):
            changed = _load_table(link, name, tables)
            rows, removed = rows + changed[0], removed + changed[1]
        return rows, removed

    def _find(self, table: str) -> "_Served":
        found = self._tables.get(table)
        if found is None:
            known = self.tables
            raise TableError(
                f"table {table!r} is not followed; {self._store.url} has "
                f"{', '.join(known) or 'no tables'}{did_you_mean(table, known)}"
            )
        return found


@dataclass(frozen=True, slots=True)
class _Served:
    spec: TableSpec  # where it is trained
    native: _native.Table

    def write(self, keys: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        self.native.push(
            keys, 8, rows, kind="assign", rate=1.0, nonce=0, time_s=0, step=0, usage=None
        )

    def remove(self, keys: NDArray[np.uint64]) -> int:
        before = int(self.native.counters()["rows"])
        head = _GONE_HEAD + len(keys).to_bytes(4, "little") + (8).to_bytes(4, "little")
        self.native.absorb(head + keys.astype("<u8").tobytes(), None)
        return before - int(self.native.counters()["rows"])


def _load_table(link: Link, name: str, tables: dict[str, _Served]) -> tuple[int, int]:
    """Write the rows that a save has of a table, then remove those it lacks by name."""
    store, manifest = link
    files = [f for f in manifest.files if f.table == name]
    spec = spec_of(store, files[0].name)
    served = tables.get(name)
    if served is None:
        served = tables[name] = _Served(spec, make_table(_serving_spec(spec)))
    elif served.spec != spec:
        raise CheckpointError(
            f"{store.url}: table {name!r} differs: {describe_difference(served.spec, spec)}"
        )
    rows = 0
    gone: list[NDArray[np.uint64]] = []
    written: list[NDArray[np.uint64]] = []
    for file in files:
        for block in read_weights(store, file, spec):
            if block.removed:
                gone.append(block.keys)
                continue
            served.write(block.keys, block.rows)
            rows += len(block.keys)
            if manifest.mode != "base":
                written.append(block.keys)
    if not gone:
        return rows, 0
    keys = np.unique(np.concatenate(gone))
    if written:  # a key may have come back since, on another shard even
        keys = np.setdiff1d(keys, np.concatenate(written), assume_unique=False)
    return rows, served.remove(keys)


def _serving_spec(spec: TableSpec) -> TableSpec:
    """The same first values and dtype at rest, without state or rules.

    Lazy segments become plain ones that begin with zeros, which is what they read.
    """
    segments = [
        SegmentSpec(
            dim=segment.dim,
            optimizer=OptimizerSpec(kind="sgd", learning_rate=1.0),
            initializer=InitializerSpec(kind="zeros") if segment.lazy else segment.initializer,
        )
        for segment in segments_of(spec)
    ]
    served = TableSpec(name=spec.name, dim=spec.dim, dtype=spec.dtype, segments=segments)
    if spec.admission.reads == "zeros":
        served.admission.CopyFrom(AdmissionSpec(kind="probability", threshold=1.0, reads="zeros"))
    return served
