"""What a disk may hold after a loss of power, told from a record of what was done to it.

`recorder.c`, preloaded into processes, keeps that record. What was synced is kept for sure: the
bytes of a file once the file was, a name once its folder was. Of the rest any part may be: of what
was written to a file each write, a piece of it, or none, with zeros where a later one was kept; of
the names in a folder each that was made, changed or removed. A rename is kept whole or not.

Not in the model: a disk that says it has what it has not, and bytes that change by themselves.
"""

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_name("recorder.c")
_HEAD = struct.Struct("<c7xQQII")
BEGUN, ACKNOWLEDGED = "B", "A"  # kinds of notes


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done: to a file, to names, or a note of a process about itself.

    Attributes:
        kind: O, made a file; W, wrote; T, cut off; S, synced; D, synced a folder; R, renamed; L,
            linked; U, removed; M, made a folder; or a note's.
        file: its inode.
        at: offset, size, or what a note says.
        first, second: bytes, or paths.
    """

    kind: str
    file: int
    at: int
    first: bytes
    second: bytes


class Recorder:
    """Has processes started with `environment` recorded.

    Args:
        root: the folder; what is done below it is.
        built: a folder for the library and the record.
    """

    def __init__(self, root: Path, built: Path) -> None:
        self.root = root.absolute()
        self.root.mkdir()
        self.log = built / "record"
        library = built / "recorder.so"
        compiler = shutil.which("cc") or "gcc"
        command = [compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True)
        self.environment = {
            "LD_PRELOAD": str(library),
            "HETERPS_POWER_ROOT": str(self.root),
            "HETERPS_POWER_LOG": str(self.log),
        }

    def events(self) -> list[Event]:
        """All that was done so far."""
        data, at, found = self.log.read_bytes(), 0, []
        while at + _HEAD.size <= len(data):
            kind, file, where, first, second = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            middle, end = at + first, at + first + second
            found.append(Event(kind.decode(), file, where, data[at:middle], data[middle:end]))
            at = end
        return found


def note(log: str, kind: str, number: int) -> None:
    """Put a note into a record: what had been acknowledged by then, say."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(file, _HEAD.pack(kind.encode(), 0, number, 0, 0))
    os.close(file)


@dataclass(eq=False, slots=True)
class _File:
    synced: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list)  # None: cut off there

    def whole(self) -> bytes:
        return _written(self.synced, self.since)


def _written(begin: bytes, writes: Sequence[tuple[int, bytes | None]]) -> bytes:
    content = bytearray(begin)
    for at, data in writes:
        end = at if data is None else at + len(data)
        content.extend(bytes(max(0, end - len(content))))
        if data is None:
            del content[at:]
        else:
            content[at:end] = data
    return bytes(content)


@dataclass(eq=False, slots=True)
class _Folder:
    """Each change is of names that are changed together; None: removed."""

    synced: dict[str, "_Node"] = field(default_factory=dict)
    since: list[dict[str, "_Node | None"]] = field(default_factory=list)
    now: dict[str, "_Node"] = field(default_factory=dict)

    def change(self, names: dict[str, "_Node | None"]) -> None:
        self.since.append(names)
        _change(self.now, names)


_Node = _File | _Folder


def _change(names: dict[str, _Node], change: dict[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """A folder that was empty, after the events that `take` was given."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._top = _Folder()
        self._files: dict[int, _File] = {}

    def take(self, event: Event) -> None:
        """One more event."""
        kind, path = event.kind, event.first.decode(errors="replace")
        if kind == "O":
            self._files[event.file] = made = _File()
            self._change(path, made)
        elif kind == "W" and event.file in self._files:
            self._files[event.file].since.append((event.at, event.first))
        elif kind == "T" and event.file in self._files:
            self._files[event.file].since.append((event.at, None))
        elif kind == "S" and event.file in self._files:
            file = self._files[event.file]
            file.synced, file.since = file.whole(), []
        elif kind == "D":
            folder = self._folder(path)
            folder.synced, folder.since = dict(folder.now), []
        elif kind == "M":
            self._change(path, _Folder())
        elif kind == "U":
            self._change(path, None)
        elif kind in ("R", "L"):
            self._rename(path, event.second.decode(), keeps=kind == "L")

    def lose_power(self, to: Path, chance: random.Random) -> None:
        """Write what is left, one of the ways that it may be, to a new folder."""
        share = chance.choice([0.0, 0.5, 0.9, 1.0])
        self._write(self._top, to, lambda: chance.random() < share, chance)

    def _write(
        self, node: _Node, to: Path, kept: Callable[[], bool], chance: random.Random
    ) -> None:
        if isinstance(node, _File):
            writes = [w for w in _torn(node.since, chance) if kept()]
            to.write_bytes(_written(node.synced, writes))
            return
        to.mkdir()
        names = dict(node.synced)
        for change in node.since:
            if kept():
                _change(names, change)
        for name, child in names.items():
            self._write(child, to / name, kept, chance)

    def _rename(self, old: str, new: str, *, keeps: bool) -> None:
        (folder, name), (into, other) = self._place(old), self._place(new)
        node = folder.now[name]
        if keeps:
            into.change({other: node})
        elif into is folder:
            folder.change({name: None, other: node})
        else:
            into.change({other: node})
            folder.change({name: None})

    def _change(self, path: str, node: _Node | None) -> None:
        folder, name = self._place(path)
        folder.change({name: node})

    def _place(self, path: str) -> tuple[_Folder, str]:
        head, _, name = path.rpartition("/")
        return self._folder(head), name

    def _folder(self, path: str) -> _Folder:
        folder = self._top
        for name in path.removeprefix(self._root).split("/"):
            if name not in ("", "."):
                found = folder.now[name]
                assert isinstance(found, _Folder), path
                folder = found
        return folder


def _torn(
    writes: Sequence[tuple[int, bytes | None]], chance: random.Random
) -> Iterator[tuple[int, bytes | None]]:
    for at, data in writes:
        if data and chance.random() < 0.3:
            yield at, data[: chance.randrange(len(data))]
        else:
            yield at, data
