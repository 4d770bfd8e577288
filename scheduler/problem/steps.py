"""Optimizer steps: how many micro-batches make one, and how many updates it may lack.

A worker of stage s keeps at most 2 * ceil((units of s and of the stages after it) / (units of s))
micro-batches between their forward and their backward, and never more than its share of the
micro-batches of S + 1 steps, S being the staleness.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.problem.workload import Workload


@dataclass(frozen=True, slots=True)
class Steps:
    """What is said of steps; nothing where `staleness` is None.

    A step has `batch` samples in `micro_batches` parts, and lacks `staleness` updates.
    """

    staleness: int | None
    micro_batches: int
    batch: int

    @classmethod
    def of(cls, workload: Workload) -> "Steps":
        """Those of a workload; micro-batches that it leaves open have the reference size."""
        batch = workload.batch or workload.reference_batch
        parts = workload.micro_batches or math.ceil(batch / workload.reference_batch)
        return cls(workload.staleness, min(parts, batch), batch)

    @property
    def copies(self) -> int:
        """How many times the size of the weights is kept: versions and the gradient."""
        return 2 if not self.staleness else self.staleness + 2

    @property
    def samples_in_flight(self) -> float:
        """Samples whose activations a stage keeps in any case: a micro-batch."""
        return self.batch / self.micro_batches

    def chosen(self, micro_batches: int, staleness: int | None) -> "Steps":
        """The same with these."""
        return replace(self, micro_batches=micro_batches, staleness=staleness)


def in_flight(units: Sequence[int], stage: int, micro_batches: int, staleness: int) -> int:
    """Return how many micro-batches a worker of a stage keeps at most, by the stages' units."""
    bound = 2 * math.ceil(sum(units[stage:]) / units[stage])
    return min(bound, math.ceil(micro_batches / units[stage]) * (staleness + 1))
