"""Geo mode: train on a replica in this process, and exchange differences now and then.

As PaddlePaddle's GEO-SGD: every worker keeps the rows it uses and applies its own optimizer to
them at the speed of memory. After every `every` pushes it adds to the servers by how much its rows
have changed since the last exchange, and takes the servers' rows, which have everybody's changes.
So the servers hold the first values plus the sum of all workers' changes.
"""

import logging
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from chassis.closing import Closing
from protos.parameter_server_pb2 import TableSpec
from ps.client.parameter_client import ParameterClient
from ps.client.push import Push
from ps.engine import _native
from ps.errors import ShardError
from ps.local.table import LocalTable
from ps.table.arrays import Floats, Keys, as_gradients, as_keys

_MOST_ROUNDS = 1 << 23  # whole numbers up to here are exact in float32
_log = logging.getLogger("heterps.ps")


@dataclass(slots=True)
class _Exchange:
    """One that has begun; what it sends keeps its number until every shard has it."""

    keys: Keys
    push: Push
    added: bool = False


class GeoTable(Closing):
    """A replica of a table's rows, as far as this worker uses them; thread-safe.

    Staleness: a pull misses changes that others have not exchanged, at most `every` pushes each,
    and those they exchanged since this worker last took the row. It takes a row that it has
    pushed to at every exchange, and any other that it pulls when it was taken more than `max_age`
    exchanges ago: at most `(max_age + 1) * every` of its own pushes.

    The optimizer's state is this worker's own and is not exchanged. Rules of the table other than
    optimizer, initializer and segments act on the servers: a key that they do not admit returns
    to its first value at the next exchange, and one show is counted at each exchange.

    Args:
        client: the connections; the table must be there.
        table: its name.
        every: pushes between exchanges.
        max_age: see above; 0 takes every row anew in each round of pushes.

    Raises:
        ValueError: numbers that make no sense.
        TableError: no such table.
    """

    def __init__(
        self, client: ParameterClient, table: str, *, every: int = 16, max_age: int = 4
    ) -> None:
        if every < 1:
            raise ValueError(f"geo table {table!r}: every={every}; expected at least 1 push")
        if max_age < 0:
            raise ValueError(
                f"geo table {table!r}: max_age={max_age}; expected 0 exchanges or more"
            )
        self._client = client
        self._every = every
        self._max_age = max_age
        self._lock = threading.RLock()
        self._spec = _replica_of(client.spec(table))
        self._rows = LocalTable(self._spec)
        self._marks = _new_marks()
        self._round = 1
        self._pushes = 0
        self._touched: list[tuple[Keys, Floats]] = []  # with their rows at the last exchange
        self._exchange: _Exchange | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """The table's name."""
        return self._spec.name

    @property
    def dim(self) -> int:
        """Floats a row."""
        return self._spec.dim

    @property
    def pushes_since_exchange(self) -> int:
        """Pushes that the servers have not seen; they are lost if this process dies."""
        return self._pushes

    def __len__(self) -> int:
        """Rows of the replica."""
        return len(self._rows)

    def pull(self, keys: Any) -> Floats:
        """Rows of `keys`, float32 [*keys.shape, dim], as this worker has them.

        Args:
            keys: NumPy or torch integers; int64 keeps its bits.

        Raises:
            ShardError: rows that the replica lacks could not be taken.
        """
        flat, shape = as_keys(keys)
        with self._lock:
            self._check_open()
            self._take(flat)
            return self._rows.pull(flat).reshape(*shape, self.dim)

    def push(self, keys: Any, grads: Any, *, rate: float = 1.0) -> None:
        """Apply gradients, float32 [*keys.shape, dim], here; those of equal keys sum first.

        An exchange that is due and fails is logged, and finished before the next push.

        Args:
            keys: NumPy or torch.
            grads: NumPy or torch.
            rate: times the learning rate.

        Raises:
            TableError: wrong shapes or dtypes, or a gradient that is not finite.
            ShardError: a shard did not answer or refused; the gradients were not applied.
        """
        flat, shape = as_keys(keys)
        values = as_gradients(grads, shape, self.dim)
        with self._lock:
            self._check_open()
            self._finish()
            self._take(flat)
            self._touch(_native.unique(flat)[0])
            self._rows.push(flat, values, rate=rate)
            self._pushes += 1
            if self._pushes >= self._every:
                try:
                    self.sync()
                except ShardError as error:
                    _log.warning("geo table %s: %s; tried again at the next push", self.name, error)

    def sync(self) -> None:
        """Exchange now: add this worker's changes, take the rows that it has changed.

        Raises:
            TableError: a change that is not finite (names its key).
            ShardError: a shard did not answer or refused. Call it again: what was sent keeps its
                number, so that no shard adds it twice.
        """
        with self._lock:
            self._check_open()
            self._finish()
            if not self._touched:
                self._pushes = 0
                return
            keys = np.concatenate([k for k, _ in self._touched])
            change = self._rows.pull(keys) - np.concatenate([rows for _, rows in self._touched])
            push = self._client._push(self.name, keys, change, kind="add", distinct=True)
            self._exchange = _Exchange(keys, push)
            self._finish()

    def close(self) -> None:
        """Exchange, and let go of the replica; safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self.sync()
            self._closed = True
            self._rows, self._marks = LocalTable(self._spec), _new_marks()

    def _finish(self) -> None:
        """Go through with the exchange that has begun, if one has."""
        exchange = self._exchange
        if exchange is None:
            return
        if not exchange.added:
            exchange.push.run()
            exchange.added = True
        rows = self._client.pull_unique(self.name, exchange.keys)
        # Nothing was pushed here since it began: the servers' rows have all of these changes.
        self._rows.push(exchange.keys, rows, kind="assign")
        self._exchange = None
        self._touched = []
        self._pushes = 0
        self._round += 1
        if self._round < _MOST_ROUNDS:
            self._mark(exchange.keys, self._round, 0)
        else:
            self._marks, self._round = _new_marks(), 1

    def _take(self, keys: Keys) -> None:
        """Take rows from the servers that are not here or too old."""
        taken, touched = self._marks.pull(keys).T
        wanted = (taken == 0) | ((self._round - taken > self._max_age) & (touched != self._round))
        if not wanted.any():
            return
        unique = _native.unique(keys[wanted])[0]
        self._rows.push(unique, self._client.pull_unique(self.name, unique), kind="assign")
        self._mark(unique, self._round, 0)

    def _touch(self, unique: Keys) -> None:
        """Note rows that are about to change for the first time in this round."""
        taken, touched = self._marks.pull(unique).T
        first = touched != self._round
        keys = unique[first]
        if len(keys):
            self._touched.append((keys, self._rows.pull(keys)))
            self._mark(keys, taken[first], self._round)

    def _mark(self, keys: Keys, taken: float | Floats, touched: float) -> None:
        marks = np.empty((len(keys), 2), np.float32)
        marks[:, 0], marks[:, 1] = taken, touched
        self._marks.push(keys, marks, kind="assign")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"geo table {self.name!r} is closed")


def _new_marks() -> LocalTable:
    """By key: the round in which its row was last taken, and in which it was last pushed to."""
    return LocalTable.create("marks", 2, optimizer="sgd", initializer="zeros")


def _replica_of(spec: TableSpec) -> TableSpec:
    """The table without what only the servers do."""
    replica = TableSpec(name=spec.name, dim=spec.dim, segments=spec.segments)
    if not spec.segments:
        replica.optimizer.CopyFrom(spec.optimizer)
        replica.initializer.CopyFrom(spec.initializer)
    for segment in replica.segments:
        segment.lazy = 0.0
    return replica
