"""Held-out splits through the stages: forward alone, as it was trained, then what is measured."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protos.job_pb2 import JobSpec
from workers.data.batches import evaluation_size
from workers.data.columns.arrays import labels_in
from workers.data.held_out import HeldOut
from workers.data.reader import Dataset, Split
from workers.data.tensors import first_samples, tensors_of
from workers.learning.objective import as_given, named
from workers.links.all_reduce import StageGroup
from workers.links.frames import EVALUATE, FrameId
from workers.links.pipeline import Links, Place
from workers.model.objective.metrics import JobMetrics
from workers.stage.rows.ahead import StageRows
from workers.stage.rows.source import evaluation_batches
from workers.stage.running.layers import StageLayers

Batches = Iterator[tuple[int, Mapping[str, Tensor]]]  # number and tensors of each
_LOOKED_AT = 64  # samples of training data
_log = logging.getLogger("heterps.stage")


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a held-out split in the last stage; elsewhere it is empty.

    Attributes:
        found: what metrics need of all batches, in the order of the files.
        first: what the model gave for the first batch, at the worker that computed it.
    """

    found: Mapping[str, Tensor]
    first: Mapping[str, Tensor] | None


class Evaluation:
    """One worker's part of measuring held-out splits.

    Args:
        held_out: what is.
        metrics: that are measured.
        lockstep: whether the workers compute together: one that has no batch any more computes
            another for the others' sake.
    """

    def __init__(
        self,
        held_out: HeldOut,
        layers: StageLayers,
        rows: StageRows,
        place: Place,
        links: Links,
        metrics: JobMetrics,
        *,
        lockstep: bool,
    ) -> None:
        self._held_out = held_out
        self._layers = layers
        self._rows = rows
        self._place = place
        self._links = links
        self._metrics = metrics
        self._lockstep = lockstep

    def run(self, split: Split, phase: str) -> Measured:
        """Predict a split; of training data its first samples.

        Args:
            phase: names this pass; no other of the job has the name.
        """
        layers, after = self._layers, self._links.after
        layers.graph.module.eval()
        taken: dict[int, Mapping[str, Tensor]] = {}  # by number of the batch
        first: Mapping[str, Tensor] | None = None
        with torch.no_grad():
            for number, tensors in self._rounds(self._batches(split, phase)):
                keys = self._rows.distinct([tensors], learning=False)
                self._rows.bind(self._rows.pull(keys, learning=False), 0)
                uploads = {n: layers.staging.upload(tensors[n]) for n in layers.graph.inputs}
                layers.randomness.measuring(number or 0)
                outputs = layers.run({name: upload.here() for name, upload in uploads.items()})
                if number is None:
                    continue
                if after is not None:
                    frame = FrameId(EVALUATE, phase, 0, number)
                    after.send(frame, layers.leaving(outputs, tensors))
                else:
                    given = named(layers.result(outputs))
                    result = as_given({name: output.cpu() for name, output in given.items()})
                    labels = labels_in(tensors)
                    if split != "train":
                        taken[number] = self._metrics.take(result, labels)
                    first = self._metrics.scores(result, labels) if number == 0 else first
        if after is not None:
            after.end(phase)
            return Measured({}, None)
        return Measured(_in_order(layers.group, taken), first)

    def _rounds(self, batches: Batches) -> Iterator[tuple[int | None, Mapping[str, Tensor]]]:
        """The batches; in lockstep further ones without a number, until all workers are done."""
        if not self._lockstep:
            yield from batches
            return
        group, item = self._layers.group, next(batches, None)
        # The first batch is the first worker's: it has one where any has.
        spare = group.gather_named(item[1] if item is not None and not self._place.rank else {})
        while group.any(item is not None):
            yield item if item is not None else (None, spare)
            item = next(batches, None)

    def _batches(self, split: Split, phase: str) -> Batches:
        place = self._place
        if not place.width_before:
            yield from _read(
                self._held_out, split, place.rank, place.width, lambda: self._links.inbox.stopped
            )
            return
        inbox = self._links.inbox
        while (frame := inbox.next_evaluation(phase, place.width_before)) is not None:
            yield frame.id.micro_batch, frame.tensors


def _in_order(group: StageGroup, taken: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What all workers of a stage have taken, by name, in the order of the batches."""
    named = {f"{number} {name}": t for number, some in taken.items() for name, t in some.items()}
    whole = group.gather_named(named)
    found: dict[str, list[Tensor]] = {}
    for key in sorted(whole, key=lambda key: int(key.partition(" ")[0])):
        found.setdefault(key.partition(" ")[2], []).append(whole[key])
    return {name: torch.cat(tensors) for name, tensors in found.items()}


def splits_to_predict(job: JobSpec) -> Sequence[Split]:
    """What a trained model is to predict: what is held out or, without any, what it learned from.

    Of the latter nothing is measured: a saved model is held against it.
    """
    held_out: list[Split] = []
    if job.data.valid:
        held_out.append("valid")
    if job.data.test:
        held_out.append("test")
    return held_out or ["train"]


def first_batch(held_out: HeldOut, split: Split, workers: int) -> Mapping[str, Tensor] | None:
    """The first batch of a split, as the first of so many workers reads it; None: it is empty."""
    batches = _read(held_out, split, 0, workers, lambda: False)
    return next((tensors for _, tensors in batches), None)


def _read(
    held_out: HeldOut, split: Split, rank: int, workers: int, stopped: Callable[[], bool]
) -> Batches:
    """A worker's share of a split; of training data one batch, which is the first worker's."""
    job = held_out.job
    if split != "train":
        return evaluation_batches(held_out, split, evaluation_size(job), rank, workers, stopped)
    if rank:
        return iter(())
    size = min(_LOOKED_AT, job.train.batch_size)
    try:
        found = first_samples(Dataset.of(job, split), size)
    except Exception as error:  # files may be gone that were read long ago: no reason to fail
        _log.warning("the saved model is not held against training: %s", error)
        return iter(())
    return iter([(0, tensors_of(found))])
