"""Micro-batches between the workers of neighbouring stages.

A frame is one micro-batch's tensors. Frames may arrive in any order; whoever waits names the
one it needs, so the order of computation, and with it every sum, is fixed by the plan alone.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from protos import stage_pb2
from workers.links.frames import FORWARD, Frame, FrameId
from workers.links.inbox import Inbox
from workers.links.line import FRAME, Line
from workers.links.service import StageService
from workers.links.session import Session

_LOOPBACK = "127.0.0.1"


class Neighbours:
    """The workers of one adjacent stage, micro-batch m going to worker m mod their number.

    Args:
        addresses: of their stage services, by rank.
        label: their stage, for errors.
        rank: of this worker in its stage.
        here: its host, as others call it.
        generation: of the job's workers.
        stop: as of `Line`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        label: str,
        rank: int,
        here: str,
        generation: int = 0,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self._rank = rank
        self._lines = [
            Line(address, f"{label} worker {target}", here, generation, bulk=True, stop=stop)
            for target, address in enumerate(addresses)
        ]

    def send(self, frame: Frame) -> None:
        """Send one micro-batch without waiting for its arrival.

        Raises:
            RpcError: an earlier frame could not be delivered.
        """
        line = self._lines[frame.id.micro_batch % len(self._lines)]
        line.send(FRAME, *frame.parts(self._rank))

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

    def leave(self) -> None:
        """Say that nothing more comes."""
        for line in self._lines:
            line.leave()

    def close(self) -> None:
        """Hang up."""
        for line in self._lines:
            line.close()


def measure_rate(size: int = 4 << 20, seconds: float = 0.3) -> float:
    """Bytes a second that one worker can pass to another on this host, codec included."""
    stop = threading.Event()
    service = StageService(Session(Inbox(stop)))
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
