"""Checkpoints: what shards write, and tables made from it.

Modes: `checkpoint` has everything that training needs; `delta` the same of the rows changed
since another checkpoint or delta, its parent; `base` has weights alone, for serving; `serving`
those changed since a base or another serving save. Layout of the files: rowfile.py.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protos.parameter_server_pb2 import SavedFile, TableSpec
from ps.checkpoint.manifest import File, Manifest, read_manifest, verify
from ps.checkpoint.places import open_store
from ps.checkpoint.rowfile import RowWriter, read_blocks, read_spec
from ps.checkpoint.store import Store
from ps.engine import _native
from ps.errors import CheckpointError, DeltaError
from ps.table.buckets import Route, buckets_of, default_route
from ps.table.spec import describe_difference, make_table

Tables = dict[str, tuple[TableSpec, _native.Table]]
ClientState = tuple[str, int, int, bytes]  # as _native.Window exports it
_LONGEST_CHAIN = 10_000


def begin(
    tables: Mapping[str, tuple[TableSpec, _native.Table]],
    mode: str,
    since: Mapping[str, int],
) -> dict[str, _native.Snapshot]:
    """Snapshots of all tables; no push may be under way.

    Raises:
        DeltaError: a table cannot tell any more what has changed since then.
        CheckpointError: a table is being saved already.
    """
    snapshots: dict[str, _native.Snapshot] = {}
    values = mode in ("base", "serving")
    try:
        for name, (_, table) in sorted(tables.items()):
            snapshots[name] = table.snapshot(
                since=since.get(name, 0), values=values, min_score=0.0, buckets=None
            )
    except (ValueError, RuntimeError) as error:
        for snapshot in snapshots.values():
            snapshot.close()
        kind = DeltaError if isinstance(error, _native.ForgottenError) else CheckpointError
        raise kind(f"table {name!r}: {error}") from None
    return snapshots


def write_tables(
    store: Store,
    folder: str,
    specs: Mapping[str, TableSpec],
    snapshots: Mapping[str, _native.Snapshot],
    shard: int,
    shards: int,
) -> list[SavedFile]:
    """Write one shard's snapshots while its tables go on changing."""
    saved = []
    for name, snapshot in snapshots.items():
        writer = RowWriter(specs[name], snapshot)
        file = f"{folder}/shard-{shard:05d}-of-{shards:05d}.{name}.rows"
        try:
            written = store.write(file, writer)
        finally:
            snapshot.close()
        saved.append(
            SavedFile(
                name=file, bytes=written.bytes, sha256=written.sha256, rows=writer.rows, table=name
            )
        )
    return saved


def write_window(
    store: Store, folder: str, clients: Sequence[ClientState], shard: int, shards: int
) -> SavedFile:
    """Write what a shard has applied of each client."""
    entries = [[c, e, s, base64.b64encode(bits).decode()] for c, e, s, bits in clients]
    file = f"{folder}/shard-{shard:05d}-of-{shards:05d}.window.json"
    written = store.write(file, [json.dumps(entries).encode()])
    return SavedFile(name=file, bytes=written.bytes, sha256=written.sha256)


def chain(store: Store) -> list[tuple[Store, Manifest]]:
    """A checkpoint and those it builds on, oldest first.

    Raises:
        CheckpointError: one is missing or is no longer the save that the next one was made of.
    """
    found = [(store, read_manifest(store))]
    while (parent := found[-1][1].parent) is not None:
        place = parent.place
        if not place.startswith("/") and "://" not in place:
            place = _beside(store.url, place)
        store = open_store(place)
        manifest = read_manifest(store)
        if manifest.id != parent.id:
            raise CheckpointError(
                f"{found[-1][0].url}: builds on save {parent.id} in {store.url}, which now holds "
                f"{manifest.id}"
            )
        found.append((store, manifest))
        if len(found) > _LONGEST_CHAIN:
            raise CheckpointError(f"{found[0][0].url}: its parents go in a circle")
    return found[::-1]


