"""Payloads in memory that a client and a shard of one host share.

It has no name in any file system: the client passes its descriptor through the shard's Unix
socket, the shard maps it, and messages then carry offsets. So it ends with the processes that use
it, however they end, and only who was let in there can have a shard map anything. It is sealed
against shrinking before a shard maps it: to read beyond the end of a mapped file kills the reader.
"""

import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable

from ps.errors import NotAttachedError, TableError

MOST_BYTES = 64 << 20
_LINE = 64  # bytes of the cache
# All pages at once: a fault for each costs more than the copying.
_MAPPED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_MOST = 1024  # regions of a shard; further clients send their payloads along


def aligned(offset: int) -> int:
    """The next offset in a region at which rows do not begin within a line of the cache."""
    return offset + -offset % _LINE


class Region:
    """The client's side: a block of shared memory of a fixed size.

    Raises:
        OSError: there is no memory for it, or this system has no such memory.
    """

    def __init__(self, size: int) -> None:
        self.name = f"heterps-{secrets.token_hex(16)}"
        self.size = size
        create: Callable[[str, int], int] | None = getattr(os, "memfd_create", None)
        if create is None:
            raise OSError("memory without a name is a feature of Linux")
        self._file = create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._file, 0, size)  # too little fails here, not by SIGBUS
            fcntl.fcntl(
                self._file,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            self._map = mmap.mmap(self._file, size, _MAPPED)
        except BaseException:
            self.close_file()
            raise

    @property
    def file(self) -> int:
        """Its descriptor, to be passed to shards, until `close_file`."""
        return self._file

    def view(self, offset: int, size: int) -> memoryview:
        """Some of its bytes."""
        return memoryview(self._map)[offset : offset + size]

    def close_file(self) -> None:
        """No further shard is to have it; the memory stays."""
        os.close(self._file)


class Regions:
    """The shard's side: regions that clients have offered, until their connections end."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._maps)

    def attach(self, name: str, file: int) -> bool:
        """Map a region; False where its owner could shrink it, or it is none, or too many are."""
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                return False
            size = os.fstat(file).st_size
            if not 0 < size <= MOST_BYTES:
                return False
            memory = mmap.mmap(file, size, _MAPPED)
        except OSError:
            return False
        with self._lock:
            if name in self._maps or len(self._maps) >= _MOST:
                return False
            self._maps[name] = memory
        return True

    def detach(self, name: str) -> None:
        """Its client does not use it any more."""
        with self._lock:
            self._maps.pop(name, None)

    def view(self, name: str, offset: int, size: int) -> memoryview:
        """Some bytes of a region.

        Raises:
            NotAttachedError: it was not attached, or is not any more.
            TableError: it has no such bytes.
        """
        with self._lock:
            memory = self._maps.get(name)
        if memory is None:
            raise NotAttachedError(f"shared memory {name[:60]!r} is not attached to this shard")
        if offset + size > len(memory):
            raise TableError(
                f"shared memory {name!r}: bytes {offset} to {offset + size}; it has {len(memory)}"
            )
        return memoryview(memory)[offset : offset + size]
