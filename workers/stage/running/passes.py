"""Forwards and backwards of a worker's micro-batches: what it computes, whenever that is."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from protos.stage_pb2 import FrameKind
from workers.data.columns.arrays import labels_in
from workers.device.copies import Upload
from workers.learning.objective import Objective, total
from workers.links.frames import BACKWARD, FORWARD, FrameId
from workers.links.pipeline import Links
from workers.stage.report.busy import BusyClock
from workers.stage.report.progress import TRAIN
from workers.stage.rows.ahead import StageRows
from workers.stage.rows.micro_batch import Arrivals, MicroBatch
from workers.stage.rows.source import WHOLE, TrainingSource
from workers.stage.running.layers import StageLayers, for_losses
from workers.stage.running.open_step import InFlight, OpenStep
from workers.stage.steps.schedule import MicroBatchSpec
from workers.stage.update.versions import Versions
from workers.stage.update.whole_loss import WholeLoss


class Passes:
    """Computes the micro-batches of training.

    Args:
        layers: of the stage.
        rows: of their embeddings.
        links: to the neighbouring stages.
        versions: of the stage's weights.
        loss: of the job.
        whole: that of whole batches, in the last stage of a job that has one.
        busy: told what is computed.
        scale: of the loss of a step.
        before_backward: called with the step before each backward.

    Attributes:
        source: of the first stage's inputs; elsewhere they arrive.
    """

    def __init__(
        self,
        layers: StageLayers,
        rows: StageRows,
        links: Links,
        versions: Versions,
        loss: Objective,
        whole: WholeLoss | None,
        busy: BusyClock,
        *,
        scale: Callable[[int], float],
        before_backward: Callable[[OpenStep], None],
    ) -> None:
        self.source: TrainingSource | None = None
        self._layers = layers
        self._rows = rows
        self._links = links
        self._versions = versions
        self._loss = loss
        self._whole = whole
        self._busy = busy
        self._scale = scale
        self._before_backward = before_backward
        self._arrivals = Arrivals(links.inbox, layers.staging, self.upload, rows)
        self._auxiliary: list[torch.nn.Module] | None = None

    def has_input(self, step: OpenStep) -> bool:
        """Whether the next forward of a step has what it computes with."""
        if self.source is not None:
            return step.given is not None or self.source.ready
        return self._arrivals.has(_frame(FORWARD, step, step.own[step.forward]))

    def has_gradient(self, flight: InFlight) -> bool:
        """Whether what a backward begins with is here."""
        return self._links.inbox.has(_frame(BACKWARD, flight.step, flight.spec))

    def upload(self, tensors: Mapping[str, Tensor]) -> dict[str, Upload]:
        """Begin to bring to the device what this worker computes with."""
        # What losses need travels on from host to host.
        last = for_losses(tensors) if self._links.after is None else {}
        needed = (*self._layers.graph.inputs, *last)
        return {name: self._layers.staging.upload(tensors[name]) for name in needed}

    def _next_input(self, step: OpenStep) -> MicroBatch:
        """The micro-batch whose forward is next, its rows and its version of weights in place."""
        if self.source is not None:
            if step.given is None:
                step.given = self.source.take()
                step.rows += [step.given.rows] if step.given.rows is not None else []
            batch = step.given.micro_batches[step.forward]
        else:
            batch = self._arrivals.micro_batch(_frame(FORWARD, step, step.own[step.forward]))
            step.rows += [batch.rows] if batch.rows is not None else []
        self._rows.bind(batch.rows, batch.position)
        self._versions.use(step.number)
        return batch

    def forward(self, step: OpenStep) -> InFlight:
        """That of a step's next micro-batch, in any stage; its backward is still to come."""
        spec = step.own[step.forward]
        batch = self._next_input(step)
        tensors = batch.on_device()
        with self._busy.running():
            given = self._layers.train(tensors, step.number, spec.index)
            auxiliary = self._auxiliary_loss()
            step.loss = step.loss + _nan_unless_finite(auxiliary)
            outputs: Mapping[str, Tensor] = given
            if self._whole is not None:
                outputs = self._whole.keep(spec, self._layers.result(given), labels_in(tensors))
        if self._links.after is not None:
            self._links.after.send(
                _frame(FORWARD, step, spec), self._layers.leaving(outputs, batch.tensors)
            )
        step.forward += 1
        return InFlight(step, spec, tensors, outputs, auxiliary)

    def backward(self, flight: InFlight) -> None:
        """That of a micro-batch, whose gradients are here."""
        step = flight.step
        if self._whole is not None:
            gradients = self._whole.gradients(flight.spec, flight.outputs)
        else:
            gradients = self._arrivals.gradients(_frame(BACKWARD, step, flight.spec))
        roots, grads = flight.roots(gradients)
        self._versions.use(step.number)
        with self._busy.running():
            if flight.auxiliary is not None and flight.auxiliary.requires_grad:
                roots.append(flight.auxiliary)
                share = flight.spec.weight * self._scale(step.number)
                grads.append(torch.full_like(flight.auxiliary, share))
            if roots:
                self._before_backward(step)
                torch.autograd.backward(roots, grads)
        self._return_gradients(step, flight.spec, flight.inputs)
        step.backward += 1

    def both(self, step: OpenStep) -> None:
        """Forward and backward of a step's next micro-batch, in the last stage."""
        spec = step.own[step.forward]
        batch = self._next_input(step)
        tensors = batch.on_device()
        with self._busy.running():
            outputs = self._layers.train(tensors, step.number, spec.index)
            parts = self._loss.parts(
                self._layers.result(outputs),
                labels_in(tensors),
                spec.weight,
                *self._counts(batch.tensors),
            )
            auxiliary = self._auxiliary_loss()
            loss = total(parts)
            whole = loss if auxiliary is None else loss + auxiliary * spec.weight
            self._before_backward(step)
            (whole * self._scale(step.number)).backward()
            step.add(parts)
            step.loss = step.loss + _nan_unless_finite(auxiliary)
        self._return_gradients(step, spec, tensors)
        step.forward += 1
        step.backward += 1

    def _counts(self, tensors: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
        """What the loss counts, besides samples, of a micro-batch and of its whole batch."""
        if not self._loss.counted:
            return [], []
        return self._loss.counts(labels_in(tensors)), tensors[WHOLE].tolist()

    def _return_gradients(
        self, step: OpenStep, spec: MicroBatchSpec, inputs: Mapping[str, Tensor]
    ) -> None:
        """Send back what the stage before waits for.

        What has no gradient is left out, so that what made it has none either, as it would here.
        """
        if self._links.before is None:
            return
        grads = {name: one.grad for name, one in inputs.items() if one.grad is not None}
        self._links.before.send(_frame(BACKWARD, step, spec), grads)

    def _auxiliary_loss(self) -> Tensor | None:
        if self._auxiliary is None:  # some have it from their first forward on
            modules = self._layers.graph.module.modules()
            self._auxiliary = [m for m in modules if hasattr(m, "aux_loss")]
        losses = [m.aux_loss for m in self._auxiliary if isinstance(m.aux_loss, Tensor)]
        return sum(losses[1:], losses[0]) if losses else None


def _frame(kind: FrameKind.ValueType, step: OpenStep, spec: MicroBatchSpec) -> FrameId:
    return FrameId(kind, TRAIN, step.number, spec.number)


def _nan_unless_finite(auxiliary: Tensor | None) -> Tensor | float:
    """0, added to the loss that is reported, which has no auxiliary ones, so that it tells."""
    return 0.0 if auxiliary is None else auxiliary.detach().double() * 0.0
