"""The manifest of a checkpoint: what it holds, and where each file's bytes must be.

JSON. Its last field is the SHA-256 of all that stands before it, so that damage is found before
anything in it is believed. Version 2, which older saves have, lacks that field.
"""

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

from google.protobuf.json_format import MessageToDict

from protos.parameter_server_pb2 import SavedFile, TableSpec
from ps.checkpoint.bounds import Fields, parse_json
from ps.checkpoint.sealed import digest_of, is_sealed, seal
from ps.checkpoint.store import Store
from ps.checkpoint.switch import Switch, read_small
from ps.engine import _native
from ps.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT, VERSION, _WITHOUT_CHECKSUM = "heterps-checkpoint", 3, 2
MODES = ("checkpoint", "delta", "base", "serving")
_FOLDER = re.compile(r"save-(\d{15})-[0-9a-f]{8}")
_FILE = re.compile(rf"{_FOLDER.pattern}/[A-Za-z0-9_.\-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 32 << 20
_KEY_BYTES = 8  # at least, of each row
_GONE_NS = 24 * 3600 * 10**9  # after which whoever began a save and has not ended it is gone


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint; `table` is empty for a shard's window of applied pushes."""

    name: str
    shard: int
    table: str
    rows: int
    bytes: int
    sha256: str

    @classmethod
    def of(cls, saved: SavedFile, shard: int) -> "File":
        """As a shard has reported it."""
        return cls(saved.name, shard, saved.table, saved.rows, saved.bytes, saved.sha256)


@dataclass(frozen=True, slots=True)
class Parent:
    """The save whose changes a delta holds."""

    place: str
    id: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        id: of this save; also the folder of its files.
        mode: checkpoint, delta, base or serving.
        shards: how many wrote it.
        route: bucket -> shard, where it is not the even one.
        generations: for each shard, table -> the cut after which a delta must begin.
        runs: the shard processes that counted these.
        positions: client -> where its reader was; a push's `position`.
        log: in a shard's own base, the number of the log that goes on from it.
        torn: pushes of clients that died while sending them, of which only a part is in.
        checksum: of the manifest as it was read; part of none.
    """

    id: str
    mode: str
    shards: int
    files: tuple[File, ...]
    tables: Mapping[str, Any]
    route: tuple[int, ...] | None = None
    generations: tuple[Mapping[str, int], ...] = ()
    runs: tuple[str, ...] = ()
    parent: Parent | None = None
    positions: Mapping[str, str] = field(default_factory=dict)
    torn: int = 0
    log: int = 0
    created: str = ""
    checksum: str = ""


def new_id() -> str:
    """The id of a save that begins now; later ones sort later."""
    return f"save-{time.time_ns() // 10_000:015d}-{token_hex(4)}"


def specs_as_json(specs: Mapping[str, TableSpec]) -> dict[str, Any]:
    """Specs for people to read; the files have their own."""
    return {
        name: MessageToDict(spec, preserving_proto_field_name=True)
        for name, spec in sorted(specs.items())
    }


def first_files(files: Sequence[File]) -> dict[str, File]:
    """One file of each table, by its name: all have its spec."""
    first: dict[str, File] = {}
    for file in files:
        if file.table:
            first.setdefault(file.table, file)
    return first


def is_checkpoint(store: Store) -> bool:
    """Whether a finished checkpoint is there."""
    return MANIFEST in store.entries()


def begin_save(store: Store) -> Switch:
    """Look at a place before anything is written there.

    Raises:
        CheckpointError: it holds something else, which is named.
    """
    switch = Switch.begin(store, MANIFEST, _MOST_BYTES)
    entries = store.entries()
    foreign = [e for e in entries if not _FOLDER.fullmatch(e) and not e.startswith(".")]
    if switch.seen is None and foreign and MANIFEST not in entries:
        raise CheckpointError(
            f"{store.url}: exists and is not a checkpoint (it has {foreign[0]!r}); expected a new "
            "or empty directory, or an earlier checkpoint to replace"
        )
    return switch


def write_manifest(switch: Switch, manifest: Manifest) -> None:
    """Make a save the checkpoint of its place; what cannot count after that goes.

    Raises:
        ReplacedError: another save was made there since `begin_save`; it stays, and the files of
            this one go.
        CheckpointError, OSError: the earlier checkpoint stays, or this one has taken its place.
    """
    store, path = switch.store, f"{switch.store.url}/{MANIFEST}"
    content = _encode(replace(manifest, created=datetime.now(UTC).isoformat(timespec="seconds")))
    try:
        _decode(path, content)  # what a load would refuse must not replace what it takes
        behind = switch.replace(content, lambda entry: _FOLDER.fullmatch(entry) is not None)
    except CheckpointError:
        store.remove(manifest.id)
        raise
    before = replaced(switch)
    gone = "" if before is None else before.id
    for entry in behind.entries:
        if entry != manifest.id and (behind.alone or entry == gone or is_gone(entry)):
            store.remove(entry)


def is_gone(folder: str) -> bool:
    """Whether a save's folder was begun so long ago that nobody will finish it."""
    found = _FOLDER.fullmatch(folder)
    return found is not None and time.time_ns() - int(found[1]) * 10_000 > _GONE_NS


def read_manifest(store: Store) -> Manifest:
    """Read and check a manifest; the files it names are looked at by `verify`.

    Raises:
        CheckpointError: naming the file, what is wrong and what was expected.
    """
    path = f"{store.url}/{MANIFEST}"
    try:
        data = read_small(store, MANIFEST, _MOST_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error}; expected the manifest of a checkpoint") from None
    if data is None:
        raise CheckpointError(f"{path}: not found; expected a finished checkpoint in {store.url}")
    return _decode(path, data)


def verify(store: Store, files: Sequence[File]) -> None:
    """Compare files with the sizes and checksums of the manifest.

    Raises:
        CheckpointError: naming the first that differs.
    """
    check_sizes(store, files)
    for file in files:
        path = f"{store.url}/{file.name}"
        try:
            with store.open(file.name) as stream:
                digest = hashlib.sha256()
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise _unreadable(path, error) from None
        if digest.hexdigest() != file.sha256:
            raise CheckpointError(
                f"{path}: SHA-256 is {digest.hexdigest()}; the manifest says {file.sha256}: it "
                "was damaged"
            )


def check_sizes(store: Store, files: Sequence[File]) -> None:
    """Compare files with the sizes of the manifest.

    Raises:
        CheckpointError: naming the first that differs, or is not there.
    """
    for file in files:
        path = f"{store.url}/{file.name}"
        try:
            size = store.size(file.name)
        except OSError as error:
            raise _unreadable(path, error) from None
        if size != file.bytes:
            raise CheckpointError(f"{path}: {size} bytes; the manifest says {file.bytes}")


def _unreadable(path: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: {error.strerror or error}; the manifest names it")


def _encode(manifest: Manifest) -> bytes:
    tree = {"format": FORMAT, "version": VERSION, "buckets": _native.BUCKETS, **asdict(manifest)}
    del tree["checksum"]
    return seal(tree)


def _decode(path: str, data: bytes) -> Manifest:
    """What a manifest says, once it is what was written and can be believed.

    Raises:
        CheckpointError: naming what is wrong and what was expected.
    """
    sealed = is_sealed(data, path)
    fields = parse_json(data, path, "the manifest of a checkpoint")
    kind = (fields.text("format"), fields.count("version"), fields.count("buckets"))
    expected = (FORMAT, VERSION if sealed else _WITHOUT_CHECKSUM, _native.BUCKETS)
    if kind != expected:
        raise CheckpointError(
            f"{path}: format, version, buckets are {kind}, {'with' if sealed else 'without'} a "
            f"SHA-256; expected {expected}"
        )
    if sealed:
        fields.text("sha256")
    for name, default in (("positions", {}), ("torn", 0), ("log", 0), ("created", "")):
        fields.default(name, default)  # the oldest saves were written without them
    manifest = replace(_manifest_of(fields), checksum=digest_of(data))
    _check(path, manifest)
    return manifest


def _manifest_of(fields: Fields) -> Manifest:
    shards = fields.count("shards", 1, _native.BUCKETS)
    parent, positions = fields.one("parent"), fields.one("positions")
    manifest = Manifest(
        id=fields.text("id"),
        mode=fields.text("mode"),
        shards=shards,
        files=tuple(_file_of(each, shards) for each in fields.objects("files")),
        tables=fields.mapping("tables"),
        route=fields.counts("route", shards - 1),
        generations=tuple(each.all_counts() for each in fields.objects("generations")),
        runs=fields.texts("runs"),
        parent=None if parent is None else Parent(parent.text("place"), parent.text("id")),
        positions={} if positions is None else positions.all_texts(),
        torn=fields.count("torn"),
        log=fields.count("log"),
        created=fields.text("created"),
    )
    fields.end()
    if parent is not None:
        parent.end()
    return manifest


def _file_of(fields: Fields, shards: int) -> File:
    size = fields.count("bytes")
    file = File(
        name=fields.text("name"),
        shard=fields.count("shard", 0, shards - 1),
        table=fields.text("table"),
        rows=fields.count("rows", 0, size // _KEY_BYTES),
        bytes=size,
        sha256=fields.text("sha256"),
    )
    fields.end()
    if not _FILE.fullmatch(file.name):
        raise fields.wrong("file name", file.name, "save-.../name")
    if not _SHA256.fullmatch(file.sha256):
        raise fields.wrong("sha256", file.sha256, "64 hexadecimal digits")
    return file


def _check(path: str, manifest: Manifest) -> None:
    """Compare the parts of a manifest with each other."""

    def expect(holds: bool, text: str) -> None:
        if not holds:
            raise CheckpointError(f"{path}: {text}")

    expect(manifest.mode in MODES, f"mode: {manifest.mode[:80]!r}; expected {', '.join(MODES)}")
    expect(
        _FOLDER.fullmatch(manifest.id) is not None, f"id: {manifest.id[:80]!r}; expected save-..."
    )
    for file in manifest.files:
        expect(
            file.name.startswith(f"{manifest.id}/"),
            f"file name {file.name[:200]!r}; expected {manifest.id}/...",
        )
    names = {file.name for file in manifest.files}
    parts = {(file.table, file.shard) for file in manifest.files}
    expect(
        len(names) == len(parts) == len(manifest.files), "names a file, or a shard's part, twice"
    )
    tables = {file.table for file in manifest.files if file.table}
    for table in tables ^ set(manifest.tables):
        what = "names no file of" if table in manifest.tables else "names a file, but no spec, of"
        expect(False, f"{what} table {table[:140]!r}; expected both")
    if manifest.route is not None:
        expect(
            len(manifest.route) == _native.BUCKETS,
            f"route has {len(manifest.route)} buckets; expected {_native.BUCKETS}",
        )
    for name, told in (("generations", manifest.generations), ("runs", manifest.runs)):
        # One process alone tells neither.
        expect(
            len(told) == manifest.shards or (len(told) == 0 and manifest.shards == 1),
            f"{name} of {len(told)} shards; expected {manifest.shards}",
        )
    for table in {file.table for file in manifest.files if file.table and file.rows}:
        lacking = [n for n in range(manifest.shards) if (table, n) not in parts][:8]
        expect(not lacking, f"names no file of table {table[:140]!r} for shards {lacking}")
    changes = manifest.mode in ("delta", "serving")
    expect(manifest.mode != "delta" or manifest.parent is not None, "a delta without a parent")
    expect(
        changes or manifest.parent is None,
        f"mode {manifest.mode!r} with a parent; expected none",
    )


def replaced(switch: Switch) -> Manifest | None:
    """The save that a switch replaces; None where there is none, or it cannot be told."""
    try:
        return None if switch.seen is None else _decode(MANIFEST, switch.seen)
    except CheckpointError:
        return None
