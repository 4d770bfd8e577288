"""One message of a step to every shard: a part of its gradients, or what becomes of them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from protos.codec import payload_prefix
from ps.client.futures import combine
from ps.client.pull import as_shard_error
from ps.client.pull_in_place import PullInPlace
from ps.client.session import Routes, Session, Shard
from ps.engine import _native
from ps.errors import StaleRouteError
from ps.lines.calls import COMMIT, STAGE, TALLY, BrokenLineError
from ps.shm.blocks import Block, SharedMemory
from ps.shm.region import aligned
from ps.table.arrays import Floats, Keys
from ps.table.rules import WIRE_BYTES

_NARROW = np.uint64(1 << 32)
R = TypeVar("R")
StepRequest = pb.StageRequest | pb.TallyRequest | pb.CommitRequest
_METHODS: dict[type, int] = {
    pb.StageRequest: STAGE,
    pb.TallyRequest: TALLY,
    pb.CommitRequest: COMMIT,
}


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of one table.

    Attributes:
        keys: distinct, uint64 [U].
        values: float32 [U, dim].
        usage: shows and clicks of each key, float32 [2, U]; None: one show each.
        wire: how the values travel.
    """

    table: str
    dim: int
    keys: Keys
    values: Floats
    usage: Floats | None = None
    wire: str = "float32"

    @property
    def key_bytes(self) -> int:
        """What a key takes on its way, at most, with all that belongs to it."""
        values = self.dim * WIRE_BYTES[self.wire]
        return 8 + values + (8 if self.usage is not None else 0)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of one table, what goes to one shard: keys, and which rows of `values` are theirs."""

    gradients: Gradients
    keys: Keys
    positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Message:
    """What is sent to one shard: a head, and a payload in shared memory or behind the head."""

    shard: Shard
    head: StepRequest
    memory: SharedMemory | None
    block: Block | None
    payload: memoryview | bytes

    def send(self, what: str) -> bytes:
        """Send it; the reply's bytes."""
        method = _METHODS[type(self.head)]
        if self.memory is not None and self.block is not None:
            line = self.block.lines[self.shard.address]
            try:
                return bytes(self.shard.data(method, self.head.SerializeToString(), what, line))
            except BrokenLineError:
                self.memory.drop()
        return bytes(self.shard.data(method, self._whole(), what))

    def _whole(self) -> bytes:
        head = self.head
        if isinstance(head, pb.TallyRequest):
            return head.SerializeToString()
        head = type(head).FromString(head.SerializeToString())
        head.region, head.region_at = "", 0
        if isinstance(head, pb.CommitRequest):
            head.ClearField("then")
        return b"".join((payload_prefix(head, len(self.payload)), self.payload))

    def end(self, *, answered: bool) -> None:
        """Give its memory back, unless the shard may still read it."""
        if self.memory is not None and self.block is not None:
            (self.memory.release if answered else self.memory.discard)(self.block)


