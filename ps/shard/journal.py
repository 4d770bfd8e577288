"""What a shard hands each push to before it is applied: a log, a replica."""

from collections.abc import Callable
from typing import Protocol

from ps.shard.ending import end_process

Buffer = bytes | memoryview
# Called once a change has its place among all others, and before a later one has: whoever keeps
# the order of changes takes a turn here.
Place = Callable[[], None]


def nowhere() -> None:
    """Of a change that may be made beside others."""


def settle(place: Place) -> None:
    """Give a change that a journal has taken its place: without one it would hold up all others."""
    try:
        place()
    except BaseException as error:
        end_process("a change has no place: %r", error)


class BehindError(RuntimeError):
    """A journal must be filled with the whole state before it can take a change."""


class Journal(Protocol):
    """Takes every change before it is acknowledged."""

    def append(self, kind: str, time_s: int, payload: Buffer, place: Place = nowhere) -> None:
        """Keep a change; returns once it is safe.

        Raises:
            BehindError: `renew` first.
        """
        ...

    def check(self) -> None:
        """See that it can take changes.

        Raises:
            TimeoutError: it does not answer.
        """
        ...

    def fall_behind(self) -> None:
        """It has taken a change that was not made: it must take the whole state before others."""
        ...

    def renew(self, *, closed: bool = False, behind: bool = False) -> None:
        """Take the whole state as it is now.

        Args:
            closed: the caller has closed the gate, and has its turn at the files.
            behind: nothing needs to be done if somebody else has done it since.
        """
        ...
