"""One shard's part in checkpoints that all shards write of the same cut."""

import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chassis import written
from protos import parameter_server_pb2 as pb
from ps.checkpoint.manifest import MODES
from ps.checkpoint.places import open_store
from ps.checkpoint.store import LocalStore
from ps.checkpoint.tables import begin_snapshots, write_applied, write_tables
from ps.engine import _native
from ps.errors import CheckpointError, DeltaError, HoldEndedError, TableError, not_written
from ps.shard.load import Loaded, read_rows
from ps.shard.state import ShardState
from ps.table.applied import Applied, AppliedWindow, pushes_of
from ps.table.buckets import Share
from ps.table.table import Table

_LOOK_S = 0.5  # to wait before a cut is told that others come first
_RESERVED_S = 3.0  # for which a cut keeps its turn unless it says another time
_TURN_S = 60.0
_NEVER = 1 << 63  # sequences and steps stay below
_log = logging.getLogger("heterps.ps")


@dataclass(frozen=True, slots=True)
class _Cut:
    tables: dict[str, Table]
    applied: Applied
    positions: list[pb.Position]
    snapshots: dict[str, _native.Snapshot]
    marks: dict[str, int]  # what a delta gives as `since`


class Saver:
    """Cut, Save and Load.

    A cut first waits for its turn on every shard, so that pushes need not wait for an earlier
    save, or a fold, that is still being written; then it closes every gate. Pushes that one
    shard has applied and another has not are let through, so that of every push the cut has all
    or nothing; then each shard takes its snapshot, opens the gate, and writes while training
    goes on.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        # What a save has waited for in vain: the next one does not wait for it.
        self._lost: dict[tuple[str, int], set[int]] = {}
        self._over: deque[str] = deque(maxlen=256)  # cuts that a late request must not begin anew

    def cut(self, request: pb.CutRequest) -> pb.CutReply:
        """Hold pushes back, let some through, and tell what has been applied; repeatable."""
        gate, files = self._state.gate, self._state.files
        if not request.id:
            raise TableError("Cut: id is empty")
        if request.abandon:
            self._end(request.id)
            return pb.CutReply()
        hold = min(max(request.hold_s, 0.0), 60.0)
        if request.renew:
            gate.renew(request.id, hold)
            return pb.CutReply(busy=not files.renew(request.id, hold))
        try:
            files.close(request.id, hold or _RESERVED_S, timeout_s=_LOOK_S)
        except TimeoutError:
            return pb.CutReply(busy=True)
        try:
            if hold:
                gate.close(request.id, hold, timeout_s=hold)
        except TimeoutError as error:
            raise CheckpointError(str(error)) from None
        if request.id in self._over:
            self._end(request.id)
            raise HoldEndedError(f"Cut: {request.id[:64]!r} is over already")
        route = self._state.route_version
        if not hold:
            return pb.CutReply(route=route)
        if request.admit:
            gate.admit(pushes_of(request.admit))
        told = self._state.pushes.windows()
        self._forget_lost(told)
        windows = []
        for window in told:
            lost = self._lost.get((window.client, window.epoch))
            windows.append(window.including(lost) if lost else window)
        return pb.CutReply(
            clients=[window.message for window in windows], route=route, series=self._series()
        )

    def keep(self, cut: str) -> None:
        """Wait until a cut's turn is over."""
        self._state.files.wait_for_end(cut)

    def forsake(self, cut: str) -> None:
        """Whoever has the turn is gone: end it, unless a save or load under way is to do so."""
        self._over.append(cut)
        self._state.gate.lapse(cut)
        self._state.files.lapse(cut)

    def _forget_lost(self, windows: list[AppliedWindow]) -> None:
        """Keep of the lost pushes those that the next cut could wait for."""
        first = {(w.client, w.epoch): w.highest - _native.WINDOW + 1 for w in windows}
        for progress in self._state.steps.progress():
            ours = progress.open_from[self._state.buckets]
            first[(progress.name, 0)] = int(ours.min()) if len(ours) else _NEVER
        for key, lost in list(self._lost.items()):
            lost -= {sequence for sequence in lost if sequence < first.get(key, _NEVER)}
            if not lost:
                del self._lost[key]

    def _series(self) -> list[pb.SeriesState]:
        """How far each series is in all buckets of this shard."""
        told = []
        for progress in self._state.steps.progress():
            lost = self._lost.get((progress.name, 0), set())
            ours = progress.open_from[self._state.buckets]
            if not len(ours):
                continue
            open_from = max(int(ours.min()), max(lost, default=-1) + 1)
            told.append(pb.SeriesState(series=progress.name, open_from=[open_from]))
        return told

    def save(self, request: pb.SaveRequest) -> pb.SaveReply:
        """Write this shard's files of a cut, or of a cut of its own."""
        _check_shard(request.shard, request.shards)
        mode = request.mode or "checkpoint"
        if mode not in MODES:
            raise TableError(f"Save: mode={mode!r}; expected {', '.join(MODES)}")
        state = self._state
        if request.since and request.run != state.run:
            raise DeltaError(
                "this shard has been restarted since the save that a delta would build on; save "
                "a whole checkpoint first"
            )
        directory, _, folder = request.directory.rpartition("/")
        if not directory or not ("://" in directory or directory.startswith("/")):
            raise TableError(
                f"Save: directory={request.directory!r}; expected an absolute path, or a URL"
            )
        for pushes in request.lost:
            lost = self._lost.setdefault((pushes.client, pushes.epoch), set())
            lost.update(pushes.sequences)
        began = time.monotonic()
        holder: object = request.cut or object()
        try:
            if request.cut:
                state.files.drain(holder)
            else:
                state.files.close(holder, float("inf"), timeout_s=_TURN_S)
        except TimeoutError as error:
            raise HoldEndedError(str(error)) from None
        try:
            cut = self._begin(request, mode, holder)
            generations = cut.marks
            store = open_store(directory)
            try:
                if isinstance(store, LocalStore):
                    written.claim(Path(request.directory))
                files = write_tables(
                    store, folder, cut.tables, cut.snapshots, request.shard, request.shards
                )
                if mode in ("checkpoint", "delta"):
                    files.append(
                        write_applied(store, folder, cut.applied, request.shard, request.shards)
                    )
            except OSError as error:
                raise not_written(
                    f"{request.directory}: {error.strerror or error}; expected a place that "
                    "every shard can write to",
                    error,
                ) from None
            finally:
                for snapshot in cut.snapshots.values():
                    snapshot.close()
        finally:
            self._end(holder)
        _log.info(
            "saved %d rows to %s in %.2f s",
            sum(f.rows for f in files),
            request.directory,
            time.monotonic() - began,
        )
        return pb.SaveReply(
            files=files, generations=generations, run=state.run, positions=cut.positions
        )

    def load(self, requests: Iterator[pb.LoadRequest]) -> Iterator[pb.LoadReply]:
        """Read this shard's rows of a save, and put them in use once all shards have read theirs.

        Whatever ends `requests` before leaves everything as it was.
        """
        request = next(requests, None)
        if request is None:
            raise TableError("Load: no request; expected the save to load")
        _check_shard(request.shard, request.shards)
        state = self._state
        route = state.route_version
        share = Share(request.shard, request.shards)
        rename = request.rename if request.HasField("rename") else None
        loaded = read_rows(state, request.directory, share, save=request.save, rename=rename)
        loaded.check(state)
        if loaded.lasting_tables:
            state.check_journals()
        reply = pb.LoadReply(rows=loaded.rows, route=route)
        yield reply
        decision = next(requests, None)
        if decision is None:
            return
        self._put_in_use(loaded, decision.cut, route)
        yield reply

    def _put_in_use(self, loaded: Loaded, cut: str, route: int) -> None:
        """Every shard has been asked to.

        One that has let pushes go on meanwhile refuses: they may be on all shards, and here alone
        their part would be lost. The load is begun again then.
        """
        state = self._state
        holder: object = cut or object()
        try:
            for gate in (state.files, state.gate):
                if not cut:
                    gate.close(holder, float("inf"), _TURN_S)
                gate.drain(holder)
            state.check_route(route)
            loaded.put_in_use(state)
        except TimeoutError as error:
            raise HoldEndedError(str(error)) from None
        finally:
            self._end(holder)
        loaded.finish(state)

    def _end(self, holder: object) -> None:
        if isinstance(holder, str):
            self._over.append(holder)
        self._state.gate.open(holder)
        self._state.files.open(holder)

    def _begin(self, request: pb.SaveRequest, mode: str, holder: object) -> "_Cut":
        state, gate = self._state, self._state.gate
        try:
            if request.cut:
                gate.drain(holder)
            else:
                gate.close(holder, 60.0)
        except TimeoutError as error:
            raise HoldEndedError(str(error)) from None
        try:
            with state.lock:
                tables: dict[str, Table] = {
                    name: table
                    for name, table in state.tables.items()
                    if name.startswith(request.prefix)
                }
                positions = state.pushes.positions()
            if not state.route_version:  # else rows of shards that nobody named would be lacking
                for table in tables.values():
                    table.check_share(Share(request.shard, request.shards).number)
            for name, mark in request.since.items():
                if name in tables and mark not in tables[name].cuts:
                    raise DeltaError(
                        f"table {name!r} was loaded, made anew or moved in part since the save "
                        "that a delta would build on; save a whole checkpoint first"
                    )
            since = {name: mark & 0xFFFFFFFF for name, mark in request.since.items()}
            snapshots = begin_snapshots(tables, mode, since)
            marks = {}
            for name, snapshot in snapshots.items():
                # Two tables of one name may come to the same cut; the upper half tells them apart.
                marks[name] = secrets.randbits(31) << 32 | snapshot.cut
                tables[name].cuts.add(marks[name])
            return _Cut(tables, state.applied(), positions, snapshots, marks)
        finally:
            gate.open(holder)


def _check_shard(shard: int, shards: int) -> None:
    if not (1 <= shards <= _native.BUCKETS and shard < shards):
        raise TableError(
            f"shard {shard} of {shards}; expected 0 <= shard < shards <= {_native.BUCKETS}"
        )
