"""One push: its messages to the shards, each applied exactly once."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from protos.codec import payload_prefix, unpack
from ps.client.futures import combine
from ps.client.pull import as_shard_error, split
from ps.client.session import SILENT, Routes, Session, Shard
from ps.engine import _native
from ps.errors import OutcomeUnknownError, ShardError, StaleRouteError
from ps.lines.calls import BrokenLineError
from ps.shm.blocks import Block, SharedMemory
from ps.shm.region import aligned
from ps.table.arrays import Floats, Keys
from ps.table.rules import WIRE_BYTES
from ps.table.usage import Usage

_NARROW = np.uint64(1 << 32)


@dataclass(frozen=True, slots=True)
class _Message:
    """Some of the push's keys, for one shard, under one sequence."""

    shard: Shard
    routes: Routes
    keys: Keys
    positions: NDArray[np.int64]  # of the keys in the push
    sequence: int
    # The sequences that belong together: whoever has seen one waits for all.
    first: int
    parts: int
    values: Floats
    usage: NDArray[np.float32] | None
    added: bool = False  # beyond those that the push was made of


@dataclass(frozen=True, slots=True)
class _SharedMessage:
    """A message whose payload lies in shared memory."""

    memory: SharedMemory
    block: Block
    head: pb.PushRequest
    payload: memoryview

    def as_bytes(self) -> bytes:
        """The same message by itself."""
        head = pb.PushRequest()
        head.CopyFrom(self.head)
        head.region, head.region_at = "", 0
        return payload_prefix(head, len(self.payload)) + bytes(self.payload)


_Sent = bytes | _SharedMessage


