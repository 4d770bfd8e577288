"""One file of a shard's log: how its bytes are laid out, and which of them can be believed.

A header, then frames: a head and a body, a heterps.v1.LogRecord, padded to 8 bytes. A head says
where it lies, how long its body is, and up to which byte the file was safe when it was written; a
frame without a body is a mark, which says the latter alone. Heads have a checksum of their own,
begun with a number that only this file has, so that no length is believed unchecked and no body
is taken for a head.

A crash leaves whole frames and then anything: no mark speaks of that, it was never acknowledged,
and it is left out. Where a later head says that a frame was safe, or a later file that this one
was longer, what cannot be read was acknowledged: that is damage.
"""

import os
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import numpy as np
from google.protobuf.message import DecodeError

from protos.codec import unpack
from protos.parameter_server_pb2 import LogRecord

# Of a file: magic, number, bytes of the file before it, salt; then the CRC-32 of these.
_HEADER = struct.Struct("<8sQQI")  # 28 bytes: with the CRC, a multiple of 8
_HEADER_CRC = struct.Struct("<I")
_MAGIC = b"HPSLOG2\n"
HEADER_BYTES = _HEADER.size + _HEADER_CRC.size
# Of a frame: CRC-32 of the rest of the head, then that of the body, where it lies, what is safe,
# bytes of the body.
_HEAD = struct.Struct("<IIQQQ")
HEAD_BYTES = _HEAD.size
_ALIGNED = 8
_SCANNED = 8 << 20  # bytes looked through at a time


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Attributes:
        number: of the file.
        before: bytes of the file before it that count; what lies behind them was never
            acknowledged.
        salt: of the checksums of its heads.
    """

    number: int
    before: int
    salt: int

    def pack(self) -> bytes:
        """Its bytes."""
        packed = _HEADER.pack(_MAGIC, self.number, self.before, self.salt)
        return packed + _HEADER_CRC.pack(crc32(packed))


def pack_head(salt: int, at: int, safe: int, size: int = 0, body_crc: int = 0) -> bytes:
    """The head of a frame; without a body, a mark.

    Args:
        salt: of the file.
        at: where the head lies.
        safe: the bytes of the file that are.
        size: of the body.
        body_crc: its CRC-32.
    """
    head = _HEAD.pack(0, body_crc, at, safe, size)
    return struct.pack("<I", crc32(head[4:], salt)) + head[4:]


def padding_of(size: int) -> int:
    """The bytes between a body of that size and the next head."""
    return -size % _ALIGNED


@dataclass(frozen=True, slots=True)
class _Head:
    body_crc: int
    at: int
    safe: int
    size: int

    @property
    def end(self) -> int:
        return self.at + HEAD_BYTES + self.size + padding_of(self.size)


@dataclass(slots=True)
class Lost:
    """What lies behind damage: bytes, and the whole records among them, by kind."""

    bytes: int = 0
    records: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.records.items()))
        return f"{self.bytes} bytes, with {kinds or 'no'} whole records"


class DamagedFileError(Exception):
    """A file lacks what was acknowledged.

    Attributes:
        at: the first byte that lacks, or cannot be read.
    """

    def __init__(self, path: Path, at: int, why: str) -> None:
        super().__init__(f"{path}: {why} at byte {at}")
        self.at = at


class LogFile:
    """A file that is read.

    Attributes:
        header: None where the file was begun and not finished: nothing was written to it.
        good: the bytes that have been read and found whole.

    Raises:
        DamagedFileError: its header cannot be read, and more follows.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self.size = path.stat().st_size
        self.good = 0
        with path.open("rb") as stream:
            self.header = _header_of(stream.read(HEADER_BYTES), number)
        if self.header is None and self.size > HEADER_BYTES:
            raise DamagedFileError(path, 0, "damaged")

    def records(self, end: int | None) -> Iterator[tuple[LogRecord, memoryview]]:
        """The records, with their payloads.

        Args:
            end: where the file ends, as the next one says; None: nothing was written after it.

        Raises:
            DamagedFileError: what was acknowledged is not all there.
        """
        if self.header is None:
            return
        safe = self.good = HEADER_BYTES
        with self.path.open("rb") as stream:
            stream.seek(self.good)
            while end is None or self.good < end:
                frame = self._read(stream)
                if frame is None:
                    break
                head, record = frame
                safe = max(safe, head.safe)
                self.good = head.end
                if record is not None:
                    yield record
        if end is None:
            safe = max([safe, *(head.safe for head in self._heads(self.good))])
        if (end is not None and self.good != end) or safe > self.good:
            raise DamagedFileError(self.path, self.good, "damaged")

    def lost(self) -> Lost:
        """What lies behind what was found good."""
        found = Lost(self.size - self.good)
        with self.path.open("rb") as stream:
            for head in self._heads(self.good):
                stream.seek(head.at)
                frame = self._read(stream)
                if frame is not None and frame[1] is not None:
                    found.records[frame[1][0].kind] += 1
        return found

    def _read(self, stream: BinaryIO) -> tuple[_Head, tuple[LogRecord, memoryview] | None] | None:
        """The frame here, and its record, if it is whole."""
        head = self._head(stream.read(HEAD_BYTES), stream.tell() - HEAD_BYTES)
        if head is None:
            return None
        if head.size == 0:
            return head, None
        body = stream.read(head.size)
        stream.seek(head.end)
        if crc32(body) != head.body_crc:
            return None
        try:
            return head, unpack(LogRecord, body)
        except DecodeError:
            return None

    def _head(self, data: bytes, at: int) -> _Head | None:
        """The head that lies at `at`, if these bytes are one."""
        assert self.header is not None
        if len(data) != HEAD_BYTES:
            return None
        checksum, body_crc, told, safe, size = _HEAD.unpack(data)
        if told != at or checksum != crc32(data[4:], self.header.salt):
            return None
        head = _Head(body_crc, at, safe, size)
        return head if head.end <= self.size else None

    def _heads(self, start: int) -> Iterator[_Head]:
        """Whatever heads there are from `start` on: each lies at a multiple of 8 and says where."""
        if self.header is None:
            return
        start += -start % _ALIGNED
        with self.path.open("rb") as stream:
            for begin in range(start, self.size, _SCANNED):
                stream.seek(begin)
                data = stream.read(_SCANNED + HEAD_BYTES)
                words = np.frombuffer(data, "<u8", len(data) // _ALIGNED)
                places = begin + _ALIGNED * np.arange(len(words), dtype=np.uint64)
                for word in np.flatnonzero(words[1:] == places[:-1]).tolist():
                    at = word * _ALIGNED
                    if at < _SCANNED:
                        head = self._head(data[at : at + HEAD_BYTES], begin + at)
                        if head is not None:
                            yield head


def _header_of(data: bytes, number: int) -> Header | None:
    if len(data) < HEADER_BYTES or data[:8] != _MAGIC:
        return None
    header = Header(*_HEADER.unpack(data[: _HEADER.size])[1:])
    return header if header.number == number and header.pack() == data else None


def new_header(number: int, before: int) -> Header:
    """The header of a new file."""
    return Header(number, before, int.from_bytes(os.urandom(4), "little"))


def name_of(number: int) -> str:
    """A file's name."""
    return f"log-{number:08d}"


def paths(directory: Path) -> list[tuple[Path, int]]:
    """The files there are, oldest first, with their numbers."""
    found = []
    for path in directory.glob("log-*"):
        number = path.name.removeprefix("log-")
        if number.isdigit():
            found.append((path, int(number)))
    return sorted(found, key=lambda pair: pair[1])
