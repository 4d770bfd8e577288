"""Files that survive a crash whole, and directories that are swapped in one step."""

import ctypes
import hashlib
import os
import shutil
from pathlib import Path
from secrets import token_hex

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path, target: Path) -> None:
    """Put `folder` in the place of `target`, so that one of the two is there at any time."""
    if not target.exists():
        os.rename(folder, target)
        sync_directory(target.parent)
        return
    if not exchange(folder, target):  # a file system without the atomic exchange
        old = target.with_name(f"{target.name}.old-{token_hex(4)}")
        os.rename(target, old)
        os.rename(folder, target)
        folder = old
    sync_directory(target.parent)
    shutil.rmtree(folder, ignore_errors=True)


def exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step, where the system can (Linux renameat2)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    code: int = rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    return code == 0
