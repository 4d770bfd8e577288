"""A step summed up over its slots, and applied: each touched row steps once."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from protos.naming import without_prefix
from ps.engine import _native
from ps.errors import ConflictError, PartsMissingError, StepOverError, TableError
from ps.shard.ending import end_process
from ps.shard.journal import Buffer
from ps.shard.stage import MOST_SLOTS, Part, Series, TableRows, check_names
from ps.shard.state import ShardState, filling_journals
from ps.table.applied import PushId
from ps.table.series import Flags
from ps.table.table import Table


@dataclass(frozen=True, slots=True)
class _TableSums:
    """The summed gradients of one table's rows, each key once."""

    table: str
    dim: int
    keys: Buffer | NDArray[np.uint64]
    key_bytes: int
    values: Buffer | NDArray[np.float32]
    usage: Buffer | NDArray[np.float32] | None = None  # float32 [2, n]; None: one show each


@dataclass(frozen=True, slots=True)
class _StepSums:
    """The gradients of a step.

    Attributes:
        tables: whose rows they are of.
        squared_norm: of all of them; not finite where one is not.
    """

    tables: tuple[_TableSums, ...]
    squared_norm: float


@dataclass(frozen=True, slots=True)
class _KeptSums:
    """Sums that a tally has made and a commit will want.

    Attributes:
        of: step, slots, the number of changes of the series' parts, and the buckets.
    """

    of: tuple[int, int, int, bytes]
    sums: _StepSums


@dataclass(slots=True)
class _Update:
    """What a step does to one table."""

    table: Table
    sums: _TableSums
    shrink: NDArray[np.uint8] | None = None  # of which buckets rows are then evicted
    turn: int = 0

    def push(self, rate: float, step: int, time_s: int) -> None:
        """Apply gradients; what is random about it follows from table, key and step."""
        name = without_prefix(self.sums.table).encode()
        self.table.native.push(
            self.sums.keys,
            self.sums.key_bytes,
            self.sums.values,
            kind="",
            rate=rate,
            nonce=crc32(name) << 32 ^ step & 0xFFFFFFFF,
            time_s=time_s & 0xFFFFFFFF,
            step=step & 0xFFFFFFFF,
            usage=self.sums.usage,
            distinct=True,
            turn=self.turn,
            shrink=self.shrink,
        )

    def pass_by(self) -> None:
        """Let others have their turn, who wait for this one."""
        if self.turn:
            replace(self, sums=_no_sums(self.table), shrink=None).push(1.0, 0, 0)


@filling_journals
def stage_part(state: ShardState, part: Part, *, route: int = 0, journal: bool = True) -> None:
    """Keep a part of a step until its commit; one of a step that is over is not kept.

    Raises:
        TableError, KeyError: it names a table that is not here, or has another dim.
        ConflictError: too many steps of the series wait, or its sender names other shards than the
            table was made with.
    """
    with state.gate.passing():
        if journal:
            state.check_route(route)
            for rows in part.tables:
                state.find(rows.table, rows.dim).check_share(route)
        if not state.steps.wants(part, state.buckets):
            return
        if journal:
            state.journal_step("stage", part.message, [part])
        state.steps.stage(part, state.buckets)


def tally_step(state: ShardState, request: pb.TallyRequest) -> float:
    """The squared norm of a step's gradients here, summed over slots; not finite if one is not.

    Raises:
        PartsMissingError: a part is lacking.
    """
    check_names(request.series, request.step)
    _check_slots(request.slots)
    with state.gate.passing():
        state.check_route(request.route)
        series = state.steps.series(request.series)
        with series.lock:
            buckets = series.progress.open(request.step) & state.buckets
            committed = request.step in series.progress.committed and not buckets.any()
            if request.committing and committed:
                return 0.0
            return _sums_of(state, series, request.step, request.slots, buckets).squared_norm


