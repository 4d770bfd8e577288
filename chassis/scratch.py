"""Folders of this user that go with who uses them, however that ends.

One is shared by the processes of a job on one host, and goes when the job does.

A node names it in its children's environment and removes it at the job's end. Each process that
uses it holds a lock in it, so that of several nodes on a host the last one removes it, and a node
that starts later sees what those that were killed have left. All of it belongs to one user, and
nobody else may look in.
"""

import fcntl
import logging
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

VARIABLE = "HETERPS_SCRATCH"
_LOCK = ".lock"
_POLL_S = 0.01
_log = logging.getLogger("heterps.scratch")
_held: dict[Path, int] = {}  # folder -> descriptor whose lock lasts as long as this process


def folder_of(job_id: str, attempt: int) -> Path:
    """Where an attempt's processes on this host meet, whichever node started them."""
    return _root() / f"{job_id}.{attempt}"


def own() -> Path | None:
    """The folder named in the environment, in use from now on; None where none can be had."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    folder = Path(named)
    try:
        _hold(folder)
    except OSError as error:
        _log.warning("no folder to share: %s", error)
        return None
    return folder


def temporary(kind: str) -> Path:
    """A new folder of this process's; to be removed by `discard`, or, was it killed, by a `sweep`.

    Raises:
        OSError: it cannot be made.
    """
    folder = _root() / f"{kind}-{secrets.token_hex(4)}"
    _hold(folder)
    return folder


def discard(folder: Path) -> None:
    """Remove a folder of `temporary`'s; safe to repeat."""
    held = _held.pop(folder, None)
    if held is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def once(path: Path, make: Callable[[Path], None]) -> None:
    """Have a file written by one of the processes that want it, while the others wait.

    Args:
        make: writes the file at the path that it is given. One that is killed is replaced.

    Raises:
        OSError: the file cannot be written. Whatever `make` raises.
    """
    while not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{path}.lock").open("w") as lock:
            if not try_lock(lock.fileno()):
                time.sleep(_POLL_S)
                continue
            if path.exists():
                return
            unfinished = Path(f"{path}.unfinished")  # of one name: what was left is overwritten
            try:
                make(unfinished)
                os.replace(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)


def own_alone(folder: Path) -> Path:
    """Make a folder of this user alone, or see that it is one; its path.

    For folders of a name that others can guess, where others can write: who made it first may read
    and change what is in it.

    Raises:
        PermissionError: it is another's, others may look into it, or it is a link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.getuid() or not private:
        raise PermissionError(f"{folder}: expected a folder that is this user's alone")
    return folder


def try_lock(descriptor: int) -> bool:
    """Lock an open file against every other opening of it; whether it was free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_unused(folder: Path) -> None:
    """Remove an attempt's folder, unless some process still uses it."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        if try_lock(descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def sweep() -> None:
    """Remove the folders of this user that no process uses: whoever should have was killed."""
    with suppress(OSError):
        for folder in list(_root().iterdir()):
            remove_unused(folder)


def _hold(folder: Path) -> None:
    held = _held.get(folder)
    if held is not None and _is_there(folder, held):
        return
    if folder.parent == _root():
        own_alone(folder.parent)
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # somebody swept it between two lines
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_there(folder, descriptor):
                if held is not None:
                    os.close(held)
                _held[folder] = descriptor
                return
            os.close(descriptor)


def _is_there(folder: Path, descriptor: int) -> bool:
    """Whether the lock that is held is the one that others would find."""
    try:
        found = os.stat(folder / _LOCK)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def _root() -> Path:
    # By host too: a temporary folder may lie on a disk that several share.
    return Path(tempfile.gettempdir(), f"heterps-{os.getuid()}-{socket.gethostname()}")
