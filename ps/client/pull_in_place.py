"""Pulls whose rows the shards of this host write to where the caller reads them.

The keys go into memory that all shards have mapped, as they came, repeated ones among them. Each
shard looks up those that are its own and writes their rows in the caller's order, so the client
finds no distinct keys, sorts none by shard, and copies and spreads no rows. All of that can be made
ready before rows may be read, and go along with the commit that they are to have seen.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from chassis import tracing
from protos import parameter_server_pb2 as pb
from ps.client.fetch import Wanted, joined
from ps.client.session import Routes, Session, Shard
from ps.errors import StaleRouteError
from ps.lines.calls import PULL, BrokenLineError, RefusedError
from ps.shm.blocks import Block, SharedMemory
from ps.shm.line import MAX_MESSAGE, UnixLine
from ps.shm.region import aligned
from ps.table.arrays import Floats, Keys

_Sent = list[tuple[Shard, UnixLine, pb.PullRequest]]  # of several tables in one message


class PullInPlace:
    """One that is to be sent, alone or along with a commit, or is under way.

    Args:
        session: the connections.
        routes: the routing that it was sent by.
        memory: where the block is from.
        block: of each table its keys, and from `rows_at` on the rows.
        wanted: the tables.
        keys_at, rows_at: where theirs begin.
    """

    def __init__(
        self,
        session: Session,
        routes: Routes,
        memory: SharedMemory,
        block: Block,
        wanted: Sequence[Wanted],
        keys_at: Sequence[int],
        rows_at: Sequence[int],
    ) -> None:
        self._session = session
        self._routes = routes
        self._memory = memory
        self._block = block
        self._wanted = wanted
        self._keys_at = keys_at
        self._rows_at = rows_at
        self._sent: _Sent = []
        self._over = False  # it will never come
        self._begun = False  # by itself
        self._came = False  # along with a commit

    @classmethod
    def begin(cls, session: Session, wanted: Sequence[Wanted]) -> "PullInPlace | None":
        """Send it, as of `prepare`."""
        made = cls.prepare(session, wanted)
        return made if made is not None and made.send() else None

    @classmethod
    def prepare(cls, session: Session, wanted: Sequence[Wanted]) -> "PullInPlace | None":
        """One to be sent; None where a shard is on another host, or no memory is left.

        The caller's keys may change from now on.

        Args:
            session: the connections.
            wanted: rows of one table or several, as float32.
        """
        routes = session.routes
        memory = session.memory()
        if memory is None or tracing.ON:  # spans follow calls of gRPC only
            return None
        if not wanted or any(len(each.keys) == 0 for each in wanted):
            return None
        route = routes.route if len(routes.addresses) > 1 else routes.route[:0]
        keys_at = _begins([each.keys.nbytes for each in wanted])
        route_at = keys_at.pop()
        rows_at = _begins([route.nbytes, *(each.rows_bytes for each in wanted)], route_at)[1:]
        block = memory.take(rows_at.pop(), routes.addresses)
        if block is None:
            return None
        made = cls(session, routes, memory, block, wanted, keys_at, rows_at)
        for number, shard in enumerate(session.shards_of(routes)):
            heads = []
            for each, keys, rows in zip(wanted, keys_at, rows_at, strict=True):
                head = each.head(routes, shard)
                head.region, head.keys_at, head.rows_at = block.region.name, keys, rows
                head.shared_out, head.shards_at, head.shard = len(route) > 0, route_at, number
                heads.append(head)
            made._sent.append((shard, block.lines[shard.address], joined(heads)))
        for each, begin in zip(wanted, keys_at, strict=True):
            block.region.view(begin, each.keys.nbytes)[:] = each.keys.view(np.uint8).data
        block.region.view(route_at, route.nbytes)[:] = route.view(np.uint8).data
        if any(head.ByteSize() > MAX_MESSAGE for _, _, head in made._sent):
            memory.release(block)
            return None
        return made

    def send(self) -> bool:
        """Send it by itself; False: the rows are to be pulled in another way."""
        self._begun = True
        try:
            for _, line, head in self._sent:
                line.send(PULL, head.SerializeToString(), self._session.timeout_s)
        except (BrokenLineError, RefusedError):
            self.give_up(gone=True)
            return False
        except BaseException:
            self.give_up()
            raise
        return True

    def goes_by(self, routes: Routes) -> bool:
        """Whether it was made by this routing, and is still wanted."""
        return routes is self._routes and not self._over

    def head_for(self, shard: Shard) -> pb.PullRequest:
        """What a message to a shard has to say of it, that takes it along."""
        return next(head for other, _, head in self._sent if other is shard)

    def went_along(self, *, came: bool) -> None:
        """A message to each shard took it along, and has been answered.

        Args:
            came: each has written its rows.
        """
        self._came = came
        if not came:
            self.give_up()

    def finish(self) -> list[Floats] | None:
        """The rows of each table, float32 [n, dim]; None: they are to be pulled in another way.

        It is sent now unless it has been.

        Raises:
            ShardError: a shard did not answer, or refused.
        """
        if self._over or not (self._came or self._begun or self.send()):
            return None
        try:
            for shard, line, head in [] if self._came else self._sent:
                reply = shard.call(
                    lambda _, timeout, line=line: line.receive(timeout),
                    None,
                    f"Pull of {head.count} rows of {head.table!r}",
                    patience_s=0.0,
                )
                shard.rows_of(reply, head, 0)
        except BrokenLineError:
            self.give_up(gone=True)
            return None
        except StaleRouteError:
            self.give_up()
            self._session.refresh(self._routes)
            return None
        except BaseException:
            self.give_up()
            raise
        begin = self._rows_at[0]
        end = self._rows_at[-1] + self._wanted[-1].rows_bytes
        whole = np.frombuffer(self._block.region.view(begin, end - begin), np.float32)
        lent = self._memory.lend(self._block, whole)
        found = []
        for each, at in zip(self._wanted, self._rows_at, strict=True):
            first, count = (at - begin) // 4, len(each.keys) * each.dim
            found.append(lent[first : first + count].reshape(len(each.keys), each.dim))
        return found

    def keys(self) -> list[Keys]:
        """The caller's keys of each table as they were at the beginning, copied."""
        region = self._block.region
        return [
            np.frombuffer(region.view(at, each.keys.nbytes), np.uint64).copy()
            for each, at in zip(self._wanted, self._keys_at, strict=True)
        ]

    def give_up(self, gone: bool = False) -> None:
        """Others may still write to the block; safe to repeat, until it has been finished.

        Args:
            gone: a shard has forgotten its blocks.
        """
        if not self._over:
            self._memory.discard(self._block)
        self._over = True
        if gone:
            self._memory.drop()


def _begins(sizes: Sequence[int], at: int = 0) -> list[int]:
    """Where pieces of these sizes begin, one after the other from `at` on, and where all end."""
    return [at, *(at + end for end in accumulate(aligned(size) for size in sizes))]
