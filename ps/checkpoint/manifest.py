"""The manifest of a checkpoint: what it holds, and where each file's bytes must be."""

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

from google.protobuf.json_format import MessageToDict

from protos.parameter_server_pb2 import SavedFile, TableSpec
from ps.checkpoint.store import Store
from ps.engine import _native
from ps.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT, VERSION = "heterps-checkpoint", 2
MODES = ("checkpoint", "delta", "base", "serving")
_FOLDER = re.compile(r"save-(\d{15})-[0-9a-f]{8}")
_FILE = re.compile(rf"{_FOLDER.pattern}/[A-Za-z0-9_.\-]+")


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


def check_free(store: Store) -> None:
    """Refuse a place that holds something else.

    Raises:
        CheckpointError: naming it.
    """
    entries = store.entries()
    foreign = [e for e in entries if not _FOLDER.fullmatch(e) and not e.startswith(".")]
    if MANIFEST not in entries and foreign:
        raise CheckpointError(
            f"{store.url}: exists and is not a checkpoint (it has {foreign[0]!r}); expected a new "
            "or empty directory, or an earlier checkpoint to replace"
        )


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Make a save the checkpoint of its place; what was there before goes afterwards."""
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "buckets": _native.BUCKETS,
        **asdict(manifest),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    store.replace(MANIFEST, json.dumps(tree, indent=1).encode())
    for entry in store.entries():
        if _FOLDER.fullmatch(entry) and entry < manifest.id:
            store.remove(entry)


def read_manifest(store: Store) -> Manifest:
    """Read and check a manifest; the files it names are looked at by `verify`.

    Raises:
        CheckpointError: naming the file, what is wrong and what was expected.
    """
    path = f"{store.url}/{MANIFEST}"
    try:
        with store.open(MANIFEST) as stream:
            tree: Any = json.loads(stream.read())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: not found; expected a finished checkpoint in {store.url}"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; expected the manifest of a checkpoint") from None
    try:
        found = (tree.pop("format"), tree.pop("version"), tree.pop("buckets"))
        if found != (FORMAT, VERSION, _native.BUCKETS):
            raise CheckpointError(
                f"{path}: format, version, buckets are {found}; "
                f"expected {(FORMAT, VERSION, _native.BUCKETS)}"
            )
        files = tuple(File(**entry) for entry in tree.pop("files"))
        parent = tree.pop("parent")
        route = tree.pop("route")
        manifest = Manifest(
            files=files,
            parent=Parent(**parent) if parent else None,
            route=tuple(route) if route else None,
            generations=tuple(tree.pop("generations")),
            runs=tuple(tree.pop("runs")),
            **tree,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: lacks or misnames a field: {error}") from None
    _check(path, manifest)
    return manifest


def verify(store: Store, files: Sequence[File]) -> None:
    """Compare files with the sizes and checksums of the manifest.

    Raises:
        CheckpointError: naming the first that differs.
    """
    for file in files:
        path = f"{store.url}/{file.name}"
        try:
            size = store.size(file.name)
            if size != file.bytes:
                raise CheckpointError(f"{path}: {size} bytes; the manifest says {file.bytes}")
            with store.open(file.name) as stream:
                digest = hashlib.sha256()
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise CheckpointError(
                f"{path}: {error.strerror or error}; the manifest names it"
            ) from None
        if digest.hexdigest() != file.sha256:
            raise CheckpointError(
                f"{path}: SHA-256 is {digest.hexdigest()}; the manifest says {file.sha256}: it "
                "was damaged"
            )


def _check(path: str, manifest: Manifest) -> None:
    for file in manifest.files:
        if not isinstance(file.name, str) or not _FILE.fullmatch(file.name):
            raise CheckpointError(f"{path}: file name {file.name!r}; expected save-.../name")
    if manifest.shards < 1 or {f.shard for f in manifest.files} - set(range(manifest.shards)):
        raise CheckpointError(f"{path}: has files of other shards than its {manifest.shards}")
    if manifest.mode not in MODES:
        raise CheckpointError(f"{path}: mode {manifest.mode!r}; expected {', '.join(MODES)}")
    if manifest.route is not None and len(manifest.route) != _native.BUCKETS:
        raise CheckpointError(
            f"{path}: route has {len(manifest.route)} buckets; expected {_native.BUCKETS}"
        )
    changes = manifest.mode in ("delta", "serving")
    if manifest.mode == "delta" and manifest.parent is None:
        raise CheckpointError(f"{path}: a delta without a parent")
    if manifest.parent is not None and not changes:
        raise CheckpointError(f"{path}: mode {manifest.mode!r} with a parent; expected none")
