"""An assignment of layers to types with its units, priced."""

from dataclasses import dataclass, field
from typing import ClassVar

from scheduler.problem.mapper import OPTIONAL


@dataclass(frozen=True, slots=True)
class PlanStage:
    """Layers `first` to `last` (inclusive) on `units` units of `type`; times in s a sample."""

    first: int
    last: int
    type: str
    units: int
    compute_s: float
    transfer_s: float
    memory_bytes: float
    bottleneck: bool
    threads: int = field(default=0, metadata=OPTIONAL)  # of each of its workers; 0: one

    DERIVED: ClassVar = ("slack", "error")  # a decision tells them of each of its stages

    @property
    def busy_s(self) -> float:
        """ET: seconds a sample."""
        return max(self.compute_s, self.transfer_s)


@dataclass(frozen=True, slots=True)
class Plan:
    """An assignment with its units, priced.

    A plan that is not feasible says why in `reason`; when only the floor is missed it is the
    fastest plan of its assignment, and when no number of units helps it has no stages. A step
    computes `micro_batches` micro-batches (0 where the workload says nothing of steps) and lacks
    `staleness` updates. `throughput` is that of the time in which all units run; for each hour of
    it `lost_share` hours are lost to interruptions, and are in `cost`.
    """

    feasible: bool
    reason: str
    assignment: tuple[str, ...]
    stages: tuple[PlanStage, ...]
    ps_units: int
    throughput: float
    price_per_hour: float
    cost: float
    micro_batches: int = field(default=0, metadata=OPTIONAL)
    staleness: int | None = field(default=None, metadata=OPTIONAL)
    lost_share: float = field(default=0.0, metadata=OPTIONAL)

    @property
    def sustained(self) -> float:
        """Samples/s over all the time, that of interruptions included."""
        return self.throughput / (1 + self.lost_share)

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key, best first: feasible before not, then cheap, then fast."""
        return (not self.feasible, self.cost if self.feasible else 0.0, -self.throughput)
