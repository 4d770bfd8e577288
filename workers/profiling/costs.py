"""What was timed of a model's layers, as the cost of each."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protos.decision_pb2 import LayerCost
from workers.profiling.datasheet import Work
from workers.profiling.memory import LayerBytes
from workers.profiling.scaling import Scaling, combined, fit_scaling
from workers.profiling.timing import Part, RowPart

Timings = dict[int, NDArray[np.float64]]  # units -> seconds [repeats, layers, parts]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Samples: of a step, of the micro-batch that is measured, and of the rows moved at once."""

    step: int
    micro_batch: int
    rows: int

    @property
    def of_step(self) -> float:
        """The micro-batch's part of a step."""
        return self.micro_batch / self.step

    @property
    def of_rows(self) -> float:
        """The micro-batch's part of the rows moved at once."""
        return self.micro_batch / self.rows


@dataclass(frozen=True, slots=True)
class Taken:
    """What was timed: computing and moving rows, by units, and what layers have in common.

    Times are of one micro-batch, but for `rows`, of a worker's share of `Sizes.rows` samples.
    """

    compute: Timings
    rows: Timings
    reduce_s: float  # of all dense gradients once, however many workers
    reading_s: float
    bytes_per_s: float
    dense_bytes: int


def layer_cost(
    index: int,
    taken: Taken,
    sizes: Sizes,
    work: Work,
    memory: LayerBytes,
    staleness: int,
    *,
    on_cpu: bool,
) -> LayerCost:
    """The cost of a layer, by number, of the micro-batch that was measured."""
    own = {k: seconds[:, index] for k, seconds in taken.compute.items()}
    passes = {k: s[:, [Part.FORWARD, Part.BACKWARD]].sum(axis=1) / k for k, s in own.items()}
    update = np.median(own[1][:, Part.UPDATE]) * sizes.of_step
    compute = [fit_scaling(passes), Scaling(float(update), 0.0)]
    if on_cpu:  # handling overlaps computing, but not on the only core
        compute.append(work.handling)
    share = memory.weights / taken.dense_bytes if taken.dense_bytes else 0.0
    reduce_s = taken.reduce_s * share * sizes.of_step
    sync = [_moving(index, taken, sizes, staleness), Scaling(reduce_s, 0.0)]
    if index == 0:
        sync.append(Scaling(taken.reading_s, 1.0))
    computing, syncing = combined(compute), combined(sync)
    forward, backward, _ = np.median(own[1], axis=0)
    return LayerCost(
        compute_s=computing.seconds,
        sync_s=syncing.seconds,
        transfer_s=work.crossing_bytes / taken.bytes_per_s,
        parallel_compute=computing.parallel,
        parallel_sync=syncing.parallel,
        memory_bytes=memory.total,
        uncertainty=combined([computing, syncing]).deviation,
        forward_share=forward / (forward + backward) if forward + backward > 0 else 0.0,
    )


def handling(index: int, taken: Taken, sizes: Sizes) -> Scaling:
    """Processor time that a layer takes beside computing, on the worker's core."""
    own = {k: seconds[:, index, RowPart.HANDLING] for k, seconds in taken.rows.items()}
    packing = fit_scaling(own)
    packing = replace(packing, seconds=packing.seconds * sizes.of_rows)
    return combined([packing, Scaling(taken.reading_s, 1.0)]) if index == 0 else packing


def slowdown_of(together: NDArray[np.float64], alone: NDArray[np.float64]) -> NDArray[np.float64]:
    """What others that compute beside a worker cost it: a factor by layer and part, at least 1."""
    before = np.maximum(np.median(alone, axis=0), 1e-9)
    factor: NDArray[np.float64] = np.maximum(1.0, np.median(together, axis=0) / before)
    return factor


def _moving(index: int, taken: Taken, sizes: Sizes, staleness: int) -> Scaling:
    """What a layer's rows take on the way, of a micro-batch's samples."""
    own = {units: seconds[:, index] for units, seconds in taken.rows.items()}
    pull = {k: s[:, RowPart.PULL] for k, s in own.items()}
    push = {k: s[:, RowPart.PUSH] for k, s in own.items()}
    # With a lag rows of the next step are pulled while gradients of the last one are pushed.
    meet = np.maximum if staleness else np.add
    scaling = fit_scaling({k: meet(pull[k], push[k]) for k in own})
    return replace(scaling, seconds=scaling.seconds * sizes.of_rows)
