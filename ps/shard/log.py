"""The write-ahead log of a shard: every change, before it is acknowledged."""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from chassis.files import lacks_room, sync_folder
from protos.codec import payload_prefix
from protos.parameter_server_pb2 import LogRecord
from ps.errors import NoRoomError
from ps.shard import logfile
from ps.shard.ending import end_process
from ps.shard.journal import BehindError, Buffer, Place, nowhere, settle

_log = logging.getLogger("heterps.ps")


class Log:
    """Appends to `directory`/log-NUMBER, a new file; thread-safe.

    A mark follows each record: with `sync` once the disk has it, before the change is
    acknowledged; else at once, since what the kernel has outlives the process.

    Args:
        directory: of the shard.
        number: of the first file.
        before: bytes of the file before it that count.
        older: bytes of all files before it.
        records: in these.
        sync: wait for the disk before a change is acknowledged. Without it what is acknowledged
            survives the death of the process, but not that of the machine.
        fold: makes a base that holds the whole state; told whether the gates are closed already.
        reach: told the present file's number, and how many bytes of it are safe, changes whole.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        *,
        before: int = 0,
        older: int = 0,
        records: int = 0,
        sync: bool = False,
        fold: Callable[[bool], None] = lambda closed: None,
        reach: Callable[[int, int], None] = lambda number, size: None,
    ) -> None:
        self._directory = directory
        self._fold = fold
        self._reach = reach
        self._sync = sync
        self._write = threading.Lock()
        self._flush = threading.Lock()  # taken first where both are
        self._behind = False
        self._older = older
        self.records = records  # that no base has taken in
        self._records_before = 0  # the present file
        self._end = self._safe = self._changed = 0  # the latter: where the last change ends
        self._begin(number, before)

    @property
    def bytes(self) -> int:
        """Size of the files that no base has taken in."""
        return self._older + self._end

    def append(self, kind: str, time_s: int, payload: Buffer, place: Place = nowhere) -> None:
        """See ps.shard.journal.Journal.

        Raises:
            NoRoomError: the disk has none.
            OSError: it cannot be written.
        """
        record = _Record.of(kind, time_s, payload)
        with self._write:
            if self._behind:
                raise BehindError("the log lacks what was before this change")
            self._put(record)
            self.records += 1
            settle(place)
            end = self._end
        if self._sync:
            with self._flush:  # one wait serves all that were written before it
                if self._safe < end:
                    self._wait_for_disk()

    def check(self) -> None:
        """See ps.shard.journal.Journal: whether there is room is asked of the whole folder."""

    def fall_behind(self) -> None:
        """See ps.shard.journal.Journal."""
        self._behind = True

    def renew(self, *, closed: bool = False, behind: bool = False) -> None:
        """See ps.shard.journal.Journal."""
        if self._behind or not behind:
            self._behind = True  # until a base has it
            self._fold(closed)
            self._behind = False

    def rotate(self, opening: Iterable[tuple[str, int, Buffer]]) -> int:
        """Go on in a new file; its number. No append may be under way.

        Args:
            opening: kind, time and payload of what the file begins with.
        """
        with self._flush, self._write:
            if self._sync:
                self._sync_file()
            file, ended = self._file, self._end
            self._begin(self.number + 1, ended)
            self._older += ended
            self._records_before = self.records
            os.close(file)
            for kind, time_s, payload in opening:
                self._put(_Record.of(kind, time_s, payload))
            self._sync_file()  # a base will go on from it
            self._safe = self._end
            self._reach(self.number, self._changed)
            return self.number

    def remove_before(self, number: int) -> None:
        """Remove the files that a base has taken in."""
        for path, found in logfile.paths(self._directory):
            if found < number:
                path.unlink(missing_ok=True)
        self._older = 0
        self.records -= self._records_before
        self._records_before = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _begin(self, number: int, before: int) -> None:
        """Begin a file; its header is on the disk before anything follows."""
        header = logfile.new_header(number, before)
        path = self._directory / logfile.name_of(number)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(file, [header.pack()], 0)
            os.fsync(file)
            sync_folder(self._directory)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        self._file, self.number, self._salt = file, number, header.salt
        self._end = self._safe = self._changed = logfile.HEADER_BYTES
        self._reach(number, self._changed)

    def _put(self, record: "_Record") -> None:
        """Write a frame, and where nobody waits for the disk its mark, at the end of the file."""
        at = self._end
        safe = self._safe if self._sync else at
        head = logfile.pack_head(self._salt, at, safe, record.size, record.checksum)
        parts = [head, *record.parts, bytes(logfile.padding_of(record.size))]
        changed = end = at + sum(map(len, parts))
        if not self._sync:
            parts.append(logfile.pack_head(self._salt, end, end))
            end += logfile.HEAD_BYTES
        try:
            _write_all(self._file, parts, at)
        except OSError as error:
            with suppress(OSError):  # the next one is written over it
                os.ftruncate(self._file, at)
            if lacks_room(error):
                raise NoRoomError(
                    f"{self._directory}: {error.strerror}: the log cannot take this change"
                ) from None
            raise
        self._end, self._changed = end, changed
        if not self._sync:
            self._reach(self.number, changed)

    def _wait_for_disk(self) -> None:
        reached, changed = self._end, self._changed
        self._sync_file()
        self._safe = reached
        self._reach(self.number, changed)
        with self._write, suppress(OSError):  # the next head says so too
            mark = logfile.pack_head(self._salt, self._end, reached)
            _write_all(self._file, [mark], self._end)
            self._end += logfile.HEAD_BYTES

    def _sync_file(self) -> None:
        try:
            os.fdatasync(self._file)
        except OSError as error:
            # The kernel forgets what it could not write: another try would succeed without it.
            end_process("%s: the disk did not take the log: %r", self._directory, error)


@dataclass(frozen=True, slots=True)
class _Record:
    """A record's bytes, their number, and their CRC-32."""

    parts: tuple[Buffer, Buffer]
    size: int
    checksum: int

    @classmethod
    def of(cls, kind: str, time_s: int, payload: Buffer) -> "_Record":
        prefix = payload_prefix(LogRecord(kind=kind, time_s=time_s), len(payload))
        body = memoryview(payload).cast("B")
        return cls((prefix, body), len(prefix) + len(body), crc32(body, crc32(prefix)))


def _write_all(file: int, parts: Iterable[Buffer], offset: int) -> None:
    views = [memoryview(part) for part in parts if len(part)]
    while views:
        done = os.pwritev(file, views, offset)
        offset += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if done:
            views[0] = views[0][done:]
