"""One message of a pull to one shard: the rows of some keys, of one table or of several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps.client.session import Routes, Session, Shard
from ps.engine import _native
from ps.lines.calls import BrokenLineError
from ps.shm.blocks import Block, SharedMemory
from ps.shm.region import aligned
from ps.table.arrays import Keys
from ps.table.rules import WIRE_BYTES

_NARROW = np.uint64(1 << 32)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows of one table.

    Attributes:
        table: its name.
        dim: floats a row.
        keys: uint64 [n].
        wire: how rows travel.
        read_only: rows on disk stay there.
    """

    table: str
    dim: int
    keys: Keys
    wire: str
    read_only: bool

    @property
    def row_bytes(self) -> int:
        """Of one row on its way."""
        return self.dim * WIRE_BYTES[self.wire]

    @property
    def rows_bytes(self) -> int:
        """Of all of them."""
        return len(self.keys) * self.row_bytes

    def head(self, routes: Routes, shard: Shard) -> pb.PullRequest:
        """What a message to a shard says of them."""
        return pb.PullRequest(
            table=self.table,
            dim=self.dim,
            count=len(self.keys),
            read_only=self.read_only,
            dtype="" if self.wire == "float32" else self.wire,
            route=routes.number_for(shard),
        )


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of a message.

    Attributes:
        rows: of each table; none of a prefetch. What may be written to is whose it came to.
        release: gives back the shared memory that they lie in.
    """

    rows: tuple[memoryview, ...]
    release: Callable[[], None] = lambda: None


def fetch(
    session: Session,
    routes: Routes,
    shard: Shard,
    wanted: Sequence[Wanted],
    prefetch: bool = False,
) -> Fetched:
    """Ask a shard for rows that are its own; through shared memory where it is on this host.

    Args:
        session: the connections.
        routes: the routing that the keys were split by.
        shard: whose they are.
        wanted: of one table or several.
        prefetch: have it bring them into memory, and send none.

    Raises:
        StaleRouteError: the routing has changed.
        ShardError: it did not answer, or refused all.
    """
    what = " and ".join(f"{len(w.keys)} rows of {w.table!r}" for w in wanted[:3])
    what = f"Pull of {what}{' and others' if len(wanted) > 3 else ''}"
    memory = None if prefetch else session.memory()
    if memory is not None:
        size = sum(aligned(w.keys.nbytes) + aligned(w.rows_bytes) for w in wanted)
        block = memory.take(size, (shard.address,))
        if block is not None:
            try:
                return _fetch_shared(routes, shard, wanted, memory, block, what)
            except BrokenLineError:
                memory.drop()
    heads: list[pb.PullRequest] = []
    payloads: list[Keys | bytes] = []
    for each in wanted:
        head = each.head(routes, shard)
        head.prefetch = prefetch
        payload: Keys | bytes = each.keys
        if len(each.keys) and each.keys.max() < _NARROW:
            head.key_bytes = 4
            payload = _native.narrow_keys(each.keys)
        heads.append(head)
        payloads.append(payload)
    first = joined(heads)
    sizes = [0 if prefetch else each.rows_bytes for each in wanted]
    rows = shard.rows_of(shard.pull(pack(first, *payloads), what), first, sum(sizes))
    ends = [0, *accumulate(sizes)]
    return Fetched(tuple(rows[begin:end] for begin, end in pairwise(ends)))


def joined(heads: Sequence[pb.PullRequest]) -> pb.PullRequest:
    """Heads of several tables as one message's."""
    first, *others = heads
    first.others.extend(others)
    return first


def _fetch_shared(
    routes: Routes,
    shard: Shard,
    wanted: Sequence[Wanted],
    memory: SharedMemory,
    block: Block,
    what: str,
) -> Fetched:
    region, keep, at = block.region, False, 0
    heads = []
    try:
        for each in wanted:
            head = each.head(routes, shard)
            head.region, head.keys_at = region.name, at
            region.view(at, each.keys.nbytes)[:] = each.keys.view(np.uint8).data
            head.rows_at = at + aligned(each.keys.nbytes)
            at = head.rows_at + aligned(each.rows_bytes)
            heads.append(head)
        places = [(head.rows_at, each.rows_bytes) for head, each in zip(heads, wanted, strict=True)]
        first = joined(heads)
        reply = shard.pull(first.SerializeToString(), what, block.lines[shard.address])
        shard.rows_of(reply, first, 0)
        keep = True
        rows = tuple(region.view(begin, size).toreadonly() for begin, size in places)
        return Fetched(rows, partial(memory.release, block))
    finally:
        if not keep:
            memory.discard(block)
