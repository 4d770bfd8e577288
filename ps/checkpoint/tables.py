"""Checkpoints: what shards write, and tables made from it.

Modes: `checkpoint` has everything that training needs; `delta` the same of the rows changed
since another checkpoint or delta, its parent; `base` has weights alone, for serving; `serving`
those changed since a base or another serving save. Layout of the files: rowfile.py.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protos.parameter_server_pb2 import SavedFile, SeriesState, TableSpec
from ps.checkpoint.bounds import read_at_most
from ps.checkpoint.manifest import (
    File,
    Manifest,
    first_files,
    new_id,
    read_manifest,
    specs_as_json,
    verify,
    write_manifest,
)
from ps.checkpoint.places import open_store
from ps.checkpoint.rowfile import RowWriter, read_blocks, read_spec, spec_of
from ps.checkpoint.store import Store
from ps.checkpoint.switch import Switch
from ps.engine import _native
from ps.errors import CheckpointError, DeltaError, ReplacedError
from ps.table.applied import Applied, AppliedWindow
from ps.table.buckets import Route, buckets_of, default_route
from ps.table.series import SeriesProgress
from ps.table.spec import describe_difference, make_table
from ps.table.table import Table

_LONGEST_CHAIN = 10_000
_MOST_APPLIED = 1 << 30  # bytes of what one shard had applied
_ATTEMPTS = 5
Chain = Sequence[tuple[Store, Manifest]]
Adapt = Callable[[TableSpec], TableSpec | None]
T = TypeVar("T")


def begin_snapshots(
    tables: Mapping[str, Table], mode: str, since: Mapping[str, int] | None = None
) -> dict[str, _native.Snapshot]:
    """Snapshots of all tables; no push may be under way.

    Args:
        tables: by name.
        mode: of the save.
        since: of a delta: the cut after which the changes of each table are wanted.

    Raises:
        DeltaError: a table cannot tell any more what has changed since then.
        CheckpointError: a table is being saved already.
    """
    snapshots: dict[str, _native.Snapshot] = {}
    values = mode in ("base", "serving")
    try:
        for name, table in sorted(tables.items()):
            after = since.get(name, 0) if since else 0
            snapshots[name] = table.native.snapshot(
                since=after, values=values, min_score=0.0, buckets=None
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
    tables: Mapping[str, Table],
    snapshots: Mapping[str, _native.Snapshot],
    shard: int,
    shards: int,
) -> list[SavedFile]:
    """Write one shard's snapshots while its tables go on changing."""
    saved = []
    for name, snapshot in snapshots.items():
        writer = RowWriter(tables[name].spec, snapshot)
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


def write_applied(
    store: Store, folder: str, applied: Applied, shard: int, shards: int
) -> SavedFile:
    """Write what a shard has applied of each client and series."""
    entries = {
        "clients": [
            [w.client, w.epoch, w.highest, base64.b64encode(w.bits).decode()]
            for w in applied.windows
        ],
        "series": [
            base64.b64encode(s.message.SerializeToString()).decode() for s in applied.series
        ],
    }
    file = f"{folder}/shard-{shard:05d}-of-{shards:05d}.window.json"
    written = store.write(file, [json.dumps(entries).encode()])
    return SavedFile(name=file, bytes=written.bytes, sha256=written.sha256)


def write_alone(
    switch: Switch,
    tables: Mapping[str, Table],
    snapshots: Mapping[str, _native.Snapshot],
    applied: Applied | None = None,
    log: int = 0,
) -> int:
    """Write a checkpoint of one process alone; its bytes.

    Args:
        switch: of `begin_save` where it is to lie.
        tables: by name.
        snapshots: of `begin_snapshots`.
        applied: what has been applied of each client and series.
        log: see Manifest.
    """
    store, folder = switch.store, new_id()
    saved = write_tables(store, folder, tables, snapshots, 0, 1)
    if applied is not None:
        saved.append(write_applied(store, folder, applied, 0, 1))
    write_manifest(
        switch,
        Manifest(
            id=folder,
            mode="checkpoint",
            shards=1,
            files=tuple(File.of(file, 0) for file in saved),
            tables=specs_as_json({name: table.spec for name, table in tables.items()}),
            log=log,
        ),
    )
    return sum(file.bytes for file in saved)


