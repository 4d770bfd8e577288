"""Tables in this process: the shard's engine without a server."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.parameter_server_pb2 import TableSpec
from ps import _native, checkpoint
from ps.arrays import as_gradients, as_keys
from ps.errors import CheckpointError, TableError
from ps.spec import describe_difference, make_spec, make_table


class LocalTable:
    """An embedding table in this process's memory; thread-safe.

    A key's row is made when it is first pulled or pushed, with the same first value that every
    shard would give it.
    """

    def __init__(self, spec: TableSpec, table: _native.Table | None = None) -> None:
        self.spec = spec
        self._table = make_table(spec) if table is None else table

    @classmethod
    def create(cls, name: str, dim: int, **options: Any) -> "LocalTable":
        """An empty table; the options are those of `ps.spec.make_spec`.

        Raises:
            TableError: naming the argument, its value and what was expected.
        """
        return cls(make_spec(name, dim, **options))

    @property
    def name(self) -> str:
        """The table's name."""
        return self.spec.name

    @property
    def dim(self) -> int:
        """Floats a row."""
        return self.spec.dim

    def __len__(self) -> int:
        """Number of rows."""
        return self._table.rows

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self._table.nbytes

    def keys(self) -> NDArray[np.uint64]:
        """The keys that have a row, in no order that means anything."""
        return self._table.keys()

    def pull(self, keys: Any, read_only: bool = False) -> NDArray[np.float32]:
        """Rows of `keys` (integers of any shape): float32 [*keys.shape, dim].

        Args:
            keys: NumPy or torch; int64 keeps its bits.
            read_only: a missing key reads its first value and grows no row.
        """
        flat, shape = as_keys(keys)
        return self._table.pull(flat, read_only).reshape(*shape, self.dim)

    def push(self, keys: Any, grads: Any) -> None:
        """Apply gradients, float32 [*keys.shape, dim]; those of equal keys sum first.

        Raises:
            TableError: wrong shapes or dtypes, or a gradient that is not finite (names its key).
        """
        flat, shape = as_keys(keys)
        values = as_gradients(grads, shape, self.dim)
        try:
            self._table.push(flat, values)
        except ValueError as error:
            raise TableError(f"table {self.name!r}: {error}") from None

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
    def load_checkpoint(directory: str | Path) -> "dict[str, LocalTable]":
        """All tables of a checkpoint, written by however many shards.

        Raises:
            CheckpointError: naming the file, what is wrong and what was expected.
        """
        tables, _ = checkpoint.load_tables(checkpoint.read_manifest(directory))
        return {name: LocalTable(spec, table) for name, (spec, table) in tables.items()}


def save_checkpoint(directory: str | Path, tables: list[LocalTable]) -> None:
    """Write one checkpoint of several tables of this process."""
    with checkpoint.writing(directory) as folder:
        pairs = {t.name: (t.spec, t._table) for t in tables}
        files = checkpoint.write_tables(folder, pairs, 0, 1)
        checkpoint.write_manifest(folder, 1, [(0, f) for f in files])
