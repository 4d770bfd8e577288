"""What a layer would cost on a device that is not here: a roofline from its data sheet.

Time is the larger of arithmetic over peak rate and bytes over memory bandwidth, each at the
share of its peak that real layers reach, plus a launch for every operation. Figures made this
way are marked `estimated` wherever they go.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from protos.decision_pb2 import LayerCost, ResourceType

# Shares of the peak that dense layers of recommendation models reach in fp32, and the time a
# kernel launch takes; rough by nature, and the reason that estimates are marked.
COMPUTE_SHARE = 0.35
BANDWIDTH_SHARE = 0.6
LAUNCH_S = 8e-6
LAUNCHES_PER_MODULE = 6  # forward, backward and optimizer kernels of a leaf module
PCIE_BYTES_PER_S = 12e9
PARALLEL = 0.95


@dataclass(frozen=True, slots=True)
class Work:
    """What one layer does to one reference batch, forward and backward."""

    flops: float
    bytes_moved: float
    launches: int


def measure_work(module: nn.Module, inputs: list[Tensor], outputs: list[Tensor]) -> Work:
    """Count a layer's arithmetic and its least memory traffic on one batch."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*inputs)
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    activations = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
    leaves = sum(1 for m in module.modules() if not any(True for _ in m.children()))
    # Backward costs twice the forward; parameters are read twice and updated with their state.
    return Work(
        flops=3.0 * counter.get_total_flops(),
        bytes_moved=3.0 * activations + 7.0 * parameters,
        launches=LAUNCHES_PER_MODULE * max(1, leaves),
    )


def estimate(kind: ResourceType, work: Work, here: LayerCost) -> LayerCost:
    """A layer's cost on `kind` from its data sheet; what the network does is taken from `here`.

    Raises:
        ValueError: the resources file gives no data sheet for the type.
    """
    if kind.flops_per_s <= 0 or kind.memory_bandwidth <= 0:
        raise ValueError(
            f"resources: type {kind.name!r} is not present on any node and has no data sheet; "
            "expected flops_per_s and memory_bandwidth"
        )
    compute_s = max(
        work.flops / (kind.flops_per_s * COMPUTE_SHARE),
        work.bytes_moved / (kind.memory_bandwidth * BANDWIDTH_SHARE),
    )
    return LayerCost(
        compute_s=compute_s + work.launches * LAUNCH_S,
        sync_s=here.sync_s,
        transfer_s=here.transfer_s,
        parallel_compute=PARALLEL,
        parallel_sync=here.parallel_sync,
        memory_bytes=here.memory_bytes,
        estimated=True,
    )
