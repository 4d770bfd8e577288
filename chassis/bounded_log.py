"""A log file that cannot grow without end, whatever the process behind it prints."""

import os
import re
import threading
from pathlib import Path
from typing import IO

from chassis.files import replace_file

LINE_BYTES = 64 << 10
TOTAL_BYTES = 64 << 20
_CHUNK = 64 << 10
_BREAK = re.compile(rb"[\r\n]")


class BoundedLog:
    """Takes in what processes print; keeps the end of it in one file.

    Offsets count every byte that was taken in, so a reader's place holds when the beginning goes.

    Args:
        path: the file; what it holds already stays.
        line_bytes: a longer line is cut, with a note.
        total_bytes: of the file; beyond it the older three quarters go, with a note.
    """

    def __init__(
        self, path: Path, line_bytes: int = LINE_BYTES, total_bytes: int = TOTAL_BYTES
    ) -> None:
        self.path = path
        self._line_bytes = line_bytes
        self._total_bytes = total_bytes
        self._lock = threading.Lock()
        self._first = 0  # offset of the file's first byte
        self._size = path.stat().st_size if path.exists() else 0
        self._line = 0  # bytes of the line under way
        self._cut = 0  # of them, not kept

    def pump(self, source: IO[bytes]) -> threading.Thread:
        """Take in all that `source` gives, on a thread of its own, which ends with it."""
        thread = threading.Thread(target=self._pump, args=(source,), name="log", daemon=True)
        thread.start()
        return thread

    def write(self, data: bytes) -> None:
        """Take in some bytes."""
        with self._lock:
            kept = self._shortened(data)
            if not kept:
                return
            with self.path.open("ab") as file:
                file.write(kept)
            self._size += len(kept)
            if self._size > self._total_bytes:
                self._drop()

    def read(self, offset: int, limit: int) -> tuple[bytes, int, bool]:
        """Bytes from `offset`, or from what is left behind it; the next offset; whether it is all.

        An offset beyond the end is taken for the end.
        """
        with self._lock:
            start = min(max(offset - self._first, 0), self._size)
            data = b""
            if self._size:
                with self.path.open("rb") as file:
                    file.seek(start)
                    data = file.read(min(limit, self._size - start))
            end = start + len(data)
            return data, self._first + end, end >= self._size

    def _pump(self, source: IO[bytes]) -> None:
        with source:
            while data := os.read(source.fileno(), _CHUNK):
                try:
                    self.write(data)
                except OSError:  # a full disk, a folder that is gone: the process goes on
                    continue

    def _shortened(self, data: bytes) -> bytes:
        """What is to be kept of `data`, by the length of the lines."""
        parts: list[bytes] = []
        position = 0
        while position < len(data):
            found = _BREAK.search(data, position)
            end = found.start() if found is not None else len(data)
            room = max(0, self._line_bytes - self._line)
            parts.append(data[position : min(end, position + room)])
            self._cut += max(0, end - position - room)
            self._line += end - position
            position = end
            if found is not None:
                if self._cut:
                    parts.append(b" [%d bytes of this line were cut]" % self._cut)
                parts.append(found.group())
                self._line = self._cut = 0
                position += 1
        return b"".join(parts)

    def _drop(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._size - self._total_bytes // 4)
            kept = file.read()
        gone = self._first + self._size - len(kept)
        note = b"[%d bytes before this were dropped]\n" % gone
        replace_file(self.path, note + kept)
        self._first = gone - len(note)
        self._size = len(note) + len(kept)
