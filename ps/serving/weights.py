"""The weights in a save, whatever its mode: keys with float32 rows, a block at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protos.parameter_server_pb2 import TableSpec
from ps.checkpoint.manifest import File, Manifest, first_files
from ps.checkpoint.places import open_store
from ps.checkpoint.rowfile import read_blocks, read_spec, spec_of
from ps.checkpoint.store import Store
from ps.checkpoint.tables import chain
from ps.engine import _native
from ps.errors import CheckpointError
from ps.serving import feed
from ps.table.spec import describe_difference, make_table

Link = tuple[Store, Manifest]
_KIND = 4  # offset in a block
_COUNTED, _NARROW, _FULL, _BLOOM = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Block:
    """Rows float32 [n, dim] of `keys` uint64 [n], or, where `removed`, keys that are gone."""

    removed: bool
    keys: NDArray[np.uint64]
    rows: NDArray[np.float32]


class Decoder:
    """Takes blocks of one table apart.

    Blocks of a base or serving save have float32 rows. Those of a checkpoint have rows as they
    lie in memory; an engine's table of the same layout, emptied each time, reads them.
    """

    def __init__(self, spec: TableSpec) -> None:
        layout = TableSpec()
        layout.CopyFrom(spec)
        layout.ClearField("tier")
        if layout.admission.kind == "bloom":  # its counters have nothing to do with rows
            layout.ClearField("admission")
        self._layout = layout
        self._dim = spec.dim
        self._table: _native.Table | None = None

    def decode(self, block: bytes) -> Iterator[Block]:
        """What a block says about weights.

        Raises:
            ValueError: it is damaged.
        """
        kind = block[_KIND]
        if kind in (_COUNTED, _BLOOM):
            return
        if kind not in (_NARROW, _FULL):
            yield Block(*_native.decode_block(block, self._dim))
            return
        if self._table is None:
            self._table = make_table(self._layout)
        self._table.absorb(block, None)
        snapshot = self._table.snapshot(since=0, values=True, min_score=0.0, buckets=None)
        try:
            while (values := snapshot.next()) is not None:
                yield Block(*_native.decode_block(values, self._dim))
        finally:
            snapshot.close()
            self._table.erase(np.ones(_native.BUCKETS, np.uint8))


def links_of(place: str | Path) -> list[Link]:
    """The saves that make up what lies at a place, oldest first.

    Args:
        place: a save of any mode, or where a Publisher writes.

    Raises:
        CheckpointError: there is none, or one is missing or damaged.
    """
    store = open_store(place)
    found = feed.read_feed(store)
    if found is None:
        return chain(store)
    base = found.bases[-1]
    entries = [base, *(d for d in found.deltas if d.number > base.number)]
    return [feed.open_entry(store, entry) for entry in entries]


def specs_of(links: Sequence[Link]) -> dict[str, TableSpec]:
    """The spec of every table of the newest save.

    Raises:
        CheckpointError: an older save has one of them with another spec.
    """
    specs: dict[str, TableSpec] = {}
    for store, manifest in reversed(links):
        for name, file in first_files(manifest.files).items():
            spec = spec_of(store, file.name)
            have = specs.get(name)
            if have is None and manifest is links[-1][1]:
                specs[name] = spec
            elif have is not None and have != spec:
                raise CheckpointError(
                    f"{store.url}/{file.name}: differs from later saves: "
                    f"{describe_difference(have, spec)}"
                )
    return specs


def read_weights(store: Store, file: File, spec: TableSpec) -> Iterator[Block]:
    """The blocks of one file of rows.

    Raises:
        CheckpointError: it is damaged, or of a table with another spec.
    """
    path = f"{store.url}/{file.name}"
    decoder = Decoder(spec)
    with store.open(file.name) as stream:
        found = read_spec(stream, path)
        if found != spec:
            raise CheckpointError(f"{path}: differs: {describe_difference(spec, found)}")
        try:
            for block in read_blocks(stream, path, file.rows):
                yield from decoder.decode(block)
        except CheckpointError:
            raise
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {error}") from None


def newest_rows(links: Sequence[Link], spec: TableSpec) -> Iterator[Block]:
    """Every row of a table once, as the newest save has it; in no order that means anything.

    The newest save is read first, and of older ones only the keys that no later one names. That
    takes memory for a block and for 8 bytes a key of the later saves.
    """
    later = np.empty(0, np.uint64)  # sorted
    for position, (store, manifest) in reversed(list(enumerate(links))):
        named = [later]
        for file in manifest.files:
            if file.table != spec.name:
                continue
            for block in read_weights(store, file, spec):
                if position > 0:
                    named.append(block.keys)
                if block.removed or not len(block.keys):
                    continue
                fresh = ~_contains(later, block.keys)
                if fresh.all():
                    yield block
                elif fresh.any():
                    yield Block(False, block.keys[fresh], block.rows[fresh])
        if len(named) > 1:
            later = np.unique(np.concatenate(named))


def _contains(ordered: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    if not len(ordered):
        return np.zeros(len(keys), np.bool_)
    at = np.searchsorted(ordered, keys)
    at[at == len(ordered)] = 0
    found: NDArray[np.bool_] = ordered[at] == keys
    return found
