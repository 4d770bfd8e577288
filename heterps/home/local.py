"""Where a user's state lives: the running cluster, and the jobs of clusters that are gone."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from chassis.files import replace_file


def home() -> Path:
    """$HETERPS_HOME, else ~/.heterps."""
    return Path(os.environ.get("HETERPS_HOME") or Path.home() / ".heterps").absolute()


@dataclass(frozen=True, slots=True)
class Role:
    """One process of a cluster."""

    label: str
    pid: int
    address: str
    log: str


@dataclass(frozen=True, slots=True)
class Running:
    """The cluster that `heterps up` started."""

    pid: int
    address: str
    directory: str
    started_at: float
    roles: tuple[Role, ...]

    def write(self) -> None:
        """Record it, in one atomic step."""
        path = _state()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(asdict(self), indent=2) + "\n")


def running() -> Running | None:
    """The cluster that is up; None when there is none, however the last one ended."""
    if not lock_held():
        return None
    try:
        state = json.loads(_state().read_text())
        return Running(**{**state, "roles": tuple(Role(**role) for role in state["roles"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None  # it is just starting or ending


def forget() -> None:
    """Remove the record of a cluster that has ended."""
    _state().unlink(missing_ok=True)


@contextlib.contextmanager
def lock() -> Iterator[bool]:
    """Hold the right to be the user's one cluster; yields False when another holds it.

    The kernel releases it with the process, so a record left by a crash is never taken for real.
    """
    path = _lock()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def lock_held() -> bool:
    """Whether a cluster's supervisor lives."""
    try:
        with _lock().open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _state() -> Path:
    return home() / "cluster.json"


def _lock() -> Path:
    return home() / "cluster.lock"
