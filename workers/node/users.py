"""A user of its own for each attempt at a job on this node, where root may give one.

Only numbers are taken, from a range that no account of this host lies in. What a job's processes
write is in folders that are theirs alone; what the node writes for or about them, logs say, lies
where they can neither write nor list.
"""

import os
import pwd
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from chassis.files import replace_file
from chassis.security import AUTHORITY, CERTIFICATE, KEY, TOKEN, SecurityError

_LEAST = 1000
_END_ALL = ("/bin/sh", "-c", "kill -9 -1")  # all that the user may send a signal to, but for itself
_END_S = 10.0


class NoUserError(RuntimeError):
    """All users are held."""


class Users:
    """Gives users out, one after the other, so that one is free for long before it comes again.

    Args:
        text: FIRST-LAST, the range.

    Raises:
        SecurityError: it cannot be used.
    """

    def __init__(self, text: str) -> None:
        first, _, last = text.partition("-")
        expected = f"expected FIRST-LAST, numbers of users from {_LEAST} on, such as 70000-79999"
        if not (first.isdecimal() and last.isdecimal() and _LEAST <= int(first) <= int(last)):
            raise SecurityError(f"--user-per-job {text}: {expected}")
        if os.geteuid() != 0:
            raise SecurityError(f"--user-per-job {text}: only root may; expected to be started so")
        self._range = range(int(first), int(last) + 1)
        if int(last) >= 2**31:
            raise SecurityError(f"--user-per-job {text}: {expected}")
        for account in pwd.getpwall():
            if account.pw_uid in self._range:
                raise SecurityError(
                    f"--user-per-job {text}: {account.pw_uid} is {account.pw_name} here; expected "
                    "a range of which no number is an account's"
                )
        self._next = 0
        self._held: set[int] = set()
        self._lock = threading.Lock()
        os.umask(0o077)  # what the node writes is nobody else's, but for what it gives away

    def take(self) -> int:
        """The next user that no job holds.

        Raises:
            NoUserError: there is none.
        """
        with self._lock:
            for turn in range(len(self._range)):
                position = (self._next + turn) % len(self._range)
                if self._range[position] not in self._held:
                    self._next = position + 1
                    self._held.add(self._range[position])
                    return self._range[position]
        raise NoUserError(
            f"all {len(self._range)} users of --user-per-job are held by jobs on this node"
        )

    def end(self, user: int) -> None:
        """End all that a user runs, and let the next job have it."""
        with suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run(
                _END_ALL,
                user=user,
                group=user,
                extra_groups=[],
                timeout=_END_S,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        with self._lock:
            self._held.discard(user)


def passable(folder: Path) -> None:
    """Make a folder that others may pass through and not look into, and its parents if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o711)


def own(folder: Path, user: int) -> Path:
    """A new folder for a user alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    os.chown(folder, user, user, follow_symlinks=False)
    return folder


def give(folder: Path, user: int) -> None:
    """Give a user a folder with all that is in it, while it may still be changing that."""
    for _, folders, files, descriptor in os.fwalk(folder):
        for name in (*folders, *files):
            os.chown(name, user, user, dir_fd=descriptor, follow_symlinks=False)
    os.chown(folder, user, user, follow_symlinks=False)


def credentials(folder: Path, user: int) -> dict[str, str]:
    """Copies of the cluster's files for a user, without its token; their places by variable."""
    found = {}
    for variable in (CERTIFICATE, KEY, AUTHORITY):
        if named := os.environ.get(variable):
            path = folder / variable.lower()
            replace_file(path, Path(named).read_bytes(), private=True, owner=user)
            found[variable] = str(path)
    return found


def environment(home: Path, user: int) -> Mapping[str, str]:
    """What a process of a user finds in place of what the node's own would."""
    return {
        "HOME": str(home),
        "TMPDIR": str(own(home / "tmp", user)),
        "USER": str(user),
        "LOGNAME": str(user),
        "XDG_CACHE_HOME": str(home / "cache"),
        TOKEN: "",
    }
