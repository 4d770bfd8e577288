"""How steps are cut into micro-batches, and who computes which.

A global batch of n samples is cut into min(M, n) micro-batches of n/M samples each, more or less
one. A micro-batch is numbered by a counter that runs on over steps; worker `number mod k` of a
stage of k workers computes it. So a stage's workers are busy alike, whether k divides M or not, and
what is computed, and in which order sums are made, follows from the job and M alone.

Where workers share out experts they compute together: the counter begins anew in each step, and
every worker gets as many micro-batches.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatchSpec:
    """One micro-batch of a step.

    Args:
        number: the running counter, by which it is dealt.
        index: its number in the step.
        first: of its rows in the global batch.
        last: the row after them.
        weight: its share of the step's loss; 0: it is computed for the other workers' sake alone.
    """

    number: int
    index: int
    first: int
    last: int
    weight: float


class Schedule:
    """Steps and micro-batches of a training; the same on every worker.

    Args:
        steps: of the training.
        samples: samples of a step's global batch, at least 1.
        micro_batches: M, of a step.
        lockstep: widths of stages whose workers compute together; M is rounded up to fit them.

    Attributes:
        micro_batches: M, as far as a step has samples enough.
    """

    def __init__(
        self,
        steps: int,
        samples: Callable[[int], int],
        micro_batches: int,
        *,
        lockstep: Sequence[int] = (),
    ) -> None:
        if micro_batches < 1:
            raise ValueError(f"micro_batches: got {micro_batches}, expected at least 1")
        self.steps = steps
        self.samples = samples
        self.lockstep = bool(lockstep)
        together = math.lcm(*lockstep) if lockstep else 1
        self.micro_batches = -(-micro_batches // together) * together
        self._before = [0]  # micro-batches before each step
        self._lock = threading.Lock()

    def count(self, step: int) -> int:
        """Micro-batches of a step."""
        if self.lockstep:
            return self.micro_batches
        return min(self.micro_batches, self.samples(step))

    def rows(self, step: int, index: int) -> tuple[int, int]:
        """The first row of a step's micro-batch in the global batch, and that after its last."""
        samples, count = self.samples(step), self.count(step)
        return samples * index // count, samples * (index + 1) // count

    def before(self, step: int) -> int:
        """The counter at the beginning of a step."""
        if self.lockstep:
            return 0
        with self._lock:
            while len(self._before) <= step:
                last = len(self._before) - 1
                self._before.append(self._before[-1] + self.count(last))
            return self._before[step]

    def own(self, step: int, rank: int, width: int) -> tuple[MicroBatchSpec, ...]:
        """What worker `rank` of a stage of `width` workers computes of a step; may be nothing."""
        before, count, samples = self.before(step), self.count(step), self.samples(step)
        own = []
        for index in range((rank - before) % width, count, width):
            first, last = self.rows(step, index)
            weight = (last - first) / samples
            if first == last:  # in lockstep alone: any sample will do
                first = min(first, samples - 1)
                last = first + 1
            own.append(MicroBatchSpec(before + index, index, first, last, weight))
        return tuple(own)

    def computes(self, step: int, rank: int, width: int) -> bool:
        """Whether worker `rank` of a stage of `width` workers has a part of a step."""
        return (rank - self.before(step)) % width < self.count(step)
