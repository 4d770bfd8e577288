"""The stream that carries a step's calls between hosts: bulk bytes without gRPC.

gRPC introduces: who may call the shard is told a port and a secret. The messages are those of the
Unix socket (`ps.lines.calls`), each behind its length, over TCP, in TLS 1.3 where the servers speak
it. Each call has a connection for itself, so that nothing small waits behind what is large.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import grpc
import numpy as np

from chassis.crowds import watch
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

_HEAD = struct.Struct("!BQ")  # method or status, bytes that follow
_LET_IN = b"\0"
_SILENCE_S = 20.0  # of a client in the middle of a message
_PIECE = 1 << 20  # bytes that are to move within a limit
_TOGETHER = 1 << 14  # bytes that are sent with their head
_MOST = 1024  # streams of a shard; what more clients have to say goes by gRPC
_SHARE = 768  # of them, of one address
_LOOK_S = 0.5
_LEAST_S = 0.001


class StreamServer:
    """The shard's side: a thread for each connection.

    Args:
        handlers: of the methods, in their order.
        host: of the shard's gRPC server.
        threads: how many messages are read and handled at once.
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
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._door = Port(host, self._serve, security, port=port)
        self.port = self._door.number
        self.secret = self._door.secret
        self._stopped = threading.Event()
        if not is_loopback(host):  # else all come from this machine
            watch(self.port, _SHARE, _LOOK_S, self._stopped)

    def close(self, grace_s: float = 5.0) -> None:
        """Take no more calls and let those under way end; safe to repeat."""
        self._door.close()
        self._stopped.set()
        with self._changed:
            self._closed = True
            for connection in self._open:  # its thread reads the end once it has answered
                hang_up(connection, socket.SHUT_RD)
            self._changed.wait_for(lambda: not self._open, grace_s)

    def _serve(self, connection: socket.socket) -> None:
        with self._changed:
            if self._closed or len(self._open) >= _MOST:
                connection.close()
                return
            self._open.add(connection)
        try:
            with contextlib.suppress(OSError, MemoryError):  # gone, or too large for this host
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(_LET_IN)
                while self._one(connection):
                    pass
        finally:
            with self._changed:
                self._open.discard(connection)
                hang_up(connection)
                connection.close()
                self._changed.notify_all()

    def _one(self, connection: socket.socket) -> bool:
        """Answer one call; whether another may follow.

        Raises:
            OSError: the client has gone, or is silent in the middle of a message.
        """
        connection.settimeout(None)
        head = connection.recv(_HEAD.size)
        if not head:
            return False
        head += bytes(_received(connection, _HEAD.size - len(head), _silence))
        method, size = _HEAD.unpack(head)
        if size > TENSOR_BYTES:
            told = f"a message of {size} bytes; expected at most {TENSOR_BYTES}"
            _send(
                connection,
                *refused(RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, told)),
                _silence,
            )
            return False
        with self._turns:
            request = bytes(_received(connection, size, _silence))
            connection.settimeout(None)  # a look for the client is not to wait
            status, reply = answered(self._handlers, method, request, connection)
        _send(connection, status, reply, _silence)
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
        super().__init__(reach(host, port, secret, security, timeout_s))
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

        def left() -> float:
            return max(_LEAST_S, until - time.monotonic())

        try:
            _send(self._socket, method, request, left)
            status, size = _HEAD.unpack(_received(self._socket, _HEAD.size, left))
            reply = _received(self._socket, size, left)
        except TimeoutError:
            raise BrokenLineError(f"no answer within {timeout:g} s") from None
        except OSError as error:
            raise BrokenLineError(str(error)) from None
        if status == OK:
            return reply
        raise refusal(status, bytes(reply))


def _silence() -> float:
    return _SILENCE_S


def _send(connection: socket.socket, kind: int, body: bytes, left: Callable[[], float]) -> None:
    """Send a message.

    Args:
        kind: its method, or status.
        left: for how many seconds no more than a piece may be on its way.

    Raises:
        OSError: the other is gone; TimeoutError: it takes nothing.
    """
    head = _HEAD.pack(kind, len(body))
    connection.settimeout(left())
    if len(body) <= _TOGETHER:
        connection.sendall(head + body)
        return
    connection.sendall(head)
    view = memoryview(body)
    for at in range(0, len(view), _PIECE):
        connection.settimeout(left())
        connection.sendall(view[at : at + _PIECE])


def _received(connection: socket.socket, size: int, left: Callable[[], float]) -> memoryview:
    """The next bytes of a connection, written once.

    Raises:
        OSError: the other is gone; TimeoutError: it sends nothing.
    """
    room = np.empty(size, np.uint8).data
    at = 0
    while at < size:
        connection.settimeout(left())
        more = connection.recv_into(room[at:])
        if not more:
            raise ConnectionError("the connection was closed")
        at += more
    return room.toreadonly()
