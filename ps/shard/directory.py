"""What a shard keeps of itself in its own directory, and takes back when it starts again.

`DIR/base/` is a checkpoint of this shard alone, `DIR/log-N` are the changes since. Folding makes
a new base while training goes on, and drops the logs before it.
"""

import logging
import threading
import time
from pathlib import Path

from ps.checkpoint.manifest import begin_save, is_checkpoint
from ps.checkpoint.store import LocalStore
from ps.checkpoint.tables import begin_snapshots, chain, load_tables, write_alone
from ps.shard import log
from ps.shard.log import Log
from ps.shard.replay import replay
from ps.shard.state import ShardState, now_s

_TURN_S = 600.0  # to wait for a save that is being written
_FOLD_FROM = 64 << 20  # bytes of log that are not worth a base yet
_log = logging.getLogger("heterps.ps")


class ShardDirectory:
    """A shard's own directory.

    Args:
        state: of the shard, still empty.
        directory: made when it is not there; of one shard alone.
        sync: see ps.shard.log.Log.
        interval_s: how old a base of tables with durability=checkpoint may be.
    """

    def __init__(
        self, state: ShardState, directory: Path, *, sync: bool = False, interval_s: float = 300
    ) -> None:
        self._state = state
        self._directory = directory
        self._interval_s = interval_s
        self._store = LocalStore(directory / "base")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folding = threading.Lock()
        self._base_bytes = 0
        self._folded = time.monotonic()
        self._pushed = 0
        self._first = 1  # log that goes on from the base
        self.recovered = self._recover()
        numbers = [number for _, number in log.files(directory)]
        self.log = Log(directory, max([self._first, *numbers]), sync=sync, fold=self.fold)
        state.journals["log"] = self.log

    def due(self) -> bool:
        """Whether it is time to fold."""
        kept = [t for t in list(self._state.tables.values()) if t.spec.durability]
        if not kept:
            return False
        if self.log.bytes > max(_FOLD_FROM, 2 * self._base_bytes):
            return True
        if not any(t.spec.durability == "checkpoint" for t in kept):
            return False
        pushed = sum(t.native.counters()["pushed"] for t in kept)
        return pushed != self._pushed and time.monotonic() - self._folded > self._interval_s

    def fold(self) -> None:
        """Write a new base and drop the logs before it."""
        state = self._state
        with self._folding, state.files.closed(_TURN_S):
            switch = begin_save(self._store)
            with state.gate.closed():
                with state.lock:
                    kept = {n: t for n, t in state.tables.items() if t.spec.durability}
                snapshots = begin_snapshots(kept, "checkpoint")
                applied = state.applied()
                number = self.log.rotate()
                self.log.append("state", now_s(), state.summary(windows=False).SerializeToString())
                for part in state.staged_for("log"):
                    self.log.append("stage", now_s(), part.message)
            self._base_bytes = write_alone(switch, kept, snapshots, applied, number)
            self.log.remove_before(number)
            self._folded = time.monotonic()
            self._pushed = sum(t.native.counters()["pushed"] for t in kept.values())
        _log.info("folded %d bytes into a base", self._base_bytes)

    def close(self) -> None:
        """Let go of the log."""
        del self._state.journals["log"]
        self.log.close()

    def _recover(self) -> bool:
        """Take back what was kept; whether there was anything."""
        began = time.monotonic()
        state, number, found = self._state, 0, False
        if is_checkpoint(self._store):
            links = chain(self._store)
            tables, applied = load_tables(links, directory=state.directory)
            state.tables.update(tables)
            state.pushes.merge(applied.windows)
            state.steps.merge(applied.series)
            number, found = links[-1][1].log, True
            self._first = number
            self._base_bytes = sum(f.bytes for f in links[-1][1].files)
        logs = [(path, n) for path, n in log.files(self._directory) if n >= number]
        records = 0
        for path, _ in logs:
            for record, payload in log.read(path, last=path == logs[-1][0]):
                replay(state, record, payload)
                records += 1
        for name, table in state.tables.items():
            if not found and table.spec.durability == "checkpoint":
                _log.warning("table %s comes back empty: no base had been made of it yet", name)
        if found or records:
            _log.info(
                "took back %d tables and %d changes from %s in %.2f s",
                len(state.tables),
                records,
                self._directory,
                time.monotonic() - began,
            )
        return found or records > 0
