"""How many rows text files have: found once, and kept in the cache folder while a file is the same.

Parquet files say it themselves.
"""

import hashlib
import json
import os
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from chassis.files import replace_file
from workers.data.files import splits as files
from workers.data.files.remote import alone, cache_folder

COUNTED_AT_ONCE = 1 << 30  # bytes of text in a split up to which reading is no matter
_KEPT = 1 << 20  # bytes of text from which on a file is worth an entry


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is kept of a file; it holds as long as size and time are the file's."""

    size: int
    mtime_ns: int
    rows: int


def known(path: Path) -> int | None:
    """Rows of a text file that has been read to its end before, as it is."""
    with suppress(OSError, ValueError, TypeError):
        entry, status = _Entry(**json.loads(_place(path).read_text())), path.stat()
        if (entry.size, entry.mtime_ns) == (status.st_size, status.st_mtime_ns):
            return entry.rows
    return None


def keep(path: Path, status: os.stat_result, rows: int) -> None:
    """Remember the rows of a text file.

    Args:
        status: of the file before it was read: what has changed since is not what was counted.
    """
    if files.text_bytes(path) >= _KEPT:
        with suppress(OSError):
            place = _place(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            entry = _Entry(status.st_size, status.st_mtime_ns, rows)
            replace_file(place, json.dumps(asdict(entry)))


def counted(path: Path) -> int:
    """Rows of a text file; it is read unless they are known.

    Raises:
        DataError: it cannot be read.
    """
    if files.text_bytes(path) < _KEPT:
        return files.count(path)
    with ExitStack() as stack:
        with suppress(OSError):  # the workers of a host want it at once
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(folder))
        rows = known(path)
        if rows is None:
            status = path.stat()
            rows = files.count(path)
            keep(path, status, rows)
    return rows


def _place(path: Path) -> Path:
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    return cache_folder() / f"{name}.rows"
