"""Whether the kernel has killed a process of ours for want of memory, as it alone knows.

It counts those that it has killed by memory group, and one that was killed by anybody else dies
alike. So a death counts as one of these only where the group's count has grown just before.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

_LATELY_S = 5.0  # within which a process that was killed is found to have ended
_GROUPS = Path("/sys/fs/cgroup")
_HOST = Path("/proc/vmstat")


class OomKills:
    """The kernel's kills of this process' group, which its children are in; ask `look` often.

    Args:
        count: how many there were so far.
    """

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        files = sources(Path("/proc/self/cgroup"), _GROUPS)
        self._now = count or (lambda: oom_kills(files))
        self._count = self._now()
        self._at = float("-inf")

    def look(self) -> None:
        """Notice those since the last time."""
        count = self._now()
        if count > self._count:
            self._at = time.monotonic()
        self._count = count

    def lately(self) -> bool:
        """Whether there was one within the last seconds."""
        self.look()
        return time.monotonic() - self._at < _LATELY_S


def sources(membership: Path, groups: Path) -> list[Path]:
    """Files that have the count, the one of the narrowest group first.

    Args:
        membership: as /proc/self/cgroup.
        groups: where they are mounted; a container sees its own group as the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    found = []
    for line in lines:
        _, _, told = line.partition(":")
        kinds, _, path = told.partition(":")
        name = path.strip("/")
        if "memory" in kinds.split(","):
            own, root = groups / "memory" / name, groups / "memory"
            found += [own / "memory.oom_control", root / "memory.oom_control"]
        elif not kinds:
            own = groups / name
            found += [own / "memory.events.local", own / "memory.events", groups / "memory.events"]
    return [*found, _HOST]


def oom_kills(files: Sequence[Path]) -> int:
    """What the first of the files that has it says; 0: none does."""
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
    return 0