@filling_journals
def commit_step(
    state: ShardState,
    request: pb.CommitRequest,
    carried: Part | None,
    message: Buffer,
    time_s: int,
    *,
    journal: bool = True,
) -> bool:
    """Apply a step, or drop it, unless it is over already; whether it was done now.

    Args:
        state: of the shard.
        request: its head.
        carried: the part that came with it.
        message: all of it, for journals.
        time_s: Unix time.
        journal: else it is a journal's, which has only parts of its own tables.

    Raises:
        TableError, KeyError: gradients that are not finite, or of a table that is not here.
        PartsMissingError: a part is lacking.
        StepOverError: the step has ended otherwise.
    """
    name, step, drop = request.series, request.step, request.drop
    what = f"Commit of step {step} of series {name[:140]!r}"
    check_names(name, step)
    if not drop:
        _check_slots(request.slots)
        for field, value in (("scale", request.scale), ("rate", request.rate)):
            if not (math.isfinite(value) and 0 <= value <= 1e6):
                raise TableError(f"{what}: {field}={value}; expected 0 to 1e6")
    with state.gate.passing(PushId(name, 0, step)):
        if journal:
            state.check_route(request.route)
            for rows in carried.tables if carried else ():
                state.find(rows.table, rows.dim).check_share(request.route)
        series = state.steps.series(name)
        with series.lock:
            buckets = series.progress.open(step) & state.buckets
            if journal and request.none_after and series.progress.committed_after(step):
                raise StepOverError(f"{what}: a later one was committed")
            if not buckets.any():
                if journal and (step in series.progress.committed) == drop:
                    ended = "committed" if drop else "dropped, or a later one was committed"
                    raise StepOverError(f"{what}: the step was {ended}")
                return False
            parts = {carried.slot: carried} if carried else state.steps.parts_of(series, step)
            sums = None
            if not drop:
                if not journal:
                    sums = _sum_up(parts, buckets)
                elif carried:
                    _check_whole(what, parts, request.slots, buckets)
                    sums = _sum_up(parts, buckets)
                else:
                    sums = _sums_of(state, series, step, request.slots, buckets)
                sums = _scaled(what, sums, request.scale)
            updates = _updates(state, sums, request.shrink, buckets, strict=journal)
            if journal:
                _journal(state, message, parts.values(), time_s, updates, request.shrink)
            _apply(updates, step, request.rate, time_s)
            state.steps.close(series, step, state.buckets, parts.values(), committed=not drop)
    return True


def _sums_of(state: ShardState, series: Series, step: int, slots: int, buckets: Flags) -> _StepSums:
    """A step summed up; kept, since whoever tallies it will commit it."""
    changed, kept = series.changed, series.sums
    asked = (step, slots, changed, buckets.tobytes())
    if isinstance(kept, _KeptSums) and asked == kept.of:
        return kept.sums
    parts = state.steps.parts_of(series, step)
    what = f"step {step} of series {series.progress.name[:140]!r}"
    _check_whole(what, parts, slots, buckets)
    sums = _sum_up(parts, buckets)
    series.sums = _KeptSums(asked, sums)
    return sums


def _check_slots(slots: int) -> None:
    if not 1 <= slots <= MOST_SLOTS:
        raise TableError(f"slots={slots}; expected 1 to {MOST_SLOTS}")


def _check_whole(what: str, parts: Mapping[int, Part], slots: int, buckets: Flags) -> None:
    """Check that all parts are here, with all keys of some buckets.

    Raises:
        PartsMissingError: naming the slots whose parts are not.
        ConflictError: naming slots that nobody is to have.
    """
    there = [slot for slot, part in parts.items() if part.covers[buckets].all()]
    lacking = sorted(set(range(slots)) - set(there))
    more = [slot for slot in parts if slot >= slots]
    expected = f"expected those of slots 0 to {slots - 1}, all staged"
    if lacking:
        raise PartsMissingError(f"{what} lacks the parts of slots {lacking[:8]}; {expected}")
    if more:
        raise ConflictError(f"{what} has slots {more[:8]}; {expected}")


