"""Optimizer steps: how many micro-batches make one, and how many updates it may lack.

A worker of stage s keeps at most 2 * ceil((units of s and of the stages after it) / (units of s))
micro-batches between their forward and their backward, and never more than its share of the
micro-batches of S + 1 steps, S being the staleness. Of a loss of whole batches it may keep all of
these: the last stage returns none of a step before it has had all. So it may in any stage but the
last where workers share out experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from protos.in_flight import most_in_flight
from scheduler.problem.workload import Workload

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # micro-batches a step
_EVEN = 1.05  # of a micro-batch's mean size: the largest


@dataclass(frozen=True, slots=True)
class Steps:
    """What is said of steps; nothing where `staleness` is None.

    A step has `batch` samples in `micro_batches` parts, which the workload has `fixed` or the plan
    chooses, and lacks `staleness` updates; before a plan is, the most that it may. Where they are
    `simulated`, what counts is a step's simulated time, not the slowest stage alone. `depth` is
    the number of micro-batches in flight by whose activations memory is judged before the units of
    a plan are known. `whole_batch` says that the loss is one of whole batches, `lockstep` that
    workers share out experts.
    """

    staleness: int | None
    micro_batches: int
    batch: int
    fixed: bool = True
    simulated: bool = False
    depth: int = 1
    whole_batch: bool = False
    lockstep: bool = False

    @classmethod
    def of(cls, workload: Workload) -> "Steps":
        """Those of a workload; micro-batches that it leaves open have the reference size."""
        batch = workload.batch or workload.reference_batch
        parts = workload.micro_batches or math.ceil(batch / workload.reference_batch)
        staleness = workload.staleness
        if workload.lockstep and staleness:
            staleness = 0  # whatever is allowed: each step ends before the next begins
        return cls(
            staleness,
            min(parts, batch),
            batch,
            fixed=workload.micro_batches > 0,
            simulated=staleness == 0,
            whole_batch=workload.whole_batch,
            lockstep=workload.lockstep,
        )

    @property
    def flushed(self) -> bool:
        """Whether what counts is the simulated time of steps that do not overlap."""
        return self.simulated and not self.staleness

    @property
    def parts(self) -> list[int]:
        """The numbers of micro-batches that a plan may choose from, the fewest first."""
        return [self.micro_batches] if self.fixed else self.even(self.micro_batches, *LADDER)

    def even(self, *counts: int) -> list[int]:
        """Numbers of micro-batches, one and those near some, with which all are nearly of a size.

        A price takes them to be; a worker that gets the larger ones would be late.
        """
        found = {1, *(min(count, self.batch) for count in counts)}
        found |= {math.ceil(self.batch / math.ceil(self.batch / count)) for count in found}
        most = _EVEN * self.batch
        return sorted(count for count in found if math.ceil(self.batch / count) * count <= most)

    @property
    def least(self) -> "Steps":
        """Those with which a plan takes the least memory, before it has chosen its own."""
        if self.staleness is None or self.simulated:
            return self
        return replace(self, staleness=min(1, self.staleness), micro_batches=self.parts[-1])

    @property
    def versions(self) -> int:
        """How many versions of the weights are kept, each with the gradient of its step."""
        return (self.staleness or 0) + 1

    @property
    def samples_in_flight(self) -> float:
        """Samples whose activations a stage keeps before its units are known."""
        return self.batch / self.micro_batches * self.depth

    @property
    def deepest(self) -> int:
        """The most micro-batches that may ever be in flight."""
        return self.least.micro_batches * ((self.staleness or 0) + 1)


def in_flight(units: Sequence[int], stage: int, steps: Steps) -> int:
    """Return how many micro-batches a worker of a stage keeps at most, by the stages' units."""
    return most_in_flight(
        units,
        stage,
        steps.micro_batches,
        steps.staleness or 0,
        whole_batch=steps.whole_batch,
        lockstep=steps.lockstep,
    )
