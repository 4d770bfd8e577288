"""One worker of one pipeline stage: forward, backward, reduce, step, push; then evaluate.

In a step, micro-batch m is computed by worker m mod k of a stage of k workers, so stages of
different widths stand side by side. A worker prefers a gradient that has arrived over a new
forward (1F1B) and takes both in the order of their micro-batches, which fixes every sum.
Each micro-batch's loss is weighted by its share of the step, so that the summed gradient is
that of the whole batch however it was spread. A step ends when all its gradients are applied.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from protos import stage_pb2
from protos.job_pb2 import JobSpec
from protos.tracing import span
from workers.data.reader import Split
from workers.layers.gates import Bias
from workers.losses import held_out, loss_function
from workers.optimizers import make_optimizer, make_schedule
from workers.reduce import StageGroup
from workers.rows import PulledRows, StageRows
from workers.source import Schedule, StepInput, TrainingSource, evaluation_batches
from workers.trace import StageGraph
from workers.transport import Inbox, Neighbours, Parcel

TRAIN = "train"
_DRAIN = "drain"
_EVALUATION_BATCH = 2048


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
    rows: PulledRows | None


class StageExecutor:
    """Runs one worker's part of a job.

    Args:
        stage, rank: which worker this is.
        widths: workers of every stage.
        before, after: the neighbouring stages, None at the ends.
        depth: micro-batches that may be in flight.
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
        before: Neighbours | None,
        after: Neighbours | None,
        device: torch.device,
        stop: threading.Event,
    ) -> None:
        self.progress = Progress()
        self._job = job
        self._graph = graph
        self._module = graph.module.to(device)
        self._rank = rank
        self._width = widths[stage]
        self._before_width = widths[stage - 1] if stage else 0
        self._schedule = schedule
        self._rows = rows
        self._group = group
        self._inbox = inbox
        self._before = before
        self._after = after
        self._device = device
        self._stop = stop
        self._depth = len(widths) - stage + 1
        self._mine = list(range(rank, schedule.micro_batches, self._width))
        self._parameters = [p for p in self._module.parameters() if p.requires_grad]
        self._optimizer = make_optimizer(job.train.optimizer, self._parameters)
        self._rate = (
            make_schedule(job.train.optimizer, self._optimizer, schedule.steps)
            if self._optimizer is not None
            else None
        )
        self._loss = loss_function(job.train.loss)
        self._auxiliary = [m for m in self._module.modules() if hasattr(m, "aux_loss")]
        self._biased = [m for m in self._module.modules() if isinstance(m, Bias)]
        for gate in self._biased:  # moves once a step, by what all workers sent
            gate.deferred = True
        group.share_parameters(self._parameters)
        if before is not None:
            inbox.on_forward = rows.pull_ahead

    def train(self, source: TrainingSource | None) -> None:
        """Run all steps; on return every gradient of this worker has been applied."""
        self._module.train()
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
            if self._after is None:
                self.progress.losses.append(loss)
        self._rows.flush()
        self.progress.ended = time.perf_counter()
        self._group.barrier()
        if self._after is not None:
            self._after.end(TRAIN)

    def evaluate(self, split: Split) -> tuple[Tensor, Tensor]:
        """Predict a held-out split; in the last stage all scores and labels [n], else empty."""
        self._module.eval()
        self.progress.phase = split
        scores: list[Tensor] = []
        labels: list[Tensor] = []
        with torch.no_grad():
            for index, tensors in self._evaluation_input(split):
                pulled = self._rows.pull([tensors], learning=False)
                self._rows.bind(pulled, 0)
                outputs = self._run({k: v.to(self._device) for k, v in tensors.items()})
                if self._after is not None:
                    self._after.send(
                        stage_pb2.EVALUATE, split, 0, index, self._with_label(outputs, tensors)
                    )
                else:
                    prediction = next(iter(outputs.values())).cpu()
                    score, label = held_out(self._job.train.loss, prediction, tensors["label"])
                    scores.append(score)
                    labels.append(label)
        if self._after is not None:
            self._after.end(split)
            return torch.empty(0), torch.empty(0)
        empty = [torch.empty(0)]
        mine = torch.stack([torch.cat(scores or empty), torch.cat(labels or empty)], dim=1)
        both = self._group.gather(mine)
        return both[:, 0], both[:, 1]

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
                self._inbox.has("forward", TRAIN, step, first)
                or self._inbox.ended(TRAIN, self._before_width)
            )
        )
        return self._inbox.has("forward", TRAIN, step, first)

    def _step(self, step: int, given: StepInput | None) -> float:
        flying: list[_InFlight] = []
        blocks: list[PulledRows | None] = [given.rows] if given else []
        loss = 0.0
        forward, backward, total = 0, 0, len(self._mine)
        while backward < total:
            if self._after is None:
                loss += self._forward_backward(step, forward, given, blocks)
                forward, backward = forward + 1, backward + 1
                continue
            if self._next_is_backward(step, forward, backward, given):
                self._backward(step, flying.pop(0))
                backward += 1
            else:
                flying.append(self._forward(step, forward, given, blocks))
                forward += 1
        begin = time.perf_counter()
        loss = self._group.sum_gradients(
            self._parameters, loss, [gate.pending for gate in self._biased]
        )
        for gate in self._biased:
            gate.step()
        if self._optimizer is not None:
            self._optimizer.step()
            if self._rate is not None:
                self._rate.step()
            self._optimizer.zero_grad(set_to_none=False)
        self.progress.busy_s += time.perf_counter() - begin
        self._rows.push(step, blocks)
        return loss

    def _next_is_backward(
        self, step: int, forward: int, backward: int, given: StepInput | None
    ) -> bool:
        def gradient_here() -> bool:
            return backward < forward and self._inbox.has(
                "backward", TRAIN, step, self._mine[backward]
            )

        may_go = forward < len(self._mine) and forward - backward < self._depth

        def input_here() -> bool:
            return may_go and (
                given is not None or self._inbox.has("forward", TRAIN, step, self._mine[forward])
            )

        self._inbox.wait(lambda: gradient_here() or input_here())
        return gradient_here()

    def _input(
        self, step: int, number: int, given: StepInput | None, blocks: list[PulledRows | None]
    ) -> tuple[dict[str, Tensor], PulledRows | None]:
        """The `number`-th micro-batch of this worker, on the device, its rows bound."""
        index = self._mine[number]
        if given is not None:
            tensors, pulled = given.micro_batches[number], given.rows
            self._rows.bind(pulled, number)
            wanted: frozenset[str] = frozenset()
        else:
            parcel = self._inbox.take("forward", TRAIN, step, index)
            tensors, wanted = parcel.tensors, parcel.wants_gradient
            pulled = self._rows.arrived(parcel)
            self._rows.bind(pulled, 0)
            blocks.append(pulled)
        moved = {name: tensor.to(self._device) for name, tensor in tensors.items()}
        for name in wanted:
            moved[name].requires_grad_()
        return moved, pulled

    def _run(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        results = self._graph.module(*(tensors[name] for name in self._graph.inputs))
        return dict(zip(self._graph.outputs, results, strict=True))

    def _forward(
        self, step: int, number: int, given: StepInput | None, blocks: list[PulledRows | None]
    ) -> _InFlight:
        tensors, pulled = self._input(step, number, given, blocks)
        begin = time.perf_counter()
        outputs = self._run(tensors)
        self.progress.busy_s += time.perf_counter() - begin
        assert self._after is not None
        self._after.send(
            stage_pb2.FORWARD,
            TRAIN,
            step,
            self._mine[number],
            self._with_label(outputs, tensors),
            samples=self._schedule.size,
            weight=1.0 / self._schedule.micro_batches,
        )
        return _InFlight(number, tensors, outputs, self._auxiliary_loss(), pulled)

    def _backward(self, step: int, flight: _InFlight) -> None:
        index = self._mine[flight.index]
        parcel = self._inbox.take("backward", TRAIN, step, index)
        begin = time.perf_counter()
        roots, grads = _roots(flight.outputs, parcel, self._device)
        if flight.auxiliary is not None and flight.auxiliary.requires_grad:
            roots.append(flight.auxiliary)
            grads.append(torch.full_like(flight.auxiliary, 1.0 / self._schedule.micro_batches))
        if roots:
            torch.autograd.backward(roots, grads)
        self.progress.busy_s += time.perf_counter() - begin
        self._return_gradients(step, index, flight.inputs)

    def _forward_backward(
        self, step: int, number: int, given: StepInput | None, blocks: list[PulledRows | None]
    ) -> float:
        tensors, _ = self._input(step, number, given, blocks)
        begin = time.perf_counter()
        outputs = self._run(tensors)
        prediction = next(iter(outputs.values()))
        share = 1.0 / self._schedule.micro_batches
        loss = self._loss(prediction, tensors["label"]) * share
        auxiliary = self._auxiliary_loss()
        whole = loss if auxiliary is None else loss + auxiliary * share
        whole.backward()
        self.progress.busy_s += time.perf_counter() - begin
        self._return_gradients(step, self._mine[number], tensors)
        return loss.item()

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

    def _with_label(
        self, outputs: dict[str, Tensor], tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        return {**outputs, "label": tensors["label"]}

    def _evaluation_input(self, split: Split) -> Iterator[tuple[int, dict[str, Tensor]]]:
        if self._before is None:
            yield from evaluation_batches(
                self._job,
                split,
                _evaluation_size(self._job),
                self._rank,
                self._width,
                self._stop.is_set,
            )
            return
        while (parcel := self._inbox.next_evaluation(split, self._before_width)) is not None:
            yield parcel.micro_batch, parcel.tensors


def _evaluation_size(job: JobSpec) -> int:
    """Samples of a batch of evaluation: of sequences no more than training has room for."""
    if job.data.tokens:
        return min(_EVALUATION_BATCH, max(1, job.train.batch_size))
    return _EVALUATION_BATCH


def _roots(
    outputs: dict[str, Tensor], parcel: Parcel, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    roots, grads = [], []
    for name, output in outputs.items():
        if output.requires_grad and name in parcel.tensors:
            roots.append(output)
            grads.append(parcel.tensors[name].to(device))
    return roots, grads
