"""A client's connections to its shards, and the calls over them."""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import grpc
from google.protobuf.message import DecodeError

from chassis import tracing
from chassis.channels import RpcError, call, connect
from chassis.memory import keep_buffers
from protos.codec import Buffer, unpack
from protos.parameter_server_pb2 import (
    AttachRequest,
    PullReply,
    PullRequest,
    RouteRequest,
)
from protos.parameter_server_pb2_grpc import ParameterServerStub
from protos.reason_pb2 import MEMORY_NOT_ATTACHED
from ps.client.futures import T, results_of
from ps.client.streams import Streams
from ps.errors import ShardError, StaleRouteError
from ps.lines.calls import COMMIT, PULL, PUSH, STAGE, TALLY, BrokenLineError
from ps.lines.stream import StreamLine
from ps.shm.blocks import SharedMemory
from ps.shm.line import MAX_MESSAGE, UnixLine
from ps.shm.region import Region
from ps.table.buckets import Route, Share, default_route, route_of

SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)  # no answer came
_PATH = "/heterps.v1.ParameterServer/"
_METHODS = {PULL: "Pull", PUSH: "Push", STAGE: "Stage", TALLY: "Tally", COMMIT: "Commit"}


@dataclass(frozen=True, slots=True)
class Routes:
    """Which shard has which bucket, as of some version."""

    version: int
    addresses: tuple[str, ...]
    route: Route

    def number_for(self, shard: "Shard") -> int:
        """How a message to one of its shards says it; where none was installed, what it has."""
        return self.version or Share(shard.index, len(self.addresses)).number


