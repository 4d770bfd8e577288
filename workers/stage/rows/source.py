"""The first stage's micro-batches: read, hashed and their rows pulled ahead on a thread."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workers.data import Batch
from workers.data.batches import in_order
from workers.data.columns.arrays import labels_in
from workers.data.held_out import HeldOut
from workers.data.reader import Split
from workers.data.tensors import tensors_of
from workers.device.copies import Upload
from workers.learning.objective import Objective
from workers.links.inbox import Inbox, Stopped
from workers.stage.rows.ahead import PulledRows, StageRows
from workers.stage.rows.micro_batch import MicroBatch
from workers.stage.steps.schedule import MicroBatchSpec

WHOLE = "whole."  # what the loss counts of the whole batch: float64, as `Objective.counts`
_AHEAD = 2  # steps
_RUN = 6  # small steps that are read on end: the first takes most of the time
_SMALL = 1 << 18  # bytes


class Batches(Protocol):
    """The global batches of a training."""

    def read(self, step: int, first: int, last: int) -> Batch:
        """Rows `first` to `last`, exclusive, of a step's global batch."""
        ...

    def labels(self, step: int) -> Batch:
        """What losses read of a step's whole global batch."""
        ...


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one worker of the first stage computes in one step.

    Args:
        rows: of all its micro-batches; None where the stage has no embeddings.
    """

    micro_batches: list[MicroBatch]
    rows: PulledRows | None

    @property
    def bytes(self) -> int:
        """Of the inputs."""
        return sum(t.nbytes for batch in self.micro_batches for t in batch.tensors.values())


class TrainingSource:
    """This worker's input of every step, some steps read before they are needed.

    Args:
        own: this worker's micro-batches of each step of the training.
        steps: those to take.
        ahead: steps to read ahead, at least 2.
        upload: begins to bring a micro-batch to the device.
        inbox: through which who waits for input is woken, and the thread ended.
        loss: which may count something else than samples, of the whole batch.
    """

    def __init__(
        self,
        batches: Batches,
        own: Callable[[int], tuple[MicroBatchSpec, ...]],
        steps: range,
        ahead: int,
        rows: StageRows,
        upload: Callable[[Mapping[str, Tensor]], dict[str, Upload]],
        inbox: Inbox,
        loss: Objective,
    ) -> None:
        self._loss = loss
        self._batches = batches
        self._own = own
        self._steps = steps
        self._ahead = max(_AHEAD, ahead)
        self._rows = rows
        self._upload = upload
        self._inbox = inbox
        self._read: deque[StepInput] = deque()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="source", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the next step's input is here, or will never be."""
        return bool(self._read) or self._failed is not None

    def take(self) -> StepInput:
        """The next step's input; steps without any for this worker are left out.

        Raises:
            Whatever went wrong while reading it.
        """
        self._inbox.wait(lambda: self.ready)
        if not self._read:
            assert self._failed is not None
            raise self._failed
        taken = self._read.popleft()
        if len(self._read) < self._ahead:  # the reading thread may wait for it
            self._inbox.wake()
        return taken

    def _fill(self) -> None:
        most = self._ahead
        try:
            for step in self._steps:
                own = self._own(step)
                if not own:
                    continue
                if len(self._read) >= most:
                    self._inbox.wait(lambda: len(self._read) < self._ahead)
                read = self._input(step, own)
                most = self._ahead + (_RUN if read.rows is None and read.bytes < _SMALL else 0)
                self._read.append(read)
                if len(self._read) == 1:  # it may be waited for
                    self._inbox.wake()
                if read.rows is not None:
                    self._rows.order.pulled(step)
        except Stopped:
            pass
        except BaseException as error:
            self._failed = error
            self._inbox.wake()

    def _input(self, step: int, own: tuple[MicroBatchSpec, ...]) -> StepInput:
        micro = [tensors_of(self._batches.read(step, one.first, one.last)) for one in own]
        if self._loss.counted and not self._loss.whole:
            whole = self._loss.counts(labels_in(tensors_of(self._batches.labels(step))))
            counts = torch.tensor(whole, dtype=torch.float64)
            micro = [{**tensors, WHOLE: counts} for tensors in micro]
        uploads = [self._upload(tensors) for tensors in micro]
        pulled = None
        if self._rows.layers:
            keys = self._rows.distinct(micro, learning=True)
            self._rows.expect(keys, step)
            pulled = self._rows.pull_in_turn(keys, step)
        return StepInput(
            [
                MicroBatch(tensors, upload, pulled, position)
                for position, (tensors, upload) in enumerate(zip(micro, uploads, strict=True))
            ],
            pulled,
        )


def evaluation_batches(
    held_out: HeldOut,
    which: Split,
    size: int,
    rank: int,
    workers: int,
    stopped: Callable[[], bool],
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """This worker's share of a held-out split, every row once: (global index, tensors)."""
    for number, batch in in_order(held_out.of(which), size, rank, workers):
        if stopped():
            raise Stopped("stopped")
        yield number, tensors_of(batch)
