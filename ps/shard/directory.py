"""What a shard keeps of itself in its own directory, and takes back when it starts again.

`DIR/base/` is a checkpoint of this shard alone, `DIR/log-N` are the changes since. Folding makes
a new base while training goes on, and drops the logs before it.
"""

import logging
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from chassis import written
from ps.checkpoint.manifest import MANIFEST, begin_save, is_checkpoint, read_manifest
from ps.checkpoint.store import LocalStore
from ps.checkpoint.tables import begin_snapshots, chain, load_tables, write_alone
from ps.errors import CheckpointError, DamageError, NoRoomError
from ps.shard.holding import Holding
from ps.shard.journal import Buffer
from ps.shard.log import Log
from ps.shard.recovery import Recovered, keep_folder, recover
from ps.shard.state import ShardState, now_s
from ps.table.table import Table

_TURN_S = 600.0  # to wait for a save that is being written
_FOLD_FROM = 64 << 20  # bytes of log that are not worth a base yet
_REPEATED_BYTES = 4 << 10  # of a log that take as long to repeat as a change without a payload
_PAUSE_S = 5.0  # before a fold that failed is tried again; doubled each time
_LONGEST_PAUSE_S = 60.0
_RECORD_BYTES = 8 + 20  # of a row in a file: key and usage
_log = logging.getLogger("heterps.ps")


