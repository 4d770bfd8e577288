"""State on its way from shard to shard."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from protos import parameter_server_pb2 as pb
from ps.engine import _native
from ps.errors import TableError
from ps.shard.stage import Part
from ps.table.table import Table

TIMEOUT_S = 600.0


def blocks_of(
    tables: Mapping[str, Table],
    snapshots: Mapping[str, _native.Snapshot],
    parts: Sequence[Part] = (),
) -> Iterator[pb.StateBlock]:
    """Tables and their rows, and parts of steps that wait for their commit."""
    for name, snapshot in snapshots.items():
        yield pb.StateBlock(table=tables[name].told)
        while (block := snapshot.next()) is not None:
            yield pb.StateBlock(name=name, payload=block)
        snapshot.close()
    for part in parts:
        yield pb.StateBlock(staged=True, payload=bytes(part.message))


def state_of(
    blocks: Iterable[pb.StateBlock], directory: str
) -> tuple[dict[str, Table], list[bytes]]:
    """New tables, and the messages of parts, from such blocks.

    Args:
        blocks: as they came.
        directory: for rows that do not fit memory.

    Raises:
        TableError: rows of a table came before it, or a spec that cannot be.
    """
    tables: dict[str, Table] = {}
    parts: list[bytes] = []
    for block in blocks:
        if block.HasField("table"):
            spec = pb.TableSpec()
            spec.CopyFrom(block.table)
            tables[spec.name] = Table.make(spec, directory)
        elif block.staged:
            parts.append(block.payload)
        elif block.name:
            if block.name not in tables:
                raise TableError(
                    f"a block of table {block.name[:140]!r}, which the transfer has not begun"
                )
            tables[block.name].native.absorb(block.payload, None)
    return tables, parts
