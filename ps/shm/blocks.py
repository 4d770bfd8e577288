"""Memory that a client shares with the shards of its host: blocks that are lent out and come back.

A block holds the payload of one message, or the rows of a whole batch, which the caller then reads
where the shards have written them.
"""

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps.errors import ShardError
from ps.shm.line import UnixLine
from ps.shm.region import MOST_BYTES, Region
from ps.table.arrays import Floats

_LEAST_BYTES = 1 << 20
_ALL_BYTES = 256 << 20
_COPIED_BYTES = 256 << 10  # rows up to here are copied: a block is worth more than the copy
_log = logging.getLogger("heterps.ps")


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Memory that shards have mapped, and the lines to them that its messages take.

    Attributes:
        region: the memory.
        lines: to each of the shards by address; they let go of it when these end.
    """

    region: Region
    lines: dict[str, UnixLine]

    def close(self) -> None:
        """It is not used any more."""
        for line in self.lines.values():
            line.close()


class SharedMemory:
    """Blocks for the messages to the shards of one routing.

    Args:
        attach: by a shard's address, what offers it a block. It raises ConnectionRefusedError
            where it can never have one, being on another host, and other errors of the system or
            ShardError where it could not be offered.
    """

    def __init__(self, attach: Mapping[str, Callable[[Region], UnixLine]]) -> None:
        self._attach = dict(attach)
        self._elsewhere: set[str] = set()  # addresses of shards on other hosts
        self._free: list[Block] = []
        self._attached: set[Block] = set()  # by the shards
        self._lent: set[Block] = set()  # to arrays
        self._returned: deque[Block] = deque()  # by arrays that are gone; any thread may add
        self._most = _ALL_BYTES
        self._bytes = 0  # of those attached and those being made
        self._lock = threading.Lock()
        _all.add(self)

    def take(self, size: int, addresses: Sequence[str]) -> Block | None:
        """A block of at least so many bytes that all these shards have.

        It is to be given back, lent or discarded. None where a shard is on another host or of
        another routing, or no memory is left: the message travels by itself then.
        """
        here = self._attach.keys() - self._elsewhere
        if size > MOST_BYTES or not here.issuperset(addresses):
            return None
        with self._lock:
            self._collect_returned()
            fitting = [block for block in self._free if block.region.size >= size]
            if fitting:
                block = min(fitting, key=lambda b: b.region.size)
                self._free.remove(block)
                return block
            size = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
            while self._free and self._bytes + size > self._most:
                self._forget(self._free.pop())
            if self._bytes + size > self._most:
                return None
            self._bytes += size
        made = self._make(size)
        with self._lock:
            if made is None:
                self._bytes -= size
                return None
            self._attached.add(made)
        if all(address in made.lines for address in addresses):
            return made
        if made.lines:
            self.release(made)
        else:
            self.discard(made)
        return None

    @property
    def near(self) -> bool:
        """Whether any of the shards is on this host, as far as is known."""
        return bool(self._attach.keys() - self._elsewhere)

    def release(self, block: Block) -> None:
        """A block is free again."""
        with self._lock:
            self._free_or_close(block)

    def lend(self, block: Block, rows: Floats) -> Floats:
        """Rows in a block as an array that gives the block back at its end, or a copy of them."""
        with self._lock:
            lent = sum(b.region.size for b in self._lent)
            copied = rows.nbytes <= _COPIED_BYTES or lent + block.region.size > self._most // 2
            if not copied:
                self._lent.add(block)
        if copied:
            rows = rows.copy()
            self.release(block)
            return rows
        return np.asarray(_Lease(self._returned, block, rows))

    def discard(self, block: Block) -> None:
        """A block is not to be used again: a shard that did not answer may still write to it."""
        with self._lock:
            self._forget(block)

    def drop(self) -> None:
        """A shard has forgotten its blocks: it was restarted."""
        with self._lock:
            self._collect_returned()
            free, self._free = self._free, []
            for block in free:
                self._forget(block)
            for block in list(self._attached):  # whoever has it closes it
                self._forget(block, close=False)

    def close(self) -> None:
        """Let go of all blocks, and make no more."""
        self._most = 0
        self.drop()

    def hang_up(self) -> None:
        """End the calls under way over all lines: the shards are gone to this client."""
        with self._lock:
            attached = list(self._attached)
        for block in attached:
            for line in list(block.lines.values()):
                line.hang_up()

    def retire_lent(self) -> None:
        """Blocks that arrays hold now are not used again: a forked child sees the same memory."""
        with self._lock:
            for block in self._lent & self._attached:
                self._forget(block, close=False)

    def _collect_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._lent.discard(block)
            self._free_or_close(block)

    def _free_or_close(self, block: Block) -> None:
        if block in self._attached:
            self._free.append(block)
        else:
            block.close()

    def _forget(self, block: Block, close: bool = True) -> None:
        if block in self._attached:
            self._attached.discard(block)
            self._bytes -= block.region.size
        if close:
            block.close()

    def _make(self, size: int) -> Block | None:
        try:
            region = Region(size)
        except OSError as error:
            _log.debug("no more shared memory: %s", error)
            self._most = self._bytes - size
            return None
        made = Block(region, {})
        try:
            for address, attach in self._attach.items():
                if address in self._elsewhere:
                    continue
                try:
                    made.lines[address] = attach(region)
                except ConnectionRefusedError:
                    self._elsewhere.add(address)
        except (ShardError, OSError) as error:  # the message itself will say what is wrong
            _log.debug("no shared memory: %s", error)
            made.close()
            return None
        finally:
            region.close_file()
        return made


class _Lease:
    """What an array of rows in a block is based on: the block is free once nobody needs it."""

    __slots__ = ("__array_interface__", "_block", "_returned", "_rows")

    def __init__(self, returned: "deque[Block]", block: Block, rows: Floats) -> None:
        self._returned = returned
        self._block = block
        self._rows = rows
        self.__array_interface__: dict[str, Any] = rows.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._block)  # no lock: this may run anywhere


_all: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()


def _before_fork() -> None:
    for memory in list(_all):
        memory.retire_lent()


os.register_at_fork(before=_before_fork)
