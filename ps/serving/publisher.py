"""Publishing tables to serving processes while they are trained: bases, and deltas between."""

import logging
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex

from chassis.closing import Closing
from ps.checkpoint.manifest import Manifest, first_files, read_manifest
from ps.checkpoint.places import open_store
from ps.checkpoint.rowfile import spec_of
from ps.checkpoint.switch import Switch
from ps.client.parameter_client import FILES_TIMEOUT_S, ParameterClient
from ps.errors import CheckpointError, DeltaError, ReplacedError, ShardError
from ps.serving import feed
from ps.serving.feed import Entry, Feed

_EMPTY = 8 + 4 + 8 + 8  # bytes of a file of rows without rows, besides its table's spec
_log = logging.getLogger("heterps.ps")


@dataclass(frozen=True, slots=True)
class Published:
    """What one round has published.

    Attributes:
        saves: names of new folders, `base-...` and `delta-...`; none when nothing had changed.
        rows: in them.
        number: of the newest delta.
        seconds: it took.
    """

    saves: tuple[str, ...]
    rows: int
    number: int
    seconds: float


class Publisher(Closing):
    """Writes weights to a place where Followers read them; training goes on meanwhile.

    First a base, then deltas with the rows changed and removed. A new base is written now and
    then, so that a follower that starts has few deltas to read, and when deltas cannot go on:
    a shard was restarted, or there are more or fewer shards. A publisher that dies, at whatever
    point, leaves what was published whole; the next one goes on from there. Only one at a time
    may write to a place.

        with Publisher(client, "s3://bucket/ads", interval_s=30):
            train()

    Args:
        client: of the shards.
        place: a directory that the shards and this process see as one, or a URL that fsspec
            knows.
        interval_s: seconds between rounds of the background thread.
        full_every: deltas between bases.
        keep: bases to keep, with the deltas after the oldest of them.
        prefix: only tables whose names begin so.
        timeout_s: for each shard to write its part.
    """

    def __init__(
        self,
        client: ParameterClient,
        place: str | Path,
        interval_s: float = 60.0,
        *,
        full_every: int = 100,
        keep: int = 2,
        prefix: str = "",
        timeout_s: float = FILES_TIMEOUT_S,
    ) -> None:
        if full_every < 1 or keep < 1 or interval_s < 0:
            raise ValueError(
                f"full_every={full_every}, keep={keep}, interval_s={interval_s}; expected at "
                "least 1, 1 and 0"
            )
        self._client = client
        self._store = open_store(place)
        self._interval_s = interval_s
        self._full_every = full_every
        self._keep = keep
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._made: list[str] = []  # in this round
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None

    @property
    def url(self) -> str:
        """The place."""
        return self._store.url

    def publish(self) -> Published:
        """One round, now.

        Raises:
            CheckpointError: the place holds something else, or somebody else publishes there.
            ShardError: a shard failed; what was published stays as it is.
        """
        began = time.monotonic()
        with self._lock:
            switch, before = feed.begin_round(self._store)
            if before is None:
                self._check_free()
            feed.remove_gone(switch, before)
            self._made.clear()
            try:
                now, rows = self._round_of(switch, before)
                feed.write_feed(switch, now, before)
            except ReplacedError:
                self._remove_made()
                raise CheckpointError(
                    f"{self._store.url}: another publisher has written {feed.LATEST} meanwhile; "
                    "expected to be the only one"
                ) from None
            except (CheckpointError, ShardError):  # before anybody was pointed to them
                self._remove_made()
                raise
        published = {e.name for e in (*before.bases, *before.deltas)} if before else set()
        saves = tuple(e.name for e in (*now.deltas, *now.bases) if e.name not in published)
        return Published(saves, rows, now.number, time.monotonic() - began)

    def start(self) -> None:
        """Publish in a thread from now on. What fails is logged, kept in `error`, and retried."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, after a last round; safe to repeat."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def __enter__(self) -> "Publisher":
        self.start()
        return self

    def _run(self) -> None:
        while True:
            last = self._stop.is_set()
            try:
                self.publish()
                self.error = None
            except (CheckpointError, ShardError, OSError, RuntimeError) as error:
                self.error = error
                _log.warning("publishing to %s: %s", self._store.url, error)
            if last:
                return
            self._stop.wait(self._interval_s)

    def _round_of(self, switch: Switch, before: Feed | None) -> tuple[Feed, int]:
        try:
            return self._round(before)
        except CheckpointError:
            switch.check()  # what another publisher has removed is not what went wrong
            raise

    def _round(self, before: Feed | None) -> tuple[Feed, int]:
        if before is None:
            return self._begin(0)
        asked = time.time()
        try:
            delta, manifest = self._delta(before)
        except DeltaError as error:
            _log.info("publishing a new base to %s: %s", self._store.url, error)
            return self._begin(before.number)
        if delta is None:
            return replace(before, updated=asked), 0
        deltas = (*before.deltas, delta)
        rows = _rows(manifest)
        bases = before.bases
        if delta.number - bases[-1].number >= self._full_every:
            # Its cut is later than the delta's. The next delta repeats what lies between, so
            # that those who have followed the deltas need not load it.
            base, manifest = self._save("base", delta.number)
            bases = (*bases, base)[-self._keep :]
            rows += _rows(manifest)
        first = min(bases[0].number, delta.number - 1)
        kept = tuple(d for d in deltas if d.number > first)
        return Feed(before.stream, bases, kept, asked), rows

    def _begin(self, number: int) -> tuple[Feed, int]:
        asked = time.time()
        base, manifest = self._save("base", number)
        return Feed(token_hex(8), (base,), (), asked), _rows(manifest)

    def _delta(self, before: Feed) -> tuple[Entry | None, Manifest]:
        """What changed since the newest delta; no entry when that is nothing.

        Raises:
            DeltaError: deltas cannot go on from what was published.
        """
        try:
            _, parent = feed.open_entry(self._store, before.last)
        except CheckpointError as error:
            raise DeltaError(str(error)) from None
        since = feed.entry_store(self._store, before.last).url
        entry, manifest = self._save("delta", before.number + 1, since)
        dropped = [name for name in parent.tables if name not in manifest.tables]
        if dropped:
            raise DeltaError(f"table {dropped[0]!r} was dropped")
        if dict(parent.tables) == dict(manifest.tables) and self._is_empty(entry, manifest):
            return None, manifest
        return entry, manifest

    def _save(self, kind: str, number: int, since: str | None = None) -> tuple[Entry, Manifest]:
        name = feed.new_name(kind, number)
        self._made.append(name)
        place = open_store(f"{self._store.url}/{name}")
        self._client.save(
            place.url,
            self._timeout_s,
            prefix=self._prefix,
            mode="serving" if since else "base",
            since=since,
        )
        manifest = read_manifest(place)
        return Entry(name, manifest.id, number), manifest

    def _is_empty(self, entry: Entry, manifest: Manifest) -> bool:
        if _rows(manifest):
            return False
        place = feed.entry_store(self._store, entry)
        sizes = {
            name: spec_of(place, file.name).ByteSize() + _EMPTY
            for name, file in first_files(manifest.files).items()
        }
        # A longer one names removed keys.
        return all(file.bytes == sizes[file.table] for file in manifest.files)

    def _check_free(self) -> None:
        foreign = [e for e in self._store.entries() if not feed.is_entry(e) and e[0] != "."]
        if foreign:
            raise CheckpointError(
                f"{self._store.url}: exists and nothing was published there (it has "
                f"{foreign[0]!r}); expected a new or empty place"
            )

    def _remove_made(self) -> None:
        """Remove the saves of a round that nobody will be pointed to."""
        for name in self._made:
            self._store.remove(name)


def _rows(manifest: Manifest) -> int:
    return sum(file.rows for file in manifest.files)
