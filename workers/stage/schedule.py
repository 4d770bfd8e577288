"""How an epoch is cut into steps and micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protos.job_pb2 import JobSpec
from workers.data import DataError, Dataset


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps and micro-batches of a training; the same on every worker."""

    micro_batches: int  # a step, over all workers
    size: int  # samples a micro-batch
    workers: int  # of the first stage
    steps_per_epoch: int
    steps: int

    @property
    def samples_per_step(self) -> int:
        """Samples a step, over all workers."""
        return self.micro_batches * self.size

    @property
    def samples_per_worker(self) -> int:
        """Samples a step that one worker of the first stage reads."""
        return self.size * (self.micro_batches // self.workers)

    @staticmethod
    def of(job: JobSpec, dataset: Dataset, widths: Sequence[int]) -> "Schedule":
        """The schedule of a job on stages of these widths.

        Raises:
            DataError: the training split does not fill one step.
        """
        first = widths[0]
        wanted = job.train.micro_batches or (first if len(widths) == 1 else 4)
        wanted = max(wanted, *widths)
        # Workers that share experts compute together, so each of them has as many micro-batches.
        unit = math.lcm(*widths) if job.train.split_experts else first
        micro_batches = -(-wanted // unit) * unit
        size = max(1, job.train.batch_size // micro_batches)
        own = size * (micro_batches // first)
        per_epoch = dataset.batches_per_epoch(own, num_shards=first, drop_last=True)
        if per_epoch == 0:
            raise DataError(
                f"{job.data.path}/{job.data.train}",
                "train.batch_size",
                job.train.batch_size,
                f"at most the {dataset.rows} rows of the split",
            )
        steps = per_epoch * job.train.epochs
        if job.train.max_steps:
            steps = min(steps, job.train.max_steps)
        return Schedule(micro_batches, size, first, per_epoch, steps)
