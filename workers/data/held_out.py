"""The held-out splits of a job, each opened once: all that is measured is of the same rows."""

from protos.job_pb2 import JobSpec
from workers.data.check import splits
from workers.data.reader import Dataset, Split


class HeldOut:
    """The held-out splits of a job; one that has been opened stays as it was then, or is refused.

    Attributes:
        job: whose they are.
    """

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self._opened: dict[Split, Dataset] = {}

    def of(self, split: Split) -> Dataset:
        """A split; raises as `Dataset` does."""
        if split not in self._opened:
            self._opened[split] = Dataset.of(self.job, split)
        return self._opened[split]

    def contents(self) -> list[str]:
        """Those of all splits, as of `Dataset`."""
        return [self.of(split).contents for split in splits(self.job) if split != "train"]
