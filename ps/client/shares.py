"""Whether a client names the shards that tables were made with, all of them in their order."""

from collections.abc import Sequence

from protos.parameter_server_pb2 import StatsReply
from ps.errors import TableError
from ps.table.buckets import Share


def check_shares(addresses: Sequence[str], replies: Sequence[StatsReply], table: str = "") -> None:
    """Compare what shards have with what a client takes them for, where no routing says.

    Args:
        addresses: of the shards, as the client names them.
        replies: of theirs to Stats, in that order.
        table: only this one.

    Raises:
        TableError: a shard has a table as another share than the client takes it for.
    """
    for shard, (address, reply) in enumerate(zip(addresses, replies, strict=True)):
        asked = Share(shard, len(addresses))
        for found in reply.tables:
            share = Share.of(found.spec.share)
            if table in ("", found.name) and share not in (None, asked):
                raise TableError(
                    f"table {found.name!r}: {address} is {share} of it, and this client names that "
                    f"as {asked}; expected the addresses that the table was made or loaded with, "
                    "all of them in their order"
                )
