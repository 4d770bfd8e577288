"""The first stage's micro-batches: read, hashed and their rows pulled ahead on a thread."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chassis.tracing import span
from protos.job_pb2 import JobSpec
from workers.data import Batch, Dataset
from workers.data.batches import in_order
from workers.data.reader import Split
from workers.device.copies import Upload
from workers.links.inbox import Stopped
from workers.stage.micro_batch import MicroBatch
from workers.stage.rows import PulledRows, StageRows
from workers.stage.schedule import Schedule

_AHEAD = 2


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one worker of the first stage computes in one step.

    Args:
        rows: of all its micro-batches; None where the stage has no embeddings.
    """

    step: int
    micro_batches: list[MicroBatch]
    rows: PulledRows | None


class TrainingSource:
    """Yields this worker's input of every step, `_AHEAD` steps read before they are needed.

    Args:
        upload: begins to bring a micro-batch to the device.
    """

    def __init__(
        self,
        job: JobSpec,
        dataset: Dataset,
        schedule: Schedule,
        rank: int,
        rows: StageRows,
        stop: threading.Event,
        upload: Callable[[Mapping[str, Tensor]], dict[str, Upload]],
    ) -> None:
        self._job = job
        self._dataset = dataset
        self._schedule = schedule
        self._rank = rank
        self._rows = rows
        self._stop = stop
        self._upload = upload
        self._queue: queue.Queue[StepInput | BaseException | None] = queue.Queue(
            max(_AHEAD, job.train.staleness)
        )
        self._thread = threading.Thread(target=self._fill, name="source", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[StepInput]:
        while True:
            item = self._get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _fill(self) -> None:
        try:
            for step, batch in enumerate(self._batches()):
                micro = split(batch, self._schedule.size)
                self._rows.bound.before_pull(step)
                with span("pull ahead", step=step):
                    pulled = self._rows.pull(micro, learning=True)
                self._rows.bound.pulled(step)
                micro_batches = [
                    MicroBatch(tensors, self._upload(tensors), pulled, position)
                    for position, tensors in enumerate(micro)
                ]
                self._put(StepInput(step, micro_batches, pulled))
            self._rows.bound.no_more_pulls()
            self._put(None)
        except Stopped:
            pass
        except BaseException as error:
            self._rows.bound.no_more_pulls()
            self._put(error)

    def _batches(self) -> Iterator[Batch]:
        schedule = self._schedule
        done = 0
        for epoch in range(self._job.train.epochs):
            for batch in self._dataset.batches(
                schedule.samples_per_worker,
                shard=self._rank,
                num_shards=schedule.workers,
                seed=self._job.train.seed,
                epoch=epoch,
                shuffle=True,
                drop_last=True,
            ):
                if done == schedule.steps:
                    return
                done += 1
                yield batch

    def _put(self, item: StepInput | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def _get(self) -> StepInput | BaseException | None:
        while not self._stop.is_set():
            try:
                return self._queue.get(timeout=0.2)
            except queue.Empty:
                continue
        raise Stopped("stopped")


def evaluation_batches(
    job: JobSpec, which: Split, size: int, rank: int, workers: int, stopped: Callable[[], bool]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """This worker's share of a held-out split, every row once: (global index, tensors)."""
    for number, batch in in_order(Dataset.of(job, which), size, rank, workers):
        if stopped():
            raise Stopped("stopped")
        yield number, tensors_of(batch)


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """A batch by the names that models use, with its label."""
    return {
        "sparse": torch.from_numpy(batch.sparse),
        "dense": torch.from_numpy(batch.dense),
        "label": _wide(batch.label),
        "tokens": _wide(batch.tokens),
    }


def _wide(array: npt.NDArray[Any]) -> Tensor:
    """Token ids as models and losses take them; they are kept at half the size."""
    return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)


def split(batch: Batch, size: int) -> list[dict[str, Tensor]]:
    """A worker's batch of a step as micro-batches of `size` samples."""
    tensors = tensors_of(batch)
    parts = {name: tensor.split(size) for name, tensor in tensors.items()}
    return [{name: pieces[i] for name, pieces in parts.items()} for i in range(len(parts["label"]))]
