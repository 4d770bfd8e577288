"""Calls between a client and a shard of one host whose payloads lie in shared memory.

What is left of such a message is a head of some hundred bytes, for which gRPC's machinery is the
larger part of the call: on a two-core virtual machine an empty call took 1.2 ms through gRPC and
0.1 ms through a Unix socket. Only what a step calls comes this way, one call at a time on a
connection. The socket is abstract, so no file outlives the shard; it serves its own user only, and
of that user who can show a secret, which the shard gives out over gRPC and thus to those with its
token.
"""

import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

import grpc

from chassis.hang_up import hang_up
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
from ps.shm.region import Region, Regions

MAX_MESSAGE = 60_000  # bytes of a head; longer ones go by another way
_SECRET = 32
_MAX_NAME = 200
_PEER = struct.Struct("3i")  # process, user, group


class UnixServer:
    """The shard's side: a thread for each connection.

    Args:
        handlers: of the methods, in their order. They raise what `abort` of their context raises.
        regions: what clients share; a connection's goes with it.
    """

    def __init__(self, handlers: Sequence[Handler], regions: Regions) -> None:
        self._handlers = tuple(handlers)
        self._regions = regions
        self.name = ""
        self.secret = secrets.token_bytes(_SECRET)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._listening: socket.socket | None = None

    def start(self) -> None:
        """Listen; where there are no abstract sockets, `name` stays empty."""
        if sys.platform != "linux":
            return
        name = f"heterps-{secrets.token_hex(16)}"
        listening = _socket()
        listening.bind(f"\0{name}")
        listening.listen()
        self._listening, self.name = listening, name
        accepting = threading.Thread(
            target=self._accept, args=(listening, name), name=f"{name} accepts", daemon=True
        )
        accepting.start()

    def close(self, grace_s: float = 5.0) -> None:
        """Take no more calls and let those under way end; safe to repeat."""
        listening, self._listening, self.name = self._listening, None, ""
        if listening is not None:
            hang_up(listening)
        with self._lock:
            open_now = dict(self._connections)
        for connection in open_now:
            hang_up(connection, socket.SHUT_RD)  # its thread reads the end once it has answered
        limit = time.monotonic() + grace_s
        for thread in open_now.values():
            thread.join(max(0.0, limit - time.monotonic()))

    def _accept(self, listening: socket.socket, name: str) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # closed
                listening.close()
                return
            thread = threading.Thread(
                target=self._serve, args=(connection,), name=f"{name} serves", daemon=True
            )
            with self._lock:  # `close` waits for a thread that it finds, which has to run
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        region = None
        try:
            with connection:
                region = self._welcome(connection)
                if region is None:
                    return
                connection.send(b"\0")
                while request := connection.recv(MAX_MESSAGE + 2):
                    connection.send(self._answer(request, connection))
        except OSError:
            return  # the client has gone
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            if region:
                self._regions.detach(region)

    def _welcome(self, connection: socket.socket) -> str | None:
        """The name of the memory that the client shares, if it does; None: it is not let in."""
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(peer)[1] != os.geteuid():
            return None
        connection.settimeout(10.0)  # whoever says nothing keeps no thread
        shown, files, _, _ = socket.recv_fds(
            connection, _SECRET + _MAX_NAME, 1, socket.MSG_CMSG_CLOEXEC
        )
        connection.settimeout(None)
        try:
            if not secrets.compare_digest(shown[:_SECRET], self.secret):
                return None
            region = shown[_SECRET:].decode(errors="replace")
            if not files:
                return ""
            return region if region and self._regions.attach(region, files[0]) else None
        finally:
            for file in files:
                os.close(file)

    def _answer(self, request: bytes, connection: socket.socket) -> bytes:
        """A reply's status and bytes."""
        if len(request) > MAX_MESSAGE + 1:
            status, told = refused(RefusedError(grpc.StatusCode.UNIMPLEMENTED, "too long"))
        else:
            status, told = answered(self._handlers, request[0], request[1:], connection)
        return bytes([status]) + told


class UnixLine(Line):
    """The client's side of one connection, for one call at a time.

    Args:
        name: of the socket.
        secret: of the shard.
        region: to be shared with the shard until this is closed.
        timeout_s: to be let in; short, as gRPC is another way.

    Raises:
        ConnectionRefusedError: there is no such socket here, or it lets this client not in.
        OSError: nobody answers.
    """

    def __init__(
        self, name: str, secret: bytes, region: Region | None = None, timeout_s: float = 1.0
    ) -> None:
        super().__init__(_socket())
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(f"\0{name}")
            if region is None:
                self._socket.send(secret)
            else:
                socket.send_fds(self._socket, [secret, region.name.encode()], [region.file])
            if self._socket.recv(1) != b"\0":
                raise ConnectionRefusedError(f"Unix socket {name!r} let this client not in")
        except BaseException:
            self._socket.close()
            raise

    def call(self, method: int, request: bytes, timeout: float) -> bytes:
        """The reply's bytes.

        Raises:
            RefusedError: the shard refused, or did not answer in time: close the line then, the
                reply may still come.
            BrokenLineError: the shard is gone.
        """
        self.send(method, request, timeout)
        return self.receive(timeout)

    def send(self, method: int, request: bytes, timeout: float) -> None:
        """Begin a call; `receive` must follow."""
        try:
            self._socket.settimeout(timeout)
            self._socket.send(bytes([method]) + request)
        except TimeoutError:
            raise RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, "") from None
        except OSError as error:
            raise BrokenLineError(str(error)) from None

    def receive(self, timeout: float) -> bytes:
        """The reply's bytes, with the errors of `call`."""
        try:
            self._socket.settimeout(timeout)
            reply = self._socket.recv(MAX_MESSAGE)
        except TimeoutError:
            raise RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, "") from None
        except OSError as error:
            raise BrokenLineError(str(error)) from None
        if not reply:
            raise BrokenLineError("the shard closed the connection")
        if reply[0] == OK:
            return reply[1:]
        raise refusal(reply[0], reply[1:])


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # messages keep their bounds
