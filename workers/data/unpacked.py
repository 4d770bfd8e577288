"""Compressed tars, of which there is a plain copy in the cache folder, as of files at a URL.

What is compressed can only be read from its beginning, and samples are read in any order. So a tar
is unpacked once a host, under a lock, and again where the copy has made room for others. All of it
is read, and its checksums with it, before the copy has its name.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from chassis import written
from workers.data.errors import DataError
from workers.data.remote import LIMIT, alone, cache_folder, cache_limit, make_room

COMPRESSIONS: Final = {
    ".tar.gz": "gzip",
    ".tgz": "gzip",
    ".tar.zst": "zstd",
    ".tar.bz2": "bz2",
}
_COPY: Final = "copy.tar"
_STEP: Final = 1 << 14  # bytes: so near to where one is cut short members are known
_ROOM: Final = 64 << 20  # bytes, after which there has to be room for as many again


class CutShortError(Exception):
    """What is compressed ends, or is damaged, in the middle.

    Attributes:
        copy: what could be read of it.
    """

    def __init__(self, copy: Path, reason: str) -> None:
        super().__init__(reason)
        self.copy = copy


def plain(path: Path) -> Path:
    """A file that can be read anywhere: itself, or its copy, which stays for an hour at least.

    Raises:
        CutShortError: it is damaged.
        DataError: there is no room for the copy.
    """
    compression = next((c for end, c in COMPRESSIONS.items() if path.name.endswith(end)), "")
    if not compression:
        return path
    status = path.stat()
    identity = f"unpacked\n{path.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
    cache = cache_folder()
    written.claim(cache)
    folder = cache / hashlib.sha256(identity.encode()).hexdigest()[:32]
    target = folder / _COPY
    folder.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        with alone(folder):
            if not target.exists():
                _unpack(path, compression, target)
    os.utime(folder)
    return target


def _unpack(path: Path, compression: str, target: Path) -> None:
    partial, limit, size = target.with_name(".partial"), cache_limit(), 0
    try:
        with partial.open("wb") as copy:
            for content in _parts(path, compression, partial):
                if size // _ROOM != (size + len(content)) // _ROOM or not size:
                    make_room(size + _ROOM, target.parent)
                size += len(content)
                if size > limit:
                    expected = f"at most {limit} bytes of it unpacked, or a larger {LIMIT}"
                    raise DataError(str(path), "contents", f"{size} bytes or more", expected)
                copy.write(content)
        os.replace(partial, target)
    except OSError as error:
        free = shutil.disk_usage(target.parent).free
        partial.unlink(missing_ok=True)
        expected = f"room for it unpacked in {target.parent.parent}, where {free} bytes are free"
        raise DataError(str(path), "contents", str(error), expected) from error
    except DataError:
        partial.unlink(missing_ok=True)
        raise


def _parts(path: Path, compression: str, partial: Path) -> Iterator[bytes]:
    source = pa.input_stream(str(path), compression=compression)
    with source:
        while True:
            try:
                content: bytes = source.read(_STEP)
            except (OSError, pa.ArrowException) as error:
                raise CutShortError(partial, str(error).splitlines()[0][:200]) from error
            if not content:
                return
            yield content
