"""One worker of one pipeline stage: forward, backward, reduce, step, push; then evaluate.

In a step, micro-batch m is computed by worker m mod k of a stage of k workers, so stages of
different widths stand side by side. A worker prefers a gradient that has arrived over a new
forward (1F1B) and takes both in the order of their micro-batches, which fixes every sum.
Each micro-batch's loss is weighted by its share of the step, so that the summed gradient is
that of the whole batch however it was spread. A step ends when all its gradients are applied.

Workers that share out experts compute in lockstep: in a step all forwards come first, and in
evaluation a worker without a batch computes one for the others' sake.

Nothing here waits for a GPU within a step: inputs are on their way before they are needed
(`workers/stage/micro_batch.py`), what leaves is copied and sent behind, and a step's loss is read
when the next one is under way.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chassis.tracing import span
from protos.job_pb2 import JobSpec
from protos.stage_pb2 import FrameKind
from workers.data.reader import Split
from workers.device.copies import Download, Upload
from workers.learning.losses import loss_function
from workers.links.frames import BACKWARD, FORWARD, FrameId
from workers.links.pipeline import Links, Place
from workers.stage.busy import BusyClock
from workers.stage.evaluation import Evaluation
from workers.stage.layers import StageLayers
from workers.stage.micro_batch import Arrivals, MicroBatch
from workers.stage.progress import Progress
from workers.stage.rows import PulledRows
from workers.stage.schedule import Schedule
from workers.stage.source import StepInput, TrainingSource
from workers.stage.update import Update

TRAIN = "train"
_DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A micro-batch whose backward is still to come."""

    number: int  # among this worker's
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    auxiliary: Tensor | None


@dataclass(slots=True)
class _Step:
    """A step of this worker under way.

    Args:
        given: its micro-batches in the first stage; elsewhere they arrive.

    Attributes:
        rows: whose gradients it collects.
        in_flight: in the order of their forwards.
        forward: micro-batches whose forward is done.
        backward: micro-batches whose backward is done.
    """

    number: int
    given: StepInput | None
    rows: list[PulledRows] = field(default_factory=list)
    in_flight: deque[_InFlight] = field(default_factory=deque)
    forward: int = 0
    backward: int = 0


