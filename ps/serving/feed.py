"""What a Publisher has published at a place: the file `latest.json`, replaced as in switch.py.

A stream is a run of deltas without a gap: each has what changed since the one before. Bases
are shortcuts into it: whoever has loaded one goes on with the deltas numbered after it.
"""

import re
import time
from dataclasses import asdict, dataclass
from secrets import token_hex

from ps.checkpoint.bounds import Fields, parse_json
from ps.checkpoint.manifest import Manifest, is_gone, read_manifest
from ps.checkpoint.places import open_store
from ps.checkpoint.sealed import is_sealed, seal
from ps.checkpoint.store import Store
from ps.checkpoint.switch import Switch, read_small
from ps.errors import CheckpointError

LATEST = "latest.json"
FORMAT, VERSION = "heterps-feed", 1
_NAME = re.compile(r"(base|delta)-\d{9}-[0-9a-f]{8}")
_ATTEMPTS, _PAUSE_S = 5, 0.05
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One save of the feed.

    Attributes:
        name: of its folder.
        id: of the save that is in it.
        number: of a delta, its own; of a base, that of the last delta that it includes.
    """

    name: str
    id: str
    number: int


@dataclass(frozen=True, slots=True)
class Feed:
    """The saves that followers may use.

    Attributes:
        stream: deltas of another stream do not go on from these.
        bases: oldest first, at least one.
        deltas: oldest first, without a gap.
        updated: Unix time up to which changes are in.
    """

    stream: str
    bases: tuple[Entry, ...]
    deltas: tuple[Entry, ...]
    updated: float

    @property
    def number(self) -> int:
        """Of the newest delta."""
        return self.deltas[-1].number if self.deltas else self.bases[-1].number

    @property
    def last(self) -> Entry:
        """What the next delta builds on."""
        return self.deltas[-1] if self.deltas else self.bases[-1]

    def since(self, number: int) -> tuple[Entry, ...] | None:
        """The deltas after `number`; None when they are not all here."""
        after = tuple(d for d in self.deltas if d.number > number)
        return after if number + len(after) == self.number else None


def new_name(kind: str, number: int) -> str:
    """A folder that nobody has used: what a killed publisher left is never written over."""
    return f"{kind}-{number:09d}-{token_hex(4)}"


def is_entry(name: str) -> bool:
    """Whether a folder is one of a feed's."""
    return _NAME.fullmatch(name) is not None


def entry_store(store: Store, entry: Entry) -> Store:
    """Where a save of the feed lies."""
    return open_store(f"{store.url}/{entry.name}")


def open_entry(store: Store, entry: Entry) -> tuple[Store, Manifest]:
    """A save of the feed.

    Raises:
        CheckpointError: it is gone, or another one.
    """
    place = entry_store(store, entry)
    manifest = read_manifest(place)
    if manifest.id != entry.id:
        raise CheckpointError(f"{place.url}: holds {manifest.id}; {LATEST} says {entry.id}")
    return place, manifest


def begin_round(store: Store) -> tuple[Switch, Feed | None]:
    """Look at what is published, before anything is written.

    Raises:
        CheckpointError: it cannot be read.
    """
    switch = Switch.begin(store, LATEST, _MOST_BYTES)
    return switch, None if switch.seen is None else _parse(f"{store.url}/{LATEST}", switch.seen)


def write_feed(switch: Switch, feed: Feed, before: Feed | None) -> None:
    """Publish it; saves that nobody can be pointed to after that go.

    Args:
        switch: of `begin_round`.
        feed: what followers may use from now on.
        before: what they could use.

    Raises:
        ReplacedError: another publisher was faster; its feed stays.
        CheckpointError, OSError: followers use the one or the other.
    """
    tree = {"format": FORMAT, "version": VERSION, **asdict(feed)}
    behind = switch.replace(seal(tree), is_entry)
    used = {e.name for e in (*feed.bases, *feed.deltas)}
    replaced = {e.name for e in (*before.bases, *before.deltas)} if before else set()
    for entry in behind.entries:
        if entry not in used and (behind.alone or entry in replaced or _is_gone(switch, entry)):
            switch.store.remove(entry)


def remove_gone(switch: Switch, feed: Feed | None) -> None:
    """Remove what was begun long ago by publishers that did not live to publish it."""
    used = {e.name for e in (*feed.bases, *feed.deltas)} if feed else set()
    for entry in switch.store.entries():
        if is_entry(entry) and entry not in used and _is_gone(switch, entry):
            switch.store.remove(entry)


def _is_gone(switch: Switch, entry: str) -> bool:
    saves = open_store(f"{switch.store.url}/{entry}").entries()
    return any(map(is_gone, saves))


def read_feed(store: Store) -> Feed | None:
    """What is published; None where nothing is yet.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = f"{store.url}/{LATEST}"
    for attempt in range(_ATTEMPTS):
        try:
            data = read_small(store, LATEST, _MOST_BYTES)
            return None if data is None else _parse(path, data)
        except (OSError, CheckpointError) as error:
            # Some remote file systems do not replace a file in one step.
            if attempt == _ATTEMPTS - 1:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"{path}: {error}") from None
            time.sleep(_PAUSE_S)
    return None


def _parse(path: str, data: bytes) -> Feed:
    is_sealed(data, path)
    fields = parse_json(data, path, "what a Publisher has published")
    found = (fields.text("format"), fields.count("version"))
    if found != (FORMAT, VERSION):
        raise CheckpointError(f"{path}: format, version are {found}; expected {(FORMAT, VERSION)}")
    feed = Feed(
        fields.text("stream"),
        tuple(map(_entry, fields.objects("bases"))),
        tuple(map(_entry, fields.objects("deltas"))),
        fields.number("updated"),
    )
    if not feed.bases:
        raise CheckpointError(f"{path}: lists no base")
    first = feed.number - len(feed.deltas) + 1
    if any(delta.number != first + index for index, delta in enumerate(feed.deltas)):
        raise CheckpointError(f"{path}: lists deltas with a gap")
    return feed


def _entry(fields: Fields) -> Entry:
    entry = Entry(fields.text("name"), fields.text("id"), fields.count("number"))
    if not is_entry(entry.name):
        raise fields.wrong("name", entry.name, "base-... or delta-...")
    return entry
