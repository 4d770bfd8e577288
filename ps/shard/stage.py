"""Parts of steps that wait for their commit.

A step of a series changes rows once, by one commit, on the sum of the parts of its slots. A part
is named by (series, step, slot), whoever brings it, and of which buckets it has all keys is known:
it is whole on a shard when it covers all of the shard's. When buckets move, so do their keys.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from protos.codec import pack, unpack
from ps.engine import _native
from ps.errors import ConflictError, TableError
from ps.shard.journal import Buffer
from ps.table.checks import value_bytes
from ps.table.series import LAST_STEP, Flags, SeriesProgress

_MOST_OPEN = 64  # steps of a series that wait at a time
_MOST_NAME = 256
MOST_SLOTS = 1 << 16


@dataclass(frozen=True, slots=True)
class TableRows:
    """Of a part, the gradients of one table's rows."""

    table: str
    dim: int
    keys: Buffer
    key_bytes: int
    values: Buffer | NDArray[np.float32]  # float32 [n, dim]
    usage: Buffer | None = None  # float32 [2, n], shows and clicks; None: one show each

    @property
    def shows_and_clicks(self) -> NDArray[np.float32] | None:
        """As float32 [2, n]."""
        if self.usage is None:
            return None
        return np.frombuffer(self.usage, np.float32).reshape(2, -1)

    def wide_keys(self) -> NDArray[np.uint64]:
        """The keys as uint64 [n]."""
        kind = np.dtype("<u4") if self.key_bytes == 4 else np.dtype("<u8")
        return np.ascontiguousarray(np.frombuffer(self.keys, kind), np.uint64)

    def only(self, buckets: Flags) -> "TableRows":
        """Those of some buckets."""
        keys = self.wide_keys()
        chosen = buckets[_native.buckets_of(keys)]
        values = np.frombuffer(self.values, np.float32).reshape(-1, self.dim)[chosen]
        usage = self.shows_and_clicks
        used = _bytes(usage[:, chosen]) if usage is not None else None
        return TableRows(self.table, self.dim, _bytes(keys[chosen]), 8, values, used)


@dataclass(frozen=True, slots=True)
class Part:
    """What one slot adds to a step.

    Attributes:
        covers: the buckets that it has all keys of.
        message: a StageRequest, as it goes to journals and other shards.
        is_made: by a shard, of what it was sent; says itself what it covers.
    """

    series: str
    step: int
    slot: int
    covers: Flags
    tables: tuple[TableRows, ...]
    message: Buffer
    is_made: bool = False

    def only(self, buckets: Flags) -> "Part":
        """What it has of some buckets."""
        return self._with(self.covers & buckets, [rows.only(buckets) for rows in self.tables])

    def plus(self, other: "Part") -> "Part":
        """Both; they have no bucket in common."""
        return self._with(self.covers | other.covers, [*self.tables, *other.tables])

    def _with(self, covers: Flags, tables: Iterable[TableRows]) -> "Part":
        named: dict[str, list[TableRows]] = {}
        for rows in tables:
            named.setdefault(rows.table, []).append(rows)
        head = pb.StageRequest(series=self.series, step=self.step, slot=self.slot)
        head.covers = np.packbits(covers, bitorder="little").tobytes()
        payload: list[Buffer] = []
        for name, pieces in named.items():
            keys = np.concatenate([rows.wide_keys() for rows in pieces])
            dim = pieces[0].dim
            used = [usage for rows in pieces if (usage := rows.shows_and_clicks) is not None]
            head.tables.append(
                pb.PartOfTable(table=name, dim=dim, count=len(keys), usage=bool(used))
            )
            payload.append(_bytes(keys))
            payload += [_bytes(np.frombuffer(rows.values, np.float32)) for rows in pieces]
            payload += [_bytes(np.concatenate(used, 1))] if used else []
        return part_of(pack(head, *payload))


def _bytes(array: NDArray[Any]) -> bytes:
    return array.tobytes()


def part_of(message: Buffer, owned: Flags | None = None) -> Part:
    """A part from its message; see `take_apart`."""
    whole = bytes(message)
    head, payload = unpack(pb.StageRequest, whole)
    return take_apart(head, payload, whole, owned)


def carried_part(
    commit: pb.CommitRequest, payload: memoryview, message: Buffer, owned: Flags
) -> Part:
    """The part that a commit carries: its series and step are the commit's."""
    commit.part.series, commit.part.step = commit.series, commit.step
    return take_apart(commit.part, payload, message, owned)


