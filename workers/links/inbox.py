"""What neighbours sent, until a worker takes it."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protos import codec, stage_pb2

FORWARD, BACKWARD = "forward", "backward"  # kinds of frames in training
BFLOAT16 = "bfloat16"
TRAINING = (FORWARD, BACKWARD)


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
