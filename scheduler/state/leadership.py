"""Being the one scheduler that works on a Redis: the right to schedule, and its loss."""

import logging
import time
from collections.abc import Callable

from scheduler.state.store import TIMEOUT_S, Store, StoreError

HOLD_S = 5.0
RENEW_S = 1.0
_AWAY_S = TIMEOUT_S + 2 * RENEW_S  # from one failed renewal to the next at most
_log = logging.getLogger("heterps.leadership")


class HeldError(RuntimeError):
    """Another scheduler works on this Redis."""


class Leadership:
    """Takes and keeps the right to schedule.

    The right is a key in Redis with a time to live, and a term: a number that grows with every
    scheduler that takes it. Writes to Redis and calls to nodes carry the term, and a lower one
    than the latest is refused, so a scheduler that was replaced while it slept does no harm (the
    fencing token of Chubby, Burrows 2006, and of Kleppmann's "How to do distributed locking").

    Args:
        holder: who takes it, unique.
        hold_s: how long the right outlives its holder.
    """

    def __init__(self, store: Store, holder: str, hold_s: float = HOLD_S) -> None:
        self._store = store
        self._holder = holder
        self._hold_s = hold_s
        self._renewed = 0.0  # time.monotonic()
        self._failed = 0.0
        self.lost = store.deposed

    def acquire(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for the right of a scheduler that has died; never work beside a live one.

        Raises:
            HeldError: a live one has it.
            StoreError
        """
        until = time.monotonic() + self._hold_s + 1.0
        while True:
            asked = time.monotonic()
            if self._store.take(self._holder, self._hold_s):
                self._renewed = asked
                _log.info("this scheduler leads, term %d", self._store.term)
                return
            if time.monotonic() > until or stop():
                raise HeldError(
                    f"{self._store.holder()} works on this Redis; expected no other scheduler"
                )
            time.sleep(0.2)

    def renew(self) -> bool:
        """Renew the right; False once another scheduler has it. To be called every `RENEW_S`.

        Raises:
            StoreError: nobody knows.
        """
        asked = time.monotonic()
        try:
            if not self.lost.is_set() and self._store.renew(self._holder, self._hold_s):
                self._renewed = asked
                return True
        except StoreError:
            self._failed = time.monotonic()
            raise
        self.lost.set()
        return False

    def is_certain(self) -> bool:
        """Whether no other scheduler can have taken over, as far as can be known.

        After a sleep this is False until the right is renewed. While Redis is away nobody can
        take over, so then it stays True.
        """
        now = time.monotonic()
        recent = now - self._renewed < self._hold_s or now - self._failed < _AWAY_S
        return recent and not self.lost.is_set()

    def confirm(self) -> bool:
        """Wait until it is known whether another scheduler has taken over; False when one has."""
        while not self.is_certain():
            if self.lost.wait(0.1):
                return False
        return True

    def release(self) -> None:
        """Give the right back, for the next scheduler to take at once."""
        try:
            self._store.release(self._holder)
        except StoreError as error:
            _log.warning("%s", error)
