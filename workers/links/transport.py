"""Micro-batches between the workers of neighbouring stages.

A frame is one micro-batch's tensors. Frames may arrive in any order; whoever waits names the
one it needs, so the order of computation, and with it every sum, is fixed by the plan alone.
"""

import threading
import time
from collections.abc import Sequence

import grpc
import torch
from google.protobuf.message import DecodeError

from chassis.servers import Server
from protos import codec, stage_pb2, stage_pb2_grpc
from workers.links.frames import FORWARD, Frame, FrameId
from workers.links.inbox import Inbox
from workers.links.line import FRAME, Line, Lines, Refused
from workers.links.notices import NoticeBoard
from workers.links.ring_port import RingPort

SERVICE = "heterps.v1.Stage"
_LOOPBACK = "127.0.0.1"
_THREADS = 4
_ENDING = "this worker is ending"


class StageService(stage_pb2_grpc.StageServicer):
    """Receives the topology once, and from then on frames and notices.

    Args:
        port: where the worker before this one connects; None: there is no other in the stage.

    Attributes:
        board: where what other workers tell is kept.
    """

    def __init__(self, inbox: Inbox, port: RingPort | None = None) -> None:
        self.inbox = inbox
        self.board = NoticeBoard(inbox.wake)
        self.port = port
        self.topology: stage_pb2.Topology | None = None
        self.started = threading.Event()
        self._lines: Lines | None = None
        self._server: Server | None = None

    @property
    def address(self) -> str:
        """Where it is served."""
        return self._server.address if self._server is not None else ""

    def Start(  # noqa: N802
        self, request: stage_pb2.Topology, context: grpc.ServicerContext
    ) -> stage_pb2.StartReply:
        """Begin; a repeated call changes nothing."""
        if self.topology is None:
            self.topology = request
            self.started.set()
        return stage_pb2.StartReply()

    def Connect(  # noqa: N802
        self, request: stage_pb2.ConnectRequest, context: grpc.ServicerContext
    ) -> stage_pb2.JoinReply:
        """Tell another worker of the job where it may connect."""
        if self._lines is None or self.inbox.stopped:
            context.abort(grpc.StatusCode.UNAVAILABLE, _ENDING)
        return self._lines.reply

    def Join(  # noqa: N802
        self, request: stage_pb2.JoinRequest, context: grpc.ServicerContext
    ) -> stage_pb2.JoinReply:
        """Tell the worker before this one where it may connect to make a ring."""
        if self.port is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker is alone in its stage")
        try:
            return self.port.admit(request)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def take(self, kind: int, message: bytes) -> None:
        """Take a frame or notice.

        Raises:
            Refused: it is none, or this worker ends: to others it is one that went away.
        """
        if self.inbox.stopped:
            raise Refused(grpc.StatusCode.UNAVAILABLE, _ENDING)
        try:
            if kind == FRAME:
                self._take_frame(*codec.unpack(stage_pb2.Frame, message))
            else:
                self.board.put(stage_pb2.Notice.FromString(message))
        except (ValueError, KeyError, DecodeError) as error:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT, f"bad frame or notice: {error}"
            ) from None

    def _take_frame(self, head: stage_pb2.Frame, payload: memoryview) -> None:
        if head.kind == stage_pb2.END:
            self.inbox.end(head.phase, head.sender)
        else:
            self.inbox.put(Frame.unpack(head, payload))

    def serve(self, bind: str) -> None:
        """Listen on host:port."""
        self._lines = Lines(bind.rpartition(":")[0], self.take)
        self._server = Server("stage", bind, threads=_THREADS)
        self._server.add(stage_pb2_grpc.add_StageServicer_to_server, self, SERVICE)
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Take nothing more."""
        if self._lines is not None:
            self._lines.close()
        if self._server is not None:
            self._server.stop(grace_s)


class Neighbours:
    """The workers of one adjacent stage, micro-batch m going to worker m mod their number.

    Args:
        addresses: of their stage services, by rank.
        label: their stage, for errors.
        rank: of this worker in its stage.
        here: its host, as others call it.
    """

    def __init__(self, addresses: Sequence[str], label: str, rank: int, here: str) -> None:
        self._rank = rank
        self._lines = [
            Line(address, f"{label} worker {target}", here)
            for target, address in enumerate(addresses)
        ]

    def send(self, frame: Frame) -> None:
        """Send one micro-batch without waiting for its arrival.

        Raises:
            RpcError: an earlier frame could not be delivered.
        """
        self._lines[frame.id.micro_batch % len(self._lines)].send(FRAME, frame.pack(self._rank))

    def end(self, phase: str) -> None:
        """Tell every worker that nothing more of `phase` comes from here; it has arrived then."""
        head = stage_pb2.Frame(kind=stage_pb2.END, phase=phase, sender=self._rank)
        for line in self._lines:
            line.send(FRAME, head.SerializeToString())
        self.flush()

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        for line in self._lines:
            line.flush()

    def close(self) -> None:
        """Hang up."""
        for line in self._lines:
            line.close()


def measure_rate(size: int = 4 << 20, seconds: float = 0.3) -> float:
    """Bytes a second that one worker can pass to another on this host, codec included."""
    stop = threading.Event()
    service = StageService(Inbox(stop))
    service.serve(f"{_LOOPBACK}:0")
    peer = Neighbours([service.address], "rate probe", 0, _LOOPBACK)
    frame = Frame(FrameId(FORWARD, "rate", 0, 0), {"x": torch.ones(size // 4)})
    try:
        peer.send(frame)
        peer.flush()
        sent, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            peer.send(frame)
            peer.flush()
            sent += size
        return sent / (time.perf_counter() - begin)
    finally:
        peer.close()
        service.stop(0.1)
