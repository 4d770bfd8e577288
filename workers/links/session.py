"""What one generation of a job's workers sends to one of them.

A worker that dies is replaced, and with it begins another generation, in which every worker has
an inbox, a board and a port of its own. So nothing sent in one generation is taken in another.
"""

import threading
from collections.abc import Callable

import grpc
from google.protobuf.message import DecodeError

from protos import codec, stage_pb2
from workers.errors import PeerLostError
from workers.links.frames import Frame
from workers.links.inbox import Inbox
from workers.links.line import FRAME, Lines, Refused
from workers.links.notices import NoticeBoard
from workers.links.ring_port import RingPort

ENDING = "this worker is ending"


class Session:
    """Takes frames and notices, once it is opened.

    Args:
        inbox: where frames are kept.
        port: where the worker before this one connects; None: there is no other in the stage.
        generation: of the job's workers.

    Attributes:
        board: where what other workers tell is kept.
        goes_back: whether what the worker has of it counts no more.
    """

    def __init__(self, inbox: Inbox, port: RingPort | None = None, generation: int = 0) -> None:
        self.inbox = inbox
        self.port = port
        self.generation = generation
        self.board = NoticeBoard(inbox.wake)
        self.goes_back = False
        self._lines: Lines | None = None
        self._lock = threading.Lock()
        self._on_back: Callable[[], None] = lambda: None

    def on_back(self, act: Callable[[], None]) -> None:
        """Have `act` called once all go back, at once where they do already."""
        with self._lock:
            self._on_back = act
        if self.goes_back:
            act()

    def go_back(self) -> None:
        """All go back, whatever this worker has; safe to repeat."""
        with self._lock:
            self.goes_back, act = True, self._on_back
        act()

    def open(self, host: str) -> None:
        """Let others connect to a port of this host."""
        self._lines = Lines(host, self._take, self._lose)

    @property
    def reply(self) -> stage_pb2.JoinReply | None:
        """Where and how others connect; None: not here, or not any more."""
        return None if self._lines is None or self.inbox.stopped else self._lines.reply

    def close(self) -> None:
        """Have nobody wait for anything of it any longer, and take nothing more."""
        self.inbox.close()
        if self.port is not None:
            self.port.close()
        if self._lines is not None:
            self._lines.close()

    def _take(self, kind: int, message: bytes, payload: memoryview | None) -> None:
        """Take a frame or notice.

        Raises:
            Refused: it is none, or this worker ends: to others it is one that went away.
        """
        if self.inbox.stopped:
            raise Refused(grpc.StatusCode.UNAVAILABLE, ENDING)
        try:
            if payload is not None:
                self._take_frame(stage_pb2.Frame.FromString(message), payload)
            elif kind == FRAME:
                self._take_frame(*codec.unpack(stage_pb2.Frame, message))
            else:
                self.board.put(stage_pb2.Notice.FromString(message))
        except (ValueError, KeyError, DecodeError) as error:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT, f"bad frame or notice: {error}"
            ) from None

    def _lose(self) -> None:
        self.inbox.lose(PeerLostError("a worker that sent to this one is gone without leave"))

    def _take_frame(self, head: stage_pb2.Frame, payload: memoryview) -> None:
        if head.kind == stage_pb2.END:
            self.inbox.end(head.phase, head.sender)
        else:
            self.inbox.put(Frame.unpack(head, payload))
