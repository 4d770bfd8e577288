"""Compressed tars, of which there is a plain copy in the cache folder, as of files at a URL.

What is compressed can only be read from its beginning, and samples are read in any order. So a tar
is unpacked once a host, under a lock, and again where the copy has made room for others. All of it
is read, and its checksums with it, before the copy has its name.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Final

import pyarrow as pa

from workers.data.errors import DataError
from workers.data.files.remote import LIMIT, cache_folder, cache_limit, copy_of, make_room

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
    try:
        return copy_of(identity, _COPY, partial(_unpack, path, compression))
    except OSError as error:
        cache = cache_folder()
        expected = f"room for it unpacked in {cache}, where {disk_usage(cache).free} bytes are free"
        raise DataError(str(path), "contents", str(error), expected) from error


def _unpack(path: Path, compression: str, target: Path) -> None:
    limit, size = cache_limit(), 0
    try:
        with target.open("wb") as copy:
            for content in _parts(path, compression, target):
                if size // _ROOM != (size + len(content)) // _ROOM or not size:
                    make_room(size + _ROOM, target.parent)
                size += len(content)
                if size > limit:
                    expected = f"at most {limit} bytes of it unpacked, or a larger {LIMIT}"
                    raise DataError(str(path), "contents", f"{size} bytes or more", expected)
                copy.write(content)
    except DataError:
        target.unlink(missing_ok=True)
        raise


def _parts(path: Path, compression: str, copy: Path) -> Iterator[bytes]:
    source = pa.input_stream(str(path), compression=compression)
    with source:
        while True:
            try:
                content: bytes = source.read(_STEP)
            except (OSError, pa.ArrowException) as error:
                raise CutShortError(copy, str(error).splitlines()[0][:200]) from error
            if not content:
                return
            yield content
