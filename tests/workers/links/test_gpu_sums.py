"""The order in which NCCL is given the sums of several steps: the same on all workers."""

import threading
import time

import pytest
import torch

from workers.links import gpu_sum
from workers.links.gpu_sum import GpuSums


class Done:
    def wait(self):
        pass


@pytest.mark.parametrize("round_", range(5))
def test_steps_are_given_in_order_whoever_adds_while_another_waits(monkeypatch, round_):
    given = []

    def all_reduce(values, async_op):
        given.append(int(values[0]))
        time.sleep(0.0005)  # others come in between where they may
        return Done()

    monkeypatch.setattr(gpu_sum.dist, "all_reduce", all_reduce)
    sums = GpuSums()
    steps = [sums.begin() for _ in range(3)]
    dtypes = (torch.float32, torch.float64, torch.int64, torch.int32, torch.float16)
    small = [torch.full((2,), number, dtype=dtype) for number, dtype in enumerate(dtypes)]
    large = [torch.full((1 << 18,), 100.0 + number) for number in range(10)]
    steps[0].add(small)
    waits = threading.Thread(target=steps[0].wait)
    waits.start()
    for tensor in large:
        steps[1].add([tensor])
    waits.join()
    steps[1].wait()
    steps[2].wait()
    assert given == [*range(5), *range(100, 110)]
