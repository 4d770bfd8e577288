"""Checkpoints: a directory of row files, and a manifest that is written last.

The client makes `DIR.tmp-XXXX`, every shard writes its files there, the client adds
`manifest.json` with their sizes and SHA-256, and one rename makes it DIR. Until then the
checkpoint that was there before stays what it was. Layout of a row file: csrc/file.cc.
"""

import base64
import json
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from protos.parameter_server_pb2 import SavedFile, TableSpec
from ps import _native
from ps.disk import publish, sha256, sync_directory, write_synced
from ps.errors import CheckpointError, TableError
from ps.spec import describe_difference, make_table

MANIFEST = "manifest.json"
FORMAT, VERSION = "heterps-checkpoint", 1
_HEADER = struct.Struct("<8s4IQI28x")
_MAGIC = b"HPSROWS\n"


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint; `table` is empty for a shard's window of applied pushes."""

    name: str
    shard: int
    table: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds."""

    directory: Path
    shards: int
    files: tuple[File, ...]

    def tables(self) -> list[str]:
        """The names of its tables."""
        return sorted({f.table for f in self.files if f.table})


Tables = dict[str, tuple[TableSpec, _native.Table]]


def is_checkpoint(directory: str | Path) -> bool:
    """Whether a finished checkpoint is there."""
    return (Path(directory) / MANIFEST).is_file()


@contextmanager
def writing(directory: str | Path) -> Iterator[Path]:
    """A new folder that becomes `directory` when the block ends well, and vanishes otherwise.

    Raises:
        CheckpointError: something that is not a checkpoint is in the way.
    """
    target = Path(directory).absolute()
    reusable = not target.exists() or is_checkpoint(target)
    if not reusable and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"{target}: exists and is not a checkpoint; expected a new or empty directory, "
            "or an earlier checkpoint to replace"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f"{target.name}.tmp-{token_hex(4)}")
    folder.mkdir()
    try:
        yield folder
        sync_directory(folder)
        publish(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_manifest(folder: Path, shards: int, files: Sequence[tuple[int, SavedFile]]) -> None:
    """Write the manifest of (shard, file)s into `folder`; only then is it a checkpoint."""
    specs: dict[str, TableSpec] = {}
    for _, file in files:
        if file.table and file.table not in specs:
            specs[file.table] = read_spec(folder / file.name)
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "shards": shards,
        "buckets": _native.BUCKETS,
        "tables": {
            name: MessageToDict(spec, preserving_proto_field_name=True)
            for name, spec in sorted(specs.items())
        },
        "files": [
            {
                "name": file.name,
                "shard": shard,
                "table": file.table,
                "rows": file.rows,
                "bytes": file.bytes,
                "sha256": file.sha256,
            }
            for shard, file in files
        ],
    }
    write_synced(folder / MANIFEST, json.dumps(tree, indent=1).encode())


def read_manifest(directory: str | Path) -> Manifest:
    """Read and check a manifest; the files it names are looked at by `verify`.

    Raises:
        CheckpointError: naming the file, what is wrong and what was expected.
    """
    path = Path(directory) / MANIFEST
    try:
        tree: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: not found; expected a finished checkpoint in {Path(directory)}"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; expected the manifest of a checkpoint") from None
    try:
        found = (tree["format"], tree["version"], tree["buckets"])
        if found != (FORMAT, VERSION, _native.BUCKETS):
            raise CheckpointError(
                f"{path}: format, version, buckets are {found}; "
                f"expected {(FORMAT, VERSION, _native.BUCKETS)}"
            )
        files = tuple(File(**entry) for entry in tree["files"])
        shards = int(tree["shards"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: lacks or misnames a field: {error}") from None
    for file in files:
        if Path(file.name).name != file.name:
            raise CheckpointError(f"{path}: file name {file.name!r}; expected a plain name")
    if {f.shard for f in files} - set(range(shards)) or shards < 1:
        raise CheckpointError(f"{path}: has files of other shards than its {shards}")
    return Manifest(Path(directory), shards, files)


def verify(manifest: Manifest, files: Sequence[File] | None = None) -> None:
    """Compare files (all, unless given) with the sizes and checksums of the manifest.

    Raises:
        CheckpointError: naming the first that differs.
    """
    for file in manifest.files if files is None else files:
        path = manifest.directory / file.name
        try:
            size = path.stat().st_size
            if size != file.bytes:
                raise CheckpointError(f"{path}: {size} bytes; the manifest says {file.bytes}")
            digest = sha256(path)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}; the manifest names it") from None
        if digest != file.sha256:
            raise CheckpointError(
                f"{path}: SHA-256 is {digest}; the manifest says {file.sha256}: it was damaged"
            )


def write_tables(
    folder: Path,
    tables: Mapping[str, tuple[TableSpec, _native.Table]],
    shard: int,
    shards: int,
    window: _native.Window | None = None,
) -> list[SavedFile]:
    """Write the files of one shard, from one cut over all its tables and its window."""
    stem = f"shard-{shard:05d}-of-{shards:05d}"
    rows: dict[str, int] = {}
    with ExitStack() as paused:
        for name in sorted(tables):
            tables[name][1].pause()
            paused.callback(tables[name][1].resume)
        clients = window.export() if window is not None else []
        for name, (spec, table) in sorted(tables.items()):
            path = folder / f"{stem}.{name}.rows"
            rows[name] = table.save(str(path), spec.SerializeToString(deterministic=True))
    saved = [_saved(folder / f"{stem}.{name}.rows", name, rows[name]) for name in sorted(tables)]
    if window is not None:
        path = folder / f"{stem}.window.json"
        entries = [[c, e, s, base64.b64encode(bits).decode()] for c, e, s, bits in clients]
        write_synced(path, json.dumps(entries).encode())
        saved.append(_saved(path, "", 0))
    return saved


def load_tables(
    manifest: Manifest, shard: int = 0, shards: int = 1, *, verified: bool = False
) -> tuple[Tables, _native.Window | None]:
    """New tables with the rows that belong to `shard` of `shards`, and the shard's window.

    The checkpoint may have been written by any number of shards. The window is None unless
    that number was the same: a client counts its pushes for each shard.

    Args:
        manifest: of the checkpoint.
        shard: which one, by bucket range.
        shards: of how many.
        verified: the checksums have been compared already.

    Raises:
        CheckpointError: naming the file, what is wrong and what was expected.
    """
    wanted = [f for f in manifest.files if _overlaps(f.shard, manifest.shards, shard, shards)]
    if not verified:
        verify(manifest, wanted)
    tables: Tables = {}
    # The spec of every table, even one without a row of ours.
    for file in manifest.files:
        if file.table and file.table not in tables:
            spec = read_spec(manifest.directory / file.name)
            if spec.name != file.table:
                raise CheckpointError(
                    f"{manifest.directory / file.name}: holds table {spec.name!r}; "
                    f"the manifest says {file.table!r}"
                )
            tables[file.table] = (spec, make_table(spec))
    window: _native.Window | None = None
    for file in wanted:
        path = manifest.directory / file.name
        if not file.table:
            if manifest.shards == shards:
                window = _read_window(path)
            continue
        spec, table = tables[file.table]
        other = read_spec(path)
        if other != spec:
            raise CheckpointError(
                f"{path}: its spec differs from that of the table's other files: "
                f"{describe_difference(spec, other)}"
            )
        try:
            table.load(str(path), shard, shards)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(str(error)) from None
    return tables, window


def read_spec(path: Path) -> TableSpec:
    """The spec in the head of a row file.

    Raises:
        CheckpointError: it is no row file.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEADER.size)
            if len(head) < _HEADER.size or head[:8] != _MAGIC:
                raise CheckpointError(f"{path}: not a file of rows (wrong magic)")
            size = _HEADER.unpack(head)[6]
            spec = TableSpec.FromString(stream.read(min(size, 1 << 20)))
        make_table(spec)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (DecodeError, TableError) as error:
        raise CheckpointError(f"{path}: the table spec in its head is damaged: {error}") from None
    return spec


def _overlaps(a: int, of_a: int, b: int, of_b: int) -> bool:
    """Whether shard a of of_a and shard b of of_b share a bucket; shards are bucket ranges."""
    buckets = _native.BUCKETS

    def bounds(shard: int, shards: int) -> tuple[int, int]:
        return -(-shard * buckets // shards), -(-(shard + 1) * buckets // shards)

    (a0, a1), (b0, b1) = bounds(a, of_a), bounds(b, of_b)
    return a0 < b1 and b0 < a1


def _read_window(path: Path) -> _native.Window:
    window = _native.Window()
    try:
        entries = json.loads(path.read_bytes())
        window.restore([(c, e, s, base64.b64decode(bits)) for c, e, s, bits in entries])
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: not a window of applied pushes: {error}") from None
    return window


def _saved(path: Path, table: str, rows: int) -> SavedFile:
    return SavedFile(
        name=path.name, bytes=path.stat().st_size, sha256=sha256(path), rows=rows, table=table
    )