def load_tables(
    links: Sequence[tuple[Store, Manifest]],
    wanted: NDArray[np.uint8] | None = None,
    directory: str = "",
    *,
    verified: bool = False,
) -> tuple[Tables, list[ClientState]]:
    """New tables with the rows of some buckets, and what had been applied of each client.

    Args:
        links: of `chain`. They may have been written by any number of shards.
        wanted: 1 for each bucket to take; all unless given.
        directory: for rows beyond a table's memory.
        verified: the checksums have been compared already.

    Raises:
        CheckpointError: naming the file, what is wrong and what was expected.
    """
    tables: Tables = {}
    clients: list[ClientState] = []
    for store, manifest in links:
        if manifest.mode in ("base", "serving"):
            raise CheckpointError(
                f"{store.url}: holds weights for serving; expected a checkpoint or delta"
            )
        files = [f for f in manifest.files if _touches(f.shard, manifest, wanted)]
        if not verified:
            verify(store, files)
        # The spec of every table, even one without a row of ours.
        for file in _first_of_each(manifest.files):
            _add_table(store, file, tables, directory)
        # What the newest save had applied holds the windows of all before.
        clients = []
        for file in manifest.files:
            if not file.table:
                clients += _read_window(store, file)
        for file in files:
            if file.table:
                # A shard may also have rows that were on their way to it, of buckets not its own.
                own = buckets_of(_route(manifest), file.shard)
                _absorb(store, file, tables, own if wanted is None else own & wanted)
    return tables, clients


def _absorb(store: Store, file: File, tables: Tables, wanted: NDArray[np.uint8]) -> None:
    path = f"{store.url}/{file.name}"
    spec, table = tables[file.table]
    with store.open(file.name) as stream:
        other = read_spec(stream, path)
        if other != spec:
            raise CheckpointError(
                f"{path}: its spec differs from that of the table's other files: "
                f"{describe_difference(spec, other)}"
            )
        try:
            for block in read_blocks(stream, path):
                table.absorb(block, wanted)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {error}") from None


def _add_table(store: Store, file: File, tables: Tables, directory: str) -> None:
    path = f"{store.url}/{file.name}"
    try:
        with store.open(file.name) as stream:
            spec = read_spec(stream, path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if spec.name != file.table:
        raise CheckpointError(
            f"{path}: holds table {spec.name!r}; the manifest says {file.table!r}"
        )
    have = tables.get(spec.name)
    if have is None:
        tables[spec.name] = (spec, make_table(spec, directory))
    elif have[0] != spec:
        raise CheckpointError(f"{path}: differs: {describe_difference(have[0], spec)}")


def _first_of_each(files: Iterable[File]) -> list[File]:
    first: dict[str, File] = {}
    for file in files:
        if file.table:
            first.setdefault(file.table, file)
    return list(first.values())


def _touches(shard: int, manifest: Manifest, wanted: NDArray[np.uint8] | None) -> bool:
    """Whether that shard of the writers held a bucket that is wanted."""
    if wanted is None:
        return True
    return bool(np.any(wanted[_route(manifest) == shard]))


def _route(manifest: Manifest) -> Route:
    if manifest.route is not None:
        return np.array(manifest.route, np.uint16)
    return default_route(manifest.shards)


def _read_window(store: Store, file: File) -> list[ClientState]:
    path = f"{store.url}/{file.name}"
    try:
        with store.open(file.name) as stream:
            entries = json.loads(stream.read())
        clients = [(str(c), int(e), int(s), base64.b64decode(bits)) for c, e, s, bits in entries]
        _native.Window().merge(clients)  # checks the sizes
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: not a window of applied pushes: {error}") from None
    return clients


def _beside(url: str, name: str) -> str:
    head, _, _ = url.rpartition("/")
    return f"{head}/{name}"


def relative_place(store: Store, parent: Store) -> str:
    """How a save names its parent: by name alone where they lie side by side."""
    mine, _, _ = store.url.rpartition("/")
    head, _, name = parent.url.rpartition("/")
    return name if mine == head else parent.url


def read_checkpoint(place: str | Path) -> Manifest:
    """The manifest of the checkpoint at a path or URL.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return read_manifest(open_store(place))