class ShardDirectory:
    """A shard's own directory.

    Args:
        state: of the shard, still empty.
        directory: made when it is not there; of one shard alone.
        sync: see ps.shard.log.Log.
        interval_s: how old a base of tables with durability=checkpoint may be.
        accept_loss: begin with what is whole where the log is damaged; the damaged files are kept
            under other names.

    Raises:
        DamageError: what was acknowledged cannot all be read.
        CheckpointError: another shard has the directory; nothing of it was touched.
    """

    def __init__(
        self,
        state: ShardState,
        directory: Path,
        *,
        sync: bool = False,
        interval_s: float = 300,
        accept_loss: bool = False,
    ) -> None:
        self._state = state
        self._directory = directory
        self._interval_s = interval_s
        self._store = LocalStore(directory / "base")
        self._folding = threading.Lock()
        self._base_bytes = 0
        self._folded = time.monotonic()
        self._again_at, self._pause_s = 0.0, _PAUSE_S
        self._pushed = 0
        written.claim(directory, mode=0o700)
        self._holding = Holding(directory)
        try:
            self._take_back(sync, accept_loss)
        except BaseException:
            self._holding.close()
            raise

    def _take_back(self, sync: bool, accept_loss: bool) -> None:
        state, directory = self._state, self._directory
        began = time.monotonic()
        first = self._load_base()
        reached = self._holding.reached
        found = recover(state, directory, first or 1, reached, accept_loss=accept_loss)
        if found.damage and not first and self._store.entries():
            keep_folder(Path(self._store.url))
        self._remove_unfinished()
        self.recovered = first > 0 or found.records > 0
        self.log = Log(
            directory,
            found.number,
            before=found.before,
            older=found.bytes,
            records=found.records,
            sync=sync,
            fold=self._fold_closed,
            reach=self._holding.reach,
        )
        state.journals["log"] = self.log
        state.require_room = self._require_room
        self._tell(found, first > 0, time.monotonic() - began)
        if found.damage:
            self.fold()  # nothing goes on from a damaged file

    def due(self) -> bool:
        """Whether it is time to fold."""
        kept = [t for t in list(self._state.tables.values()) if t.spec.durability]
        if not kept or time.monotonic() < self._again_at:
            return False
        cost = self.log.bytes + _REPEATED_BYTES * self.log.records
        if cost > max(_FOLD_FROM, 2 * self._base_bytes):
            return True
        if not any(t.spec.durability == "checkpoint" for t in kept):
            return False
        pushed = sum(t.native.counters()["pushed"] for t in kept)
        return pushed != self._pushed and time.monotonic() - self._folded > self._interval_s

    def fold(self) -> None:
        """Write a new base and drop the logs before it.

        Raises:
            NoRoomError: the disk has none for it; the old base and its logs stay.
            CheckpointError, OSError: it could not be written; they stay, too.
        """
        self._fold_closed(False)

    def close(self) -> None:
        """Let go of the log."""
        del self._state.journals["log"]
        self.log.close()
        self._holding.close()

    def _fold_closed(self, closed: bool) -> None:
        """Fold.

        Args:
            closed: the caller has closed the gate, and has its turn at the files.
        """
        with ExitStack() as turns:
            turns.enter_context(self._folding)
            if not closed:
                turns.enter_context(self._state.files.closed(_TURN_S))
            try:
                self._write_base(closed)
            except BaseException as error:
                self._again_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                self._remove_unfinished()
                if isinstance(error, OSError):
                    raise NoRoomError(
                        f"{self._directory}: a base cannot be written: {error}"
                    ) from None
                raise
            self._again_at, self._pause_s = 0.0, _PAUSE_S

    def _write_base(self, closed: bool) -> None:
        state = self._state
        with ExitStack() as ends:
            with ExitStack() as gate:
                if not closed:
                    gate.enter_context(state.gate.closed())
                with state.lock:
                    kept = {n: t for n, t in state.tables.items() if t.spec.durability}
                self._check_room(kept)
                snapshots = begin_snapshots(kept, "checkpoint")
                for snapshot in snapshots.values():
                    ends.callback(snapshot.close)
                applied = state.applied()
                summary = state.summary(windows=False).SerializeToString()
                opening: list[tuple[str, int, Buffer]] = [("state", now_s(), summary)]
                for table in kept.values():
                    opening.append(("create", now_s(), table.told.SerializeToString()))
                opening += [("stage", now_s(), p.message) for p in state.staged_for("log")]
                number = self.log.rotate(opening)
            switch = begin_save(self._store)
            self._base_bytes = write_alone(switch, kept, snapshots, applied, number)
        self.log.remove_before(number)
        self._folded = time.monotonic()
        self._pushed = sum(t.native.counters()["pushed"] for t in kept.values())
        _log.info("folded %d bytes into a base", self._base_bytes)

    def _require_room(self, more: Mapping[str, Table]) -> None:
        """Find out whether a base fits that has these tables too; raises as `_check_room`."""
        tables = {**self._state.tables, **more}
        self._check_room({name: table for name, table in tables.items() if table.spec.durability})

    def _check_room(self, tables: Mapping[str, Table]) -> None:
        """Find out whether a base fits before anything is begun.

        Raises:
            NoRoomError: it would not.
        """
        need = 0
        for table in tables.values():
            counters = table.native.counters()
            need += counters["bytes"]  # its index takes more than the files' heads
            need += counters["disk_rows"] * (table.native.row_bytes + _RECORD_BYTES)
        free = shutil.disk_usage(self._directory).free
        if need > free:
            raise NoRoomError(
                f"{self._directory}: a base of up to {need} bytes has no room in the {free} that "
                "are free"
            )

    def _load_base(self) -> int:
        """Take back the base; the log that goes on from it, 0 where there is no base.

        Raises:
            DamageError: it cannot be read.
        """
        if not is_checkpoint(self._store):
            return 0
        state = self._state
        try:
            links = chain(self._store)
            tables, applied = load_tables(links, directory=state.directory)
        except CheckpointError as error:
            raise DamageError(
                f"{error}; expected the base of this shard. Restore a checkpoint into an empty "
                "directory instead"
            ) from None
        state.tables.update(tables)
        state.pushes.merge(applied.windows)
        state.steps.merge(applied.series)
        manifest = links[-1][1]
        self._base_bytes = sum(f.bytes for f in manifest.files)
        return manifest.log

    def _remove_unfinished(self) -> None:
        """Remove what a base that was not finished has left."""
        with suppress(CheckpointError):
            named = read_manifest(self._store).id if is_checkpoint(self._store) else ""
            for entry in self._store.entries():
                if entry not in (MANIFEST, named):
                    self._store.remove(entry)

    def _tell(self, found: Recovered, based: bool, seconds: float) -> None:
        for name, table in self._state.tables.items():
            if not based and table.spec.durability == "checkpoint":
                _log.warning("table %s comes back empty: no base had been made of it yet", name)
        if self.recovered:
            _log.info(
                "took back %d tables and %d changes from %s in %.2f s",
                len(self._state.tables),
                found.records,
                self._directory,
                seconds,
            )
        if found.damage:
            _log.error("--accept-loss: %s", found.damage)
