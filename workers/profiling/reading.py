"""What reading a job's training data takes."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from protos.job_pb2 import JobSpec
from workers.data import Batch, Dataset
from workers.profiling.scaling import Scaling, combined

_BATCHES = 20


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds of one batch, and its share of decoding the split, which no worker is spared."""

    batch_s: float
    decode_s: float

    @property
    def scaling(self) -> Scaling:
        """Each of several workers reads its own share."""
        return combined([Scaling(self.batch_s, 1.0), Scaling(self.decode_s, 0.0)])


def time_reading(job: JobSpec, size: int, samples: float) -> Reading:
    """Read some batches of `size` twice: what the first time took longer was decoding.

    Args:
        samples: of the whole training, over which decoding is spread.
    """
    fresh = Dataset.of(job, "train")

    def read() -> list[float]:
        times, begin = [], time.perf_counter()
        for _ in islice(cycle_batches(fresh, size), _BATCHES):
            times.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        return times

    first, again = read(), read()
    decode_s = max(0.0, sum(first) - sum(again))
    return Reading(max(statistics.median(again), 1e-9), decode_s * size / max(size, samples))


def cycle_batches(dataset: Dataset, size: int) -> Iterator[Batch]:
    """Batches without end."""
    for epoch in count():
        yield from dataset.batches(size, seed=0, epoch=epoch, shuffle=True, drop_last=True)
