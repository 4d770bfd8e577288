"""Micro-batches between the workers of neighbouring stages.

A frame is one micro-batch's tensors. Frames may arrive in any order; whoever waits names the
one it needs, so the order of computation, and with it every sum, is fixed by the plan alone.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc
import torch
from google.protobuf.message import DecodeError

from chassis.channels import RpcError, connect, status_of
from chassis.servers import TENSOR_BYTES, Server
from protos import codec, stage_pb2, stage_pb2_grpc
from workers.links.frames import FORWARD, Frame, FrameId
from workers.links.inbox import Inbox
from workers.links.notices import NoticeBoard
from workers.links.ring_port import RingPort

SERVICE = "heterps.v1.Stage"
SEND_TIMEOUT_S = 120.0
_MAX_OUTSTANDING = 8


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

    def Start(  # noqa: N802
        self, request: stage_pb2.Topology, context: grpc.ServicerContext
    ) -> stage_pb2.StartReply:
        """Begin; a repeated call changes nothing."""
        if self.topology is None:
            self.topology = request
            self.started.set()
        return stage_pb2.StartReply()

    def Send(  # noqa: N802
        self, request: stage_pb2.Frame, context: grpc.ServicerContext
    ) -> stage_pb2.FrameReply:
        """Take one frame; the server calls `send`, which spares the payload a parse."""
        self._refuse_at_end(context)
        self._put(request, memoryview(request.payload))
        return stage_pb2.FrameReply()

    def send(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Take one frame from its raw bytes."""
        self._refuse_at_end(context)
        try:
            self._put(*codec.unpack(stage_pb2.Frame, data))
        except (ValueError, KeyError, DecodeError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"bad frame: {error}")
        return b""

    def _put(self, head: stage_pb2.Frame, payload: memoryview) -> None:
        if head.kind == stage_pb2.END:
            self.inbox.end(head.phase, head.sender)
        else:
            self.inbox.put(Frame.unpack(head, payload))

    def _refuse_at_end(self, context: grpc.ServicerContext) -> None:
        """Once this worker ends nobody takes what comes; to others it is one that went away."""
        if self.inbox.stopped:
            context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is ending")

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

    def Tell(  # noqa: N802
        self, request: stage_pb2.Notice, context: grpc.ServicerContext
    ) -> stage_pb2.NoticeReply:
        """Take a notice."""
        self._refuse_at_end(context)
        self.board.put(request)
        return stage_pb2.NoticeReply()

    def serve(self, bind: str, threads: int) -> Server:
        """A started server of this service."""
        server = Server("stage", bind, threads=threads, most_bytes=TENSOR_BYTES)
        server.add(
            stage_pb2_grpc.add_StageServicer_to_server,
            self,
            SERVICE,
            raw={"Send": self.send},
        )
        server.start()
        return server


class Neighbours:
    """The workers of one adjacent stage, micro-batch m going to worker m mod their number."""

    def __init__(self, addresses: Sequence[str], label: str, rank: int) -> None:
        self._width = len(addresses)
        self._label = label
        self._rank = rank
        self._channels = [connect(address) for address in addresses]
        self._send: list[Any] = [c.unary_unary(f"/{SERVICE}/Send") for c in self._channels]
        self._outstanding: deque[tuple[int, Any]] = deque()

    def send(self, frame: Frame) -> None:
        """Send one micro-batch without waiting for its arrival.

        Raises:
            RpcError: an earlier frame could not be delivered.
        """
        self._submit(frame.id.micro_batch % self._width, frame.pack(self._rank))

    def end(self, phase: str) -> None:
        """Tell every worker that nothing more of `phase` comes from here."""
        self.flush()
        head = stage_pb2.Frame(kind=stage_pb2.END, phase=phase, sender=self._rank)
        for target in range(self._width):
            self._submit(target, head.SerializeToString())
        self.flush()

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        while self._outstanding:
            self._settle()

    def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            channel.close()

    def _submit(self, target: int, data: bytes) -> None:
        while len(self._outstanding) >= _MAX_OUTSTANDING:
            self._settle()
        future = self._send[target].future(data, timeout=SEND_TIMEOUT_S)
        self._outstanding.append((target, future))

    def _settle(self) -> None:
        target, future = self._outstanding.popleft()
        try:
            future.result()
        except grpc.RpcError as error:
            code, details = status_of(error)
            raise RpcError(f"{self._label} worker {target}", code, details) from None


def measure_rate(size: int = 4 << 20, seconds: float = 0.3) -> float:
    """Bytes a second that one worker can pass to another on this host, codec included."""
    stop = threading.Event()
    service = StageService(Inbox(stop))
    server = service.serve("127.0.0.1:0", threads=4)
    peer = Neighbours([server.address], "rate probe", 0)
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
        server.stop(0.1)
