"""Running statistics over workers against one process that runs the same micro-batches in order."""

import copy

import pytest
import torch
from torch import nn

from workers.model.code.entry import ModelError
from workers.model.module.statistics import RunningStatistics

STEPS = [4, 4, 3, 4]  # micro-batches of each


class Twice(nn.Module):
    """Calls one layer twice in a forward."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)

    def forward(self, x):
        return self.norm(self.norm(x + 2) * 3 + 1)


def model(momentum):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(3, 3, dtype=torch.float64),
        nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64),
        Twice(momentum),
        nn.BatchNorm1d(3, track_running_stats=False, dtype=torch.float64),
        nn.Unflatten(1, (1, 3)),
        nn.InstanceNorm1d(1, momentum=0.2, track_running_stats=True, dtype=torch.float64),
    )


def micro_batches():
    torch.manual_seed(2)
    return [[torch.randn(2 + m, 3, dtype=torch.float64) * 5 for m in range(n)] for n in STEPS]


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_they_are_those_of_one_process(momentum, width):
    alone = model(momentum).train()
    workers = [copy.deepcopy(alone) for _ in range(width)]
    kept = [RunningStatistics(worker, width) for worker in workers]
    number = 0
    for step, inputs in enumerate(micro_batches()):
        for x in inputs:
            expected = alone(x)
        for index, x in enumerate(inputs):
            rank = number % width
            number += 1
            with kept[rank].counting(step, index):
                out = workers[rank](x)
            workers[rank](x * 7)  # again, as to save memory: does not count
        torch.testing.assert_close(out, expected)
        parts = [statistics.take(step, len(inputs)) for statistics in kept]
        sums = [sum(tensors) for tensors in zip(*parts, strict=True)]
        for worker, statistics in zip(workers, kept, strict=True):
            statistics.apply(step, sums)
            torch.testing.assert_close(
                worker.state_dict(), alone.state_dict(), rtol=1e-12, atol=1e-12
            )


def test_a_step_that_is_not_applied_leaves_them_alone():
    module = model(0.1).train()
    before = copy.deepcopy(module.state_dict())
    statistics = RunningStatistics(module, 1)
    with statistics.counting(0, 0):
        module(micro_batches()[0][0])
    statistics.take(0, 1)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    module.eval()(micro_batches()[0][0])
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        return x


def test_another_buffer_that_training_changes_is_refused_on_several_workers():
    for workers in (1, 2):
        module = nn.Sequential(Counting())
        statistics = RunningStatistics(module, workers)
        with statistics.counting(0, 0):
            module(torch.ones(2))
        if workers == 1:
            assert statistics.take(0, 1) == []
            continue
        with pytest.raises(ModelError, match=r"'0.seen': training changes this buffer in forward"):
            statistics.take(0, 1)


class Renewing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer("seen", torch.ones(2))

    def forward(self, x):
        self.change(self)
        return x


def _renew(module):
    module.seen = module.seen * 0.5


def _behind_the_version(module):
    module.seen.data.mul_(0.5)


@pytest.mark.parametrize("change", [_renew, _behind_the_version])
def test_a_buffer_is_found_changed_however_it_is_done(change):
    module = nn.Sequential(Renewing(change))
    statistics = RunningStatistics(module, 2)
    for index in range(2):  # a new tensor may take the place of the first one in memory
        with statistics.counting(0, index):
            module(torch.ones(2))
    with pytest.raises(ModelError, match=r"'0.seen': training changes this buffer"):
        statistics.take(0, 4)


def _add(module):
    module.seen += 1.0


@pytest.mark.parametrize("change", [_renew, _behind_the_version, _add])
@pytest.mark.parametrize("for_good", [False, True])
def test_buffers_are_had_as_after_any_step_that_later_forwards_have_left(change, for_good):
    module = nn.Sequential(Renewing(change), nn.BatchNorm1d(2))
    module[0].register_buffer("stays", torch.ones(1))
    statistics, found = RunningStatistics(module, 1), {}

    def forward(step):
        found.setdefault(step, module[0].seen.clone())
        for index in range(2):
            with statistics.counting(step, index):
                module(torch.rand(4, 2))

    forward(0)
    statistics.apply(0, statistics.take(0, 2))
    forward(1)
    forward(2)
    newest = module[0].seen.clone()
    for step in (1, 2):
        if for_good and step == 2:
            break
        with statistics.as_of(step):
            assert torch.equal(module.state_dict()["0.seen"], found[step])
        assert torch.equal(module[0].seen, newest)
    if for_good:
        statistics.go_back(1)
        assert torch.equal(module[0].seen, found[1])
    statistics.apply(1, statistics.take(1, 2))
    with statistics.as_of(3):  # none has begun that
        assert torch.equal(module[0].seen, found[1] if for_good else newest)


@pytest.mark.parametrize("value", [True, 3, 0.5, float("nan"), float("inf")])
def test_buffers_that_stay_as_they_are_may_be_anything(value):
    module = nn.Module()
    module.register_buffer("kept", torch.tensor([value]))
    module.register_buffer("none", None)
    statistics = RunningStatistics(module, 2)
    for step in range(2):
        assert statistics.take(step, 1) == []


def test_one_sample_cannot_be_normalised():
    module = nn.BatchNorm1d(3)
    RunningStatistics(module, 1)
    with pytest.raises(ModelError, match=r"train.drop_last: true"):
        module(torch.ones(1, 3))
    module.eval()(torch.ones(1, 3))
