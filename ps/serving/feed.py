"""What a Publisher has published at a place: the file `latest.json`, replaced in one step.

A stream is a run of deltas without a gap: each has what changed since the one before. Bases
are shortcuts into it: whoever has loaded one goes on with the deltas numbered after it.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from secrets import token_hex
from typing import Any

from ps.checkpoint.manifest import Manifest, read_manifest
from ps.checkpoint.places import open_store
from ps.checkpoint.store import Store
from ps.errors import CheckpointError

LATEST = "latest.json"
FORMAT, VERSION = "heterps-feed", 1
_NAME = re.compile(r"(base|delta)-\d{9}-[0-9a-f]{8}")
_ATTEMPTS, _PAUSE_S = 5, 0.05


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


def write_feed(store: Store, feed: Feed) -> None:
    """Publish it."""
    tree = {"format": FORMAT, "version": VERSION, **asdict(feed)}
    store.replace(LATEST, json.dumps(tree, indent=1).encode())


def read_feed(store: Store) -> Feed | None:
    """What is published; None where nothing is yet.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = f"{store.url}/{LATEST}"
    for attempt in range(_ATTEMPTS):
        try:
            with store.open(LATEST) as stream:
                return _parse(json.loads(stream.read()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, CheckpointError) as error:
            # Some remote file systems do not replace a file in one step.
            if attempt == _ATTEMPTS - 1:
                raise CheckpointError(f"{path}: {error}") from None
            time.sleep(_PAUSE_S)
    return None


def _parse(tree: Any) -> Feed:
    try:
        found = (tree["format"], tree["version"])
        if found != (FORMAT, VERSION):
            raise CheckpointError(f"format, version are {found}; expected {(FORMAT, VERSION)}")
        feed = Feed(
            str(tree["stream"]),
            tuple(_entry(e) for e in tree["bases"]),
            tuple(_entry(e) for e in tree["deltas"]),
            float(tree["updated"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"lacks or misnames a field: {error}") from None
    numbers = [d.number for d in feed.deltas]
    if not feed.bases or numbers != list(range(feed.number - len(numbers) + 1, feed.number + 1)):
        raise CheckpointError("lists no base, or deltas with a gap")
    return feed


def _entry(tree: Mapping[str, Any]) -> Entry:
    entry = Entry(str(tree["name"]), str(tree["id"]), int(tree["number"]))
    if not is_entry(entry.name):
        raise CheckpointError(f"names {entry.name!r}; expected base-... or delta-...")
    return entry
