"""A pull by streams, piece by piece, on the thread that wants the rows.

While a shard looks up the keys of one piece the client finds the distinct ones of the next; while
it looks up those, the rows of the first are on their way and are spread. So both ends and what is
between them work at once, and no thread waits for another of its process.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from google.protobuf.message import DecodeError

from chassis import tracing
from protos.codec import pack, payload_tag
from protos.parameter_server_pb2 import PullReply
from ps.client.fetch import Wanted, asked
from ps.client.session import Routes, Session, Shard
from ps.engine import _native
from ps.lines.calls import PULL, BrokenLineError, RefusedError
from ps.lines.stream import StreamLine
from ps.table.arrays import Floats, Keys

# Larger batches travel as several messages: gRPC is fastest with 1-16 MiB.
MESSAGE_BYTES = 8 << 20
_LEAST = 1 << 15  # keys that are worth it
_PIECE = 54_000  # keys, about: a shard takes all its cores for so many
_WIDE = 128  # bytes of a row: copying wider ones keeps both ends busy anyhow
_SHARDS = 8  # with more a message would be small
_MOST_BYTES = 1 << 28  # of rows: some are held twice


def pull_in_pieces(session: Session, wanted: Wanted) -> Floats | None:
    """The rows of the caller's keys, float32 [n, dim]; None: they are to be pulled in another way.

    That has half of the session's time then, as after any stream that stalls; what a shard has
    refused it will refuse again, and say why.

    Args:
        session: the connections.
        wanted: keys as they came, any of them repeated.
    """
    keys, size = wanted.keys, len(wanted.keys) * wanted.row_bytes
    routes = session.routes
    few = len(keys) < _LEAST or len(routes.addresses) > _SHARDS
    large = wanted.row_bytes > _WIDE or size > _MOST_BYTES
    if few or large or wanted.wire != "float32" or tracing.ON:
        return None
    memory = session.memory()
    if memory is not None and memory.near:
        return None
    shards = session.shards_of(routes)
    lines: list[StreamLine] = []
    pull: _Pull | None = None
    until = time.monotonic() + session.timeout_s / 2
    try:
        for shard in shards:
            line = shard.streams.take() if shard.streams else None
            if line is None:
                return None
            lines.append(line)
        pull = _Pull(wanted, routes, shards, lines, until)
        return pull.run()
    except (BrokenLineError, OSError):
        streams = shards[pull.busy_with if pull else -1].streams
        if streams is not None:
            streams.broke(stalled=time.monotonic() >= until)
        return None
    except RefusedError:
        return None
    finally:
        for number, line in enumerate(lines):
            streams = shards[number].streams
            assert streams is not None
            streams.give_back(line, whole=pull is None or pull.is_whole(number))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A message that is under way.

    Attributes:
        shard: its number.
        begin, count: of its rows, among all that are asked for.
        piece: which.
    """

    shard: int
    begin: int
    count: int
    piece: int


class _Pull:
    def __init__(
        self,
        wanted: Wanted,
        routes: Routes,
        shards: Sequence[Shard],
        lines: Sequence[StreamLine],
        until: float,
    ) -> None:
        self._wanted = wanted
        self._routes = routes
        self._shards = shards
        self._lines = lines
        self._until = until
        n, dim = len(wanted.keys), wanted.dim
        self._pieces = _native.Pieces(wanted.keys, routes.route, len(shards))
        self._out = np.empty((n, dim), np.float32)
        self._rows = np.empty((n, dim), np.float32)  # those that do not lie as the keys do
        self._ends: list[int] = []
        self._spread = 0  # pieces
        self._waiting: deque[_Asked] = deque()
        self._broken = False
        self.busy_with = 0  # the number of a shard

    def run(self) -> Floats:
        """The rows.

        Raises:
            RefusedError, BrokenLineError, OSError: there are none.
        """
        n = len(self._wanted.keys)
        bytes_a_piece = min(MESSAGE_BYTES, _PIECE * self._wanted.row_bytes)
        count = max(2, round(n * self._wanted.row_bytes / bytes_a_piece))
        for piece in range(count):
            end = n * (piece + 1) // count
            at = self._pieces.asked
            found = self._pieces.next(end)
            self._ends.append(end)
            for number, keys in enumerate(found):
                if len(keys):
                    self._ask(number, keys, at, piece)
                    at += len(keys)
        while self._waiting:
            self._take()
        self._spread_until(count)
        return self._out

    def is_whole(self, shard: int) -> bool:
        """Whether nothing is under way between this client and a shard."""
        return not self._broken and all(one.shard != shard for one in self._waiting)

    def _ask(self, number: int, keys: Keys, at: int, piece: int) -> None:
        wanted = replace(self._wanted, keys=keys)
        head, payload = asked(self._routes, self._shards[number], wanted)
        sending = self._lines[number].begin(PULL, pack(head, payload))
        here = _Asked(number, at, len(keys), piece)
        self.busy_with, self._broken = number, True  # until all of it has gone
        while not sending.go_on():
            # The shard reads no further while what it has answered is not taken.
            if any(one.shard == number for one in self._waiting):
                self._take()
            else:
                sending.wait(self._until)
        self._broken = False
        self._waiting.append(here)

    def _take(self) -> None:
        """Receive what was asked for first."""
        one = self._waiting[0]
        self.busy_with = one.shard
        end = one.begin + one.count
        straight = end <= self._pieces.straight
        room = (self._out if straight else self._rows)[one.begin : end].reshape(-1).view(np.uint8)
        try:
            head = self._lines[one.shard].finish(room.data, self._until)
        except RefusedError:
            self._waiting.popleft()
            raise
        self._check(head, one.count, len(room))
        self._waiting.popleft()
        self._spread_until(self._waiting[0].piece if self._waiting else len(self._ends))

    def _check(self, head: bytes, count: int, size: int) -> None:
        tag = payload_tag(size)
        with suppress(DecodeError):
            reply = PullReply.FromString(head.removesuffix(tag))
            if head.endswith(tag) and (reply.dim, reply.count) == (self._wanted.dim, count):
                return
        raise BrokenLineError("not a reply to what was asked")

    def _spread_until(self, pieces: int) -> None:
        """Copy the rows of pieces that have come whole."""
        while self._spread < pieces:
            begin = self._ends[self._spread - 1] if self._spread else 0
            end, dim = self._ends[self._spread], self._wanted.dim
            last = end == len(self._wanted.keys)
            self._pieces.spread(begin, end, self._rows, self._out, dim, last)
            self._spread += 1
