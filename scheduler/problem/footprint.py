"""Memory: what a unit of a stage keeps of weights, optimizer, activations in flight and data.

A layer says either how much memory it takes in all, or what that is made of; of the latter the
activations are kept of as many micro-batches as are in flight.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler.problem.run import Run
from scheduler.problem.steps import Steps, in_flight
from scheduler.problem.workload import Layer, Resources, Workload

Floats = NDArray[np.float64]

_TOLERANCE = 1e-9  # a capacity exceeded by less is kept


class Footprint:
    """The memory of a workload's layers and stages on a cluster's types, in bytes a unit."""

    def __init__(self, workload: Workload, resources: Resources, steps: Steps) -> None:
        self._layers, self._types, self._steps = workload.layers, resources.types, steps
        shares = [k.units_per_host or k.limit if k.is_cpu else np.inf for k in resources.types]
        # On the host: beside what a CPU's unit has there, and not on a GPU.
        self._copies = [int(workload.copied and kind.is_cpu) for kind in resources.types]
        self._data: Floats = workload.data_bytes / np.array(shares, dtype=float)

    @cached_property
    def itemized(self) -> bool:
        """Whether some layer says what its memory is made of, instead of how much it is in all."""
        return any(_itemized(layer) for layer in self._layers)

    def weighed(self, memory: Floats) -> tuple[Floats, Floats]:
        """What layers take before a plan has units and staleness, from what they say, [L, T].

        Also what of it is for each micro-batch in flight.
        """
        held = np.zeros(memory.shape)
        for row, layer in enumerate(self._layers):
            if _itemized(layer):
                held[row] = layer.activation_bytes * self._steps.batch / self._steps.micro_batches
        least = self._steps.least
        return self._with(memory, least, least.samples_in_flight), held

    def most(self, memory: Floats) -> Floats:
        """What they may take: with all versions, and all in flight that ever may be, [L, T]."""
        steps = self._steps
        return self._with(memory, steps, steps.batch * steps.versions)

    def _with(self, memory: Floats, steps: Steps, samples: float) -> Floats:
        """What layers take with the activations of so many samples, and the data, [L, T]."""
        memory = memory.copy()
        for row, layer in enumerate(self._layers):
            if _itemized(layer):
                memory[row] = [_kept_bytes(layer, steps, samples, n) for n in self._copies]
        memory[0] += self._data
        return memory

    def stage_bytes(self, runs: Sequence[Run], units: Sequence[int], steps: Steps) -> list[float]:
        """Memory a unit of each stage, with the micro-batches that it has in flight."""
        found = []
        for number, run in enumerate(runs):
            held = in_flight(units, number, steps) * steps.batch / steps.micro_batches
            total = self._data[run.type] if run.first == 0 else 0.0
            for layer in self._layers[run.first : run.last + 1]:
                if _itemized(layer):
                    total += _kept_bytes(layer, steps, held, self._copies[run.type])
                else:
                    total += layer.cost[self._types[run.type].name].memory_bytes
            found.append(float(total))
        return found

    def why_overfull(self, runs: Sequence[Run], units: Sequence[int], steps: Steps) -> str:
        """Say which stage does not hold what it has in flight, or return nothing."""
        for run, needed in zip(runs, self.stage_bytes(runs, units, steps), strict=True):
            kind = self._types[run.type]
            if needed > kind.memory_bytes * (1 + _TOLERANCE):
                first, last = (self._layers[row].name for row in (run.first, run.last))
                return (
                    f"layers {first!r} to {last!r} need {needed:.3g} bytes with their "
                    f"micro-batches in flight, a unit of {kind.name} has {kind.memory_bytes:.3g}"
                )
        return ""


def fits_disks(workload: Workload, resources: Resources) -> NDArray[np.bool_]:
    """Whether a unit of a type may have a layer, for its disk, [L, T].

    One that has layers with experts on disk may have all of them, so that stages can be cut
    anywhere.
    """
    needed = sum(layer.disk_bytes for layer in workload.layers)
    holds = [not kind.ssd_bytes or needed <= kind.ssd_bytes for kind in resources.types]
    plain = [not layer.disk_bytes for layer in workload.layers]
    able: NDArray[np.bool_] = np.array(plain)[:, None] | np.array(holds)[None, :]
    return able


def _kept_bytes(layer: Layer, steps: Steps, samples: float, copies: int) -> float:
    """Memory of a layer that has the activations of so many samples, and copies of its state."""
    versions = layer.weight_bytes * steps.versions
    state = versions + layer.optimizer_bytes
    return (1 + copies) * state + versions + layer.activation_bytes * samples


def _itemized(layer: Layer) -> bool:
    return max(layer.weight_bytes, layer.optimizer_bytes, layer.activation_bytes) > 0
