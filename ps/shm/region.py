"""Payloads in memory that a client and a shard of one host share.

The client makes a file in /dev/shm, the shard maps it, and messages then carry offsets. A shard
takes only files of that folder, of that name, of its own user and closed to others, so that a
request can name no other memory; and it must find a secret in it, so that a file of the same
name on another host is not mistaken for it.
"""

import contextlib
import mmap
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict

from ps.errors import NotAttachedError, TableError

FOLDER = "/dev/shm"
_NAME = re.compile(r"heterps-[0-9a-f]{32}")
_NONCE = 32
_LINE = 64  # bytes of the cache
# All pages at once: a fault for each costs more than the copying.
_MAPPED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_MOST = 256  # regions a shard keeps mapped; the least recently used goes


def aligned(offset: int) -> int:
    """The next offset in a region at which rows do not begin within a line of the cache."""
    return offset + -(_NONCE + offset) % _LINE


class Region:
    """The client's side: a block of shared memory of a fixed size."""

    def __init__(self, size: int) -> None:
        self.name = f"heterps-{secrets.token_hex(16)}"
        self.nonce = secrets.token_bytes(_NONCE)
        self.size = size
        path = f"{FOLDER}/{self.name}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(path, flags, 0o600)
        try:
            os.posix_fallocate(file, 0, _NONCE + size)  # a full /dev/shm fails here, not by SIGBUS
            self._map = mmap.mmap(file, _NONCE + size, _MAPPED)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        self._map[:_NONCE] = self.nonce
        self._linked = True

    def view(self, offset: int, size: int) -> memoryview:
        """Some of its bytes."""
        return memoryview(self._map)[_NONCE + offset : _NONCE + offset + size]

    def unlink(self) -> None:
        """Take its name away, once the shard has mapped it: it then ends with its users."""
        if self._linked:
            self._linked = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{FOLDER}/{self.name}")


class Regions:
    """The shard's side: regions that clients have offered."""

    def __init__(self) -> None:
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def attach(self, name: str, nonce: bytes) -> bool:
        """Map a region; False where it is not this host's, user's or any at all."""
        if not _NAME.fullmatch(name) or len(nonce) != _NONCE:
            return False
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(f"{FOLDER}/{name}", flags)
        except OSError:
            return False
        try:
            info = os.fstat(file)
            ours = info.st_uid == os.geteuid() and stat.S_IMODE(info.st_mode) == 0o600
            if not (ours and stat.S_ISREG(info.st_mode) and info.st_size > _NONCE):
                return False
            memory = mmap.mmap(file, info.st_size, _MAPPED)
        except (OSError, ValueError):
            return False
        finally:
            os.close(file)
        if not secrets.compare_digest(memory[:_NONCE], nonce):
            return False
        with self._lock:
            self._maps[name] = memory
            while len(self._maps) > _MOST:
                self._maps.popitem(last=False)
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
            if memory is not None:
                self._maps.move_to_end(name)
        if memory is None:
            raise NotAttachedError(f"shared memory {name[:60]!r} is not attached to this shard")
        if offset + size > len(memory) - _NONCE:
            raise TableError(
                f"shared memory {name!r}: bytes {offset} to {offset + size}; it has "
                f"{len(memory) - _NONCE}"
            )
        return memoryview(memory)[_NONCE + offset : _NONCE + offset + size]
