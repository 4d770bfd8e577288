"""The write-ahead log of a shard: every change, before it is acknowledged.

A record: CRC-32 of what follows (uint32), its length (uint64), then a heterps.v1.LogRecord. A
record that was cut short by a crash was never acknowledged, and ends the log.
"""

import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

from google.protobuf.message import DecodeError

from chassis.files import sync_folder
from protos.codec import payload_prefix, unpack
from protos.parameter_server_pb2 import LogRecord
from ps.errors import CheckpointError
from ps.shard.journal import Buffer

_HEAD = struct.Struct("<IQ")
_log = logging.getLogger("heterps.ps")


class Log:
    """Appends to `directory`/log-NUMBER; thread-safe.

    Args:
        directory: of the shard.
        number: of the first file; one that is there already is continued.
        sync: wait for the disk before a change is acknowledged. Without it what is acknowledged
            survives the death of the process, but not that of the machine.
        fold: makes a base that holds the whole state.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        *,
        sync: bool = False,
        fold: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._fold = fold
        self._sync = sync
        self._write = threading.Lock()
        self._flush = threading.Lock()
        self.number = number
        self._file = self._open(number)
        self._end = os.fstat(self._file).st_size
        self._safe = self._end

    @property
    def bytes(self) -> int:
        """Size of the file in use."""
        return self._end

    def append(self, kind: str, time_s: int, payload: Buffer) -> None:
        """See ps.shard.journal.Journal."""
        prefix = payload_prefix(LogRecord(kind=kind, time_s=time_s), len(payload))
        body = memoryview(payload).cast("B")
        checksum = crc32(body, crc32(prefix))
        size = len(prefix) + len(body)
        parts = [memoryview(_HEAD.pack(checksum, size) + prefix), body]
        with self._write:
            before = self._end
            try:
                _write_all(self._file, parts)
            except OSError:
                os.ftruncate(self._file, before)  # a half record would end the log
                raise
            self._end = end = before + _HEAD.size + size
            file = self._file
        if self._sync:
            with self._flush:  # one wait serves all that were written before it
                if self._safe < end and file == self._file:
                    reached = self._end
                    os.fdatasync(file)
                    self._safe = reached

    def renew(self, *, closed: bool = False, behind: bool = False) -> None:
        """See ps.shard.journal.Journal; a log is never behind."""
        del closed
        if not behind:
            self._fold()

    def rotate(self) -> int:
        """Go on in a new file; its number. No append may be under way."""
        with self._write, self._flush:
            if self._sync:
                os.fdatasync(self._file)
            file = self._open(self.number + 1)
            os.close(self._file)
            self._file, self._end, self._safe = file, 0, 0
            self.number += 1
            return self.number

    def remove_before(self, number: int) -> None:
        """Remove the files that a base has taken in."""
        for path, found in files(self._directory):
            if found < number:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _open(self, number: int) -> int:
        path = self._directory / f"log-{number:08d}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        sync_folder(self._directory)
        return file


def files(directory: Path) -> list[tuple[Path, int]]:
    """The log files there are, oldest first, with their numbers."""
    found = []
    for path in directory.glob("log-*"):
        number = path.name.removeprefix("log-")
        if number.isdigit():
            found.append((path, int(number)))
    return sorted(found, key=lambda pair: pair[1])


def read(path: Path, *, last: bool) -> Iterator[tuple[LogRecord, memoryview]]:
    """The records of a file, with their payloads.

    Args:
        path: of the file.
        last: nothing was written after this file: a record that is cut short is cut off.

    Raises:
        CheckpointError: a record is damaged, and it is not the end of the last file.
    """
    good = 0
    with path.open("rb") as stream:
        while True:
            head = stream.read(_HEAD.size)
            if not head:
                return
            body = b""
            if len(head) == _HEAD.size:
                checksum, size = _HEAD.unpack(head)
                left = os.fstat(stream.fileno()).st_size - stream.tell()
                body = stream.read(size) if size <= left else b""
            if not body or crc32(body) != checksum:
                break
            try:
                record, payload = unpack(LogRecord, body)
            except DecodeError:
                break
            yield record, payload
            good = stream.tell()
    if not last:
        raise CheckpointError(f"{path}: damaged at byte {good}, and later logs go on from it")
    _log.warning("%s: cut off after byte %d: its last record was never finished", path, good)
    os.truncate(path, good)


def _write_all(file: int, parts: list[memoryview]) -> None:
    views = [part for part in parts if len(part)]
    while views:
        done = os.writev(file, views)
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]
