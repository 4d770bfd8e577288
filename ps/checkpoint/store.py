"""Where checkpoints lie: a directory, or any place that fsspec can reach (s3://, gs://, ...).

A save writes files under names that nobody uses yet and replaces one small file, the manifest,
last and in one step. That needs no renaming of directories, which object stores lack.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from chassis.files import make_folder, open_regular, replace_file, sync_folder
from ps.errors import CheckpointError

_LOCK = ".lock"
_LOCK_S, _LOOK_S = 10.0, 0.02
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that have none


@dataclass(frozen=True, slots=True)
class Written:
    """What was written."""

    bytes: int
    sha256: str


class Store(Protocol):
    """A folder of files. Names may contain one slash."""

    @property
    def url(self) -> str:
        """The place, as `open_store` takes it."""
        ...

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        """Write a new file and wait until it is safe."""
        ...

    def replace(self, name: str, data: bytes | memoryview) -> None:
        """Put a small file in the place of an old one, in one step."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open for reading.

        Raises:
            OSError: it is not there, is no regular file, or cannot be read.
        """
        ...

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            OSError: it is not there.
        """
        ...

    def entries(self) -> list[str]:
        """Names of files and folders in it; none when it does not exist."""
        ...

    def remove(self, folder: str) -> None:
        """Remove a folder and what is in it; safe to repeat."""
        ...

    def alone(self) -> AbstractContextManager[bool]:
        """Keep other writers out for a moment; False where a store has no such thing.

        Raises:
            CheckpointError: another one stays in for too long.
        """
        ...


class LocalStore:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def url(self) -> str:
        """Its absolute path."""
        return str(self._root)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        """See Store."""
        path = self._root / name
        make_folder(path.parent)
        digest, size = hashlib.sha256(), 0
        with path.open("wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(path.parent)
        sync_folder(self._root)
        return Written(size, digest.hexdigest())

    def replace(self, name: str, data: bytes | memoryview) -> None:
        """See Store."""
        make_folder(self._root)
        replace_file(self._root / name, data, durable=True)

    def open(self, name: str) -> BinaryIO:
        """See Store."""
        return open_regular(self._root / name)

    def size(self, name: str) -> int:
        """See Store."""
        return (self._root / name).stat().st_size

    def entries(self) -> list[str]:
        """See Store."""
        return sorted(os.listdir(self._root)) if self._root.is_dir() else []

    def remove(self, folder: str) -> None:
        """See Store."""
        path = self._root / folder
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """See Store. The kernel lets go of the lock when its holder dies, however that dies."""
        make_folder(self._root)
        lock = self._root / _LOCK
        limit = time.monotonic() + _LOCK_S
        while True:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                locked = self._lock(descriptor, limit)
                if not _is_at(descriptor, lock):  # whoever had it before has removed it
                    continue
                try:
                    yield locked
                    return
                finally:
                    lock.unlink(missing_ok=True)
                    if locked:  # a child that was forked meanwhile has it open too
                        fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                os.close(descriptor)

    def _lock(self, descriptor: int, limit: float) -> bool:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise CheckpointError(
                        f"{self._root}: another process has kept it locked for {_LOCK_S:g} s while "
                        "it replaces what is there; nothing was changed, try again"
                    ) from None
                time.sleep(_LOOK_S)
            except OSError as error:
                if error.errno in NO_LOCKS:
                    return False
                raise


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still names the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
