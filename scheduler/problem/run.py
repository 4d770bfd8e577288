"""A stage before it has units: serial and parallel seconds a sample."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.problem.steps import Steps


@dataclass(frozen=True, slots=True)
class Run:
    """A stage before it has units: serial and parallel seconds a sample."""

    first: int
    last: int
    type: int
    compute_serial: float
    compute_parallel: float
    transfer_serial: float
    transfer_parallel: float
    memory_bytes: float
    forward_serial: float  # the forward's part of compute
    forward_parallel: float
    crossing_serial: float  # that part of the transfer that crosses to the next stage
    crossing_parallel: float
    delay: float = 0.0  # at the end of a step, whatever the units
    far: float = 0.0  # of the transfer besides, of units that are on several hosts
    near: float = np.inf  # units that are on one

    def compute_s(self, units: float) -> float:
        """CT at `units`."""
        return self.compute_serial + self.compute_parallel / units

    def transfer_s(self, units: float) -> float:
        """DT at `units`."""
        return self.transfer_serial + self.far_s(units) + self.transfer_parallel / units

    def far_s(self, units: float) -> float:
        """What of DT sums among several hosts take besides."""
        return self.far if units > self.near else 0.0

    def stepped(
        self, units: int, steps: Steps, handled: float
    ) -> tuple[int, float, float, float, float]:
        """The stage as `_planner.simulate` takes it: seconds a micro-batch of a worker, and a step.

        Units beyond the micro-batches of a step have no part in its sums.

        Args:
            handled: of a micro-batch, what its worker is busy with besides.
        """
        size = steps.batch / steps.micro_batches
        busy = (self.compute_serial * units + self.compute_parallel) * size
        forward = (self.forward_serial * units + self.forward_parallel) * size
        cross = (self.crossing_serial * units + self.crossing_parallel) * size
        serial = self.transfer_serial + self.far_s(units) - self.crossing_serial
        parallel = self.transfer_parallel - self.crossing_parallel
        sync = serial + parallel / min(units, steps.micro_batches)
        backward = max(0.0, busy - forward) + handled / 2
        return units, forward + handled / 2, backward, cross, max(0.0, sync) * steps.batch

    def busy_s(self, limit: int) -> NDArray[np.float64]:
        """ET at 1 .. `limit` units."""
        units = np.arange(1.0, limit + 1.0)
        far = np.where(units > self.near, self.far, 0.0)
        return np.maximum(
            self.compute_serial + self.compute_parallel / units,
            self.transfer_serial + far + self.transfer_parallel / units,
        )
