"""A step's gradient summed over workers, and what becomes of the weights."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from protos.job_pb2 import JobSpec
from workers.device.copies import OnHost
from workers.links.all_reduce import StageGroup
from workers.links.ring_port import local_rings
from workers.model.code.entry import ModelError
from workers.model.module.statistics import RunningStatistics
from workers.moe.layer import MoE
from workers.stage.rows.ahead import DistinctKeys, PulledRows
from workers.stage.rows.commits import largest
from workers.stage.steps.schedule import Schedule
from workers.stage.update.update import Update, _all_finite
from workers.stage.update.versions import Versions

CPU = torch.device("cpu")
SIZE = 3


@pytest.fixture
def together():
    """Runs a function of the group on each of three workers; what each gave."""
    stop = threading.Event()
    groups = [StageGroup(CPU, ring) for ring in local_rings(SIZE, stop.is_set)]

    def run(work):
        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(work, groups, timeout=60))

    yield run
    stop.set()
    for group in groups:
        group.close()


def job_of(name="sgd", **optimizer):
    job = JobSpec()
    job.train.optimizer.name = name
    job.train.optimizer.learning_rate = 0.5
    for key, value in optimizer.items():
        setattr(job.train.optimizer, key, value)
    return job


def layer(seed=0):
    module = nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(seed)
    return module


def give(module, value):
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, value)


def zero(value=0.0):
    return torch.tensor([value], dtype=torch.float64)


def update_of(job, module, group, steps=10, staleness=0):
    versions = Versions(module, staleness)
    statistics = RunningStatistics(module, group.size)
    schedule = Schedule(steps, lambda step: 8, 2)
    return Update(job, module, group, statistics, schedule, versions), versions


def test_all_workers_begin_alike_and_take_the_step_of_the_sum(together):
    def work(group):
        module = layer(seed=group.rank + 1)
        update, _ = update_of(job_of(), module, group)
        begun = [p.detach().clone() for p in module.parameters()]
        losses = []
        for step in range(2):
            give(module, float(group.rank))
            gradient = update.gather(step, zero(float(group.rank)), None)
            report = update.report(gradient)
            assert report.finite
            losses.append(report.loss)
            update.apply(gradient, 1.0)
            assert all(p.grad is None for p in module.parameters())
        return begun, losses, list(module.parameters())

    for begun, losses, ended in together(work):
        assert losses == [3.0, 3.0]  # 0 + 1 + 2
        assert all((p == 1).all() for p in begun)  # rank 0's
        assert all((p == 1 - 2 * 0.5 * 3).all() for p in ended)


def test_a_parameter_without_a_gradient_on_any_worker_is_left_alone(together):
    def work(group):
        module = nn.ModuleList([layer(1), layer(1)])
        update, _ = update_of(job_of("adam", weight_decay=0.1), module, group)
        for step in range(2):
            if group.rank == 1 or step == 0:  # in step 0 all have one for the first layer
                give(module[0], 1.0)
            if group.rank == 2 and step == 0:
                give(module[1], 1.0)
            gradient = update.gather(step, zero(), None)
            update.report(gradient)
            update.apply(gradient, 1.0)
        return [p.detach().clone() for p in module.parameters()]

    plain = nn.ModuleList([layer(1), layer(1)])
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.5, weight_decay=0.1)
    for step, gradient in enumerate((3.0, 1.0)):
        give(plain[0], gradient)
        if step == 0:
            give(plain[1], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for ended in together(work):
        for mine, other in zip(ended, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other.detach())


def test_one_worker_equals_torch():
    module, plain = layer(1), layer(1)
    job = job_of("adamw", weight_decay=0.1, schedule="cosine", warmup_steps=2)
    update, _ = update_of(job, module, StageGroup(CPU), 6)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.5, weight_decay=0.1)
    for step in range(6):
        warm = (step + 1) / 3
        cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * (step - 2) / 4)) / 2
        optimizer.param_groups[0]["lr"] = 0.5 * (warm if step < 2 else cosine)
        for one in (module, plain):
            give(one, step - 2.5)
        update.apply(update.gather(step, zero(), None), 1.0)
        optimizer.step()
        for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_step_computes_on_the_weights_that_it_may_and_is_applied_to_the_newest(name, staleness):
    steps = 7
    module, plain = layer(1), layer(1)
    update, versions = update_of(job_of(name), module, StageGroup(CPU), steps, staleness)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[name](plain.parameters(), lr=0.5)
    history = [[p.detach().clone() for p in plain.parameters()]]
    for step in range(steps):
        for ahead in range(staleness, -1, -1):  # steps are open together
            versions.use(min(step + ahead, steps - 1))
        for mine, seen in zip(module.parameters(), history[max(0, step - staleness)], strict=True):
            torch.testing.assert_close(mine.detach(), seen)
            mine.grad = mine.detach() - step
        for parameter, seen in zip(
            plain.parameters(), history[max(0, step - staleness)], strict=True
        ):
            parameter.grad = seen - step
        optimizer.step()
        update.apply(update.gather(step, zero(), None), 1.0)
        history.append([p.detach().clone() for p in plain.parameters()])
        for mine, newest in zip(module.parameters(), history[-1], strict=True):
            torch.testing.assert_close(mine.detach(), newest)  # what a model is saved of


def test_shared_and_frozen_parameters_stay_so_in_every_version():
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    module["b"].bias.requires_grad_(False)
    frozen = module["b"].bias
    versions = Versions(module, 1)
    versions.open()
    first = module["a"].weight
    versions.use(1)
    assert module["a"].weight is module["b"].weight is not first
    assert module["b"].bias is frozen
    assert len(versions.parameters(1)) == 2
    versions.use(0)
    assert module["a"].weight is module["b"].weight is first


class Keeping(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.kept = keep(self.weight)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (lambda weight: [weight], lambda module: module.kept[0]),
        (lambda weight: {"w": [1, weight]}, lambda module: module.kept["w"][1]),
    ],
)
def test_parameters_that_a_module_keeps_in_a_list_are_those_of_the_version(keep, kept):
    module = Keeping(keep)
    versions = Versions(module, 1)
    versions.open()
    for step in range(4):
        versions.use(step)
        assert kept(module) is module.weight is versions.parameters(step)[0]


def test_parameters_in_a_tuple_are_refused_where_there_are_versions():
    with pytest.raises(ModelError, match="Keeping: a tuple in it has parameters"):
        Versions(Keeping(lambda weight: (weight,)), 1)
    Versions(Keeping(lambda weight: (weight,)), 0).open()


def rows(gradient):
    leaf = torch.zeros(1, 2, requires_grad=True)
    leaf.grad = torch.full((1, 2), gradient)
    of = DistinctKeys({}, {}, {}, {})
    return PulledRows(of, {"t": OnHost().upload(leaf)}, learning=True, leaves={"t": leaf})


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, None])
@pytest.mark.parametrize("where", ["dense", "rows"])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_what_is_largest_on_one_worker_is_known_to_all(together, bad, where, clip):
    def work(group):
        module = layer(1)
        job = job_of()
        job.train.clip = clip
        update, _ = update_of(job, module, group)
        mine = 1e30 if bad is None or group.rank != 1 else bad  # whose square float32 has not
        give(module, mine if where == "dense" else 1.0)
        pulled = [rows(mine if where == "rows" else 1.0)]
        gradient = update.gather(0, zero(), largest(pulled))
        report = update.report(gradient)
        update.skip(gradient)
        assert all(p.grad is None for p in module.parameters())
        return report, list(module.parameters())

    for report, ended in together(work):
        assert report.finite == (bad is None)
        if bad is None and clip:
            expected = 3 * (3e30 if where == "dense" else 3.0) ** 2
            assert report.squared_norm == pytest.approx(expected, rel=1e-5)
        assert all((p == 1).all() for p in ended)


def test_rows_whose_sum_float32_cannot_hold_are_known_before_they_are_applied(together):
    def work(group):
        update, _ = update_of(job_of(), layer(1), group)
        reports = []
        for step, (size, blocks) in enumerate([(2e38, 1), (1e38, 1), (0.5e38, 3)]):
            gradient = update.gather(step, zero(), largest([rows(size)] * blocks))
            reports.append(update.report(gradient).finite)
            update.skip(gradient)
        return reports

    assert together(work) == [[False, True, False]] * SIZE


def test_a_bias_gate_moves_once_a_step_by_what_all_workers_sent(together):
    def work(group):
        torch.manual_seed(0)
        module = MoE(3, experts=3, k=1, gate="bias", rate=0.25, seed=0)
        update, _ = update_of(job_of(), module, group)
        x = torch.randn(
            5 * (group.rank + 1), 3, generator=torch.Generator().manual_seed(group.rank)
        )
        before = module.gate.bias.clone()
        for part in x.split(5):
            module(part).sum().backward()
        assert torch.equal(module.gate.bias, before)  # not between micro-batches
        loads = module.gate.pending.clone()
        gradient = update.gather(0, zero(), None)
        update.report(gradient)
        update.apply(gradient, 1.0)
        return loads, module.gate.bias - before

    results = together(work)
    load = sum(loads for loads, _ in results)
    for _, moved in results:
        torch.testing.assert_close(moved, 0.25 * torch.sign(load.float().mean() - load.float()))


def test_a_stage_without_parameters_takes_steps():
    update, _ = update_of(job_of(), nn.ReLU(), StageGroup(CPU), staleness=2)
    for step in range(4):
        gradient = update.gather(step, zero(2.0), None)
        report = update.report(gradient)
        assert (report.loss, report.finite) == (2.0, True)
        update.apply(gradient, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, -math.inf])
def test_gradients_are_finite_though_their_sum_is_not(dtype, wrong):
    most = torch.finfo(dtype).max
    gradients = [torch.zeros(0, dtype=dtype), torch.full((3, 4), most, dtype=dtype)]
    assert _all_finite(gradients[:1])
    if wrong is not None:
        gradients.append(torch.tensor([1.0, -math.inf, wrong]).to(dtype))
    assert _all_finite(gradients) == (wrong is None)