class StageExecutor:
    """Runs one worker's part of a job.

    Args:
        layers: of the stage.
        place: which worker this is.
        links: to the neighbouring stages.
        update: of the stage's dense parameters.
        lockstep: whether the workers of the stage share out experts.
    """

    def __init__(
        self,
        job: JobSpec,
        layers: StageLayers,
        place: Place,
        links: Links,
        schedule: Schedule,
        update: Update,
        stop: threading.Event,
        *,
        lockstep: bool = False,
    ) -> None:
        self.progress = Progress()
        self._job = job
        self._layers = layers
        self._place = place
        self._links = links
        self._inbox = links.inbox
        self._schedule = schedule
        self._share = 1.0 / schedule.micro_batches  # of the step's loss that a micro-batch is
        self._update = update
        self._stop = stop
        self._lockstep = lockstep
        self._own = place.own(schedule.micro_batches)
        # Stages in lockstep may want all of a step's micro-batches before they return any.
        ahead = len(place.widths) - place.stage + 1
        self._depth = len(self._own) if job.train.split_experts else ahead
        # What this worker computes with; labels travel on from host to host.
        self._needed = (*layers.graph.inputs, *(("label",) if links.after is None else ()))
        self._arrivals = Arrivals(links.inbox, layers.staging, self.upload, layers.rows)
        self._template: dict[str, Tensor] | None = None  # a micro-batch, for the others' sake
        self._losses: deque[Download] = deque()
        self._busy = BusyClock(layers.device)
        self._loss = loss_function(job.train.loss)
        self._auxiliary = [m for m in layers.graph.module.modules() if hasattr(m, "aux_loss")]

    def train(self, source: TrainingSource | None) -> None:
        """Run all steps; on return every gradient of this worker has been applied."""
        self._layers.graph.module.train()
        self.progress.phase = TRAIN
        self.progress.began = time.perf_counter()
        inputs = iter(source) if source is not None else None
        while (step := self._next_step(inputs)) is not None:
            with span("step", step=step.number, rank=self._place.rank):
                loss = self._run(step)
            self.progress.step = step.number + 1
            self.progress.samples = self.progress.step * self._schedule.samples_per_step
            self.progress.busy_s = self._busy.seconds()
            if self._links.after is None:
                self._losses.append(self._layers.staging.download([loss]))
                self._read_losses(behind=1)
        self._read_losses(behind=0)
        self._layers.rows.flush()
        self.progress.busy_s = self._busy.seconds()
        self.progress.ended = time.perf_counter()
        self._end(TRAIN)

    def evaluate(self, split: Split) -> tuple[Tensor, Tensor]:
        """Predict a held-out split; in the last stage all scores and labels [n], else empty."""
        self.progress.phase = split
        evaluation = Evaluation(
            self._job, self._layers, self._place, self._links, self._template, self._stop
        )
        return evaluation.run(split)

    def drain(self) -> None:
        """Wait until every worker of the stages before has ended, its writes done.

        Once the last stage returns from here, all tables and weights are final.
        """
        self._inbox.wait(lambda: self._inbox.ended(_DRAIN, self._place.width_before))
        self._end(_DRAIN)

    def upload(self, tensors: Mapping[str, Tensor]) -> dict[str, Upload]:
        """Begin to bring to the device what this worker computes with."""
        return {name: self._layers.staging.upload(tensors[name]) for name in self._needed}

    def _end(self, phase: str) -> None:
        """Say that nothing more of a phase comes, once all workers of the stage are here."""
        self._layers.group.barrier()
        if self._links.after is not None:
            self._links.after.end(phase)

    def _next_step(self, inputs: Iterator[StepInput] | None) -> _Step | None:
        number = self.progress.step
        if inputs is not None:
            given = next(inputs, None)
            if given is None:
                return None
            return _Step(number, given, rows=[given.rows] if given.rows is not None else [])
        first = self._frame(FORWARD, number, 0)
        ended = self._place.width_before
        self._inbox.wait(lambda: self._inbox.has(first) or self._inbox.ended(TRAIN, ended))
        return _Step(number, None) if self._inbox.has(first) else None

    def _frame(self, kind: FrameKind.ValueType, step: int, number: int) -> FrameId:
        """The frame of this worker's `number`-th micro-batch."""
        return FrameId(kind, TRAIN, step, self._own[number])

    def _run(self, step: _Step) -> Tensor:
        """Take a step; the loss of all workers of the stage."""
        loss = torch.zeros((), dtype=torch.float64, device=self._layers.device)
        while step.backward < len(self._own):
            if self._links.after is None:
                loss = loss + self._forward_backward(step)
            elif self._next_is_backward(step):
                self._backward(step)
            else:
                self._forward(step)
        with self._busy.running():
            loss, counts = self._update.apply(step.number, loss, step.rows)
        self._layers.rows.push(step.number, step.rows if counts else [])
        return loss

    def _read_losses(self, behind: int) -> None:
        """Take in the losses of all steps but the last `behind`."""
        while len(self._losses) > behind:
            read = self._losses.popleft()
            self.progress.losses.append(read.wait()[0].item())
            read.release()

    def _next_is_backward(self, step: _Step) -> bool:
        """Wait until there is something to compute; whether that is a backward."""
        if self._lockstep:  # the same order on all workers, whatever arrives first
            return step.forward == len(self._own)
        may_go = step.forward < len(self._own) and step.forward - step.backward < self._depth

        def gradient_here() -> bool:
            return step.backward < step.forward and self._inbox.has(
                self._frame(BACKWARD, step.number, step.backward)
            )

        def input_here() -> bool:
            return may_go and (
                step.given is not None
                or self._inbox.has(self._frame(FORWARD, step.number, step.forward))
            )

        self._inbox.wait(lambda: gradient_here() or input_here())
        return gradient_here()

    def _next_input(self, step: _Step) -> MicroBatch:
        """The micro-batch whose forward is next, its rows bound."""
        if step.given is not None:
            batch = step.given.micro_batches[step.forward]
        else:
            batch = self._arrivals.micro_batch(self._frame(FORWARD, step.number, step.forward))
            if batch.rows is not None:
                step.rows.append(batch.rows)
        self._layers.rows.bind(batch.rows, batch.position)
        if self._lockstep and self._template is None:
            self._template = {name: tensor.detach() for name, tensor in batch.tensors.items()}
        return batch

    def _forward(self, step: _Step) -> None:
        assert self._links.after is not None
        batch = self._next_input(step)
        tensors = batch.on_device()
        with self._busy.running():
            outputs = self._layers.run(tensors)
        self._links.after.send(
            self._frame(FORWARD, step.number, step.forward),
            self._layers.leaving(outputs, batch.tensors),
        )
        step.in_flight.append(_InFlight(step.forward, tensors, outputs, self._auxiliary_loss()))
        step.forward += 1

    def _backward(self, step: _Step) -> None:
        flight = step.in_flight.popleft()
        gradients = self._arrivals.gradients(self._frame(BACKWARD, step.number, flight.number))
        roots, grads = _roots(flight.outputs, gradients)
        with self._busy.running():
            if flight.auxiliary is not None and flight.auxiliary.requires_grad:
                roots.append(flight.auxiliary)
                grads.append(torch.full_like(flight.auxiliary, self._share))
            if roots:
                torch.autograd.backward(roots, grads)
        self._return_gradients(step, flight.number, flight.inputs)
        step.backward += 1

    def _forward_backward(self, step: _Step) -> Tensor:
        """Forward and backward of the last stage; the micro-batch's part of the loss."""
        tensors = self._next_input(step).on_device()
        with self._busy.running():
            outputs = self._layers.run(tensors)
            prediction = _wide(next(iter(outputs.values())))
            loss = self._loss(prediction, tensors["label"]) * self._share
            auxiliary = self._auxiliary_loss()
            whole = loss if auxiliary is None else loss + auxiliary * self._share
            if self._update.loss_scale is not None:
                whole = whole * self._update.loss_scale.value
            whole.backward()
        self._return_gradients(step, step.forward, tensors)
        step.forward += 1
        step.backward += 1
        return loss.detach().double()

    def _return_gradients(self, step: _Step, number: int, inputs: Mapping[str, Tensor]) -> None:
        if self._links.before is None:
            return
        grads = {
            name: tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for name, tensor in inputs.items()
            if tensor.requires_grad
        }
        self._links.before.send(self._frame(BACKWARD, step.number, number), grads)

    def _auxiliary_loss(self) -> Tensor | None:
        losses = [m.aux_loss for m in self._auxiliary if isinstance(m.aux_loss, Tensor)]
        return sum(losses[1:], losses[0]) if losses else None


def _roots(
    outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    roots, grads = [], []
    for name, output in outputs.items():
        if output.requires_grad and name in gradients:
            roots.append(output)
            grads.append(gradients[name])
    return roots, grads


def _wide(prediction: Tensor) -> Tensor:
    """Predictions of 16 bits in float32, for the loss."""
    return prediction.float() if prediction.element_size() < 4 else prediction
