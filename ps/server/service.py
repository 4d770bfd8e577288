"""The gRPC methods of one shard: any bytes a caller sends end in a reply or a status."""

import logging
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from chassis.refusal import Refusing, refuse
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from protos.parameter_server_pb2_grpc import ParameterServerServicer
from protos.reason_pb2 import DISK_FULL, REASON_UNSPECIFIED
from ps.engine import _native
from ps.errors import (
    CheckpointError,
    ConflictError,
    NoRoomError,
    OutdatedError,
    StaleRouteError,
    TableError,
)
from ps.lines.stream import StreamServer
from ps.server.clocks import Clocks
from ps.server.data_plane import DataPlane
from ps.server.metrics import ShardMetrics
from ps.shard.ending import end_process
from ps.shard.replica import Standby
from ps.shard.reshard import Mover
from ps.shard.save import Saver
from ps.shard.state import ShardState, now_s
from ps.shm.line import UnixServer
from ps.table.checks import check_spec

_log = logging.getLogger("heterps.ps")
_CODES: list[tuple[type[BaseException], grpc.StatusCode]] = [
    (StaleRouteError, grpc.StatusCode.ABORTED),
    (OutdatedError, grpc.StatusCode.OUT_OF_RANGE),
    (ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (CheckpointError, grpc.StatusCode.FAILED_PRECONDITION),
    (KeyError, grpc.StatusCode.NOT_FOUND),
    (DecodeError, grpc.StatusCode.INVALID_ARGUMENT),
    (TableError, grpc.StatusCode.INVALID_ARGUMENT),
    (TimeoutError, grpc.StatusCode.UNAVAILABLE),
    (MemoryError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoRoomError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (_native.DiskFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
]
R = TypeVar("R")


class ParameterService(ParameterServerServicer):
    """One shard.

    Args:
        state: its tables.
        threads: how many calls are handled at once.
    """

    def __init__(self, state: ShardState, threads: int = 0) -> None:
        self.state = state
        if threads:
            state.gate.most_waiting = max(1, threads // 2)
        self.metrics = ShardMetrics(self.stats, threads)
        self.data = DataPlane(state)
        self.saver = Saver(state)
        self.mover = Mover(state)
        self.standby = Standby(state)
        self.clocks = Clocks(max(1, threads // 2))
        self.log_bytes: Callable[[], int] = lambda: 0
        data = (self.pull, self.push, self.stage, self.tally, self.commit)  # PULL, PUSH, ...
        self.unix = UnixServer(data, self.data.regions)
        self.stream: StreamServer | None = None
        self._lines = data
        self._began = time.monotonic()

    def listen(self, host: str, port: int, threads: int) -> None:
        """Take streams, too, with the errors of `StreamServer`; and begin to take Unix sockets."""
        self.stream = StreamServer(self._lines, host, threads, port)
        self.unix.start()

    def hang_up(self, grace_s: float) -> None:
        """Take no more calls but gRPC's, and let those under way end."""
        self.unix.close(grace_s)
        if self.stream is not None:
            self.stream.close(grace_s)

    # Data, raw: the message's bytes in, the reply's bytes out.

    def pull(self, request: bytes, context: Refusing) -> bytes:
        """Pull."""
        return self._guarded("Pull", context, lambda: self.data.pull(request))

    def push(self, request: bytes, context: Refusing) -> bytes:
        """Push."""

        def work() -> bytes:
            reply, applied = self.data.push(request)
            self.metrics.pushed(applied)
            return reply

        return self._guarded("Push", context, work)

    def stage(self, request: bytes, context: Refusing) -> bytes:
        """Stage."""
        return self._guarded("Stage", context, lambda: self.data.stage(request))

    def tally(self, request: bytes, context: Refusing) -> bytes:
        """Tally."""
        return self._guarded("Tally", context, lambda: self.data.tally(request))

    def commit(self, request: bytes, context: Refusing) -> bytes:
        """Commit."""

        def work() -> bytes:
            reply, applied = self.data.commit(request)
            self.metrics.pushed(applied)
            return reply

        return self._guarded("Commit", context, work)

    def replicate(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Replicate."""
        return self._guarded("Replicate", context, lambda: self.standby.replicate(request))

    def keys(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Keys."""

        def work() -> bytes:
            head = pb.KeysRequest.FromString(request)
            table = self.state.find(head.table, 0).native
            keys = table.keys(min(head.limit or 100, 1 << 24))[: head.limit or 100]
            return pack(pb.KeysReply(rows=table.counters()["rows"]), keys)

        return self._guarded("Keys", context, work)

    # The same for a caller that goes through protobuf.

    def Pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> pb.PullReply:  # noqa: N802
        """Pull as an ordinary method."""
        return pb.PullReply.FromString(self.pull(request.SerializeToString(), context))

    def Push(self, request: pb.PushRequest, context: grpc.ServicerContext) -> pb.PushReply:  # noqa: N802
        """Push as an ordinary method."""
        return pb.PushReply.FromString(self.push(request.SerializeToString(), context))

    def Stage(self, request: pb.StageRequest, context: grpc.ServicerContext) -> pb.StageReply:  # noqa: N802
        """Stage as an ordinary method."""
        return pb.StageReply.FromString(self.stage(request.SerializeToString(), context))

    def Tally(self, request: pb.TallyRequest, context: grpc.ServicerContext) -> pb.TallyReply:  # noqa: N802
        """Tally as an ordinary method."""
        return pb.TallyReply.FromString(self.tally(request.SerializeToString(), context))

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitReply:  # noqa: N802
        """Commit as an ordinary method."""
        return pb.CommitReply.FromString(self.commit(request.SerializeToString(), context))

    def Keys(self, request: pb.KeysRequest, context: grpc.ServicerContext) -> pb.KeysReply:  # noqa: N802
        """Keys as an ordinary method."""
        return pb.KeysReply.FromString(self.keys(request.SerializeToString(), context))

    def Replicate(  # noqa: N802
        self, request: pb.LogRecord, context: grpc.ServicerContext
    ) -> pb.ReplicateReply:
        """Replicate as an ordinary method."""
        return pb.ReplicateReply.FromString(self.replicate(request.SerializeToString(), context))

    # Control: ordinary protobuf.

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:  # noqa: N802
        """Where a client may come with what a step calls."""

        def work() -> pb.AttachReply:
            reply = pb.AttachReply(socket=self.unix.name, secret=self.unix.secret)
            if self.stream is not None:
                reply.stream_port, reply.stream_secret = self.stream.port, self.stream.secret
            return reply

        return self._guarded("Attach", context, work)

    def Advance(  # noqa: N802
        self, request: pb.AdvanceRequest, context: grpc.ServicerContext
    ) -> pb.AdvanceReply:
        """Bounded staleness; answers within seconds, ready or not."""

        def work() -> pb.AdvanceReply:
            reply = self.clocks.advance(request)
            if not request.leave:
                self.metrics.lag(max(0, request.clock - reply.slowest))
            return reply

        return self._guarded("Advance", context, work)

    def CreateTable(  # noqa: N802
        self, request: pb.CreateTableRequest, context: grpc.ServicerContext
    ) -> pb.CreateTableReply:
        """Make a table; doing it again with the same spec changes nothing."""

        def work() -> pb.CreateTableReply:
            spec = pb.TableSpec()
            spec.CopyFrom(request.table)
            check_spec(spec)
            return pb.CreateTableReply(created=self.state.create(spec))

        return self._guarded("CreateTable", context, work)

    def DropTables(  # noqa: N802
        self, request: pb.DropTablesRequest, context: grpc.ServicerContext
    ) -> pb.DropTablesReply:
        """Forget the tables whose names begin with a prefix; safe to repeat."""

        def work() -> pb.DropTablesReply:
            if not request.prefix:
                raise TableError("DropTables: the prefix is empty; expected the beginning of names")
            names = self.state.drop(request.prefix)
            _log.info("dropped %s", ", ".join(names) or f"nothing beginning {request.prefix!r}")
            return pb.DropTablesReply(tables=names)

        return self._guarded("DropTables", context, work)

    def Shrink(self, request: pb.ShrinkRequest, context: grpc.ServicerContext) -> pb.ShrinkReply:  # noqa: N802
        """Apply a table's eviction rules now."""

        def work() -> pb.ShrinkReply:
            asked = pb.ShrinkRequest()
            asked.CopyFrom(request)
            asked.time_s = asked.time_s or now_s()
            evicted = self.state.shrink(asked)
            rows = self.state.find(request.table, 0).native.counters()["rows"]
            return pb.ShrinkReply(evicted=evicted, rows=rows)

        return self._guarded("Shrink", context, work)

    def Cut(self, request: pb.CutRequest, context: grpc.ServicerContext) -> pb.CutReply:  # noqa: N802
        """Hold pushes back for a save."""
        return self._guarded("Cut", context, lambda: self.saver.cut(request))

    def Keep(self, request: pb.CutRequest, context: grpc.ServicerContext) -> pb.CutReply:  # noqa: N802
        """Stay until a cut's turn is over; it ends with the caller."""

        def gone() -> None:
            self.saver.forsake(request.id)

        def work() -> pb.CutReply:
            self.saver.keep(request.id)
            return pb.CutReply()

        if not context.add_callback(gone):  # it is gone already
            gone()
        return self._guarded("Keep", context, work)

    def Save(self, request: pb.SaveRequest, context: grpc.ServicerContext) -> pb.SaveReply:  # noqa: N802
        """Write this shard's files."""
        return self._guarded("Save", context, lambda: self.saver.save(request))

    def Load(  # noqa: N802
        self, request_iterator: Iterator[pb.LoadRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.LoadReply]:
        """Read a save's rows beside the tables, and put them in their place when told."""
        replies = self.saver.load(_until_gone(request_iterator))
        while (reply := self._guarded("Load", context, lambda: next(replies, None))) is not None:
            yield reply

    def Route(self, request: pb.RouteRequest, context: grpc.ServicerContext) -> pb.RouteReply:  # noqa: N802
        """Tell or install the routing."""
        return self._guarded("Route", context, lambda: self.mover.route(request))

    def Move(self, request: pb.MoveRequest, context: grpc.ServicerContext) -> pb.MoveReply:  # noqa: N802
        """Send buckets to another shard."""
        return self._guarded("Move", context, lambda: self.mover.move(request))

    def Absorb(  # noqa: N802
        self, request_iterator: Iterator[pb.StateBlock], context: grpc.ServicerContext
    ) -> pb.AbsorbReply:
        """Take state from another shard."""

        def work() -> pb.AbsorbReply:
            first = next(request_iterator, None)
            if first is None:
                raise TableError("Absorb: no blocks; expected at least one")
            taker = self.standby if first.reset else self.mover
            return pb.AbsorbReply(rows=taker.absorb(first, request_iterator))

        return self._guarded("Absorb", context, work)

    def Fetch(  # noqa: N802
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StateBlock]:
        """Give the whole state to a primary that has lost its own."""
        del request
        try:
            yield from self.standby.fetch()
        except Exception as error:
            _log.exception("Fetch failed")
            context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:2000])

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsReply:  # noqa: N802
        """What the tables hold and what the process uses."""
        return self._guarded("Stats", context, self.stats)

    def stats(self) -> pb.StatsReply:
        """As Stats."""
        tables = [
            pb.TableStats(name=name, dim=table.spec.dim, spec=table.told, **table.native.counters())
            for name, table in sorted(dict(self.state.tables).items())
        ]
        return pb.StatsReply(
            tables=tables,
            cpu_seconds=time.process_time(),
            resident_bytes=_resident_bytes(),
            bytes_in=self.data.bytes_in,
            bytes_out=self.data.bytes_out,
            log_bytes=self.log_bytes(),
            uptime_s=time.monotonic() - self._began,
            run=self.state.run,
            staged_bytes=self.state.steps.staged_bytes(),
        )

    def _guarded(self, method: str, context: Refusing, work: Callable[[], R]) -> R:
        """Run a handler; what it raises becomes a status, and only surprises are logged."""
        try:
            with self.metrics.call(method):
                if not context.is_active():  # whatever it came by, and however long it has waited
                    raise TimeoutError("the caller has given up; nothing was begun")
                return work()
        except _native.BrokenError as error:
            end_process("%s: %r", method, error)
        except Exception as error:
            text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
            code = next((c for kind, c in _CODES if isinstance(error, kind)), None)
            if code is None:
                _log.exception("%s failed", method)
                code, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
            elif isinstance(error, MemoryError):
                text = "the shard has no memory left for this"
            reason = REASON_UNSPECIFIED
            # Others' reasons are texts.
            if isinstance(error, CheckpointError | ConflictError | TableError):
                reason = error.reason
            elif isinstance(error, NoRoomError | _native.DiskFullError):
                reason = DISK_FULL
        return refuse(context, code, text[:2000], reason)


def _until_gone(requests: Iterator[R]) -> Iterator[R]:
    """What a caller sends, until it ends or its connection does."""
    try:
        yield from requests
    except grpc.RpcError:
        return


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