def check_for_training(store: Store, manifest: Manifest) -> None:
    """Refuse weights alone.

    Raises:
        CheckpointError: naming the place.
    """
    if manifest.mode in ("base", "serving"):
        raise CheckpointError(
            f"{store.url}: holds weights for serving; expected a checkpoint or delta"
        )


def chain(store: Store) -> list[tuple[Store, Manifest]]:
    """A checkpoint and those it builds on, oldest first.

    Raises:
        CheckpointError: one is missing or is no longer the save that the next one was made of.
    """
    found = [(store, read_manifest(store))]
    ids = {found[0][1].id}
    while (parent := found[-1][1].parent) is not None:
        if parent.id in ids:
            raise CheckpointError(f"{store.url}: builds on {parent.id}, which builds on it")
        ids.add(parent.id)
        place = parent.place
        if not place.startswith("/") and "://" not in place:
            place = _sibling(store.url, place)
        store = open_store(place)
        manifest = read_manifest(store)
        if manifest.id != parent.id:
            raise CheckpointError(
                f"{found[-1][0].url}: builds on save {parent.id} in {store.url}, which now holds "
                f"{manifest.id}"
            )
        found.append((store, manifest))
        if len(found) > _LONGEST_CHAIN:
            raise CheckpointError(
                f"{found[0][0].url}: builds on over {_LONGEST_CHAIN} saves; expected fewer"
            )
    return found[::-1]


def save_of(links: Chain) -> str:
    """Which save that is, with all that it builds on: the checksum of their manifests."""
    checksums = "".join(manifest.checksum for _, manifest in links)
    return hashlib.sha256(checksums.encode()).hexdigest()


def read_save(place: str | Path, read: Callable[[Chain], T], save: str = "") -> T:
    """Read what lies at a place, all of it of one save.

    Args:
        place: path or URL.
        read: is given the chain. It is repeated where another save has taken the place meanwhile.
        save: the one that it must be, as of `save_of`; whichever is there unless given.

    Raises:
        ReplacedError: another save lies there, or again and again.
        CheckpointError: from `read`, or naming what is damaged.
    """
    store = open_store(place)
    for attempt in range(_ATTEMPTS):
        links = chain(store)
        found = save_of(links)
        if save and found != save:
            break
        try:
            return read(links)
        except (CheckpointError, OSError) as error:
            if _lies_at(store, found):
                if isinstance(error, OSError):
                    raise CheckpointError(f"{store.url}: {error.strerror or error}") from None
                raise
            if save or attempt == _ATTEMPTS - 1:
                break
    raise ReplacedError(
        f"{store.url}: another save has taken the place of the one that was to be read; "
        "expected one that stays"
    )


def _lies_at(store: Store, save: str) -> bool:
    try:
        return save_of(chain(store)) == save
    except CheckpointError:
        return False  # a parent has gone, so what failed may be of either


