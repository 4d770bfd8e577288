"""Tables in this process: the shard's engine without a server."""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.parameter_server_pb2 import TableSpec
from ps.checkpoint.manifest import begin_save
from ps.checkpoint.places import open_store
from ps.checkpoint.tables import begin_snapshots, load_tables, read_save, write_alone
from ps.engine import _native
from ps.errors import CheckpointError, TableError
from ps.table.arrays import as_gradients, as_keys
from ps.table.gate import Gate
from ps.table.spec import describe_difference, make_spec, make_table
from ps.table.table import Table
from ps.table.usage import Usage


class LocalTable:
    """An embedding table in this process's memory; thread-safe.

    A key's row is made when it is first pushed to; before, it reads the same first value that
    every shard would give it.

    Args:
        spec: what it is.
        table: the engine's table, where there is one already.
        directory: for rows beyond the table's `memory_bytes`; that of temporary files unless
            given.
    """

    def __init__(
        self, spec: TableSpec, table: _native.Table | None = None, directory: str = ""
    ) -> None:
        self.spec = spec
        self._gate = Gate()
        self._table = table or make_table(spec, directory or tempfile.gettempdir())

    @classmethod
    def create(cls, name: str, dim: int, *, directory: str = "", **options: Any) -> "LocalTable":
        """An empty table; the options are those of `ps.table.spec.make_spec`.

        Raises:
            TableError: naming the argument, its value and what was expected.
        """
        return cls(make_spec(name, dim, **options), directory=directory)

    @property
    def name(self) -> str:
        """The table's name."""
        return self.spec.name

    @property
    def dim(self) -> int:
        """Floats a row."""
        return self.spec.dim

    def __len__(self) -> int:
        """Number of rows, in memory and on disk."""
        return int(self._table.counters()["rows"])

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return int(self._table.counters()["bytes"])

    @property
    def counters(self) -> dict[str, int]:
        """What it holds and has done; the fields of heterps.v1.TableStats."""
        return self._table.counters()

    def keys(self) -> NDArray[np.uint64]:
        """The keys that have a row, in no order that means anything."""
        return self._table.keys(limit=1 << 62)

    def pull(self, keys: Any, read_only: bool = False) -> NDArray[np.float32]:
        """Rows of `keys` (integers of any shape): float32 [*keys.shape, dim].

        Args:
            keys: NumPy or torch; int64 keeps its bits.
            read_only: rows that lie on disk are read there, and stay.
        """
        flat, shape = as_keys(keys)
        return self._table.pull(flat, read_only).reshape(*shape, self.dim)

    def push(
        self,
        keys: Any,
        grads: Any,
        *,
        kind: str = "",
        rate: float = 1.0,
        step: int = 0,
        shows: Any = None,
        clicks: Any = None,
        time_s: int | None = None,
    ) -> None:
        """Apply gradients, float32 [*keys.shape, dim]; those of equal keys sum first.

        Args:
            keys: NumPy or torch.
            grads: NumPy or torch.
            kind: "" for gradients, `add` to add to the weights, `assign` to write them.
            rate: times the learning rate.
            step: of the trainer, for `ttl_steps`.
            shows: float32 [*keys.shape], for scores and counts.
            clicks: likewise.
            time_s: Unix time, for `ttl_s`; now unless given.

        Raises:
            TableError: wrong shapes or dtypes, or a gradient that is not finite (names its key).
        """
        flat, shape = as_keys(keys)
        values = as_gradients(grads, shape, self.dim)
        usage = Usage.of(self.spec, shows, clicks, shape).values
        try:
            _native.check_finite(flat, 8, values, self.dim)
        except ValueError as error:
            raise TableError(f"table {self.name!r}: {error}") from None
        with self._gate.passing():
            self._table.push(
                flat,
                8,
                values,
                kind=kind,
                rate=rate,
                nonce=time.monotonic_ns(),
                time_s=int(time.time()) if time_s is None else time_s,
                step=step,
                usage=usage,
            )

    def shrink(self, *, step: int = 0, decay: bool = True, time_s: int | None = None) -> int:
        """Apply the table's eviction rules; the number of keys removed."""
        now = int(time.time()) if time_s is None else time_s
        with self._gate.closed():
            return self._table.shrink(time_s=now, step=step, decay=decay)

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint that holds this table alone."""
        save_checkpoint(directory, [self])

    def load(self, directory: str | Path) -> None:
        """Replace all rows with those a checkpoint has for this table.

        Raises:
            CheckpointError: it lacks the table, has it with another spec, or is damaged.
        """
        tables = LocalTable.load_checkpoint(directory)
        found = tables.get(self.name)
        if found is None:
            raise CheckpointError(
                f"{directory}: has no table {self.name!r}; it has {', '.join(tables) or 'none'}"
            )
        if found.spec != self.spec:
            raise CheckpointError(
                f"{directory}: table {self.name!r} differs: "
                f"{describe_difference(self.spec, found.spec)}"
            )
        self._table = found._table

    @staticmethod
    def load_checkpoint(directory: str | Path, *, save: str = "") -> "dict[str, LocalTable]":
        """All tables of a checkpoint, written by however many shards.

        Args:
            directory: path or URL.
            save: the checksum of the save that it must be, as `heterps ps save --json` tells it.

        Raises:
            CheckpointError: naming the file, what is wrong and what was expected.
        """
        tables, _ = read_save(
            directory, lambda links: load_tables(links, directory=tempfile.gettempdir()), save
        )
        return {name: LocalTable(table.spec, table.native) for name, table in tables.items()}


def save_checkpoint(directory: str | Path, tables: list[LocalTable]) -> None:
    """Write one checkpoint of several tables of this process."""
    switch = begin_save(open_store(directory))
    held = {table.name: Table(table.spec, table._table) for table in tables}
    snapshots: dict[str, _native.Snapshot] = {}
    for table in tables:
        with table._gate.closed():
            snapshots |= begin_snapshots({table.name: held[table.name]}, "checkpoint")
    write_alone(switch, held, snapshots)
