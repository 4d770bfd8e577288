"""Pulls whose rows the shards of this host write to where the caller reads them.

The keys go into memory that all shards have mapped, as they came, repeated ones among them. Each
shard looks up those that are its own and writes their rows in the caller's order, so the client
finds no distinct keys, sorts none by shard, and copies and spreads no rows.
"""

import numpy as np

from chassis import tracing
from protos import parameter_server_pb2 as pb
from ps.client.session import Routes, Session, Shard
from ps.errors import StaleRouteError
from ps.shm.blocks import Block, SharedMemory
from ps.shm.line import PULL, BrokenLineError, RefusedError, UnixLine
from ps.shm.region import aligned
from ps.table.arrays import Floats, Keys

_Sent = list[tuple[Shard, UnixLine, pb.PullRequest]]


class PullInPlace:
    """One that is under way.

    Args:
        session: the connections.
        routes: the routing that it was sent by.
        memory: where the block is from.
        block: keys, and from `rows_at` on the rows.
        keys: how many.
    """

    def __init__(
        self,
        session: Session,
        routes: Routes,
        memory: SharedMemory,
        block: Block,
        rows_at: int,
        keys: int,
        dim: int,
    ) -> None:
        self._session = session
        self._routes = routes
        self._memory = memory
        self._block = block
        self._rows_at = rows_at
        self._count = keys
        self._dim = dim
        self._sent: _Sent = []

    @classmethod
    def begin(
        cls, session: Session, table: str, dim: int, keys: Keys, read_only: bool
    ) -> "PullInPlace | None":
        """Send it; None where a shard is on another host, or no memory is left.

        The caller's keys may change from now on.
        """
        routes = session.routes
        memory = session.memory()
        if memory is None or len(keys) == 0 or tracing.ON:  # spans follow calls of gRPC only
            return None
        route = routes.route if len(routes.addresses) > 1 else routes.route[:0]
        route_at = aligned(keys.nbytes)
        rows_at = aligned(route_at + route.nbytes)
        block = memory.take(rows_at + len(keys) * dim * 4, routes.addresses)
        if block is None:
            return None
        made = cls(session, routes, memory, block, rows_at, len(keys), dim)
        for shard in session.shards_of(routes):
            head = pb.PullRequest(
                table=table,
                dim=dim,
                count=len(keys),
                read_only=read_only,
                route=routes.number_for(shard),
                region=block.region.name,
                rows_at=rows_at,
                shared_out=len(route) > 0,
                shards_at=route_at,
                shard=len(made._sent),
            )
            made._sent.append((shard, block.lines[shard.address], head))
        block.region.view(0, keys.nbytes)[:] = keys.view(np.uint8).data
        block.region.view(route_at, route.nbytes)[:] = route.view(np.uint8).data
        try:
            for _, line, head in made._sent:
                line.send(PULL, head.SerializeToString(), session.timeout_s)
        except (BrokenLineError, RefusedError):
            made._give_up(gone=True)
            return None
        except BaseException:
            made._give_up()
            raise
        return made

    def finish(self) -> Floats | None:
        """The rows, float32 [n, dim]; None where they are to be pulled in another way.

        Raises:
            ShardError: a shard did not answer, or refused.
        """
        try:
            for shard, line, head in self._sent:
                reply = shard.call(
                    lambda _, timeout, line=line: line.receive(timeout),
                    None,
                    f"Pull of {self._count} rows of {head.table!r}",
                    patience_s=0.0,
                )
                shard.rows_of(reply, head, 0)
        except BrokenLineError:
            self._give_up(gone=True)
            return None
        except StaleRouteError:
            self._give_up()
            self._session.refresh(self._routes)
            return None
        except BaseException:
            self._give_up()
            raise
        size = self._count * self._dim * 4
        rows = np.frombuffer(self._block.region.view(self._rows_at, size), np.float32)
        return self._memory.lend(self._block, rows.reshape(self._count, self._dim))

    def keys(self) -> Keys:
        """The caller's keys as they were at the beginning, copied."""
        return np.frombuffer(self._block.region.view(0, 8 * self._count), np.uint64).copy()

    def _give_up(self, gone: bool = False) -> None:
        """Others may still write to the block.

        Args:
            gone: a shard has forgotten its blocks.
        """
        self._memory.discard(self._block)
        if gone:
            self._memory.drop()
