"""One worker of one pipeline stage: forward, backward, reduce, step, push; then evaluate.

In a step, micro-batch m is computed by worker m mod k of a stage of k workers, so stages of
different widths stand side by side. A worker prefers a gradient that has arrived over a new
forward (1F1B) and takes both in the order of their micro-batches, which fixes every sum.
Each micro-batch's loss is weighted by its share of the step, so that the summed gradient is
that of the whole batch however it was spread. A step ends when all its gradients are applied.

Workers that share out experts compute in lockstep: in a step all forwards come first, and in
evaluation a worker without a batch computes one for the others' sake.

Nothing here waits for a GPU within a step: inputs are on their way before they are needed
(`workers/device/copies.py`), what leaves is copied and sent behind, and a step's loss is read when
the next one is under way.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chassis.tracing import span
from protos import stage_pb2
from protos.job_pb2 import JobSpec
from workers.data.reader import Split
from workers.device.copies import Download, Staging, Upload
from workers.learning.losses import loss_function
from workers.learning.precision import Precision
from workers.links.all_reduce import StageGroup
from workers.links.inbox import BACKWARD, FORWARD, Inbox, Parcel
from workers.links.outbox import Outbox
from workers.model.trace import StageGraph
from workers.stage.busy import BusyClock
from workers.stage.evaluation import Evaluation, StageLayers
from workers.stage.rows import PulledRows, StageRows
from workers.stage.source import Schedule, StepInput, TrainingSource
from workers.stage.update import Update

TRAIN = "train"
_DRAIN = "drain"


@dataclass(slots=True)
class Progress:
    """How far this worker is; read by the reporting thread."""

    phase: str = "start"
    step: int = 0
    samples: int = 0
    losses: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    @property
    def train_seconds(self) -> float:
        """Wall time of training so far."""
        return (self.ended or time.perf_counter()) - self.began if self.began else 0.0


@dataclass(slots=True)
class _InFlight:
    """A micro-batch whose backward is still to come."""

    index: int
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    auxiliary: Tensor | None


class StageExecutor:
    """Runs one worker's part of a job.

    Args:
        graph: the stage's layers, on the device.
        stage, rank: which worker this is.
        widths: workers of every stage.
        staging: to and from the device.
        precision: of forward passes.
        before, after: the neighbouring stages, None at the ends.
        lockstep: whether the workers of the stage share out experts.
    """

    def __init__(
        self,
        job: JobSpec,
        graph: StageGraph,
        *,
        stage: int,
        rank: int,
        widths: list[int],
        schedule: Schedule,
        rows: StageRows,
        group: StageGroup,
        inbox: Inbox,
        before: Outbox | None,
        after: Outbox | None,
        staging: Staging,
        precision: Precision,
        device: torch.device,
        stop: threading.Event,
        lockstep: bool = False,
    ) -> None:
        self.progress = Progress()
        self._job = job
        self._graph = graph
        self._rank = rank
        self._width = widths[stage]
        self._before_width = widths[stage - 1] if stage else 0
        self._schedule = schedule
        self._rows = rows
        self._group = group
        self._inbox = inbox
        self._before = before
        self._after = after
        self._staging = staging
        self._layers = StageLayers(graph, rows, group, staging, precision)
        self._update = Update(job, graph.module, group, schedule.steps, precision)
        self._device = device
        self._stop = stop
        self._lockstep = lockstep
        self._mine = list(range(rank, schedule.micro_batches, self._width))
        # Stages in lockstep may want all of a step's micro-batches before they return any.
        self._depth = len(self._mine) if job.train.split_experts else len(widths) - stage + 1
        # What this worker computes with; labels travel on from host to host.
        self._needed = (*graph.inputs, *(("label",) if after is None else ()))
        self._uploads: dict[tuple[str, int, int], dict[str, Upload]] = {}
        self._template: dict[str, Tensor] | None = None  # a micro-batch, for the others' sake
        self._losses: deque[Download] = deque()
        self._busy = BusyClock(device)
        self._loss = loss_function(job.train.loss)
        self._auxiliary = [m for m in self._graph.module.modules() if hasattr(m, "aux_loss")]
        inbox.on_arrival = self._arrived

    def train(self, source: TrainingSource | None) -> None:
        """Run all steps; on return every gradient of this worker has been applied."""
        self._graph.module.train()
        self.progress.phase = TRAIN
        self.progress.began = time.perf_counter()
        step = 0
        inputs = iter(source) if source is not None else None
        while True:
            given = next(inputs, None) if inputs is not None else None
            if inputs is not None and given is None:
                break
            if inputs is None and not self._another_step(step):
                break
            with span("step", step=step, rank=self._rank):
                loss = self._step(step, given)
            step += 1
            self.progress.step = step
            self.progress.samples = step * self._schedule.samples_per_step
            self.progress.busy_s = self._busy.seconds()
            if self._after is None:
                self._losses.append(self._staging.download([loss]))
                self._read_losses(behind=1)
        self._read_losses(behind=0)
        self._rows.flush()
        self.progress.busy_s = self._busy.seconds()
        self.progress.ended = time.perf_counter()
        self._group.barrier()
        if self._after is not None:
            self._after.end(TRAIN)

    def evaluate(self, split: Split) -> tuple[Tensor, Tensor]:
        """Predict a held-out split; in the last stage all scores and labels [n], else empty."""
        self.progress.phase = split
        evaluation = Evaluation(
            *(self._job, self._layers, self._rank, self._width, self._inbox, self._before_width),
            after=self._after,
            template=self._template,
            stop=self._stop,
        )
        return evaluation.run(split)

    def drain(self) -> None:
        """Wait until every worker of the stages before has ended, its writes done.

        Once the last stage returns from here, all tables and weights are final.
        """
        self._inbox.wait(lambda: self._inbox.ended(_DRAIN, self._before_width))
        self._group.barrier()
        if self._after is not None:
            self._after.end(_DRAIN)

    def _another_step(self, step: int) -> bool:
        first = self._mine[0]
        self._inbox.wait(
            lambda: (
                self._inbox.has(FORWARD, TRAIN, step, first)
                or self._inbox.ended(TRAIN, self._before_width)
            )
        )
        return self._inbox.has(FORWARD, TRAIN, step, first)

    def _step(self, step: int, given: StepInput | None) -> Tensor:
        flying: list[_InFlight] = []
        blocks: list[PulledRows | None] = [given.rows] if given else []
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        forward, backward, total = 0, 0, len(self._mine)
        while backward < total:
            if self._after is None:
                loss = loss + self._forward_backward(step, forward, given, blocks)
                forward, backward = forward + 1, backward + 1
                continue
            if self._next_is_backward(step, forward, backward, given):
                self._backward(step, flying.pop(0))
                backward += 1
            else:
                flying.append(self._forward(step, forward, given, blocks))
                forward += 1
        pulled = [block for block in blocks if block is not None]
        with self._busy.running():
            loss, counts = self._update.apply(step, loss, pulled)
        self._rows.push(step, pulled if counts else [])
        return loss

    def _read_losses(self, behind: int) -> None:
        """Take in the losses of all steps but the last `behind`."""
        while len(self._losses) > behind:
            read = self._losses.popleft()
            self.progress.losses.append(read.wait()[0].item())
            read.release()

    def _next_is_backward(
        self, step: int, forward: int, backward: int, given: StepInput | None
    ) -> bool:
        if self._lockstep:  # the same order on all workers, whatever arrives first
            return forward == len(self._mine)

        def gradient_here() -> bool:
            return backward < forward and self._inbox.has(
                BACKWARD, TRAIN, step, self._mine[backward]
            )

        may_go = forward < len(self._mine) and forward - backward < self._depth

        def input_here() -> bool:
            return may_go and (
                given is not None or self._inbox.has(FORWARD, TRAIN, step, self._mine[forward])
            )

        self._inbox.wait(lambda: gradient_here() or input_here())
        return gradient_here()

    def _input(
        self, step: int, number: int, given: StepInput | None, blocks: list[PulledRows | None]
    ) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        """The `number`-th micro-batch of this worker, on the device and as it came; rows bound."""
        index = self._mine[number]
        if given is not None:
            tensors, uploads = given.micro_batches[number], given.uploads[number]
            self._rows.bind(given.rows, number)
            wanted: frozenset[str] = frozenset()
        else:
            parcel = self._inbox.take(FORWARD, TRAIN, step, index)
            tensors, wanted = parcel.tensors, parcel.wants_gradient
            pulled = self._rows.arrived(parcel)
            self._rows.bind(pulled, 0)
            blocks.append(pulled)
            uploads = self._uploaded(FORWARD, parcel)
        if self._lockstep and self._template is None:
            self._template = {name: tensor.detach() for name, tensor in tensors.items()}
        moved = {name: upload.here() for name, upload in uploads.items()}
        for name in wanted & moved.keys():
            moved[name].requires_grad_()
        return moved, tensors

    def upload(self, tensors: Mapping[str, Tensor]) -> dict[str, Upload]:
        """Begin to bring to the device what this worker computes with."""
        return {name: self._staging.upload(tensors[name]) for name in self._needed}

    def _arrived(self, kind: str, parcel: Parcel) -> None:
        """Begin with what can be begun of a frame that is here; on the thread that took it in."""
        self._uploads[kind, parcel.step, parcel.micro_batch] = self._upload_of(kind, parcel)
        if kind == FORWARD:
            self._rows.pull_ahead(parcel)

    def _uploaded(self, kind: str, parcel: Parcel) -> dict[str, Upload]:
        """A frame's tensors under way; it may have come before we were there to be told."""
        begun = self._uploads.pop((kind, parcel.step, parcel.micro_batch), None)
        return self._upload_of(kind, parcel) if begun is None else begun

    def _upload_of(self, kind: str, parcel: Parcel) -> dict[str, Upload]:
        if kind == FORWARD:
            return self.upload(parcel.tensors)
        return {name: self._staging.upload(tensor) for name, tensor in parcel.tensors.items()}

    def _forward(
        self, step: int, number: int, given: StepInput | None, blocks: list[PulledRows | None]
    ) -> _InFlight:
        tensors, as_came = self._input(step, number, given, blocks)
        with self._busy.running():
            outputs = self._layers.run(tensors)
        assert self._after is not None
        self._after.send(
            stage_pb2.FORWARD,
            TRAIN,
            step,
            self._mine[number],
            self._layers.leaving(outputs, as_came),
            samples=self._schedule.size,
            weight=1.0 / self._schedule.micro_batches,
        )
        return _InFlight(number, tensors, outputs, self._auxiliary_loss())

    def _backward(self, step: int, flight: _InFlight) -> None:
        index = self._mine[flight.index]
        parcel = self._inbox.take(BACKWARD, TRAIN, step, index)
        gradients = {name: u.here() for name, u in self._uploaded(BACKWARD, parcel).items()}
        roots, grads = _roots(flight.outputs, gradients)
        with self._busy.running():
            if flight.auxiliary is not None and flight.auxiliary.requires_grad:
                roots.append(flight.auxiliary)
                grads.append(torch.full_like(flight.auxiliary, 1.0 / self._schedule.micro_batches))
            if roots:
                torch.autograd.backward(roots, grads)
        self._return_gradients(step, index, flight.inputs)

    def _forward_backward(
        self, step: int, number: int, given: StepInput | None, blocks: list[PulledRows | None]
    ) -> Tensor:
        tensors, _ = self._input(step, number, given, blocks)
        with self._busy.running():
            outputs = self._layers.run(tensors)
            prediction = _wide(next(iter(outputs.values())))
            share = 1.0 / self._schedule.micro_batches
            loss = self._loss(prediction, tensors["label"]) * share
            auxiliary = self._auxiliary_loss()
            whole = loss if auxiliary is None else loss + auxiliary * share
            if self._update.loss_scale is not None:
                whole = whole * self._update.loss_scale.value
            whole.backward()
        self._return_gradients(step, self._mine[number], tensors)
        return loss.detach().double()

    def _return_gradients(self, step: int, index: int, inputs: dict[str, Tensor]) -> None:
        if self._before is None:
            return
        wanted = {n: t for n, t in inputs.items() if t.requires_grad}
        grads = {
            n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in wanted.items()
        }
        self._before.send(stage_pb2.BACKWARD, TRAIN, step, index, grads)

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
