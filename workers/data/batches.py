"""The global batches of a training: the same for every number of workers, stages and shards."""

from collections.abc import Iterator
from itertools import count

from protos.job_pb2 import JobSpec
from protos.losses import of_whole_batches
from workers.data.columns.arrays import Batch
from workers.data.errors import DataError
from workers.data.order import Epochs, KeptEpochs
from workers.data.reader import Dataset
from workers.data.sharing import SharedWindows
from workers.data.windows import OwnWindows, Stream, StreamedEpochs

_EVALUATED = 2048  # samples of a batch


class GlobalBatches:
    """Batch t of a training has samples t * batch_size and on of its epoch's order.

    The order follows from seed and epoch alone: a permutation where the split stays in memory,
    else units in random order and rows shuffled in windows. Every sample of an epoch comes once.
    A split of text that is too large to be counted has no ends of epochs: its batches are all full,
    and the files are read again until `max_steps`.

    Attributes:
        steps: global batches in all.
        steps_per_epoch: of them; 0 where epochs have no ends.

    Args:
        drop_last: leave out an epoch's last batch where it is not full.
        max_steps: end after so many; 0 for all of the epochs.

    Raises:
        DataError: there is nothing to train on; or its rows have to be counted, and cannot be.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int = 0,
        epochs: int = 1,
        drop_last: bool = False,
        max_steps: int = 0,
    ) -> None:
        self._dataset = dataset
        self._size = batch_size
        self._rows = dataset.rows if dataset.is_countable or not max_steps else None
        if self._rows is None:
            self.steps_per_epoch, self.steps = 0, max_steps
        else:
            used = self._rows // batch_size * batch_size if drop_last else self._rows
            if not used:
                raise DataError(
                    dataset.where, "train.batch_size", batch_size, _fewer(self._rows, drop_last)
                )
            self._rows = used
            self.steps_per_epoch = -(-used // batch_size)
            self.steps = self.steps_per_epoch * epochs
            if max_steps:
                self.steps = min(self.steps, max_steps)
        self._epochs = _epochs(dataset, seed, epochs, endless=self._rows is None)

    @staticmethod
    def of(job: JobSpec, dataset: Dataset) -> "GlobalBatches":
        """The batches of a job's training split."""
        train = job.train
        return GlobalBatches(
            dataset,
            train.batch_size,
            seed=train.seed,
            epochs=max(1, train.epochs),
            drop_last=train.drop_last,
            max_steps=train.max_steps,
        )

    @property
    def total(self) -> int:
        """Samples of all steps."""
        if self._rows is None:
            return self.steps * self._size
        epochs, rest = divmod(self.steps, self.steps_per_epoch)
        return epochs * self._rows + min(rest * self._size, self._rows)

    def samples(self, step: int) -> int:
        """Samples of a global batch."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        if self._rows is None:
            return self._size
        return min(self._size, self._rows - step % self.steps_per_epoch * self._size)

    def read(self, step: int, first: int = 0, last: int | None = None) -> Batch:
        """Rows `first` to `last` of a global batch, in memory of their own.

        It is cheap in ascending order.

        Raises:
            DataError: a value of the files does not match the job; or they have changed.
        """
        last = self.samples(step) if last is None else last
        return self._read(step, first, last)

    def labels(self, step: int) -> Batch:
        """What losses read of a whole global batch; raises as `read` does."""
        return self._read(step, 0, self.samples(step), labels=True)

    def _read(self, step: int, first: int, last: int, *, labels: bool = False) -> Batch:
        samples = self.samples(step)
        if not 0 <= first <= last <= samples:
            raise IndexError(f"rows {first} to {last} of the {samples} of step {step}")
        epoch, place = divmod(step, self.steps_per_epoch) if self.steps_per_epoch else (0, step)
        start = place * self._size
        found = self._epochs.read(epoch, start + first, start + last, labels=labels)
        if len(found) != last - first:
            got, expected = f"{len(found)} rows of step {step}", f"{last - first}, as before"
            raise DataError(self._dataset.where, "contents", got, expected)
        return found

    def position(self, step: int) -> str:
        """What `go_on` takes elsewhere to begin to read near a step; "": nothing is of use."""
        if step >= self.steps or self._dataset.is_kept:
            return ""
        place = step % self.steps_per_epoch if self.steps_per_epoch else step
        start = place * self._size // self._dataset.window_rows * self._dataset.window_rows
        rows = 0 if self.steps_per_epoch else self._dataset.pass_rows
        return self._dataset.position(start % rows if rows else start)

    def go_on(self, position: str) -> None:
        """Know where reading can begin, as of a process that has read before."""
        self._dataset.go_on(position)

    def close(self) -> None:
        """Give back what was held for reading."""
        self._epochs.close()


def evaluation_size(job: JobSpec) -> int:
    """Samples of a batch of evaluation: of sequences no more than training has room for.

    Nor more than it compares, where the loss may be one of whole batches.
    """
    long = job.data.tokens or any(one.length or one.shape for one in job.data.columns.values())
    long = long or bool(job.data.label_lists)
    if long or job.model.loss or of_whole_batches(job):
        return min(_EVALUATED, max(1, job.train.batch_size))
    return _EVALUATED


def in_order(dataset: Dataset, size: int, rank: int, workers: int) -> Iterator[tuple[int, Batch]]:
    """A worker's share of a split in batches of `size` in the order of the files.

    Yields:
        Number among all workers' batches, and the batch; the last one may be short.
    """
    epochs = _epochs(dataset, None, 1, endless=False)
    try:
        for number in count(rank, workers):
            batch = epochs.read(0, number * size, (number + 1) * size)
            if not len(batch):
                return
            yield number, batch
    finally:
        epochs.close()


def _epochs(dataset: Dataset, seed: int | None, epochs: int, *, endless: bool) -> Epochs:
    if dataset.is_kept:
        return KeptEpochs(dataset, seed)
    stream, folder = Stream(dataset, seed, epochs, endless), dataset.folder
    if folder is None:
        return StreamedEpochs(stream, OwnWindows(stream))
    return StreamedEpochs(stream, SharedWindows(stream, folder / stream.name))


def _fewer(rows: int, drop_last: bool) -> str:
    if drop_last:
        return f"at most the {rows} rows of the split, or drop_last: false"
    return "a split with rows"
