"""A line: one worker's messages to another, in order, over a connection of our own.

Nothing is answered but the question whether all has come. A worker that takes nothing more says why
and hangs up; one that ends says so to all: it has what it needed, or tells of its failure itself.
"""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable

import grpc

from chassis.channels import RpcError, call, connect
from chassis.servers import TENSOR_BYTES
from protos.stage_pb2 import ConnectRequest, JoinReply
from protos.stage_pb2_grpc import StageStub
from workers.links.port import CALL_S, Port, reach
from workers.links.writer import Writer

FRAME, NOTICE, _ASK = range(3)
_HEAD = struct.Struct("!BQ")  # kind, bytes that follow
_ANSWER = struct.Struct("!II")  # status, bytes of an explanation that follow
_OK, _LEFT = 0, 1000
_CLOSE_S = 2.0
_BUFFER = 1 << 16  # bytes read at once
_MOST = 8  # messages that wait where the other side is slow
_RETRY_S = 30.0
_TIMEOUT_S = 120.0
_LAST_WORD_S = 1.0
_TIME = struct.Struct("@ll")  # seconds and microseconds, of setsockopt
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Refused(Exception):  # noqa: N818
    """A message is not taken.

    Args:
        code: what the sender is told, with the text.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Line:
    """The sender's end; connects when it is first used.

    Args:
        address: of the other worker's stage service.
        label: that worker, for errors.
        here: this worker's host, as others call it.
        generation: of the job's workers.
        retry_s: for how long it is tried again while nobody answers there.
    """

    def __init__(
        self,
        address: str,
        label: str,
        here: str,
        generation: int = 0,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._generation = generation
        self._address = address
        self._here = here
        self._label = label
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._writer: Writer | None = None
        self._lost: OSError | None = None

    def send(self, kind: int, message: bytes) -> None:
        """Send a message without waiting for its arrival.

        Args:
            kind: FRAME | NOTICE.

        Raises:
            RpcError: the other cannot be reached, or did not take what was sent before.
        """
        self.check()
        writer = self._writer or self._connect()
        writer.send(_HEAD.pack(kind, len(message)), message)

    def check(self) -> None:
        """Raise what could not be delivered, as far as it is known.

        Raises:
            RpcError: that.
        """
        if self._lost is not None:
            raise self._error(self._lost)

    def flush(self) -> None:
        """Wait until the other has taken all that was sent, or has ended.

        Raises:
            RpcError: it did not.
        """
        if self._writer is None or self._connection is None:
            return
        self.check()
        if not select.select([self._connection], [], [], 0)[0]:  # it has said nothing yet
            self._writer.send(_HEAD.pack(_ASK, 0))
            self._writer.flush()
        try:
            status, text = self._answer(self._connection)
        except OSError as lost:
            raise self._told(grpc.StatusCode.UNAVAILABLE.value[0], str(lost)) from None
        if status not in (_OK, _LEFT):
            raise self._told(status, text)

    def close(self) -> None:
        """Hang up; what is on its way arrives."""
        if self._writer is not None and self._connection is not None:
            self._writer.close()
            _shut(self._connection)
            self._connection.close()

    def _connect(self) -> Writer:
        with self._lock:
            if self._writer is not None:
                return self._writer
            with connect(self._address) as channel:
                reply: JoinReply = call(
                    StageStub(channel).Connect,
                    ConnectRequest(generation=self._generation),
                    what=self._label,
                    timeout_s=CALL_S,
                    retry_s=self._retry_s,
                )
            try:
                connection = reach(reply, self._address.rpartition(":")[0], self._here)
            except OSError as error:
                raise RpcError(
                    self._label, grpc.StatusCode.UNAVAILABLE, f"cannot be reached: {error}"
                ) from error
            connection.settimeout(None)
            # A timeout of Python's would have every call ask the kernel first.
            for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, way, _TIME.pack(int(_TIMEOUT_S), 0))
            self._connection = connection
            self._writer = Writer(connection, "line sends", self._fail, most=_MOST)
            return self._writer

    def _fail(self, error: OSError) -> None:
        self._lost = error

    def _error(self, lost: OSError) -> RpcError:
        """What the other said of it, or else what the kernel did."""
        assert self._connection is not None
        with contextlib.suppress(OSError):
            self._connection.settimeout(_LAST_WORD_S)
            status, text = self._answer(self._connection)
            if status != _OK:
                return self._told(status, text)
        return self._told(grpc.StatusCode.UNAVAILABLE.value[0], str(lost))

    def _told(self, status: int, text: str) -> RpcError:
        if status == _LEFT:
            return RpcError(self._label, grpc.StatusCode.UNAVAILABLE, "has ended")
        return RpcError(self._label, _CODES.get(status, grpc.StatusCode.UNKNOWN), text)

    @staticmethod
    def _answer(connection: socket.socket) -> tuple[int, str]:
        status, length = _ANSWER.unpack(_exactly(connection, _ANSWER.size))
        return status, _exactly(connection, length).decode(errors="replace")


class Lines:
    """The takers' end: a thread for each line that comes in.

    Args:
        host: of the worker's server.
        take: given the kind of each message and its bytes, in the order of the line; what it
            raises as `Refused` is told to the sender.
    """

    def __init__(self, host: str, take: Callable[[int, bytes], None]) -> None:
        self._take = take
        self._lock = threading.Condition()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._port = Port(host, self._receive)

    @property
    def reply(self) -> JoinReply:
        """Where and how others connect."""
        return self._port.reply

    @property
    def _ended(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Tell all that this worker has ended, and hang up."""
        self._port.close()
        with self._lock:
            self._closed = True
            for connection in self._open:  # its thread comes to the end of what was sent
                _shut(connection, socket.SHUT_RD)
            self._lock.wait_for(lambda: not self._open, _CLOSE_S)

    def _receive(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._open.add(connection)
        try:
            with contextlib.suppress(OSError), connection.makefile("rb", _BUFFER) as file:
                while len(head := file.read(_HEAD.size)) == _HEAD.size:
                    kind, length = _HEAD.unpack(head)
                    if kind == _ASK:
                        connection.sendall(_ANSWER.pack(_OK, 0))
                        continue
                    try:
                        if length > TENSOR_BYTES:
                            raise Refused(
                                grpc.StatusCode.RESOURCE_EXHAUSTED,
                                f"a message of {length} bytes; expected at most {TENSOR_BYTES}",
                            )
                        message = file.read(length)
                        if len(message) < length:
                            return
                        self._take(kind, message)
                    except Refused as refused:
                        text = str(refused).encode()
                        status = refused.code.value[0]
                        connection.sendall(_ANSWER.pack(status, len(text)) + text)
                        return
        finally:
            if self._ended:
                with contextlib.suppress(OSError):
                    connection.sendall(_ANSWER.pack(_LEFT, 0))
            with self._lock:
                self._open.discard(connection)
                _shut(connection)
                connection.close()
                self._lock.notify_all()


def _shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with contextlib.suppress(OSError):  # not its own method: that of TLS would go on in the clear
        socket.socket.shutdown(connection, how)


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionError("closed the connection")
        data += more
    return data