class Shard:
    """One shard as a client sees it.

    Args:
        index: among the shards, for errors.
        address: host:port.
        timeout_s: of a call, and how long an unreachable shard is tried.
        channels: connections to spread messages over.
        aborted: set once every call is to fail.
        streams: whether what a step calls may come by streams.
    """

    def __init__(
        self,
        index: int,
        address: str,
        timeout_s: float,
        channels: int,
        aborted: threading.Event,
        streams: bool = True,
    ) -> None:
        self.index = index
        self.address = address
        self._timeout_s = timeout_s
        self._aborted = aborted
        self._channels = [connect(address) for _ in range(channels)]
        self.stub = ParameterServerStub(self._channels[0])
        # Bytes in and out: the payloads never pass through protobuf.
        self._data: dict[int, list[Callable[..., bytes]]] = {
            number: [_raw(c, name) for c in self._channels] for number, name in _METHODS.items()
        }
        self.keys = _raw(self._channels[0], "Keys")
        self._turn = itertools.count()
        self._streams = Streams(self._stream) if streams else None

    def pull(self, request: bytes, what: str, line: UnixLine | None = None) -> Buffer:
        """Pull, raw; see `data`."""
        return self.data(PULL, request, what, line)

    def push(self, request: bytes, what: str, line: UnixLine | None = None) -> Buffer:
        """Push, raw; see `data`."""
        return self.data(PUSH, request, what, line)

    def call(
        self,
        method: Callable[..., T],
        request: object,
        what: str,
        timeout_s: float | None = None,
        patience_s: float | None = None,
        said_s: float | None = None,
    ) -> T:
        """Call and, while the shard cannot be reached, repeat; every method of it may be.

        Args:
            method: of the stub.
            request: its message.
            what: names it in errors.
            timeout_s: of one attempt; the session's unless given.
            patience_s: for how long it is repeated; the session's timeout unless given.
            said_s: what an error says that it waited for, where this is the last of several ways.

        Raises:
            StaleRouteError: the routing has changed.
            BrokenLineError: it does not know the shared memory that the request names.
            ShardError: no answer in time, or a refusal; CANCELLED: it was aborted.
        """
        limit = timeout_s or self._timeout_s
        patience = self._timeout_s if patience_s is None else patience_s
        aborted = self._aborted
        try:
            if aborted.is_set():
                raise self._given_up(what)
            return call(
                *(method, request),
                what=what,
                timeout_s=limit,
                retry_s=patience,
                stop=aborted.is_set,
                pause=aborted.wait,
            )
        except RpcError as error:
            if aborted.is_set():
                raise self._given_up(what) from None
            if error.code is grpc.StatusCode.ABORTED:
                raise StaleRouteError(str(error)) from None
            if error.reason == MEMORY_NOT_ATTACHED:
                raise BrokenLineError(error.details) from None
            if error.code in SILENT:
                text = f"did not answer within {said_s or limit:g} s ({what}: {error.details})"
            else:
                text = f"refused {what}: {error.details} ({error.code.name})"
            raise ShardError(self.index, self.address, error.code, text, error.reason) from None
        except ValueError:
            if aborted.is_set():  # gRPC's word for a channel that is closed
                raise self._given_up(what) from None
            raise

    def _given_up(self, what: str) -> ShardError:
        text = f"was not asked any more ({what}): its client was aborted"
        return ShardError(self.index, self.address, grpc.StatusCode.CANCELLED, text)

    def data(self, number: int, request: bytes, what: str, line: UnixLine | None = None) -> Buffer:
        """One of the calls of a step, raw: by a line of this host, else by a stream, else by gRPC.

        A stream has half of the time, so that a call whose stream stalls is answered within it.
        What was sent twice says so by its name.

        Args:
            number: of ps.lines.calls.
            request: the message.
            what: names it in errors.
            line: to this shard.
        """
        whole, limit = time.monotonic() + self._timeout_s, self._timeout_s
        if not tracing.ON:  # spans follow calls of gRPC only
            if line is not None and len(request) <= MAX_MESSAGE:
                return self.call(partial(line.call, number), request, what)
            if self._streams is not None:
                with contextlib.suppress(BrokenLineError):
                    return self.call(partial(self._streams.call, number), request, what, limit / 2)
                limit = max(limit / 2, whole - time.monotonic())
        methods = self._data[number]
        method = methods[next(self._turn) % len(methods)]
        return self.call(method, request, what, limit, said_s=self._timeout_s)

    def rows_of(self, reply: Buffer, asked: PullRequest, size: int) -> memoryview:
        """The payload of its reply to a pull, which has to have `size` bytes.

        Raises:
            RuntimeError: it is no reply to what was asked.
        """
        try:
            head, payload = unpack(PullReply, reply)
            if (head.dim, head.count, len(payload)) != (asked.dim, asked.count, size):
                raise ValueError(
                    f"{head.count} rows of dim {head.dim} in {len(payload)} bytes; expected "
                    f"{asked.count} of {asked.dim} in {size}"
                )
        except (DecodeError, ValueError) as error:
            raise RuntimeError(
                f"parameter-server shard {self.index} ({self.address}) sent a malformed "
                f"reply to Pull of {asked.table!r}: {error}"
            ) from None
        return payload

    def close(self) -> None:
        """Close the connections; calls under way fail."""
        if self._streams is not None:
            self._streams.close()
        for channel in self._channels:
            channel.close()

    def attach(self, region: Region) -> UnixLine:
        """Share memory with it; tried once, since messages have another way.

        Raises:
            ConnectionRefusedError: it is not on this host or of this user, or has enough.
            OSError, ShardError: it could not be asked.
        """
        limit = min(1.0, self._timeout_s)
        reply = self.call(self.stub.Attach, AttachRequest(), "Attach", limit, patience_s=0.0)
        if not reply.socket:
            raise ConnectionRefusedError("the shard has no Unix socket")
        return UnixLine(reply.socket, reply.secret, region)

    def _stream(self) -> StreamLine:
        """A stream to it; tried once, since messages have another way.

        Raises:
            OSError, ShardError: there is none to be had.
        """
        limit = min(1.0, self._timeout_s / 8)
        reply = self.call(self.stub.Attach, AttachRequest(), "Attach", limit, patience_s=0.0)
        if not reply.stream_port:
            raise ConnectionRefusedError("the shard takes no streams")
        host = self.address.rpartition(":")[0]
        return StreamLine(host, reply.stream_port, reply.stream_secret, timeout_s=limit)


