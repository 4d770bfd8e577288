"""What a shard does by itself, now and then: make room, apply limits, fold its log, let go."""

import logging
import threading
import time

from chassis.memory import release_buffers
from protos.parameter_server_pb2 import ShrinkRequest
from ps.engine import _native
from ps.errors import CheckpointError
from ps.shard.directory import ShardDirectory
from ps.shard.ending import end_process
from ps.shard.replica import Replicator
from ps.shard.state import ShardState, now_s

_PERIOD_S = 0.2
_EXPIRY_S = 60.0
_CHECK_S = 1.0
_REST_S = 2.0  # without a push or pull, after which buffers of messages go
_RELEASE_S = 10.0  # while that lasts: messages that were refused leave buffers too
_log = logging.getLogger("heterps.ps")


class Maintenance:
    """A thread of its own.

    Args:
        state: of the shard.
        durable: its directory, if it has one.
        replicator: its replica, if it has one.
    """

    def __init__(
        self,
        state: ShardState,
        durable: ShardDirectory | None,
        replicator: Replicator | None = None,
    ) -> None:
        self._state = state
        self._durable = durable
        self._replicator = replicator
        self._checked = time.monotonic()
        self._handled, self._release_at = 0, time.monotonic()
        self._stop = threading.Event()
        self._expired = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="maintenance", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, after what is under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            try:
                self._round()
            except _native.BrokenError as error:
                end_process("maintenance: %r", error)
            except (CheckpointError, OSError, RuntimeError, TimeoutError) as error:
                _log.warning("maintenance: %s; it is tried again", error)

    def _round(self) -> None:
        expire = time.monotonic() - self._expired > _EXPIRY_S
        for name, table in list(self._state.tables.items()):
            if table.spec.tier.memory_bytes:
                table.native.demote()
            rules = table.spec.eviction
            if self._state.follows:
                continue
            full = rules.max_rows and table.native.counters()["rows"] > rules.max_rows
            if full or (expire and rules.ttl_s):
                evicted = self._state.shrink(ShrinkRequest(table=name, time_s=now_s()))
                if evicted:
                    _log.info("table %s: evicted %d rows", name, evicted)
        if expire:
            self._expired = time.monotonic()
            forgotten = self._state.pushes.forget(now_s())
            if forgotten:
                _log.info("forgot %d clients that have pushed nothing for long", len(forgotten))
        if self._durable is not None and self._durable.due():
            self._durable.fold()
        if time.monotonic() - self._checked > _CHECK_S:
            self._checked = time.monotonic()
            self._release_idle_buffers()
            if self._replicator is not None:
                self._replicator.refill()

    def _release_idle_buffers(self) -> None:
        counts = [t.native.counters() for t in list(self._state.tables.values())]
        handled = sum(count["pulled"] + count["pushed"] for count in counts)
        now = time.monotonic()
        if handled != self._handled:
            self._handled, self._release_at = handled, now + _REST_S
        elif now > self._release_at:
            release_buffers()
            self._release_at = now + _RELEASE_S
