"""Held-out splits through the stages: forward alone, as it was trained, then scores and labels."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protos.job_pb2 import JobSpec
from workers.data.reader import Split
from workers.learning.losses import held_out
from workers.links.frames import EVALUATE, FrameId
from workers.links.pipeline import Links, Place
from workers.stage.layers import StageLayers
from workers.stage.rows import StageRows
from workers.stage.source import evaluation_batches

_BATCH = 2048
Batches = Iterator[tuple[int, Mapping[str, Tensor]]]  # number and tensors of each


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a held-out split in the last stage; elsewhere it is empty.

    Attributes:
        scores, labels: of all samples [n].
        first: scores of the first batch, at the worker that computed it.
    """

    scores: Tensor
    labels: Tensor
    first: Tensor | None


class Evaluation:
    """One worker's part of measuring held-out splits.

    Args:
        template: any batch, where the workers compute in lockstep: one that has no batch any more
            computes it for the others' sake. Else None.
    """

    def __init__(
        self,
        job: JobSpec,
        layers: StageLayers,
        rows: StageRows,
        place: Place,
        links: Links,
        template: Mapping[str, Tensor] | None,
    ) -> None:
        self._job = job
        self._layers = layers
        self._rows = rows
        self._place = place
        self._links = links
        self._template = template

    def run(self, split: Split, phase: str) -> Measured:
        """Predict a split.

        Args:
            phase: names this pass; no other of the job has the name.
        """
        layers, after = self._layers, self._links.after
        layers.graph.module.eval()
        scores: list[Tensor] = []
        labels: list[Tensor] = []
        first: Tensor | None = None
        with torch.no_grad():
            for number, tensors in self._rounds(self._batches(split, phase)):
                self._rows.bind(self._rows.pull([tensors], learning=False), 0)
                uploads = {n: layers.staging.upload(tensors[n]) for n in layers.graph.inputs}
                outputs = layers.run({name: upload.here() for name, upload in uploads.items()})
                if number is None:
                    continue
                if after is not None:
                    frame = FrameId(EVALUATE, phase, 0, number)
                    after.send(frame, layers.leaving(outputs, tensors))
                else:
                    prediction = next(iter(outputs.values())).cpu()
                    score, label = held_out(self._job.train.loss, prediction, tensors["label"])
                    scores.append(score)
                    labels.append(label)
                    first = score if number == 0 else first
        empty = [torch.empty(0)]
        if after is not None:
            after.end(phase)
            return Measured(empty[0], empty[0], None)
        mine = torch.stack([torch.cat(scores or empty), torch.cat(labels or empty)], dim=1)
        both = layers.group.gather(mine)
        return Measured(both[:, 0], both[:, 1], first)

    def _rounds(self, batches: Batches) -> Iterator[tuple[int | None, Mapping[str, Tensor]]]:
        """The batches; in lockstep further ones without a number, until all workers are done."""
        if self._template is None:
            yield from batches
            return
        while True:
            item = next(batches, None)
            if not self._layers.group.any(item is not None):
                return
            yield item if item is not None else (None, self._template)

    def _batches(self, split: Split, phase: str) -> Batches:
        place = self._place
        if not place.width_before:
            yield from evaluation_batches(
                self._job,
                split,
                _size(self._job),
                place.rank,
                place.width,
                lambda: self._links.inbox.stopped,
            )
            return
        inbox = self._links.inbox
        while (frame := inbox.next_evaluation(phase, place.width_before)) is not None:
            yield frame.id.micro_batch, frame.tensors


def first_batch(job: JobSpec, split: Split, workers: int) -> Mapping[str, Tensor] | None:
    """The first batch of a split, as the first of so many workers reads it; None: it is empty."""
    batches = evaluation_batches(job, split, _size(job), 0, workers, lambda: False)
    return next((tensors for _, tensors in batches), None)


def _size(job: JobSpec) -> int:
    """Samples of a batch of evaluation: of sequences no more than training has room for."""
    if job.data.tokens:
        return min(_BATCH, max(1, job.train.batch_size))
    return _BATCH
