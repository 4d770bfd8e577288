"""A line: one worker's messages to another, in order, over a connection of our own.

Nothing is answered but the question whether all has come; what lay in shared memory is given back.
A worker that takes nothing more says why and hangs up; one that ends says so to all: it has what it
needed, or tells of its failure itself. A sender takes its leave, too: a line that ends without it
is one of a worker that died.
"""

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import grpc

from chassis.channels import RpcError, call, connect
from chassis.hang_up import hang_up
from chassis.port import CALL_S, Port
from chassis.servers import TENSOR_BYTES
from protos.codec import Buffer, payload_tag
from protos.stage_pb2 import ConnectRequest, JoinReply
from protos.stage_pb2_grpc import StageStub
from workers.links.joining import NEAR, reach, reply_of
from workers.links.shared import LEAST_BYTES, Arena, Mapped, Slot
from workers.links.writer import Writer

# Kinds of messages; _SHARED is a frame whose payload lies in shared memory.
FRAME, NOTICE, _ASK, _SHARED, _LEAVE = range(5)
_HEAD = struct.Struct("!BQ")  # kind, bytes that follow
_ANSWER = struct.Struct("!II")  # status, bytes of an explanation that follow
_SLOT = struct.Struct("!IQQQ")  # its number, where it begins, its bytes and those of the payload
_OK, _LEFT, _FREE = 0, 1000, 1001  # the last: the slot of that number, and nothing follows
_CLOSE_S = 2.0
_LEAVE_S = 0.1  # for the last word to one that takes nothing just now
_BUFFER = 1 << 16  # bytes read at once
_MOST = 8  # messages that wait where the other side is slow
_RETRY_S = 30.0
_PAUSE_S = 0.2  # until it is asked again whether this worker is called away
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
        stop: whether this worker is called away, so that nothing is tried again.
        bulk: whether payloads are to lie in memory that both share, where they share a host.
    """

    def __init__(
        self,
        address: str,
        label: str,
        here: str,
        generation: int = 0,
        retry_s: float = _RETRY_S,
        *,
        bulk: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self._generation = generation
        self._stop = stop
        self._address = address
        self._here = here
        self._label = label
        self._retry_s = retry_s
        self._bulk = bulk
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._answers: _Answers | None = None
        self._arena: Arena | None = None
        self._writer: Writer | None = None
        self._lost: OSError | None = None

    def send(self, kind: int, message: bytes, payload: Sequence[Buffer] = ()) -> None:
        """Send a message without waiting for its arrival.

        Args:
            kind: FRAME | NOTICE.
            payload: its last field, as `protos.codec` has it; may change once this has returned.

        Raises:
            RpcError: the other cannot be reached, or did not take what was sent before.
        """
        self.check()
        writer = self._writer or self._connect()
        size = sum(map(len, payload))
        if self._arena is not None and self._answers is not None and size >= LEAST_BYTES:
            self._answers.take_slots()
            slot = self._arena.put(payload, size)
            if slot is not None:
                kind = _SHARED
                message = _SLOT.pack(slot.number, slot.first, slot.size, size) + message
                payload = ()
        if payload:
            message = b"".join((message, payload_tag(size), *payload))
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
        if self._writer is None or self._answers is None:
            return
        self.check()
        if not self._answers.has_one():
            self._writer.send(_HEAD.pack(_ASK, 0))
            self._writer.flush()
        try:
            status, text = self._answers.next()
        except OSError as lost:
            raise self._told(grpc.StatusCode.UNAVAILABLE.value[0], str(lost)) from None
        if status not in (_OK, _LEFT):
            raise self._told(status, text)

    def leave(self) -> None:
        """Say that nothing more comes: from here on the taker does without this worker."""
        if self._writer is not None:
            self._writer.send(_HEAD.pack(_LEAVE, 0), needed=False)

    def close(self) -> None:
        """Hang up; what is on its way arrives."""
        if self._writer is not None and self._connection is not None:
            self._writer.close(_LEAVE_S, _HEAD.pack(_LEAVE, 0))
            hang_up(self._connection)
            self._connection.close()
        if self._arena is not None:
            self._arena.close()

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
                    stop=self._stop,
                    pause=self._wait,
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
            if connection.family == socket.AF_UNIX:
                self._share(connection)
            self._answers = _Answers(connection, self._arena)
            self._writer = Writer(connection, "line sends", self._fail, most=_MOST)
            return self._writer

    def _wait(self, seconds: float) -> None:
        """Wait until it is tried again, or this worker is called away."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not (self._stop and self._stop()):
            time.sleep(min(left, _PAUSE_S))

    def _share(self, connection: socket.socket) -> None:
        """Say whether memory is shared, as each connection within a host begins."""
        if self._bulk:
            with contextlib.suppress(OSError):  # payloads go through the socket
                self._arena = Arena()
        with contextlib.suppress(OSError):  # found by the first that is sent
            socket.send_fds(connection, [b"\0"], [self._arena.file] if self._arena else [])

    def _fail(self, error: OSError) -> None:
        self._lost = error

    def _error(self, lost: OSError) -> RpcError:
        """What the other said of it, or else what the kernel did."""
        assert self._connection is not None
        assert self._answers is not None
        with contextlib.suppress(OSError):
            self._connection.settimeout(_LAST_WORD_S)
            status, text = self._answers.next()
            if status != _OK:
                return self._told(status, text)
        return self._told(grpc.StatusCode.UNAVAILABLE.value[0], str(lost))

    def _told(self, status: int, text: str) -> RpcError:
        if status == _LEFT:
            return RpcError(self._label, grpc.StatusCode.UNAVAILABLE, "has ended")
        return RpcError(self._label, _CODES.get(status, grpc.StatusCode.UNKNOWN), text)