class Session:
    """The connections of one process. A forked child must make its own.

    Attributes:
        client, epoch: with a push's sequence they name it, once and for all.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        client: str | None,
        *,
        channels: int,
        shared_memory: bool,
        streams: bool,
    ) -> None:
        keep_buffers()
        self.pid = os.getpid()
        self.client = client or f"{socket.gethostname()[:64]}-{self.pid}-{uuid4().hex[:12]}"
        self.epoch = time.time_ns()
        self._aborted = threading.Event()
        self._make: Callable[[int, str], Shard] = lambda index, address: Shard(
            index, address, timeout_s, channels, self._aborted, streams
        )
        self._shared_memory = shared_memory
        self._memory: tuple[tuple[str, ...], SharedMemory] | None = None
        self.timeout_s = timeout_s
        self._shards: dict[str, Shard] = {}
        self._lock = threading.Lock()
        self._next = 1
        self.routes = Routes(0, tuple(addresses), default_route(len(addresses)))
        self._pool = ThreadPoolExecutor(
            min(64, 4 * len(addresses) + 4), thread_name_prefix="ps-client"
        )

    @property
    def shards(self) -> list[Shard]:
        """The shards of the present routing, in order."""
        return self.shards_of(self.routes)

    def shards_of(self, routes: Routes) -> list[Shard]:
        """The shards of a routing."""
        return self.connect(routes.addresses)

    def connect(self, addresses: Sequence[str]) -> list[Shard]:
        """Shards by address; connections are kept."""
        with self._lock:
            for index, address in enumerate(addresses):
                if address not in self._shards:
                    self._shards[address] = self._make(index, address)
            return [self._shards[address] for address in addresses]

    def memory(self) -> SharedMemory | None:
        """What is shared with the shards of the present routing; None: not wanted."""
        if not self._shared_memory:
            return None
        held, routes = self._memory, self.routes
        if held is not None and held[0] == routes.addresses:
            return held[1]
        shards = self.shards_of(routes)
        with self._lock:
            held = self._memory
            if held is None or held[0] != routes.addresses:
                if held is not None:
                    held[1].close()
                made = SharedMemory({shard.address: shard.attach for shard in shards})
                self._memory = held = (routes.addresses, made)
            return held[1]

    def sequences(self, count: int) -> int:
        """The first of so many consecutive numbers for messages of one push."""
        with self._lock:
            first = self._next
            self._next += count
            return first

    def refresh(self, stale: Routes) -> None:
        """Ask the shards for the routing that holds now, or wait a little for a newer one."""
        if self.routes.version > stale.version:
            return  # somebody else has asked
        self.update_routes()
        if self.routes.version <= stale.version:
            time.sleep(0.02)  # not installed everywhere yet

    def update_routes(self) -> None:
        """Go by the newest routing that a shard knows.

        One that does not answer at once may have left it.
        """
        asked: set[str] = set()
        while True:
            self.connect(self.routes.addresses)  # those that are new
            with self._lock:
                shards = [s for s in self._shards.values() if s.address not in asked]
            if not shards:
                return
            for shard in shards:
                asked.add(shard.address)
                self._update_from(shard)

    def _update_from(self, shard: Shard) -> None:
        wait_s = min(1.0, self.timeout_s)
        try:
            reply = shard.call(shard.stub.Route, RouteRequest(), "Route", wait_s, 0.0)
        except ShardError:
            return
        routing = reply.routing
        with self._lock:
            if routing.version > self.routes.version:
                self.routes = Routes(routing.version, tuple(routing.shards), route_of(routing))

    def submit(
        self, works: Sequence[Callable[[], T]], *, last_here: bool = False
    ) -> list["Future[T]"]:
        """Start calls side by side.

        Args:
            last_here: the last is made on this thread, before this returns.
        """
        if not last_here or not works:
            return [self._pool.submit(work) for work in works]
        futures = self.submit(works[:-1])
        last: Future[T] = Future()
        try:
            last.set_result(works[-1]())
        except Exception as error:
            last.set_exception(error)
        return [*futures, last]

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Make calls side by side, the last on this thread; the first error once all are done."""
        return results_of(self.submit(works, last_here=True))

    def run_on_new_threads(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """As `run`, on threads of their own: pushes that a cut holds back may have all others."""
        with ThreadPoolExecutor(max(1, len(works)), thread_name_prefix="ps-control") as pool:
            return results_of([pool.submit(work) for work in works])

    def abort(self) -> None:
        """Have every call fail, those under way at once; safe to repeat."""
        self._aborted.set()
        with self._lock:
            shards, memory = [*self._shards.values()], self._memory
        for shard in shards:
            shard.close()
        if memory is not None:
            memory[1].hang_up()

    def close(self) -> None:
        """Wait for what was started, then disconnect."""
        self._pool.shutdown(wait=True)
        if self._memory is not None:
            self._memory[1].close()
        for shard in self._shards.values():
            shard.close()


def _raw(channel: grpc.Channel, method: str) -> Callable[..., bytes]:
    made: Callable[..., bytes] = channel.unary_unary(_PATH + method)
    return made
