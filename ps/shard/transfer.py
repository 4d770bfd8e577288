"""State on its way from shard to shard."""

from collections.abc import Iterator, Mapping

from protos import parameter_server_pb2 as pb
from ps.engine import _native
from ps.errors import TableError
from ps.table.table import Table

TIMEOUT_S = 600.0


def blocks_of(
    tables: Mapping[str, Table], snapshots: Mapping[str, _native.Snapshot]
) -> Iterator[pb.StateBlock]:
    """Tables and their rows."""
    for name, snapshot in snapshots.items():
        yield pb.StateBlock(table=tables[name].spec)
        while (block := snapshot.next()) is not None:
            yield pb.StateBlock(name=name, payload=block)
        snapshot.close()


def native_of(tables: Mapping[str, Table], name: str) -> _native.Table:
    """The table that a block belongs to.

    Raises:
        TableError: the block came before its table.
    """
    if name not in tables:
        raise TableError(f"a block of table {name[:140]!r}, which the transfer has not begun")
    return tables[name].native
