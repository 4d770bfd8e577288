"""Estimates from data sheets: rooflines, what stays the network's, and how far off they are."""

import math
import sys

import pytest
import torch
from torch import nn

from protos.decision_pb2 import LayerCost, ResourceType
from workers.profiling.datasheet import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    LAUNCH_S,
    PCIE_BYTES_PER_S,
    Work,
    estimate,
    measure_work,
    misses,
    roofline,
)
from workers.profiling.scaling import Scaling

GPU = ResourceType(name="v100", device="cuda", flops_per_s=1e13, memory_bandwidth=1e12)
CORE = ResourceType(name="cpu", device="cpu", flops_per_s=1e11, memory_bandwidth=1e10)
HERE = LayerCost(sync_s=0.01, transfer_s=0.02, parallel_sync=0.5, memory_bytes=1e6)


def test_arithmetic_bounds_a_large_product_and_memory_a_small_one():
    large = Work(flops=1e12, activation_bytes=1e6, parameter_bytes=0, launches=0)
    assert roofline(GPU, large).seconds == pytest.approx(1e12 / (1e13 * COMPUTE_SHARE))
    assert roofline(GPU, large).parallel == pytest.approx(1.0)
    small = Work(flops=1.0, activation_bytes=1e9, parameter_bytes=1e9, launches=0)
    assert roofline(GPU, small).seconds == pytest.approx(2e9 / (1e12 * BANDWIDTH_SHARE))
    # More workers have more micro-batches at once, each with its reads of the weights.
    assert roofline(GPU, small).parallel == pytest.approx(1.0)


def test_an_update_does_not_divide():
    update = roofline(GPU, Work(0.0, 1e9, 0.0, 0, update_bytes=1e9))
    assert update.seconds == pytest.approx(2e9 / (1e12 * BANDWIDTH_SHARE))
    assert update.parallel == pytest.approx(0.5)  # each worker makes it, once a step


def test_launches_come_with_each_micro_batch():
    launches = roofline(GPU, Work(0.0, 0.0, 0.0, launches=10))
    assert launches.seconds == pytest.approx(10 * LAUNCH_S)
    assert launches.parallel == pytest.approx(1.0)


def test_an_accelerator_adds_the_bus_to_what_the_network_takes():
    work = Work(1e9, 1e6, 1e6, 6, host_bytes=12e6, crossing_bytes=24e6)
    cost = estimate(GPU, work, HERE, 0.7)
    assert cost.sync_s == pytest.approx(0.01 + 12e6 / PCIE_BYTES_PER_S)
    assert cost.transfer_s == pytest.approx(0.02 + 24e6 / PCIE_BYTES_PER_S)
    assert (cost.estimated, cost.uncertainty, cost.memory_bytes) == (True, 0.7, 1e6)


def test_a_core_also_packs_its_rows():
    work = Work(1e9, 1e6, 1e6, 6, host_bytes=12e6, handling=Scaling(0.005, 1.0))
    cost = estimate(CORE, work, HERE)
    assert cost.compute_s == pytest.approx(roofline(CORE, work).seconds + 0.005)
    assert cost.sync_s == pytest.approx(0.01)


def test_a_type_without_a_data_sheet_is_named():
    with pytest.raises(ValueError, match=r"'abacus'.*flops_per_s and memory_bandwidth"):
        estimate(ResourceType(name="abacus"), Work(1.0, 1.0, 1.0, 1), HERE)


def test_misses_is_the_factor_that_estimates_are_off_by():
    works = [Work(1e9 * n, 0.0, 0.0, 0) for n in (1, 2, 3)]
    truth = [roofline(CORE, work).seconds for work in works]
    assert misses(CORE, works, truth) == pytest.approx(0.0)
    assert misses(CORE, works, [2 * s for s in truth]) == pytest.approx(math.log(2))
    assert misses(CORE, works, [s / 2 for s in truth]) == pytest.approx(math.log(2))
    assert misses(ResourceType(name="abacus"), works, truth) == 0.0


def test_work_counts_forward_and_backward_of_a_product(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it is an error
    layer = nn.Linear(64, 32)
    inputs, outputs = torch.ones(16, 64), torch.ones(16, 32)
    flops, activations, parameters, launches = measure_work(layer, [inputs], [outputs])
    assert flops == 3 * 2 * 16 * 64 * 32
    assert activations == 3 * 4 * (16 * 64 + 16 * 32)
    assert parameters == 3 * 4 * (64 * 32 + 32)
    assert launches > 0