def load_tables(
    links: Chain,
    wanted: NDArray[np.uint8] | None = None,
    directory: str = "",
    *,
    verified: bool = False,
    adapt: Adapt = lambda spec: spec,
    weights_alone: bool = False,
) -> tuple[dict[str, Table], Applied]:
    """New tables with the rows of some buckets, and what had been applied.

    Args:
        links: of `chain`. They may have been written by any number of shards.
        wanted: 1 for each bucket to take; all unless given.
        directory: for rows beyond a table's memory.
        verified: the checksums have been compared already.
        adapt: from a table's spec in the files, the one to make it with; None leaves it out.
        weights_alone: rows begin anew, whatever the spec they are made with, with these weights.

    Raises:
        CheckpointError: naming the file, what is wrong and what was expected.
    """
    tables: dict[str, Table] = {}
    applied = Applied()
    for store, manifest in links:
        check_for_training(store, manifest)
        files = [f for f in manifest.files if _touches(f.shard, manifest, wanted)]
        if not verified:
            verify(store, files)
        # The spec of every table, even one without a row of ours.
        for file in first_files(manifest.files).values():
            _add_table(store, file, tables, directory, adapt)
        # What the newest save had applied holds the windows of all before.
        applied = Applied()
        for file in manifest.files:
            if not file.table:
                _read_applied(store, file, applied)
        for file in files:
            if file.table:
                # A shard may also have rows that were on their way to it, of buckets not its own.
                own = buckets_of(_route(manifest), file.shard)
                own = own if wanted is None else own & wanted
                _absorb(store, file, tables, own, adapt, weights_alone=weights_alone)
    return tables, applied


def _absorb(
    store: Store,
    file: File,
    tables: dict[str, Table],
    wanted: NDArray[np.uint8],
    adapt: Adapt,
    *,
    weights_alone: bool,
) -> None:
    path = f"{store.url}/{file.name}"
    with store.open(file.name) as stream:
        written = read_spec(stream, path)
        other = adapt(written)
        if other is None:
            return
        table = tables[other.name]
        if other != table.spec:
            raise CheckpointError(
                f"{path}: its spec differs from that of the table's other files: "
                f"{describe_difference(table.spec, other)}"
            )
        source = None
        if weights_alone:
            written.ClearField("tier")  # it only says how rows of the file lie
            source = make_table(written)
        try:
            for block in read_blocks(stream, path, file.rows):
                table.native.absorb(block, wanted, source)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        except MemoryError:
            raise CheckpointError(f"{path}: its rows need more memory than there is") from None


def _add_table(
    store: Store, file: File, tables: dict[str, Table], directory: str, adapt: Adapt
) -> None:
    path = f"{store.url}/{file.name}"
    try:
        spec = spec_of(store, file.name)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if spec.name != file.table:
        raise CheckpointError(
            f"{path}: holds table {spec.name!r}; the manifest says {file.table!r}"
        )
    adapted = adapt(spec)
    if adapted is None:
        return
    have = tables.get(adapted.name)
    if have is None:
        tables[adapted.name] = Table.make(adapted, directory)
    elif have.spec != adapted:
        raise CheckpointError(f"{path}: differs: {describe_difference(have.spec, adapted)}")


def _touches(shard: int, manifest: Manifest, wanted: NDArray[np.uint8] | None) -> bool:
    """Whether that shard of the writers held a bucket that is wanted."""
    if wanted is None:
        return True
    return bool(np.any(wanted[_route(manifest) == shard]))


def _route(manifest: Manifest) -> Route:
    if manifest.route is not None:
        return np.array(manifest.route, np.uint16)
    return default_route(manifest.shards)


def _read_applied(store: Store, file: File, into: Applied) -> None:
    path = f"{store.url}/{file.name}"
    try:
        with store.open(file.name) as stream:
            entries = json.loads(read_at_most(stream, _MOST_APPLIED, path))
        if isinstance(entries, list):  # of saves without series
            entries = {"clients": entries, "series": []}
        clients = entries["clients"]
        told = [(str(c), int(e), int(s), base64.b64decode(bits)) for c, e, s, bits in clients]
        _native.Window().merge(told)  # checks the sizes
        series = [
            SeriesProgress.of(SeriesState.FromString(base64.b64decode(each)))
            for each in entries["series"]
        ]
    except (
        *(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError, MemoryError),
        DecodeError,
    ) as error:
        raise CheckpointError(f"{path}: not what a shard has applied: {error}") from None
    into.windows.extend(AppliedWindow(*window) for window in told)
    into.series.extend(series)


def _sibling(url: str, name: str) -> str:
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