class _Answers:
    """What the taker says: slots of shared memory that are free again, and answers."""

    def __init__(self, connection: socket.socket, arena: Arena | None) -> None:
        self._connection = connection
        self._arena = arena
        self._came = bytearray()
        self._ended = False

    def next(self) -> tuple[int, str]:
        """Wait for an answer: its status, and what it says.

        Raises:
            OSError: the connection is closed or broken, or nothing came for too long.
        """
        while True:
            self._receive(_ANSWER.size)
            status, length = _ANSWER.unpack_from(self._came)
            if status != _FREE:
                break
            self._take_slot()
        end = _ANSWER.size + length
        self._receive(end)
        text = self._came[_ANSWER.size : end].decode(errors="replace")
        del self._came[:end]
        return status, text

    def take_slots(self) -> None:
        """Take the slots that are free again, as far as it is known."""
        with contextlib.suppress(OSError):  # that nothing has come, or nothing comes any more
            while more := self._connection.recv(_BUFFER, socket.MSG_DONTWAIT):
                self._came += more
            self._ended = True
        while len(self._came) >= _ANSWER.size and _ANSWER.unpack_from(self._came)[0] == _FREE:
            self._take_slot()

    def has_one(self) -> bool:
        """Whether an answer has come, or the end."""
        if self._arena is None:
            return bool(self._came) or bool(select.select([self._connection], [], [], 0)[0])
        self.take_slots()
        # What comes from now on, or has come in part, may be a slot: no answer to wait for.
        return self._ended or len(self._came) >= _ANSWER.size

    def _take_slot(self) -> None:
        if self._arena is not None:
            self._arena.give_back(_ANSWER.unpack_from(self._came)[1])
        del self._came[: _ANSWER.size]

    def _receive(self, size: int) -> None:
        """Have so many bytes here."""
        while len(self._came) < size:
            more = self._connection.recv(size - len(self._came))
            if not more:
                raise ConnectionError("closed the connection")
            self._came += more


