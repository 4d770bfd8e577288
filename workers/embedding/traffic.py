"""Pulls of coming batches and pushes of past ones, kept in order."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps import ParameterClient

Keys = NDArray[np.uint64]
Rows = NDArray[np.float32]


class Batch:
    """Rows of one batch: which, and how far their pulls and pushes are.

    Args:
        keys: distinct keys of each table, by its name.
        learning: whether its gradients are to come.
    """

    def __init__(self, keys: Mapping[str, Keys], learning: bool) -> None:
        self.keys = keys
        self.learning = learning
        self.pulls: list[Future[Rows]] | None = None  # None: not begun
        self.expected = learning  # its backward is to come, and later pulls wait for it
        self.unacknowledged = 0  # pushes

    @property
    def pending(self) -> bool:
        """Whether a pull that begins now would miss its gradients."""
        return self.expected or self.unacknowledged > 0


class RowTraffic:
    """Begins each batch's pulls once they miss at most `max_staleness` earlier batches' gradients.

    Batches count in the order in which they were asked for. A batch that is taken waits for
    earlier gradients under way, not for a backward that has not run: one that never comes, or
    comes after several forwards, holds nothing up. Thread-safe.
    """

    def __init__(self, client: ParameterClient, max_staleness: int) -> None:
        self._client = client
        self._max_staleness = max_staleness
        self._changed = threading.Condition()  # around a lock that its holder may take again
        self._batches: list[Batch] = []  # in order: to be pulled, or pending
        self._failures: list[BaseException] = []

    def ask(self, batch: Batch) -> None:
        """Pull a batch's rows as soon as its turn comes."""
        with self._changed:
            self._batches.append(batch)
            self._advance()

    def take(self, batch: Batch, learning: bool) -> list[Rows]:
        """Wait for the rows of a batch asked for: float32 [keys, dim] of each table.

        Args:
            batch: as it was asked for.
            learning: whether its gradients are to come.

        Raises:
            ShardError, TableError: of the pull, or of an earlier push.
        """
        with self._changed:
            for earlier in self._batches:
                if earlier is batch:
                    break
                earlier.expected = False
            self._advance()
            self._changed.wait_for(lambda: batch.pulls is not None)
            self._raise_failure()
            batch.expected = learning
            self._keep(batch)
        return [future.result() for future in batch.pulls or []]

    def drop(self, batch: Batch) -> None:
        """Forget a batch that will not be taken; pulls under way end unread."""
        with self._changed:
            batch.expected = False
            if batch in self._batches:
                self._batches.remove(batch)
            self._advance()

    def push(self, batch: Batch, gradients: Sequence[Any]) -> None:
        """Begin to push a batch's gradients, [keys, dim] of each table; None where there is none.

        Raises:
            TableError: a gradient is not finite.
        """
        with self._changed:
            batch.expected = True
            self._keep(batch)
        try:
            for (table, keys), gradient in zip(batch.keys.items(), gradients, strict=True):
                if gradient is not None:
                    self._push_table(batch, table, keys, gradient)
        finally:
            with self._changed:
                batch.expected = False
                self._advance()

    def flush(self) -> None:
        """Wait until every push begun is acknowledged.

        Raises:
            ShardError, TableError: of the first push that failed since the last call.
        """
        with self._changed:
            self._changed.wait_for(lambda: not any(b.unacknowledged for b in self._batches))
            self._raise_failure()

    def _push_table(self, batch: Batch, table: str, keys: Keys, gradient: Any) -> None:
        future = self._client.push_async(table, keys, gradient)
        with self._changed:
            batch.unacknowledged += 1
        future.add_done_callback(partial(self._acknowledged, batch))

    def _acknowledged(self, batch: Batch, push: "Future[None]") -> None:
        with self._changed:
            batch.unacknowledged -= 1
            error = push.exception()
            if error is not None:
                self._failures.append(error)
            self._advance()

    def _advance(self) -> None:
        """Begin the pulls whose turn has come; forget batches that are done. Under the lock."""
        pending = 0
        for batch in self._batches:
            if pending > self._max_staleness:
                break
            if batch.pulls is None:
                batch.pulls = [self._pull(table, batch) for table in batch.keys]
            pending += batch.pending
        self._batches = [b for b in self._batches if b.pulls is None or b.pending]
        self._changed.notify_all()

    def _pull(self, table: str, batch: Batch) -> "Future[Rows]":
        try:
            return self._client.pull_async(table, batch.keys[table], read_only=not batch.learning)
        except Exception as error:  # raised to whoever takes the batch: this may be another thread
            failed: Future[Rows] = Future()
            failed.set_exception(error)
            return failed

    def _keep(self, batch: Batch) -> None:
        """Have a batch that became pending again among those that others wait for."""
        if batch.pending and batch not in self._batches:
            self._batches.insert(0, batch)

    def _raise_failure(self) -> None:
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]
