"""What processes take: proportional set sizes of a process and of all that it has started."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_NAMED = ("-m", "--type", "--index")


@dataclass(frozen=True, slots=True)
class Used:
    """Memory of a process, in bytes.

    Attributes:
        what: the module that it runs.
        pss: its own, and its share of what it shares.
        own: what nobody else has.
        rss: all that it sees.
    """

    what: str
    pss: int
    own: int
    rss: int

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        parts = f"{self.pss / 1e6:.0f} MB proportional, {self.own / 1e6:.0f} its own"
        return f"{self.what}: {parts}, {self.rss / 1e6:.0f} resident"


def used_by(root: int) -> list[Used]:
    """Of a process and its descendants that live now, the largest first."""
    found = []
    for pid in [root, *_descendants(root)]:
        with suppress(OSError, ValueError, KeyError):
            rolled = _rollup(pid)
            own = rolled["Private_Clean"] + rolled["Private_Dirty"]
            found.append(Used(_what(pid), rolled["Pss"], own, rolled["Rss"]))
    return sorted(found, key=lambda used: used.pss, reverse=True)


def _rollup(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    parts = (line.split() for line in lines)
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in parts}


def _descendants(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                text = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2]
                children.setdefault(int(text.split()[1]), []).append(int(name))
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            yield child
            waiting.append(child)


def _what(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
    if "-m" in words:
        at = words.index("-m") + 1
        more = words[at + 1 : at + 2] if words[at] == "chassis.forking" else []
        return " ".join([words[at], *more])
    return " ".join(Path(word).name for word in words[:3])