def take_apart(
    head: pb.StageRequest, payload: memoryview, message: Buffer, owned: Flags | None = None
) -> Part:
    """A part, checked. Its gradients need not be finite: whoever commits finds out.

    Args:
        head: of the message.
        payload: of it; it must stay as it is.
        message: as it goes to journals.
        owned: the buckets of this shard, which a part covers unless it says so itself.

    Raises:
        TableError: sizes that do not fit, or names and numbers that cannot be.
    """
    what = f"step {head.step} of series {head.series[:140]!r}"
    check_names(head.series, head.step)
    if head.slot >= MOST_SLOTS:
        raise TableError(f"{what}: slot {head.slot}; expected below {MOST_SLOTS}")
    if len({each.table for each in head.tables}) != len(head.tables):
        raise TableError(f"{what}: a table comes twice; expected each once")
    tables, at = [], 0
    for each in head.tables:
        key_bytes = each.key_bytes or 8
        if key_bytes not in (4, 8) or not each.dim:
            raise TableError(
                f"{what}: table {each.table[:140]!r} with dim={each.dim}, key_bytes={key_bytes}; "
                "expected a dim, and 4 or 8"
            )
        width = value_bytes(f"{what}: table {each.table[:140]!r}", each.dtype)
        middle = at + each.count * key_bytes
        values_end = middle + each.count * each.dim * width
        end = values_end + (8 * each.count if each.usage else 0)
        if end > len(payload):
            break
        values: Buffer | NDArray[np.float32] = payload[middle:values_end]
        if width == 2:
            values = _native.decode_values(values, each.dtype)
        usage = payload[values_end:end] if each.usage else None
        rows = TableRows(each.table, each.dim, payload[at:middle], key_bytes, values, usage)
        _check_usage(what, rows)
        tables.append(rows)
        at = end
    if len(tables) != len(head.tables) or at != len(payload):
        raise TableError(
            f"{what}: the payload has {len(payload)} bytes; expected those of the keys and "
            f"gradients of {len(head.tables)} tables"
        )
    if head.covers:
        if len(head.covers) != _native.BUCKETS // 8:
            raise TableError(f"{what}: covers has {len(head.covers)} bytes")
        bits = np.frombuffer(head.covers, np.uint8)
        covers = np.unpackbits(bits, bitorder="little").astype(bool)
    else:
        covers = np.ones(_native.BUCKETS, bool) if owned is None else owned
    made = bool(head.covers)
    return Part(head.series, head.step, head.slot, covers, tuple(tables), message, made)


def _check_usage(what: str, rows: TableRows) -> None:
    usage = rows.shows_and_clicks
    if usage is not None and not (np.isfinite(usage).all() and (usage >= 0).all()):
        raise TableError(
            f"{what}: table {rows.table[:140]!r}: shows and clicks; expected finite numbers >= 0"
        )


def check_names(series: str, step: int) -> None:
    """Check what names a step.

    Raises:
        TableError: a series without a name, or a step that is too high.
    """
    if not 1 <= len(series) <= _MOST_NAME:
        raise TableError(f"series: {len(series)} characters; expected 1 to {_MOST_NAME}")
    if step > LAST_STEP:
        raise TableError(f"series {series!r}: step {step}; expected below 2**62")


@dataclass(slots=True)
class Series:
    """A series on this shard.

    Attributes:
        lock: held by whoever sums up or ends a step.
        staged: step -> slot -> part.
        changed: counts the changes of `staged`.
    """

    progress: SeriesProgress
    lock: threading.Lock = field(default_factory=threading.Lock)
    staged: dict[int, dict[int, Part]] = field(default_factory=dict)
    changed: int = 0
    sums: object = None  # of the step that was summed up last, see ps.shard.commit


