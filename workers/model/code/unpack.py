"""Unpacking an archive that somebody else made: plain files and folders, inside, within limits."""

import gzip
import os
import shutil
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import IO, BinaryIO, cast

from chassis.files import lacks_room

_CHUNK = 1 << 20


class ArchiveError(ValueError):
    """An archive that is refused; nothing of it is left on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an archive may take.

    Attributes:
        most_bytes: unpacked, with the archive's own headers.
        files: and folders.
        path_bytes: of a member's path.
        depth: of folders.
    """

    most_bytes: int = 64 << 20
    files: int = 20_000
    path_bytes: int = 400
    depth: int = 32


def unpack(archive: Path, folder: Path, limits: Limits) -> None:
    """Unpack a .tar.gz into a folder, which appears once all of it is there.

    Owner and times are ours, modes 0644 or 0755: no setuid, no devices, no links of any kind.

    Args:
        archive: the file.
        folder: to be made.
        limits: beyond which it is refused.

    Raises:
        ArchiveError: it is refused or damaged, naming the member.
        OSError: there is no room for it.
    """
    temporary = folder.with_name(f".{folder.name}.{token_hex(4)}")
    temporary.mkdir(parents=True, mode=0o755)
    try:
        with archive.open("rb") as packed, gzip.GzipFile(fileobj=packed, mode="rb") as stream:
            bounded = cast(BinaryIO, _Bounded(stream, limits))
            _unpack(bounded, temporary, limits)
            while bounded.read(_CHUNK):  # the checksum comes last
                pass
        os.replace(temporary, folder)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeError) as error:
        raise ArchiveError(f"not a .tar.gz archive, or a damaged one: {error}") from None
    except OSError as error:
        if lacks_room(error):
            raise
        raise ArchiveError(f"cannot be unpacked: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Bounded:
    """Counts what is decompressed: a small file may say it holds terabytes, and hold them."""

    def __init__(self, stream: gzip.GzipFile, limits: Limits) -> None:
        self._stream = stream
        self._most = limits.most_bytes + 2048 * (limits.files + 1)  # with the headers
        self._count = 0
        self._limits = limits

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(min(size, _CHUNK) if size >= 0 else _CHUNK)
        self._count += len(data)
        if self._count > self._most:
            raise ArchiveError(f"over {self._limits.most_bytes} bytes unpacked")
        return data


def _unpack(stream: BinaryIO, folder: Path, limits: Limits) -> None:
    seen: set[str] = set()
    count = total = 0
    # As a stream: each member is looked at and written before the next one is read.
    with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as archive:
        for member in archive:
            count += 1
            if count > limits.files:
                raise ArchiveError(f"over {limits.files} files and folders")
            path = _path(member, limits)
            if str(path) in seen:
                raise ArchiveError(f"{_shown(member)}: comes twice")
            seen.add(str(path))
            target = folder / path
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True, mode=0o755)
                continue
            if not member.isreg() or member.issparse():
                raise ArchiveError(f"{_shown(member)}: {_kind(member)}; expected files and folders")
            total += member.size
            if member.size < 0 or total > limits.most_bytes:
                raise ArchiveError(f"over {limits.most_bytes} bytes unpacked")
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            content = archive.extractfile(member)
            assert content is not None
            mode = 0o755 if member.mode & 0o100 else 0o644
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(target, flags, mode), "wb") as output:
                shutil.copyfileobj(content, output, _CHUNK)
                if output.tell() != member.size:
                    raise ArchiveError(f"{_shown(member)}: cut off")


def _path(member: tarfile.TarInfo, limits: Limits) -> PurePosixPath:
    """Where a member goes, relative to the folder.

    Raises:
        ArchiveError: outside, or too long.
    """
    name = member.name
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or "\\" in name:
        raise ArchiveError(f"{_shown(member)}: leads out of the folder")
    if not path.parts:
        if member.isdir():
            return path
        raise ArchiveError(f"{_shown(member)}: no name")
    if len(os.fsencode(name)) > limits.path_bytes or len(path.parts) > limits.depth:
        raise ArchiveError(
            f"{_shown(member)}: a path of {len(os.fsencode(name))} bytes and {len(path.parts)} "
            f"parts; expected at most {limits.path_bytes} and {limits.depth}"
        )
    return path


def _shown(member: tarfile.TarInfo) -> str:
    return repr(member.name[:80])


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym():
        return f"a symbolic link to {member.linkname[:80]!r}"
    if member.islnk():
        return f"a hard link to {member.linkname[:80]!r}"
    if member.isdev():
        return "a device or pipe"
    return f"a member of type {member.type!r}"
