"""The file by which a shard holds its directory: locked while it lives, it says how far its log is.

A log that has lost its end looks like one that was never longer, so what was acknowledged last is
told here too. It is never told too early: what a loss of power takes of this file makes it lag.
"""

import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from chassis.scratch import try_lock
from ps.checkpoint.store import NO_LOCKS
from ps.errors import CheckpointError

_NAME = ".shard"
_REACHED = struct.Struct("<QQ")  # number of the log's newest file, bytes of it
_CRC = struct.Struct("<I")
_BYTES = _REACHED.size + _CRC.size


class Holding:
    """A shard's directory, held until `close`, or the end of the process.

    Attributes:
        reached: number of the newest file of the log as the last shard here left it, and the bytes
            of it that were acknowledged; None where that is not known.

    Raises:
        CheckpointError: another shard has it: it would go on in files of its own, and each would
            forget what the other one acknowledges.
    """

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._map: mmap.mmap | None = None
        try:
            _lock(self._file, directory)
            self.reached = _parsed(os.pread(self._file, _BYTES, 0))
            with suppress(OSError):  # a full disk: nothing is told
                os.posix_fallocate(self._file, 0, _BYTES)
                self._map = mmap.mmap(self._file, _BYTES)
        except BaseException:
            self.close()
            raise

    def reach(self, number: int, size: int) -> None:
        """So many bytes of the log's file are safe."""
        if self._map is not None:
            told = _REACHED.pack(number, size)
            self._map[:_BYTES] = told + _CRC.pack(crc32(told))

    def close(self) -> None:
        """Let go of it."""
        if self._map is not None:
            self._map.close()
        os.close(self._file)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        free = try_lock(descriptor)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return
    if not free:
        raise CheckpointError(
            f"{directory}: another process has it; expected the directory of this shard alone"
        )


def _parsed(data: bytes) -> tuple[int, int] | None:
    told, crc = data[: _REACHED.size], data[_REACHED.size :]
    if len(data) != _BYTES or crc != _CRC.pack(crc32(told)):
        return None
    number, size = _REACHED.unpack(told)
    return number, size
