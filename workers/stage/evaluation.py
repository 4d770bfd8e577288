"""Held-out splits through the stages: forward alone, as it was trained, then scores and labels."""

import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from protos import stage_pb2
from protos.job_pb2 import JobSpec
from workers.data.reader import Split
from workers.device.copies import Staging
from workers.learning.losses import held_out
from workers.learning.precision import Precision
from workers.links.all_reduce import StageGroup
from workers.links.inbox import Inbox
from workers.links.outbox import Outbox
from workers.model.trace import StageGraph
from workers.stage.rows import StageRows
from workers.stage.source import evaluation_batches

_BATCH = 2048
Batches = Iterator[tuple[int, dict[str, Tensor]]]  # number and tensors of each


class StageLayers:
    """One worker's layers, and how they are run.

    Args:
        graph: the layers, on the device.
        rows: their embeddings'.
        group: the workers of the stage.
        staging: to and from the device.
        precision: of forward passes.
    """

    def __init__(
        self,
        graph: StageGraph,
        rows: StageRows,
        group: StageGroup,
        staging: Staging,
        precision: Precision,
    ) -> None:
        self.graph = graph
        self.module = graph.module
        self.rows = rows
        self.group = group
        self.staging = staging
        self.precision = precision

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of inputs on the device, whose rows are bound."""
        with self.precision.computing():
            results = self.module(*(tensors[name] for name in self.graph.inputs))
        return dict(zip(self.graph.outputs, results, strict=True))

    def leaving(
        self, outputs: Mapping[str, Tensor], as_came: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What goes to the next stage: outputs, and what only passes through from the host."""
        passing = {
            name: as_came[name]
            for name, tensor in outputs.items()
            if name in as_came and not tensor.requires_grad
        }
        return {**outputs, **passing, "label": as_came["label"]}


class Evaluation:
    """One worker's part of measuring held-out splits.

    Args:
        rank, width: of the stage's workers.
        before: workers of the stage before; 0: this one reads the data.
        template: any batch, where the workers compute in lockstep: one that has no batch any more
            computes it for the others' sake. Else None.
    """

    def __init__(
        self,
        job: JobSpec,
        stage: StageLayers,
        rank: int,
        width: int,
        inbox: Inbox,
        before: int,
        after: Outbox | None,
        template: dict[str, Tensor] | None,
        stop: threading.Event,
    ) -> None:
        self._job = job
        self._stage = stage
        self._rank = rank
        self._width = width
        self._inbox = inbox
        self._before = before
        self._after = after
        self._template = template
        self._stop = stop

    def run(self, split: Split) -> tuple[Tensor, Tensor]:
        """Predict a split; in the last stage all scores and labels [n], else empty."""
        stage = self._stage
        stage.module.eval()
        scores: list[Tensor] = []
        labels: list[Tensor] = []
        with torch.no_grad():
            for number, tensors in self._rounds(self._batches(split)):
                stage.rows.bind(stage.rows.pull([tensors], learning=False), 0)
                uploads = {n: stage.staging.upload(tensors[n]) for n in stage.graph.inputs}
                outputs = stage.run({name: upload.here() for name, upload in uploads.items()})
                if number is None:
                    continue
                if self._after is not None:
                    leaving = stage.leaving(outputs, tensors)
                    self._after.send(stage_pb2.EVALUATE, split, 0, number, leaving)
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
        both = stage.group.gather(mine)
        return both[:, 0], both[:, 1]

    def _rounds(self, batches: Batches) -> Iterator[tuple[int | None, dict[str, Tensor]]]:
        """The batches; in lockstep further ones without a number, until all workers are done."""
        if self._template is None:
            yield from batches
            return
        while True:
            item = next(batches, None)
            if not self._stage.group.any(item is not None):
                return
            yield item if item is not None else (None, self._template)

    def _batches(self, split: Split) -> Batches:
        if not self._before:
            size = _size(self._job)
            yield from evaluation_batches(
                self._job, split, size, self._rank, self._width, self._stop.is_set
            )
            return
        while (parcel := self._inbox.next_evaluation(split, self._before)) is not None:
            yield parcel.micro_batch, parcel.tensors


def _size(job: JobSpec) -> int:
    """Samples of a batch of evaluation: of sequences no more than training has room for."""
    if job.data.tokens:
        return min(_BATCH, max(1, job.train.batch_size))
    return _BATCH
