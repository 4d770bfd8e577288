"""What reading a job's training data takes."""

import statistics
import time
from collections.abc import Iterator
from itertools import islice

from torch import Tensor

from workers.data import GlobalBatches
from workers.data.tensors import tensors_of

_TIMED = 20


def time_reading(batches: GlobalBatches, size: int) -> float:
    """Seconds of reading `size` samples, once the files are parsed."""
    for _ in range(2):
        times: list[float] = []
        begin = time.perf_counter()
        for _ in islice(micro_batches(batches, size), _TIMED):
            times.append(time.perf_counter() - begin)
            begin = time.perf_counter()
    return max(statistics.median(times), 1e-9)


def micro_batches(batches: GlobalBatches, size: int) -> Iterator[dict[str, Tensor]]:
    """The first `size` samples of each global batch that has as many, without end."""
    if size > batches.samples(0):
        raise ValueError(f"size: got {size}, expected at most {batches.samples(0)}")
    while True:
        for step in range(batches.steps):
            if batches.samples(step) >= size:
                yield tensors_of(batches.read(step, 0, size))
