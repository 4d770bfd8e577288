"""Micro-batches between the workers of neighbouring stages.

A frame is one micro-batch's tensors. Frames may arrive in any order; whoever waits names the
one it needs, so the order of computation, and with it every sum, is fixed by the plan alone.
"""

import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor

from protos import codec, stage_pb2, stage_pb2_grpc
from protos.channels import RpcError, connect, status_of
from protos.servers import Server
from workers import combine
from workers.combine import Hub

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

SERVICE = "heterps.v1.Stage"
SEND_TIMEOUT_S = 120.0
FORWARD, BACKWARD = "forward", "backward"  # kinds of frames in training
TRAINING = (FORWARD, BACKWARD)
BFLOAT16 = "bfloat16"
_MAX_OUTSTANDING = 8
_MAX_EVALUATION_FRAMES = 32
_KINDS = {
    stage_pb2.FORWARD: FORWARD,
    stage_pb2.BACKWARD: BACKWARD,
    stage_pb2.EVALUATE: "evaluate",
}


class Stopped(RuntimeError):  # noqa: N818
    """The job was cancelled, or this process was asked to end."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One received micro-batch."""

    step: int
    micro_batch: int
    samples: int
    weight: float
    tensors: dict[str, Tensor]
    wants_gradient: frozenset[str]


class Inbox:
    """Frames that arrived and were not yet taken."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._ready = threading.Condition()
        self._parcels: dict[tuple[str, str, int, int], Parcel] = {}
        self._evaluation: dict[str, deque[Parcel]] = defaultdict(deque)
        self._ended: dict[str, set[int]] = defaultdict(set)
        # Told of each frame of training before it can be taken: its kind and what it holds.
        self.on_arrival: Callable[[str, Parcel], None] | None = None

    def put(self, frame: stage_pb2.Frame, payload: memoryview) -> None:
        """Add a frame; holds the sender of evaluation frames while too many wait."""
        if frame.kind == stage_pb2.END:
            with self._ready:
                self._ended[frame.phase].add(frame.sender)
                self._ready.notify_all()
            return
        kind, parcel = _KINDS[frame.kind], _parcel(frame, payload)
        if kind in TRAINING and self.on_arrival is not None:
            self.on_arrival(kind, parcel)
        with self._ready:
            if kind in TRAINING:
                self._parcels[kind, frame.phase, frame.step, frame.micro_batch] = parcel
            else:
                queue = self._evaluation[frame.phase]
                while len(queue) >= _MAX_EVALUATION_FRAMES and not self._stop.is_set():
                    self._ready.wait(0.2)
                queue.append(parcel)
            self._ready.notify_all()

    def has(self, kind: str, phase: str, step: int, micro_batch: int) -> bool:
        """Whether that frame is here."""
        return (kind, phase, step, micro_batch) in self._parcels

    def take(self, kind: str, phase: str, step: int, micro_batch: int) -> Parcel:
        """Wait for a frame and take it."""
        key = (kind, phase, step, micro_batch)
        self.wait(lambda: key in self._parcels)
        with self._ready:
            return self._parcels.pop(key)

    def ended(self, phase: str, senders: int) -> bool:
        """Whether all workers of the stage before have ended the phase."""
        return len(self._ended[phase]) >= senders

    def next_evaluation(self, phase: str, senders: int) -> Parcel | None:
        """The next evaluation frame in order of arrival, None after the last."""
        self.wait(lambda: bool(self._evaluation[phase]) or self.ended(phase, senders))
        with self._ready:
            queue = self._evaluation[phase]
            parcel = queue.popleft() if queue else None
            self._ready.notify_all()
            return parcel

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds.

        Raises:
            Stopped: the process was asked to end first.
        """
        with self._ready:
            while not condition():
                if self._stop.is_set():
                    raise Stopped("stopped")
                self._ready.wait(0.2)

    def wake(self) -> None:
        """Make waiters look at their conditions again."""
        with self._ready:
            self._ready.notify_all()


