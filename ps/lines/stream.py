"""The stream that carries a step's calls between hosts: bulk bytes without gRPC.

gRPC introduces: who may call the shard is told a port and a secret. The messages are those of the
Unix socket (`ps.lines.calls`), each behind its length, over TCP, in TLS 1.3 where the servers speak
it. Each call has a connection for itself, so that nothing small waits behind what is large.
"""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence

import grpc

from chassis.crowds import owner
from chassis.hang_up import hang_up
from chassis.port import Port, reach
from chassis.security import Security, is_loopback
from chassis.servers import TENSOR_BYTES
from protos.codec import Buffer
from ps.lines.calls import (
    OK,
    BrokenLineError,
    Handler,
    Line,
    RefusedError,
    answered,
    refusal,
    refused,
)
from ps.lines.frames import MALFORMED, receive, receive_head, receive_rows, send

_LET_IN = b"\0"
_SILENCE_S = 20.0  # of a client in the middle of a message
_PACE = 1 << 16  # bytes a second that it sends or takes at least
_SMALL = 1 << 16  # bytes of a message that is read whoever else is sending
_MOST = 1024  # streams of a shard; what more clients have to say goes by gRPC
_SHARE = 768  # of them, of one address
# A host that is gone without a word is known after a minute and a half.
_IDLE_S, _PROBE_S, _PROBES = 60, 10, 3


class StreamServer:
    """The shard's side: a thread for each connection.

    Args:
        handlers: of the methods, in their order.
        host: of the shard's gRPC server.
        threads: how many messages are handled at once.
        port: 0 for any free one.

    Attributes:
        port: where clients connect.
        secret: what they show there.

    Raises:
        SecurityError: others could reach it, and it would speak in the clear.
        OSError: the port is in use, or the host is not this machine's.
    """

    def __init__(
        self,
        handlers: Sequence[Handler],
        host: str,
        threads: int,
        port: int = 0,
        security: Security | None = None,
    ) -> None:
        self._handlers = tuple(handlers)
        self._turns = threading.Semaphore(threads)
        self._reading = threading.Semaphore(4 * threads)
        self._changed = threading.Condition()
        self._open: dict[socket.socket, bytes] = {}  # and whose they are
        self._crowd: Counter[bytes] = Counter()
        self._share = _MOST if is_loopback(host) else _SHARE  # else all come from this machine
        self._closed = False
        self._door = Port(host, self._serve, security, port=port, bulk=True)
        self.port = self._door.number
        self.secret = self._door.secret

    def close(self, grace_s: float = 5.0) -> None:
        """Take no more calls and let those under way end; safe to repeat."""
        self._door.close()
        with self._changed:
            self._closed = True
            for connection in self._open:  # its thread reads the end once it has answered
                hang_up(connection, socket.SHUT_RD)
            self._changed.wait_for(lambda: not self._open, grace_s)

    def _serve(self, connection: socket.socket) -> None:
        if not self._let_in(connection):
            connection.close()
            return
        try:
            with contextlib.suppress(OSError, MemoryError):  # gone, or too large for this host
                _notice_the_end(connection)
                connection.sendall(_LET_IN)
                while self._one(connection):
                    pass
        finally:
            with self._changed:
                whose = self._open.pop(connection)
                self._crowd[whose] -= 1
                if not self._crowd[whose]:
                    del self._crowd[whose]
                hang_up(connection)
                connection.close()
                self._changed.notify_all()

    def _let_in(self, connection: socket.socket) -> bool:
        """Whether there is room for one more, of its address, too.

        Whoever is not let in goes by gRPC for a while. To close streams later would cut off calls.
        """
        try:
            whose = owner(connection.getpeername()[0])
        except (OSError, ValueError):  # it has gone
            return False
        with self._changed:
            full = len(self._open) >= _MOST or self._crowd[whose] >= self._share
            if self._closed or full:
                return False
            self._open[connection] = whose
            self._crowd[whose] += 1
            return True

    def _one(self, connection: socket.socket) -> bool:
        """Answer one call; whether another may follow.

        Raises:
            OSError: the client has gone, or is silent or slow in the middle of a message.
        """
        found = receive_head(connection, None, _SILENCE_S)
        if found is None:
            return False
        method, size = found
        if size > TENSOR_BYTES:
            told = f"a message of {size} bytes; expected at most {TENSOR_BYTES}"
            status, reply = refused(RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, told))
            send(connection, status, reply, _until(len(reply)))
            return False
        # Not in a turn: clients that stall must not hold back those that do not.
        place: contextlib.AbstractContextManager[object] = self._reading
        if size <= _SMALL:
            place = contextlib.nullcontext()
        with place:
            request = receive(connection, size, _until(size))
        with self._turns:
            connection.settimeout(None)  # a look for the client is not to wait
            status, reply = answered(self._handlers, method, request, connection)
        send(connection, status, reply, _until(len(reply)))
        return True


class StreamLine(Line):
    """The client's side of one connection, for one call at a time.

    Args:
        host: of the shard, as it is called by gRPC.
        port: where it takes streams.
        secret: that it gave out.
        timeout_s: to be let in; short, as gRPC is another way.

    Raises:
        OSError: nobody answers there, it is not who it should be, or lets this client not in.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        security: Security | None = None,
        timeout_s: float = 1.0,
    ) -> None:
        super().__init__(reach(host, port, secret, security, timeout_s, bulk=True))
        try:
            if self._socket.recv(1) != _LET_IN:
                raise ConnectionRefusedError(f"{host}:{port} let this client not in")
        except BaseException:
            self._socket.close()
            raise

    def call(self, method: int, request: bytes, timeout: float) -> Buffer:
        """The reply's bytes.

        Raises:
            RefusedError: the shard refused.
            BrokenLineError: the shard is gone, or did not answer in time: close the line then, the
                reply may still come.
        """
        until = time.monotonic() + timeout
        try:
            send(self._socket, method, request, until)
            found = receive_head(self._socket, until, timeout)
            if found is None:
                raise ConnectionError("the connection was closed")
            status, size = found
            if size > TENSOR_BYTES:
                raise ConnectionError(f"a reply of {size} bytes")
            reply = receive_rows(self._socket, size, until)
            refusing = None if status == OK else refusal(status, bytes(reply))
        except TimeoutError:
            raise BrokenLineError(f"no answer within {timeout:g} s") from None
        except (OSError, MemoryError, *MALFORMED) as error:
            raise BrokenLineError(str(error)) from None
        if refusing is not None:
            raise refusing
        return reply


def _until(size: int) -> float:
    """When a message of so many bytes has to have come or gone."""
    return time.monotonic() + _SILENCE_S + size / _PACE


def _notice_the_end(connection: socket.socket) -> None:
    """Have the kernel ask whether the other host is still there."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", _PROBES),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