class Lines:
    """The takers' end: a thread for each line that comes in.

    Args:
        host: of the worker's server.
        take: given the kind of each message, its bytes and, where that lies in shared memory, its
            payload, in the order of the line; what it raises as `Refused` is told to the sender.
        lose: called where a sender is gone without leave.
    """

    def __init__(
        self,
        host: str,
        take: Callable[[int, bytes, memoryview | None], None],
        lose: Callable[[], None],
    ) -> None:
        self._take = take
        self._lose = lose
        self._lock = threading.Condition()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._port = Port(host, self._receive, near=NEAR)

    @property
    def reply(self) -> JoinReply:
        """Where and how others connect."""
        return reply_of(self._port)

    @property
    def _ended(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Tell all that this worker has ended, and hang up."""
        self._port.close()
        with self._lock:
            self._closed = True
            for connection in self._open:  # its thread comes to the end of what was sent
                hang_up(connection, socket.SHUT_RD)
            self._lock.wait_for(lambda: not self._open, _CLOSE_S)

    def _receive(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._open.add(connection)
        says = _Says(connection)
        mapped: Mapped | None = None
        owes = True  # the sender, of whom more is to come
        try:
            with contextlib.suppress(OSError), connection.makefile("rb", _BUFFER) as file:
                if connection.family == socket.AF_UNIX:
                    mapped = _mapped(connection, says)
                while len(head := file.read(_HEAD.size)) == _HEAD.size:
                    kind, length = _HEAD.unpack(head)
                    if kind == _ASK:
                        says.answer(_OK)
                        continue
                    if kind == _LEAVE:
                        owes = False
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
                        if kind == _SHARED:
                            self._take(FRAME, message[_SLOT.size :], _payload(message, mapped))
                        else:
                            self._take(kind, message, None)
                    except Refused as refused:
                        owes = False
                        says.answer(refused.code.value[0], str(refused))
                        return
        finally:
            if owes and not self._ended:
                self._lose()
            if self._ended:
                with contextlib.suppress(OSError):
                    says.answer(_LEFT)
            with self._lock:
                self._open.discard(connection)
                hang_up(connection)
                connection.close()
                self._lock.notify_all()
            if mapped is not None:
                mapped.close()


class _Says:
    """The taker's answers, from whichever thread has one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._free: deque[int] = deque()

    def answer(self, status: int, text: str = "") -> None:
        """Answer what was asked, or refuse it.

        Raises:
            OSError: the sender is gone.
        """
        with self._lock:
            said = text.encode()
            self._connection.sendall(_ANSWER.pack(status, len(said)) + said)
        self._give_back()

    def give_back(self, number: int) -> None:
        """Nothing refers to what is in a slot any more; called by whoever let the last go."""
        self._free.append(number)
        self._give_back()

    def _give_back(self) -> None:
        # Without waiting: who comes here may hold any lock, this one too.
        while self._free and self._lock.acquire(blocking=False):
            try:
                while self._free:
                    said = _ANSWER.pack(_FREE, self._free[0])
                    self._connection.send(said, socket.MSG_DONTWAIT)
                    self._free.popleft()
            except BlockingIOError:
                return  # the sender has not taken those before: with the next
            except OSError:
                self._free.clear()  # it is gone
            finally:
                self._lock.release()


def _mapped(connection: socket.socket, says: _Says) -> Mapped | None:
    """The memory that the sender shares, if it does.

    Raises:
        OSError: it is gone.
    """
    _, files, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    return Mapped(files[0], says.give_back) if files else None


def _payload(message: bytes, mapped: Mapped | None) -> memoryview:
    """What of shared memory a message names.

    Raises:
        Refused: it names none.
    """
    try:
        if mapped is None:
            raise ValueError("no memory is shared")
        number, first, total, size = _SLOT.unpack_from(message)
        return mapped.view(Slot(number, first, total), size)
    except (struct.error, ValueError) as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