class StageService(stage_pb2_grpc.StageServicer):
    """Receives the topology once, and from then on frames and parts of sums.

    Args:
        hub: where the stage's workers on other hosts bring their parts, at rank 0.
    """

    def __init__(self, inbox: Inbox, hub: Hub | None = None) -> None:
        self.inbox = inbox
        self.hub = hub
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
        self.inbox.put(request, memoryview(request.payload))
        return stage_pb2.FrameReply()

    def send(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Take one frame from its raw bytes."""
        try:
            frame, payload = codec.unpack(stage_pb2.Frame, data)
            self.inbox.put(frame, payload)
        except (ValueError, KeyError, DecodeError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"bad frame: {error}")
        return b""

    def Combine(  # noqa: N802
        self, request: stage_pb2.Part, context: grpc.ServicerContext
    ) -> stage_pb2.Part:
        """Bring a part; the server calls `combine`, which spares the payload a parse."""
        return stage_pb2.Part.FromString(self.combine(request.SerializeToString(), context))

    def combine(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Take one worker's part and answer with what came of all."""
        if self.hub is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker combines nothing")
        return combine.serve(self.hub, data, context)

    def serve(self, bind: str, threads: int) -> Server:
        """A started server of this service."""
        server = Server("stage", bind, threads=threads)
        server.add(
            stage_pb2_grpc.add_StageServicer_to_server,
            self,
            SERVICE,
            raw={"Send": self.send, "Combine": self.combine},
        )
        server.start()
        return server


class Neighbours:
    """The workers of one adjacent stage, micro-batch m going to worker m mod their number."""

    def __init__(self, addresses: Sequence[str], label: str, rank: int) -> None:
        self.width = len(addresses)
        self._label = label
        self._rank = rank
        self._channels = [connect(address) for address in addresses]
        self._send: list[Any] = [c.unary_unary(f"/{SERVICE}/Send") for c in self._channels]
        self._outstanding: deque[tuple[int, Any]] = deque()

    def send(
        self,
        kind: stage_pb2.FrameKind.ValueType,
        phase: str,
        step: int,
        micro_batch: int,
        tensors: Mapping[str, Tensor],
        *,
        wanted: Collection[str] = (),
        samples: int = 0,
        weight: float = 0.0,
    ) -> None:
        """Send one micro-batch without waiting for its arrival.

        Args:
            kind, phase, step, micro_batch: what it is.
            tensors: on the host, by name.
            wanted: names of those whose gradients the receiver is to send back.
            samples, weight: how much of the step it is.

        Raises:
            RpcError: an earlier frame could not be delivered.
        """
        specs, buffers = codec.pack_arrays(
            (name, _array(tensor)) for name, tensor in tensors.items()
        )
        for spec in specs:
            spec.wants_gradient = spec.name in wanted
            if tensors[spec.name].dtype == torch.bfloat16:
                spec.dtype = BFLOAT16
        head = stage_pb2.Frame(
            kind=kind,
            step=step,
            micro_batch=micro_batch,
            sender=self._rank,
            phase=phase,
            samples=samples,
            weight=weight,
            tensors=specs,
        )
        self._submit(micro_batch % self.width, codec.pack(head, *buffers))

    def end(self, phase: str) -> None:
        """Tell every worker that nothing more of `phase` comes from here."""
        self.flush()
        head = stage_pb2.Frame(kind=stage_pb2.END, phase=phase, sender=self._rank)
        for target in range(self.width):
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
    tensor = {"x": torch.ones(size // 4)}
    try:
        peer.send(stage_pb2.FORWARD, "rate", 0, 0, tensor)
        peer.flush()
        sent, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            peer.send(stage_pb2.FORWARD, "rate", 0, 0, tensor)
            peer.flush()
            sent += size
        return sent / (time.perf_counter() - begin)
    finally:
        peer.close()
        server.stop(0.1)


def _array(tensor: Tensor) -> NDArray[np.generic]:
    """A tensor for the codec; NumPy knows no bfloat16, so of that its bits."""
    tensor = tensor.detach()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _parcel(frame: stage_pb2.Frame, payload: memoryview) -> Parcel:
    bits = [spec for spec in frame.tensors if spec.dtype == BFLOAT16]
    for spec in bits:
        spec.dtype = "int16"
    arrays = codec.unpack_arrays(frame.tensors, payload)
    tensors = {name: torch.from_numpy(np.asarray(a)) for name, a in arrays.items()}
    for spec in bits:
        tensors[spec.name] = tensors[spec.name].view(torch.bfloat16)
    return Parcel(
        step=frame.step,
        micro_batch=frame.micro_batch,
        samples=frame.samples,
        weight=frame.weight,
        tensors=tensors,
        wants_gradient=frozenset(s.name for s in frame.tensors if s.wants_gradient),
    )
