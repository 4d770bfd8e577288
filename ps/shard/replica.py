"""A shard's replica: another process that has applied all that the primary has acknowledged.

The primary sends each change and waits before it applies and acknowledges it. A replica that
misses one (it was restarted) says so, and is filled with the whole state. A primary that was
restarted takes its state back from the replica before it serves.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from uuid import uuid4

import grpc

from chassis.channels import RpcError, call, connect
from protos import parameter_server_pb2 as pb
from protos.codec import pack, unpack
from protos.parameter_server_pb2_grpc import ParameterServerStub
from protos.reason_pb2 import REPLICA_BEHIND
from ps.checkpoint.tables import begin_snapshots
from ps.errors import ConflictError, LacksChangesError, TableError
from ps.shard import transfer
from ps.shard.exactly_once import ExactlyOnce
from ps.shard.journal import BehindError, Buffer, Place, nowhere, settle
from ps.shard.replay import replay
from ps.shard.stage import Steps
from ps.shard.state import ShardState
from ps.table.applied import AppliedWindow

_TIMEOUT_S = 10.0
_TURN_S = 60.0
_PATH = "/heterps.v1.ParameterServer/Replicate"
_log = logging.getLogger("heterps.ps")


class Replicator:
    """The primary's side: a journal that is another process.

    Args:
        state: of the primary, still empty.
        address: of the replica.
        patience_s: how long an unreachable replica is waited for, by each change.
    """

    def __init__(self, state: ShardState, address: str, patience_s: float = 20.0) -> None:
        self._state = state
        self._address = address
        self._patience_s = patience_s
        self._channel = connect(address)
        self._stub = ParameterServerStub(self._channel)
        self._replicate: Callable[..., bytes] = self._channel.unary_unary(_PATH)
        self._lock = threading.Lock()
        self._primary = state.run
        self._number = 0
        self._behind = False
        self._filled_run = ""  # the run of the replica that has the state
        self.recovered = self._recover()
        state.journals["replica"] = self

    def append(self, kind: str, time_s: int, payload: Buffer, place: Place = nowhere) -> None:
        """See ps.shard.journal.Journal.

        Raises:
            ConflictError: another shard has taken this one's place there.
            TimeoutError: it does not answer.
        """
        with self._lock:
            if self._behind:
                raise BehindError(f"replica {self._address} lacks what was before this change")
            # A number is used once: whether a record without an answer was taken is not known.
            self._number += 1
            record = pb.LogRecord(kind=kind, time_s=time_s, of=self._primary, number=self._number)
            try:
                call(
                    self._replicate,
                    pack(record, bytes(payload)),
                    what=f"replica {self._address}",
                    timeout_s=_TIMEOUT_S,
                    retry_s=self._patience_s,
                )
            except RpcError as error:
                if error.reason == REPLICA_BEHIND:
                    self._behind = True
                    raise BehindError(str(error)) from None
                if error.code is grpc.StatusCode.FAILED_PRECONDITION:
                    raise ConflictError(f"the replica refuses this change: {error}") from None
                raise TimeoutError(f"the replica does not answer: {error}") from None
            settle(place)

    def fall_behind(self) -> None:
        """See ps.shard.journal.Journal."""
        self._behind = True

    def renew(self, *, closed: bool = False, behind: bool = False) -> None:
        """See ps.shard.journal.Journal."""
        if closed:
            self._fill()
            return
        with self._state.files.closed(_TURN_S), self._state.gate.closed():
            if self._behind or not behind:
                self._fill()

    def check(self) -> None:
        """See ps.shard.journal.Journal."""
        self._run()

    def refill(self) -> None:
        """Fill a replica that was restarted, before the next change asks for it.

        Raises:
            TimeoutError: it does not answer.
        """
        with self._state.lock:
            kept = any(t.spec.durability == "replica" for t in self._state.tables.values())
        if self._run() != self._filled_run and kept:
            self.renew()

    def _run(self) -> str:
        """Which run of the replica answers."""
        try:
            reply: pb.StatsReply = call(
                self._stub.Stats,
                pb.StatsRequest(),
                what=f"replica {self._address}",
                timeout_s=_TIMEOUT_S,
            )
        except RpcError as error:
            raise TimeoutError(f"the replica does not answer: {error}") from None
        return reply.run

    def _fill(self) -> None:
        state = self._state
        with state.lock:
            tables = {n: t for n, t in state.tables.items() if t.spec.durability == "replica"}
        snapshots = begin_snapshots(tables, "checkpoint")
        parts = state.staged_for("replica")
        head = state.summary(windows=True)
        head.reset = True
        head.of, head.number = self._primary, self._number

        def messages() -> Iterator[pb.StateBlock]:
            yield head
            yield from transfer.blocks_of(tables, snapshots, parts)

        try:
            call(
                self._stub.Absorb,
                messages(),
                what=f"filling replica {self._address}",
                timeout_s=transfer.TIMEOUT_S,
            )
            self._filled_run = call(
                self._stub.Stats,
                pb.StatsRequest(),
                what=f"replica {self._address}",
                timeout_s=_TIMEOUT_S,
            ).run
            self._behind = False
        except RpcError as error:
            if error.code is grpc.StatusCode.FAILED_PRECONDITION:
                raise ConflictError(f"the replica refuses to be filled: {error}") from None
            raise TimeoutError(f"the replica cannot be filled: {error}") from None
        finally:
            for snapshot in snapshots.values():
                snapshot.close()
        _log.info("filled replica %s", self._address)

    def close(self) -> None:
        """Disconnect."""
        del self._state.journals["replica"]
        self._channel.close()

    def _recover(self) -> bool:
        """Take the state back from the replica, if it has one."""
        began = time.monotonic()
        try:
            run = call(
                self._stub.Stats,
                pb.StatsRequest(),
                what=f"replica {self._address}",
                timeout_s=_TIMEOUT_S,
                retry_s=self._patience_s,
            ).run
            replies = self._stub.Fetch(pb.FetchRequest(), timeout=transfer.TIMEOUT_S)
            head = next(replies)
            tables, parts = transfer.state_of(replies, self._state.directory)
        except (RpcError, grpc.RpcError) as error:
            raise TableError(
                f"--replica {self._address}: {error}; expected a shard started with --standby"
            ) from None
        if not head.of:
            return False
        self._primary, self._number, self._filled_run = head.of, head.number, run
        self._state.tables.update(tables)
        self._state.take_over(head)
        self._state.take_parts(parts)
        _log.info(
            "took back %d tables from replica %s in %.2f s",
            len(tables),
            self._address,
            time.monotonic() - began,
        )
        return True


class Standby:
    """The replica's side."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._primary = ""
        self._number = 0

    def replicate(self, request: bytes) -> bytes:
        """Apply the primary's next change.

        Raises:
            LacksChangesError: one is missing: it wants the whole state first.
            ConflictError: it follows another shard.
        """
        record, payload = unpack(pb.LogRecord, request)
        with self._lock:
            self._check_primary(record.of)
            if not self._primary or record.number > self._number + 1:
                raise LacksChangesError("this replica lacks earlier changes; it must be filled")
            applied = record.number == self._number + 1
            if applied:  # else the answer to it was lost
                replay(self._state, record, payload)
                self._number = record.number
        return pb.ReplicateReply(applied=applied).SerializeToString()

    def absorb(self, first: pb.StateBlock, rest: Iterator[pb.StateBlock]) -> int:
        """Take the whole state in the place of what is here.

        Raises:
            ConflictError: it follows another shard; nothing was replaced.
        """
        tables, parts = transfer.state_of(rest, self._state.directory)
        pushes = ExactlyOnce()
        pushes.merge(map(AppliedWindow.of, first.window))  # refused before anything is replaced
        with self._lock, self._state.gate.closed(), self._state.lock:
            self._check_primary(first.of)
            self._state.tables = tables
            self._state.pushes = pushes
            self._state.steps = Steps()
            self._state.take_over(first)
            self._state.take_parts(parts)
            self._state.follows = True
            self._primary, self._number = first.of, first.number
        return sum(table.native.counters()["rows"] for table in tables.values())

    def fetch(self) -> Iterator[pb.StateBlock]:
        """The whole state.

        From then on it is another state's replica: what the primary that died has sent, and what
        arrives only now, must not be taken for a change of the new one's.
        """
        state = self._state
        with state.files.closed(_TURN_S):
            with self._lock, state.gate.closed():
                tables = dict(state.tables)
                snapshots = begin_snapshots(tables, "checkpoint")
                parts = state.steps.parts()
                head = state.summary(windows=True)
                if self._primary:
                    self._primary = uuid4().hex
                head.of, head.number = self._primary, self._number
            try:
                yield head
                yield from transfer.blocks_of(tables, snapshots, parts)
            finally:
                for snapshot in snapshots.values():
                    snapshot.close()

    def _check_primary(self, primary: str) -> None:
        """Refuse a shard whose place another has taken.

        Raises:
            ConflictError: it is not the one that this replica follows.
        """
        if self._primary and primary != self._primary:
            raise ConflictError(
                "this replica follows another shard, which has taken over what it had"
            )