def _sum_up(parts: Mapping[int, Part], buckets: Flags) -> _StepSums:
    """The sums over slots, in the order of slots, of the rows of some buckets."""
    named: dict[str, list[TableRows]] = {}
    for _, part in sorted(parts.items()):
        cut = (part.covers & ~buckets).any()  # else all that it has is of them
        for rows in part.tables:
            named.setdefault(rows.table, []).append(rows.only(buckets) if cut else rows)
    tables, squares = [], 0.0
    for name, pieces in named.items():
        first = pieces[0]
        for rows in pieces:
            if rows.dim != first.dim:
                raise TableError(f"table {name!r}: parts of dim {first.dim} and {rows.dim}")
        if len(pieces) == 1:
            sums = _TableSums(
                name, first.dim, first.keys, first.key_bytes, first.values, first.usage
            )
        else:
            given = [(r.keys, r.key_bytes, r.values) for r in pieces]
            keys, values = _native.merge(given, first.dim)
            sums = _TableSums(name, first.dim, keys, 8, values, _usage_of(pieces))
        squares += _native.squared_norm(sums.values)
        tables.append(sums)
    return _StepSums(tuple(tables), squares)


def _usage_of(pieces: Sequence[TableRows]) -> NDArray[np.float32] | None:
    """Shows and clicks summed over slots, float32 [2, U], keys in the order of `_native.merge`."""
    if all(rows.usage is None for rows in pieces):
        return None
    given = []
    for rows in pieces:
        usage = rows.shows_and_clicks
        if usage is None:
            usage = np.stack([np.ones(len(rows.keys) // rows.key_bytes, np.float32)] * 2)
            usage[1] = 0
        given.append((rows.keys, rows.key_bytes, np.ascontiguousarray(usage.T)))
    _, sums = _native.merge(given, 2)
    return np.ascontiguousarray(sums.T)


def _scaled(what: str, sums: _StepSums, scale: float) -> _StepSums:
    """The sums times `scale`.

    Raises:
        TableError: one of them is not finite: no row can take it.
    """
    if not math.isfinite(sums.squared_norm):
        raise TableError(f"{what}: gradients that are not finite; expected them to be dropped")
    if scale == 1.0:
        return sums
    tables = []
    squares = 0.0
    for each in sums.tables:
        values = _native.scaled(each.values, scale)
        squares += _native.squared_norm(values)
        tables.append(replace(each, values=values))
    if not math.isfinite(squares):
        raise TableError(f"{what}: scale={scale} makes gradients infinite")
    return _StepSums(tuple(tables), squares)


def _updates(
    state: ShardState,
    sums: _StepSums | None,
    shrink: Iterable[str],
    buckets: Flags,
    *,
    strict: bool,
) -> list[_Update]:
    """What a step does to tables here: those of one journal together, in the order of journals.

    So no two steps wait for each other's turns.

    Args:
        state: of the shard.
        sums: None for a step that is dropped.
        shrink: names of the tables whose rows are evicted after it.
        buckets: in which it is open.
        strict: all of its tables must be here; else it is a journal's, which has only its own.

    Raises:
        TableError, KeyError: one is not here, or has another dim.
        DiskFullError: one has no room.
    """
    order = {durability: number for number, durability in enumerate(state.journals)}
    updates: dict[str, _Update] = {}
    for each in sums.tables if sums else ():
        if strict or each.table in state.tables:
            table = state.find(each.table, each.dim)
            table.native.check_room()
            updates[each.table] = _Update(table, each)
    for name in shrink:
        if strict or name in state.tables:
            table = state.find(name, 0)
            update = updates.setdefault(name, _Update(table, _no_sums(table)))
            update.shrink = buckets.astype(np.uint8)
    return sorted(updates.values(), key=lambda update: order.get(update.table.spec.durability, -1))


def _journal(
    state: ShardState,
    message: Buffer,
    parts: Iterable[Part],
    time_s: int,
    updates: Sequence[_Update],
    shrink: Iterable[str],
) -> None:
    """Tell the journals of a step; each update has its turn then."""

    def place(durability: str) -> None:
        for update in updates:
            if update.table.spec.durability == durability:
                update.turn = update.table.native.take_turn()

    try:
        state.journal_step("commit", message, parts, time_s, place, shrink)
    except BaseException:
        for update in updates:
            update.pass_by()
        raise


def _apply(updates: Sequence[_Update], step: int, rate: float, time_s: int) -> None:
    """Let each row step once."""
    try:
        for update in updates:
            update.push(rate, step, time_s)
    except BaseException as error:
        end_process("step %d began and cannot be finished: %r", step, error)


def _no_sums(table: Table) -> _TableSums:
    return _TableSums(table.spec.name, table.spec.dim, b"", 8, b"")
