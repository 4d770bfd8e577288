"""Types of the native module built from this folder."""

from collections.abc import Callable, Sequence
from enum import Enum

from typing_extensions import Buffer

class Kind(Enum):
    FINE = 0
    ERRNO = 1
    SHORT = 2
    DAMAGED = 3
    DROPPED = 4
    THROWN = 5

class Transfer:
    """A read of extents that follow one another, or a write of one."""

    def __init__(
        self,
        file: int,
        direct: bool,
        writes: bool,
        at: int,
        memory: list[memoryview],
        expected: Sequence[int | None],
        before: Callable[[int, int], None] | None,
    ) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def outcome(self) -> tuple[Kind, int, int, int]: ...

class Readers:
    def __init__(self, threads: int, ahead: bool) -> None: ...
    def begin(self, transfer: Transfer, part: int, then: Transfer | None) -> None: ...
    def begin_ahead(self, transfer: Transfer, part: int) -> None: ...
    def hurry(self, transfer: Transfer) -> None: ...
    def drop(self, transfer: Transfer) -> int: ...
    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Raises what the handler of a signal raises; so does `close`."""
    def close(self) -> None: ...
    @property
    def busy(self) -> float: ...
    @property
    def waited(self) -> float: ...
    @property
    def flying(self) -> int: ...

def checksum(data: Buffer) -> int: ...