class Steps:
    """The series of a shard; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[str, Series] = {}

    def series(self, name: str) -> Series:
        """One by name, made when it is heard of first."""
        with self._lock:
            return self._obtain(name)

    def wants(self, part: Part, owned: Flags) -> bool:
        """Whether the step is open still in any bucket of this shard.

        Raises:
            ConflictError: too many steps wait for their commit.
        """
        with self._lock:
            have = self._series.get(part.series)
            if have is None:
                return True
            if not (have.progress.open(part.step) & owned).any():
                return False
            if part.step not in have.staged and len(have.staged) >= _MOST_OPEN:
                raise ConflictError(
                    f"Stage of step {part.step} of series {part.series!r}: {len(have.staged)} "
                    f"steps wait for their commit; expected at most {_MOST_OPEN}"
                )
            return True

    def stage(self, part: Part, owned: Flags) -> None:
        """Keep a part of an open step, in the place of what was there of it in the same buckets."""
        with self._lock:
            series = self._obtain(part.series)
            if not (series.progress.open(part.step) & owned).any():
                return
            before = series.staged.get(part.step, {}).get(part.slot)
            if before is not None and (before.covers & ~part.covers).any():
                part = part.plus(before.only(~part.covers))
            self._put(series, part)

    def parts_of(self, series: Series, step: int) -> dict[int, Part]:
        """The parts of a step, by slot."""
        with self._lock:
            return dict(series.staged.get(step, {}))

    def close(
        self,
        series: Series,
        step: int,
        buckets: Flags,
        parts: Iterable[Part],
        *,
        committed: bool,
    ) -> None:
        """A step of these parts is over in some buckets.

        Nothing of it, or of the steps before it, is kept of them.
        """
        with self._lock:
            series.progress.name_tables(rows.table for part in parts for rows in part.tables)
            series.progress.close(step, buckets, committed=committed)
            series.sums = None
            everywhere = bool(buckets.all())
            for old in [s for s in series.staged if s <= step]:
                gone = series.staged.pop(old)
                if not everywhere:  # buckets that are on their way here
                    left = [p.only(~buckets) for p in gone.values() if (p.covers & ~buckets).any()]
                    if left:
                        series.staged[old] = {part.slot: part for part in left}
            series.changed += 1

    def put(self, part: Part) -> None:
        """Keep a part as it was kept before."""
        with self._lock:
            self._put(self._obtain(part.series), part)

    # When buckets move.

    def let_go(self, buckets: Flags) -> None:
        """Keep nothing of some buckets."""
        with self._lock:
            for series in self._series.values():
                for parts in series.staged.values():
                    for slot, part in parts.items():
                        parts[slot] = part.only(~buckets)
                series.changed += 1

    def take_progress(self, told: Iterable[SeriesProgress], buckets: Flags) -> None:
        """What is over in buckets that are on their way here; nothing of series not told of."""
        with self._lock:
            for series in self._series.values():
                series.progress.open_from[buckets] = 0
            for progress in told:
                self._obtain(progress.name).progress.take(progress, buckets)

    def take(self, part: Part) -> None:
        """Keys of buckets that are on their way here."""
        with self._lock:
            series = self._obtain(part.series)
            before = series.staged.get(part.step, {}).get(part.slot)
            self._put(series, before.plus(part) if before is not None else part)

    # The whole state.

    def parts(self) -> list[Part]:
        """All that wait."""
        with self._lock:
            return list(self._all())

    def progress(self) -> list[SeriesProgress]:
        """How far each series is; copies."""
        with self._lock:
            return [SeriesProgress.of(s.progress.message) for s in self._series.values()]

    def merge(self, told: Iterable[SeriesProgress]) -> None:
        """Add what an earlier run of this shard knew."""
        with self._lock:
            for progress in told:
                self._obtain(progress.name).progress.merge(progress)

    def forget(self, tables: Iterable[str]) -> None:
        """Forget the series that have changed any of these tables: their rows are others now.

        One whose last step is over has ended, and stays so.
        """
        changed = set(tables)
        with self._lock:
            for name, series in list(self._series.items()):
                if not changed.isdisjoint(series.progress.tables) and not series.progress.ended:
                    del self._series[name]

    def drop(self, prefix: str) -> bool:
        """Forget the series whose names begin so; whether there were any."""
        with self._lock:
            names = [name for name in self._series if name.startswith(prefix)]
            for name in names:
                del self._series[name]
        return bool(names)

    def staged_bytes(self) -> int:
        """The size of all parts that wait."""
        with self._lock:
            return sum(len(part.message) for part in self._all())

    def _all(self) -> Iterator[Part]:
        for series in self._series.values():
            for parts in series.staged.values():
                yield from parts.values()

    def _obtain(self, name: str) -> Series:
        found = self._series.get(name)
        if found is None:
            found = self._series[name] = Series(SeriesProgress(name))
        return found

    def _put(self, series: Series, part: Part) -> None:
        series.staged.setdefault(part.step, {})[part.slot] = part
        series.progress.name_tables(rows.table for rows in part.tables)
        series.changed += 1


def durabilities_of(
    parts: Iterable[Part], kept_as: Mapping[str, str], others: Iterable[str] = ()
) -> set[str] | None:
    """The durabilities of the tables that parts name, and of others; None where there are none."""
    named = {rows.table for part in parts for rows in part.tables} | set(others)
    return {kept_as.get(name, "") for name in named} or None
