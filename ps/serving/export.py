"""Exports: the weights of a save as Parquet or safetensors, for tools that know nothing of us.

An export is a folder: `tables/NAME.parquet` or `tables/NAME.safetensors`, `dense.safetensors`
where dense weights were given, and, written last, `export.json` with the sizes and checksums.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from google.protobuf.json_format import MessageToDict

from chassis.files import sync_folder
from chassis.near import did_you_mean
from protos.parameter_server_pb2 import TableSpec
from ps.checkpoint.manifest import verify
from ps.checkpoint.places import open_store
from ps.checkpoint.store import LocalStore, Store
from ps.errors import CheckpointError
from ps.serving.export_files import FORMATS, Table, dense_bytes
from ps.serving.weights import Link, links_of, newest_rows, specs_of

MANIFEST = "export.json"
FORMAT, VERSION = "heterps-export", 1
DTYPES = ("float32", "float16")


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file of an export; `table` is empty for the dense weights, which have no rows."""

    name: str
    table: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, as in `export.json`.

    Attributes:
        target: where.
        save: id of the save it was made from.
        format: parquet or safetensors.
        dtype: of the values.
        files: one a table, and the dense weights.
    """

    target: str
    save: str
    format: str
    dtype: str
    files: tuple[ExportedFile, ...]

    @property
    def rows(self) -> int:
        """Of all tables."""
        return sum(file.rows for file in self.files)


def export_checkpoint(
    place: str | Path,
    target: str | Path,
    format: str = "parquet",
    dtype: str = "float32",
    tables: Sequence[str] | None = None,
    *,
    dense: Mapping[str, Any] | str | Path | None = None,
    replace: bool = False,
) -> Exported:
    """Write the rows of a save, and what it builds on, as files that others can read.

    Parquet: columns `key` (uint64) and `values` (a fixed-size list of `dim` floats); the
    metadata of the schema has the table's spec under `heterps.spec`. Safetensors: tensors
    `NAME.keys` (int64 with the bits of the uint64 key) and `NAME.values` [rows, dim]. Rows are
    in no order that means anything. Memory for a row group and 8 bytes a key of the deltas is
    enough, whatever the size of the tables.

    A local target appears whole, by a rename. At a URL the files count once `export.json` is
    there.

    Args:
        place: a save of any mode, or where a Publisher writes.
        target: a new or empty folder, or a URL that fsspec knows.
        format: parquet or safetensors.
        dtype: of the values: float32 or float16.
        tables: only these; all unless given.
        dense: the model's other weights: tensors by name, or a safetensors file.
        replace: an earlier export at `target`.

    Raises:
        CheckpointError: the save is missing or damaged, lacks a table, or has a value that
            float16 cannot hold; or something else is at `target`, which stays.
        ValueError: another format or dtype.
    """
    if format not in FORMATS or dtype not in DTYPES:
        raise ValueError(
            f"format={format!r}, dtype={dtype!r}; expected {' or '.join(FORMATS)}, and "
            f"{' or '.join(DTYPES)}"
        )
    links = links_of(place)
    url = links[-1][0].url
    specs = _chosen(specs_of(links), tables, url)
    for store, manifest in links:
        verify(store, [f for f in manifest.files if f.table in specs])
    save = links[-1][1].id
    with _staged(target, replace) as store:
        files = []
        if dense is not None:  # first: a mistake there shows at once
            written = store.write("dense.safetensors", dense_bytes(dense))
            files.append(ExportedFile("dense.safetensors", "", 0, written.bytes, written.sha256))
        for spec in specs.values():
            files.append(_write_table(store, links, spec, format, dtype, save))
        exported = Exported(open_store(target).url, save, format, dtype, tuple(files))
        store.replace(MANIFEST, _manifest(exported, specs))
    return exported


def _write_table(
    store: Store, links: Sequence[Link], spec: TableSpec, format: str, dtype: str, save: str
) -> ExportedFile:
    table = Table(
        name=spec.name,
        dim=spec.dim,
        dtype=dtype,
        metadata={"heterps.spec": json.dumps(_as_json(spec)), "heterps.save": save},
        spool=store.url if isinstance(store, LocalStore) else None,
    )
    name = f"tables/{spec.name}.{format}"
    written = store.write(name, FORMATS[format](table, newest_rows(links, spec)))
    return ExportedFile(name, spec.name, table.rows, written.bytes, written.sha256)


def _chosen(
    specs: dict[str, TableSpec], tables: Iterable[str] | None, url: str
) -> dict[str, TableSpec]:
    if tables is None:
        return dict(sorted(specs.items()))
    for name in tables:
        if name not in specs:
            known = sorted(specs)
            raise CheckpointError(
                f"{url}: has no table {name!r}; it has {', '.join(known) or 'none'}"
                f"{did_you_mean(name, known)}"
            )
    return {name: specs[name] for name in sorted(set(tables))}


def _manifest(exported: Exported, specs: Mapping[str, TableSpec]) -> bytes:
    tree = asdict(exported)
    del tree["target"]  # it may be moved
    tree = {
        "about": FORMAT,
        "version": VERSION,
        **tree,
        "tables": {name: _as_json(spec) for name, spec in specs.items()},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return json.dumps(tree, indent=1).encode()


def _as_json(spec: TableSpec) -> dict[str, Any]:
    return dict(MessageToDict(spec, preserving_proto_field_name=True))


@contextmanager
def _staged(target: str | Path, replace: bool) -> Iterator[Store]:
    """Where to write what is to become the target."""
    store = open_store(target)
    entries = store.entries()
    finished = MANIFEST in entries
    if entries and not finished:
        raise CheckpointError(
            f"{store.url}: exists and is not a finished export (it has {entries[0]!r}); expected "
            "a new or empty place"
        )
    if finished and not replace:
        raise CheckpointError(
            f"{store.url}: holds an export; expected another place, or to be told to replace it"
        )
    if not isinstance(store, LocalStore):
        if finished:  # from here on it no longer counts
            store.remove(MANIFEST)
            store.remove("tables")
            store.remove("dense.safetensors")
        try:
            yield store
        except BaseException:
            store.remove("tables")
            store.remove("dense.safetensors")
            raise
        return
    path = Path(store.url)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{token_hex(4)}")
    staging.mkdir()
    try:
        yield LocalStore(staging)
        _swap(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _swap(staging: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.{token_hex(4)}")
    if path.exists():
        os.rename(path, old)
    os.rename(staging, path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)
