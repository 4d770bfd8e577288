"""Files that appear whole or not at all: written aside, then put in the place of the old one."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from secrets import token_hex


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; what is there at the end takes the place of `path`.

    On an error the old file stays, and nothing is left beside it.
    """
    unfinished = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def lacks_room(error: OSError) -> bool:
    """Whether something cannot be written for want of room: on the disk, by a quota or a limit."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def replace_file(
    path: Path,
    content: bytes | memoryview | str,
    *,
    private: bool = False,
    durable: bool = False,
    owner: int | None = None,
) -> None:
    """Put `content` in the place of a file, in one step; text as UTF-8.

    Args:
        private: readable by its owner alone, from the first byte on.
        durable: return once it would outlast a loss of power.
        owner: number of the user and group to give it to; root alone may.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    data = content.encode() if isinstance(content, str) else content
    mode = 0o600 if private else 0o666
    with aside(path) as unfinished:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(unfinished, flags, mode), "wb") as stream:
            stream.write(data)
            if owner is not None:
                os.fchown(stream.fileno(), owner, owner)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
    if durable:
        sync_folder(path.parent)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """What a file holds that somebody else has written: through no link, of no pipe or device.

    Raises:
        OSError: it is none such, is larger, or cannot be read.
    """
    with open_regular(path, os.O_NOFOLLOW) as stream:
        if os.fstat(stream.fileno()).st_size > most_bytes:
            told = f"expected a file of at most {most_bytes} bytes"
            raise OSError(errno.EOVERFLOW, told, str(path))
        return stream.read(most_bytes)


def open_regular(path: Path, flags: int = 0) -> BufferedReader:
    """Open a file for reading; a pipe or device in its place, which could block for ever, is none.

    Args:
        flags: of `os.open`, besides.

    Raises:
        OSError: it is no regular file, or cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file", str(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, where there are none; they outlast a loss of power.

    Raises:
        OSError: it cannot be made.
    """
    made = [folder, *folder.parents]
    made = made[: next((i for i, path in enumerate(made) if path.is_dir()), len(made))]
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    for path in reversed(made):
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder would outlast a loss of power."""
    _sync(folder, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Wait until what others have written to a file would outlast a loss of power."""
    _sync(path)


def _sync(path: Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
