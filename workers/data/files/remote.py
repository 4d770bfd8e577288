"""Data at a URL that fsspec knows (s3://, gs://, https://, …): copied to this machine once.

The reader wants files that it can map into memory. A copy is made under a lock, so that the
workers of a machine fetch each file once, and is made anew when the file there has changed.
HETERPS_CACHE names the folder, HETERPS_CACHE_BYTES its limit.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, cast

from chassis import scratch, written
from workers.data.errors import DataError

FOLDER, LIMIT = "HETERPS_CACHE", "HETERPS_CACHE_BYTES"
_DEFAULT_LIMIT = 100 << 30
_IN_USE_S = 3600.0  # a copy that was asked for so recently stays
_VERSION = ("etag", "last-modified", "lastmodified", "content-md5", "digest", "mtime", "updated")
_log = logging.getLogger("heterps.data")


def is_url(path: str) -> bool:
    """Whether a `data.path` is for fsspec; file:// is a folder like any other."""
    return "://" in path and not path.startswith("file://")


def copies(url: str, pattern: str, key: str) -> list[Path]:
    """Copies of the files that `pattern` names under `url`, in order of name.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    import fsspec

    try:
        system, root = cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    except (ImportError, ValueError) as error:
        raise DataError("job", "data.path", url, f"a URL that fsspec can read ({error})") from None
    wanted = f"{root.rstrip('/')}/{pattern}"
    try:
        if any(sign in pattern for sign in "*?["):
            found = [_copy(system, name, url) for name in sorted(system.glob(wanted))]
        else:
            found = [_copy(system, wanted, url)]
    except FileNotFoundError:
        found = []
    except Exception as error:  # each file system has errors of its own
        text = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise DataError(f"{url}/{pattern}", key, pattern, f"a file to read ({text})") from error
    if not found:
        raise DataError("job", key, pattern, f"a file or glob at {url}; nothing there matches")
    return found


def _copy(system: Any, name: str, url: str) -> Path:
    """The copy of one file, made if need be."""
    facts = system.info(name)
    size = facts.get("size")
    version = [f"{k}={facts[k]}" for k in sorted(facts, key=str) if str(k).lower() in _VERSION]
    identity = "\n".join([url, name, str(size), *version])

    def fetch(partial: Path) -> None:
        make_room(int(size or 0), partial.parent)
        began = time.monotonic()
        system.get_file(name, str(partial))
        if size is not None and partial.stat().st_size != size:
            raise OSError(f"{partial.stat().st_size} bytes came of {size}")
        _log.info("copied %s, %s bytes in %.1f s", name, size, time.monotonic() - began)

    return copy_of(identity, PurePosixPath(name).name, fetch)


def copy_of(identity: str, name: str, make: Callable[[Path], None]) -> Path:
    """The copy that `identity` stands for, which stays for an hour at least.

    Args:
        name: of the file.
        make: writes it, where there is none; what it raises leaves none.
    """
    cache = cache_folder()
    written.claim(cache)
    folder = cache / hashlib.sha256(identity.encode()).hexdigest()[:32]
    target = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)  # before one looks: what was asked for just now makes no room
    if not target.exists():
        with alone(folder):
            if not target.exists():
                partial = folder / ".partial"  # of one name: a killed worker's is overwritten
                try:
                    make(partial)
                    os.replace(partial, target)
                except OSError:
                    partial.unlink(missing_ok=True)
                    raise
    return target


def cache_folder() -> Path:
    """Where copies are, and what is known of files elsewhere: the first that can be written.

    Raises:
        PermissionError: that is in the folder for temporary files, where another user made one of
            its name, and could change what is trained on.
    """
    named = os.environ.get(FOLDER)
    if named:
        return Path(named).absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heterps" / "data"
    with suppress(OSError):
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    last = Path(tempfile.gettempdir(), f"heterps-data-{os.getuid()}")
    try:
        return scratch.own_alone(last)
    except PermissionError as error:
        raise PermissionError(f"{error}; name another as {FOLDER}") from None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder against the other processes of this machine."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cache_limit() -> int:
    """Bytes that all copies may have."""
    return int(os.environ.get(LIMIT) or _DEFAULT_LIMIT)


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # one that got its name meanwhile
            total += file.stat().st_size
    return total


def make_room(size: int, own: Path) -> None:
    """Remove the copies that were asked for longest ago, while there are too many bytes."""
    limit = cache_limit()
    entries = [
        (path.stat().st_mtime, _bytes_in(path), path)
        for path in own.parent.iterdir()
        if path.is_dir() and path != own
    ]
    total = size + sum(one for _, one, _ in entries)
    for when, one, path in sorted(entries):
        if total <= limit or time.time() - when < _IN_USE_S:
            return
        shutil.rmtree(path, ignore_errors=True)
        total -= one
