"""Shared memory for the messages of one shard: blocks that are lent out and come back."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ps.errors import ShardError
from ps.region import Region

BLOCK_BYTES = 20 << 20  # a message's keys and rows, see MESSAGE_BYTES of ps.client
_MOST = 8
_log = logging.getLogger("heterps.ps")


class SharedMemory:
    """Blocks that a shard of this host has mapped; none where it is another host.

    Args:
        attach: offers a block to the shard; False when it cannot have it.
    """

    def __init__(self, attach: Callable[[Region], bool]) -> None:
        self._attach = attach
        self._free: list[Region] = []
        self._known: set[Region] = set()  # by the shard
        self._making = 0
        self._refused = False
        self._lock = threading.Lock()

    @contextmanager
    def block(self, size: int) -> Iterator[Region | None]:
        """A block of at least so many bytes, or None: the message travels by itself then."""
        region = self.take(size)
        try:
            yield region
        except BaseException:
            self.discard(region)
            raise
        self.give_back(region)

    def take(self, size: int) -> Region | None:
        """As `block`; to be given back."""
        if size > BLOCK_BYTES or self._refused:
            return None
        with self._lock:
            if self._free:
                return self._free.pop()
            if len(self._known) + self._making >= _MOST:
                return None
            self._making += 1
        region = self._make()
        with self._lock:
            self._making -= 1
            if region is not None:
                self._known.add(region)
        return region

    def give_back(self, region: Region | None) -> None:
        """A block is free again."""
        if region is not None:
            with self._lock:
                if region in self._known:
                    self._free.append(region)

    def discard(self, region: Region | None) -> None:
        """A block is not to be used again: a shard that did not answer may still look at it."""
        if region is not None:
            with self._lock:
                self._known.discard(region)

    def drop(self) -> None:
        """The shard has forgotten its blocks: it was restarted."""
        with self._lock:
            self._free.clear()
            self._known.clear()

    def close(self) -> None:
        """Let go of all blocks."""
        self._refused = True
        with self._lock:
            self._free.clear()

    def _make(self) -> Region | None:
        try:
            region = Region(BLOCK_BYTES)
        except OSError as error:
            _log.debug("no shared memory: %s", error)
            self._refused = True
            return None
        try:
            if self._attach(region):
                return region
        except ShardError as error:
            _log.debug("no shared memory: %s", error)
        finally:
            region.unlink()
        self._refused = True
        return None
