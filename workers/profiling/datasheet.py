"""What a layer would cost on a device that is not here: a roofline from its data sheet.

Time is the larger of arithmetic over peak rate and bytes over memory bandwidth (Williams et al.,
"Roofline", CACM 2009), each at the share of its peak that real layers reach, plus a launch for
every operation. Figures made this way are marked `estimated` wherever they go.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from protos.decision_pb2 import LayerCost, ResourceType
from workers.profiling.arithmetic import forward_flops
from workers.profiling.scaling import NOTHING, Scaling, combined
from workers.profiling.timing import tensors_in

# Shares of the peak that dense layers of recommendation models reach in fp32, and the time a
# kernel launch takes; rough by nature, and the reason that estimates are marked.
COMPUTE_SHARE = 0.35
BANDWIDTH_SHARE = 0.6
LAUNCH_S = 8e-6  # on a CPU core about what dispatching an operation takes
LAUNCHES_PER_MODULE = 6  # forward, backward and optimizer kernels of a leaf module
PCIE_BYTES_PER_S = 12e9  # what a copy reaches over 16 lanes of PCIe 3.0, the slowest still rented
LEAST_UNCERTAINTY = 0.5  # a roofline is seldom nearer than a factor of e^0.5 = 1.6
UPDATE_TRAFFIC = 4.0  # times the weights: they, their gradients and two moments
_PASSES_TRAFFIC = 3.0  # read forward and backward, and gradients written


@dataclass(frozen=True, slots=True)
class Work:
    """What one layer does to one micro-batch, forward and backward.

    Args:
        flops: of the whole of it.
        activation_bytes: memory traffic that shrinks with it.
        parameter_bytes: memory traffic that does not.
        launches: kernels, whatever its size.
        update_bytes: memory traffic of its part of a step's update, which each worker makes.
        host_bytes: what an accelerator takes from and gives to the host: embedding rows.
        crossing_bytes: what leaves for the next stage and comes back.
        forth_bytes: what leaves.
        disk_bytes: read and written, of experts that lie out of memory.
        handling: processor time of reading, pulling and pushing, as measured here; a CPU core
            has it on top of its arithmetic.
    """

    flops: float
    activation_bytes: float
    parameter_bytes: float
    launches: int
    update_bytes: float = 0.0
    host_bytes: float = 0.0
    crossing_bytes: float = 0.0
    forth_bytes: float = 0.0
    disk_bytes: float = 0.0
    handling: Scaling = NOTHING


def measure_work(
    module: nn.Module, inputs: list[Any], outputs: list[Tensor]
) -> tuple[float, float, float, int]:
    """Count a layer's arithmetic and its least memory traffic on one micro-batch.

    Returns:
        The first four fields of `Work`.
    """
    flops = forward_flops(module, inputs)
    parameters = sum(p.nbytes for p in module.parameters())
    activations = sum(t.nbytes for t in (*tensors_in(inputs), *outputs))
    leaves = sum(1 for m in module.modules() if not any(True for _ in m.children()))
    # Backward costs twice the forward.
    return (
        3.0 * flops,
        3.0 * activations,
        _PASSES_TRAFFIC * parameters,
        LAUNCHES_PER_MODULE * max(1, leaves),
    )


def roofline(kind: ResourceType, work: Work) -> Scaling:
    """Computing time of a layer on `kind`, and how it divides over units.

    Raises:
        ValueError: the type has no data sheet.
    """
    if kind.flops_per_s <= 0 or kind.memory_bandwidth <= 0:
        raise ValueError(
            f"resources: type {kind.name!r} is not present on any node and has no data sheet; "
            "expected flops_per_s and memory_bandwidth, or a name of the catalogue"
        )

    bandwidth = kind.memory_bandwidth * BANDWIDTH_SHARE
    arithmetic = work.flops / (kind.flops_per_s * COMPUTE_SHARE)
    memory = (work.activation_bytes + work.parameter_bytes) / bandwidth
    passes = Scaling(max(arithmetic, memory) + work.launches * LAUNCH_S, 1.0)
    return combined([passes, Scaling(work.update_bytes / bandwidth, 0.0)])


def estimate(
    kind: ResourceType, work: Work, here: LayerCost, uncertainty: float = LEAST_UNCERTAINTY
) -> LayerCost:
    """A layer's cost on `kind` from its data sheet; what the network does is taken from `here`.

    Args:
        uncertainty: standard deviation of ln(estimate / truth), as `misses` found it.

    Raises:
        ValueError: the type has no data sheet.
    """
    compute = roofline(kind, work)
    if kind.ssd_bandwidth > 0 and work.disk_bytes / kind.ssd_bandwidth > compute.seconds:
        compute = Scaling(work.disk_bytes / kind.ssd_bandwidth, compute.parallel)
    host_s, crossing_s = 0.0, 0.0
    if kind.device == "cpu":
        compute = combined([compute, work.handling])
    else:
        host_s = work.host_bytes / PCIE_BYTES_PER_S
        crossing_s = work.crossing_bytes / PCIE_BYTES_PER_S
    sync = combined([Scaling(here.sync_s, here.parallel_sync), Scaling(host_s, 1.0)])
    return LayerCost(
        compute_s=compute.seconds,
        sync_s=sync.seconds,
        transfer_s=here.transfer_s + crossing_s,
        parallel_compute=compute.parallel,
        parallel_sync=sync.parallel,
        memory_bytes=here.memory_bytes,
        estimated=True,
        uncertainty=uncertainty,
        forward_share=here.forward_share,
        delay_s=here.delay_s,
        fixed_s=here.fixed_s,  # most of it is calls, which their host makes
    )


def misses(kind: ResourceType, works: Sequence[Work], measured_s: Sequence[float]) -> float:
    """How far the roofline is off on a type that was measured; 0 where it has no data sheet.

    The root mean square of ln(estimate / measurement) over the layers, each counted by its time.
    """
    total = sum(measured_s)
    if kind.flops_per_s <= 0 or kind.memory_bandwidth <= 0 or not total > 0:
        return 0.0
    squares = sum(
        seconds * math.log(roofline(kind, work).seconds / seconds) ** 2
        for work, seconds in zip(works, measured_s, strict=True)
        if seconds > 0 and roofline(kind, work).seconds > 0
    )
    return math.sqrt(squares / total)
