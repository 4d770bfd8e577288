"""A worker's micro-batches, whose inputs and rows are on their way before they are needed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from workers.device.copies import Staging, Upload
from workers.links.frames import FORWARD, Frame, FrameId
from workers.links.inbox import Inbox
from workers.stage.rows.ahead import PulledRows, StageRows


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a worker computes a forward pass of.

    Args:
        tensors: as they came, on the host; with the label.
        uploads: those that the stage computes with, on their way to the device.
        rows: of its keys; None where the stage has no embeddings.
        position: its number among the micro-batches that `rows` were pulled for.
        wants_gradient: names whose gradients the stage before waits for.
    """

    tensors: Mapping[str, Tensor]
    uploads: Mapping[str, Upload]
    rows: PulledRows | None
    position: int = 0
    wants_gradient: frozenset[str] = frozenset()

    def on_device(self) -> dict[str, Tensor]:
        """What the stage computes with, collecting gradients where these are waited for."""
        tensors = {name: upload.here() for name, upload in self.uploads.items()}
        for name in self.wants_gradient & tensors.keys():
            tensors[name].requires_grad_()
        return tensors


class Arrivals:
    """Frames of training, begun to be uploaded and their rows pulled as soon as they are here.

    Args:
        upload: begins to bring a forward frame's tensors to the device.
        rows: of the stage's embeddings.
    """

    def __init__(
        self,
        inbox: Inbox,
        staging: Staging,
        upload: Callable[[Mapping[str, Tensor]], dict[str, Upload]],
        rows: StageRows,
    ) -> None:
        self._inbox = inbox
        self._staging = staging
        self._upload = upload
        self._rows = rows
        self._begun: dict[FrameId, dict[str, Upload]] = {}
        inbox.on_arrival = self._arrived

    def has(self, frame: FrameId) -> bool:
        """Whether a forward frame and its rows are here."""
        came = self._inbox.peek(frame)
        if came is None:
            return False
        self._rows.pull_ahead(came)  # it may have come before we were there to be told
        return self._rows.have_arrived(frame)

    def micro_batch(self, frame: FrameId) -> MicroBatch:
        """Take a forward frame that is here with its rows."""
        came = self._inbox.take(frame)
        return MicroBatch(
            came.tensors,
            rows=self._rows.arrived(frame),
            uploads=self._uploads(came),
            wants_gradient=came.wants_gradient,
        )

    def gradients(self, frame: FrameId) -> dict[str, Tensor]:
        """Take a backward frame; its gradients on the device."""
        uploads = self._uploads(self._inbox.take(frame))
        return {name: upload.here() for name, upload in uploads.items()}

    def _arrived(self, frame: Frame) -> None:
        """Begin with what can be begun; on the thread that took the frame in."""
        self._begun[frame.id] = self._begin(frame)
        if frame.id.kind == FORWARD:
            self._rows.pull_ahead(frame)

    def _uploads(self, frame: Frame) -> dict[str, Upload]:
        """A frame's tensors under way; it may have come before we were there to be told."""
        begun = self._begun.pop(frame.id, None)
        return self._begin(frame) if begun is None else begun

    def _begin(self, frame: Frame) -> dict[str, Upload]:
        if frame.id.kind == FORWARD:
            return self._upload(frame.tensors)
        return {name: self._staging.upload(tensor) for name, tensor in frame.tensors.items()}