class ToEveryShard:
    """One message to every shard of a routing; to all of them anew when the routing changes.

    Whoever has had a message already says so and does nothing. So that the caller's arrays may be
    used again, and all of a part can be split anew, messages keep what they carry until the end.

    Args:
        session: the connections.
        head: what all of them have in common.
        gradients: those they carry, split by shard.
        what: names the call in errors.
        along: of a commit, what it is to be followed by where it goes through shared memory.
    """

    def __init__(
        self,
        session: Session,
        head: StepRequest,
        gradients: Sequence[Gradients] = (),
        what: str = "",
        along: PullInPlace | None = None,
    ) -> None:
        self._session = session
        self._head = head
        self._what = what
        self._along = along
        self._routes = session.routes
        self._messages = self._make(gradients)

    def start(self, finish: Callable[[list[bytes]], R], *, here: bool = False) -> "Future[R]":
        """Send in the background; `finish` makes the result of the shards' replies.

        Args:
            here: on this thread as far as may be; all is done when this returns.
        """
        works = [partial(m.send, self._what) for m in self._messages]
        sending = self._session.submit(works, last_here=here)

        def ended(replies: list[bytes]) -> R:
            self._end(answered=True)
            return finish(replies)

        return combine(sending, ended, or_else=lambda error: finish(self._again(error)))

    def abandon(self) -> None:
        """Give up what has not been sent; nothing where it has."""
        self._end(answered=True)

    def _again(self, error: BaseException) -> list[bytes]:
        """Send it by the routing that holds now; on this thread, which may be a helper."""
        limit = time.monotonic() + self._session.timeout_s
        while isinstance(error, StaleRouteError) and time.monotonic() < limit:
            gradients, self._along = self._carried(), None
            self._end(answered=True)
            self._session.refresh(self._routes)
            self._routes = self._session.routes
            self._messages = self._make(gradients)
            try:
                replies = [message.send(self._what) for message in self._messages]
            except StaleRouteError as another:
                error = another
                continue
            except BaseException:
                self._end(answered=False)
                raise
            self._end(answered=True)
            return replies
        self._end(answered=False)
        raise as_shard_error(self._session, error)

    def _end(self, *, answered: bool) -> None:
        messages, self._messages = self._messages, []
        for message in messages:
            message.end(answered=answered)

    def _make(self, gradients: Sequence[Gradients]) -> list[_Message]:
        routes = self._routes
        shards = self._session.shards_of(routes)
        split: list[list[_Rows]] = [[] for _ in shards]
        for each in gradients:
            if len(shards) == 1:
                groups = [(each.keys, np.arange(len(each.keys), dtype=np.int64))]
            else:
                groups = _native.partition(each.keys, routes.route, len(shards))
            for rows, (keys, positions) in zip(split, groups, strict=True):
                rows.append(_Rows(each, keys, positions))
        return [
            self._message(routes, shard, rows) for shard, rows in zip(shards, split, strict=True)
        ]

    def _message(self, routes: Routes, shard: Shard, rows: list[_Rows]) -> _Message:
        head = type(self._head).FromString(self._head.SerializeToString())
        head.route = routes.number_for(shard)
        part = head.part if isinstance(head, pb.CommitRequest) else head
        size = sum(len(r.keys) * r.gradients.key_bytes for r in rows)
        memory = self._session.memory()
        block = memory.take(size + 64, (shard.address,)) if memory is not None else None
        if rows and isinstance(part, pb.StageRequest):
            for r in rows:
                narrow = block is None and len(r.keys) > 0 and r.keys.max() < _NARROW
                part.tables.append(
                    pb.PartOfTable(
                        table=r.gradients.table,
                        dim=r.gradients.dim,
                        count=len(r.keys),
                        key_bytes=4 if narrow else 0,
                        dtype="" if r.gradients.wire == "float32" else r.gradients.wire,
                        usage=r.gradients.usage is not None,
                    )
                )
        if block is None or isinstance(head, pb.TallyRequest):
            return _Message(shard, head, memory, block, self._payload(part, rows))
        along = self._along
        if isinstance(head, pb.CommitRequest) and along is not None and along.goes_by(routes):
            head.then.CopyFrom(along.head_for(shard))
        if not rows:
            return _Message(shard, head, memory, block, b"")
        begin = aligned(8 * len(rows[0].keys)) - 8 * len(rows[0].keys)
        head.region, head.region_at = block.region.name, begin
        payload = block.region.view(begin, size)
        at = 0
        for r in rows:
            end = at + len(r.keys) * r.gradients.key_bytes
            _native.push_into(
                payload[at:end],
                r.keys,
                r.gradients.values,
                r.positions,
                r.gradients.dim,
                r.gradients.wire,
                8,
                r.gradients.usage,
            )
            at = end
        return _Message(shard, head, memory, block, payload)

    def _payload(self, part: StepRequest, rows: list[_Rows]) -> bytes:
        if not isinstance(part, pb.StageRequest):
            return b""
        return b"".join(
            _native.push_message(
                b"",
                r.keys,
                r.gradients.values,
                r.positions,
                r.gradients.dim,
                r.gradients.wire,
                table.key_bytes or 8,
                r.gradients.usage,
            )
            for table, r in zip(part.tables, rows, strict=True)
        )

    def _carried(self) -> list[Gradients]:
        """What the messages carry: the caller's arrays may have changed since."""
        pieces: dict[str, list[Gradients]] = {}
        for message in self._messages:
            head = message.head
            if isinstance(head, pb.TallyRequest):
                continue
            part = head.part if isinstance(head, pb.CommitRequest) else head
            payload, at = memoryview(message.payload), 0
            for each in part.tables:
                wire = each.dtype or "float32"
                middle = at + each.count * (each.key_bytes or 8)
                end = middle + each.count * each.dim * WIRE_BYTES[wire]
                kind = np.dtype("<u4") if each.key_bytes == 4 else np.dtype("<u8")
                keys = np.frombuffer(payload[at:middle], kind).astype(np.uint64)
                values = _native.decode_values(payload[middle:end], wire).reshape(-1, each.dim)
                at, usage = end, None
                if each.usage:
                    at = end + 8 * each.count
                    usage = np.frombuffer(payload[end:at], np.float32).reshape(2, -1).copy()
                one = Gradients(each.table, each.dim, keys, values, usage, wire)
                pieces.setdefault(each.table, []).append(one)
        return [_joined(found) for found in pieces.values()]


def _joined(pieces: Sequence[Gradients]) -> Gradients:
    """Gradients of one table that went to several shards."""
    first = pieces[0]
    usage = [piece.usage for piece in pieces if piece.usage is not None]
    return replace(
        first,
        keys=np.concatenate([piece.keys for piece in pieces]),
        values=np.concatenate([piece.values for piece in pieces]),
        usage=np.ascontiguousarray(np.concatenate(usage, 1)) if usage else None,
    )