class Push:
    """Gradients, or weights, of distinct keys.

    Sequences are given to messages when the push is made, so however often one is sent no row
    takes it twice. A message that a shard refuses because buckets have moved was not applied, and
    never will be as it is: it is split anew, and its first part takes over its sequence.

    Args:
        session: the connections.
        head: all that its messages have in common.
        keys: distinct, uint64 [U].
        values: float32 [U, dim].
        usage: of the keys.
        wire: how values travel.
    """

    def __init__(
        self,
        session: Session,
        head: pb.PushRequest,
        keys: Keys,
        values: Floats,
        usage: Usage,
        wire: str,
    ) -> None:
        self._session = session
        self._head = head
        # Weights that are written outright keep all their digits.
        self._wire = "float32" if head.kind == "assign" else wire
        self._row_bytes = (
            8 + WIRE_BYTES[self._wire] * head.dim + (8 if usage.values is not None else 0)
        )
        self._lock = threading.Lock()
        self._unknown = False  # whether one may have been applied that was not acknowledged
        routes = session.routes
        parts = split(session, routes, keys, self._row_bytes)
        first = session.sequences(len(parts))
        head.client, head.epoch = session.client, session.epoch
        head.made_s = int(time.time())
        head.usage = usage.values is not None
        head.distinct = True
        if self._wire != "float32":
            head.dtype = self._wire
        self._messages = [
            _Message(
                shard,
                routes,
                part,
                positions,
                first + i,
                first,
                len(parts),
                values,
                usage.values,
            )
            for i, (shard, part, positions) in enumerate(parts)
        ]

    def run(self) -> None:
        """Send it, or what of it was not acknowledged; returns once every shard has acknowledged.

        Raises:
            OutcomeUnknownError: one did not answer in time.
            ShardError: one refused; others may have applied what was theirs.
        """
        try:
            self._session.run([partial(self._deliver, m) for m in self._taken()])
        except ShardError as error:
            raise self._explained(error) from None

    def start(self) -> "Future[None]":
        """Send it in the background, with the errors of `run`; arrays are copied first."""
        works: list[Callable[[], None]] = [
            partial(self._deliver, m, self._prepare(m)) for m in self._messages
        ]
        self._taken()

        def failed(error: BaseException) -> None:
            raise self._explained(error) if isinstance(error, ShardError) else error

        return combine(self._session.submit(works), lambda _: None, or_else=failed)

    def _taken(self) -> list[_Message]:
        """The messages to be sent; `_keep` gives back what was not acknowledged."""
        messages, self._messages, self._unknown = self._messages, [], False
        return messages

    def _keep(self, messages: list[_Message], error: BaseException) -> None:
        with self._lock:
            self._messages += messages
            self._unknown |= isinstance(error, ShardError) and error.code in SILENT

    def _explained(self, error: ShardError) -> ShardError:
        """The error, or one that says what to do where an answer is lacking."""
        return OutcomeUnknownError(error, self.run) if self._unknown else error

    def _deliver(self, message: _Message, prepared: _Sent | None = None) -> None:
        what = f"Push of {len(message.keys)} rows to {self._head.table!r}"
        limit = time.monotonic() + self._session.timeout_s
        left = [message]
        while left:
            sent = prepared or self._prepare(left[0])
            prepared = None
            try:
                self._send(left[0].shard, sent, what)
                left.pop(0)
            except StaleRouteError as error:
                left[:1] = self._split_anew(self._as_sent(left[0], sent))
                if time.monotonic() > limit:
                    self._keep(left, error)
                    raise as_shard_error(self._session, error) from None
            except BaseException as error:
                left[0] = self._as_sent(left[0], sent)
                self._keep(left, error)
                raise

    def _prepare(self, message: _Message) -> _Sent:
        """What to send, without the caller's arrays."""
        return self._write_shared(message) or self._encode(message)

    def _send(self, shard: Shard, sent: _Sent, what: str) -> None:
        if isinstance(sent, bytes):
            shard.push(sent, what)
            return
        memory, block = sent.memory, sent.block
        try:
            shard.push(sent.head.SerializeToString(), what, block.lines[shard.address])
        except BrokenLineError:
            memory.discard(block)
        except BaseException:
            memory.discard(block)
            raise
        else:
            memory.release(block)
            return
        memory.drop()
        shard.push(sent.as_bytes(), what)  # it may have been applied: it is what it was

    def _as_sent(self, message: _Message, sent: _Sent) -> _Message:
        """The message with the values that were sent: the caller's may have changed since."""
        if isinstance(sent, bytes):
            head, payload = unpack(pb.PushRequest, sent)
        else:
            head, payload = sent.head, sent.payload
        count, dim = len(message.keys), self._head.dim
        begin = count * (head.key_bytes or 8)
        end = begin + count * dim * WIRE_BYTES[self._wire]
        usage = np.frombuffer(payload[end:], np.float32).reshape(2, count) if head.usage else None
        return replace(
            message,
            positions=np.arange(count, dtype=np.int64),
            values=_native.decode_values(payload[begin:end], self._wire).reshape(count, dim),
            usage=usage,
        )

    def _split_anew(self, message: _Message) -> list[_Message]:
        """A message by the routing that holds now."""
        self._session.refresh(message.routes)
        routes = self._session.routes
        parts = split(self._session, routes, message.keys, self._row_bytes)
        if len(parts) == 1:
            return [replace(message, shard=parts[0][0], routes=routes)]
        first = self._session.sequences(len(parts) - 1)
        return [
            _Message(
                shard,
                routes,
                keys,
                np.ascontiguousarray(message.positions[at]),
                message.sequence if i == 0 else first + i - 1,
                first,
                len(parts) - 1,
                message.values,
                message.usage,
                message.added or i > 0,
            )
            for i, (shard, keys, at) in enumerate(parts)
        ]

    def _head_of(self, message: _Message) -> pb.PushRequest:
        head = pb.PushRequest()
        head.CopyFrom(self._head)
        head.count = len(message.keys)
        head.sequence = message.sequence
        head.route = message.routes.number_for(message.shard)
        head.first, head.parts = message.first, message.parts
        if message.added:  # its sequence does not tell its place among pushes
            head.ClearField("position")
        return head

    def _encode(self, message: _Message) -> bytes:
        head = self._head_of(message)
        narrow = len(message.keys) > 0 and message.keys.max() < _NARROW
        key_bytes = 4 if narrow else 8
        if narrow:
            head.key_bytes = 4
        size = len(message.keys) * (self._row_bytes - 8 + key_bytes)
        return _native.push_message(
            payload_prefix(head, size),
            message.keys,
            message.values,
            message.positions,
            self._head.dim,
            self._wire,
            key_bytes,
            message.usage,
        )

    def _write_shared(self, message: _Message) -> _SharedMessage | None:
        """The message in shared memory; None where there is none."""
        memory = self._session.memory()
        if memory is None:
            return None
        size = len(message.keys) * self._row_bytes
        begin = aligned(message.keys.nbytes) - message.keys.nbytes
        block = memory.take(begin + size, (message.shard.address,))
        if block is None:
            return None
        head = self._head_of(message)
        head.region, head.region_at = block.region.name, begin
        payload = block.region.view(begin, size)
        _native.push_into(
            payload,
            message.keys,
            message.values,
            message.positions,
            self._head.dim,
            self._wire,
            8,
            message.usage,
        )
        return _SharedMessage(memory, block, head, payload)
