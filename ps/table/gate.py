"""What changes a shard passes the gate; a cut closes it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ps.table.applied import PushId


class Gate:
    """Many may be inside at once; whoever closes it waits until they have left.

    While it is closed, pushes that were named by `admit` still pass: those of which other
    shards have applied a part already.

    Args:
        most_waiting: how many may wait to enter; the rest are turned away, to come back. Whoever
            waits keeps a thread, and the call that opens the gate needs one too.
    """

    def __init__(self, most_waiting: int = 1 << 30) -> None:
        self.most_waiting = most_waiting
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._closing = 0
        self._holder: object | None = None
        self._until = 0.0
        self._admitted: set[PushId] = set()

    @property
    def waiting(self) -> int:
        """How many wait to enter."""
        return self._waiting

    @contextmanager
    def passing(self, push: PushId | None = None) -> Iterator[None]:
        """Be inside for a while.

        Raises:
            TimeoutError: too many wait already.
        """
        with self._changed:
            full = self._waiting >= self.most_waiting
            if full and self._is_closed() and push not in self._admitted:
                raise TimeoutError("pushes are held back for a moment; come back")
            self._waiting += 1
            try:
                while self._is_closed() and push not in self._admitted:
                    self._changed.wait(self._wait_s())
            finally:
                self._waiting -= 1
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self, timeout_s: float = 60.0) -> Iterator[None]:
        """Keep everybody out for a while.

        Raises:
            TimeoutError: somebody else held it, or somebody stayed inside, for too long.
        """
        me = object()
        self.close(me, float("inf"), timeout_s)
        try:
            yield
        finally:
            self.open(me)

    def close(self, holder: object, hold_s: float, timeout_s: float = 60.0) -> None:
        """Close for `holder`, who has it until `open`, or for `hold_s` seconds.

        Raises:
            TimeoutError: somebody else held it, or somebody stayed inside, for too long.
        """
        limit = time.monotonic() + timeout_s
        with self._changed:
            if self.held_by(holder):
                self._until = time.monotonic() + hold_s
                return
            self._closing += 1
            try:
                while self._is_held() or self._inside:
                    left = limit - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(f"pushes could not be held back within {timeout_s:g} s")
                    self._changed.wait(min(left, self._wait_s()))
                self._holder = holder
                self._until = time.monotonic() + hold_s
                self._admitted.clear()
            finally:
                self._closing -= 1
                self._changed.notify_all()

    def renew(self, holder: object, hold_s: float) -> bool:
        """Hold for at least so long from now on; whether `holder` had it still."""
        with self._changed:
            if not self.held_by(holder):
                return False
            self._until = max(self._until, time.monotonic() + hold_s)
            return True

    def lapse(self, holder: object) -> None:
        """Let everybody in if `holder` has it for a while only; safe to repeat."""
        with self._changed:
            if self._until < float("inf"):
                self.open(holder)

    def wait_for_end(self, holder: object) -> None:
        """Wait until `holder` has it no more."""
        with self._changed:
            while self.held_by(holder):
                self._changed.wait(self._wait_s())

    def held_by(self, holder: object) -> bool:
        """Whether it is closed for `holder` still."""
        return self._is_held() and self._holder == holder

    def admit(self, pushes: set[PushId]) -> None:
        """Let these through, now or when they come."""
        with self._changed:
            self._admitted |= pushes
            self._changed.notify_all()

    def drain(self, holder: object, timeout_s: float = 60.0) -> None:
        """Admit nobody any more, and wait until those who were let through have left.

        Raises:
            TimeoutError: the hold is over, or somebody stayed inside for too long.
        """
        limit = time.monotonic() + timeout_s
        with self._changed:
            self._admitted.clear()
            while self._inside and time.monotonic() < limit:
                self._changed.wait(self._wait_s())
            if self._inside or not self.held_by(holder):
                raise TimeoutError("the hold was over before its time, so it was given up")
            self._until = float("inf")

    def open(self, holder: object) -> None:
        """Let everybody in again; safe to repeat."""
        with self._changed:
            if self._holder == holder:
                self._holder = None
                self._admitted.clear()
                self._changed.notify_all()

    def _is_held(self) -> bool:
        return self._holder is not None and time.monotonic() < self._until

    def _is_closed(self) -> bool:
        return self._is_held() or self._closing > 0

    def _wait_s(self) -> float:
        """Until the hold ends by itself, at most a second."""
        return min(1.0, max(0.001, self._until - time.monotonic())) if self._holder else 1.0
