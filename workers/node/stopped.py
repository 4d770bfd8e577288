"""Processes that somebody stopped, and nobody continues: to others they only seem slow."""

import time
from contextlib import suppress
from pathlib import Path

from workers.node.launched import Entry

STILL_S = 30.0  # that it may last, as long as one takes to look at a process


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, as SIGSTOP does; not where it is traced."""
    with suppress(OSError):
        _, _, fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")
        return fields.startswith(b"T")
    return False


def stands_still(entry: Entry) -> bool:
    """Whether a process has been stopped for too long; to be asked again and again."""
    assert entry.child is not None
    now = time.monotonic()
    if not is_stopped(entry.child.pid):
        entry.stopped_since = None
    elif entry.stopped_since is None:
        entry.stopped_since = now
    return entry.stopped_since is not None and now - entry.stopped_since > STILL_S
