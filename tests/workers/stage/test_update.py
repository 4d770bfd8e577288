"""The end of a step: gradients summed over workers, the optimizer, steps that do not count."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from protos.job_pb2 import JobSpec
from workers.device.copies import OnHost
from workers.learning.precision import Precision
from workers.links.all_reduce import StageGroup
from workers.links.ring_port import local_rings
from workers.moe.layer import MoE
from workers.stage.rows import PulledRows
from workers.stage.update import Update

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


def test_all_workers_begin_alike_and_take_the_step_of_the_sum(together):
    def work(group):
        module = layer(seed=group.rank + 1)
        update = Update(job_of(), module, group, 10, Precision.of("", CPU))
        assert update.loss_scale is None
        begun = [p.detach().clone() for p in module.parameters()]
        losses = []
        for step in range(2):
            give(module, float(group.rank))
            loss, counts = update.apply(
                step, torch.tensor(float(group.rank), dtype=torch.double), []
            )
            assert counts
            losses.append(loss.item())
            assert all((p.grad == 0).all() for p in module.parameters())
        return begun, losses, list(module.parameters())

    for begun, losses, ended in together(work):
        assert losses == [3.0, 3.0]  # 0 + 1 + 2
        assert all((p == 1).all() for p in begun)  # rank 0's
        assert all((p == 1 - 2 * 0.5 * 3).all() for p in ended)


def test_one_worker_equals_torch():
    module, plain = layer(1), layer(1)
    job = job_of("adamw", weight_decay=0.1, schedule="cosine", warmup_steps=2)
    update = Update(job, module, StageGroup(CPU), 6, Precision.of("", CPU))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.5, weight_decay=0.1)
    for step in range(6):
        warm = (step + 1) / 3
        cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * (step - 2) / 4)) / 2
        optimizer.param_groups[0]["lr"] = 0.5 * (warm if step < 2 else cosine)
        for one in (module, plain):
            give(one, step - 2.5)
        update.apply(step, torch.zeros(()), [])
        optimizer.step()
        for mine, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


def rows(gradient):
    leaf = torch.zeros(1, 2, requires_grad=True)
    leaf.grad = torch.full((1, 2), gradient)
    key = {"sparse": np.zeros(1, np.uint64)}
    return PulledRows(key, {"t": OnHost().upload(leaf)}, {}, True, {"t": leaf})


@pytest.mark.parametrize("where", ["dense", "rows"])
def test_a_step_beyond_float16_on_one_worker_counts_on_none(together, where):
    def work(group):
        module = layer(1)
        precision = Precision(torch.float16, "cpu")
        update = Update(job_of(warmup_steps=4), module, group, 10, precision)
        scale = update.loss_scale
        first = scale.value
        counted, pulled = [], []
        for step in range(3):
            bad = step == 1 and group.rank == 1
            give(module, float("inf") if bad and where == "dense" else scale.value)
            pulled.append(rows(float("inf") if bad and where == "rows" else 2 * scale.value))
            counted.append(update.apply(step, torch.zeros(()), [pulled[-1]])[1])
        return counted, scale.value / first, list(module.parameters()), pulled

    for counted, scale, ended, pulled in together(work):
        assert counted == [True, False, True]
        assert scale == 0.5
        # Two steps of a gradient of 3 at the first two rates of the warm-up, 1/5 and 2/5 of 0.5.
        for parameter in ended:
            torch.testing.assert_close(parameter, torch.full_like(parameter, 1 - 3 * (0.1 + 0.2)))
        for step in (0, 2):  # rows' gradients are as if the loss had not been scaled
            assert torch.equal(pulled[step].gradients()[0], torch.full((1, 2), 2.0))


def test_a_bias_gate_moves_once_a_step_by_what_all_workers_sent(together):
    def work(group):
        torch.manual_seed(0)
        module = MoE(3, experts=3, k=1, gate="bias", rate=0.25, seed=0)
        update = Update(job_of(), module, group, 10, Precision.of("", CPU))
        x = torch.randn(
            5 * (group.rank + 1), 3, generator=torch.Generator().manual_seed(group.rank)
        )
        before = module.gate.bias.clone()
        for part in x.split(5):
            module(part).sum().backward()
        assert torch.equal(module.gate.bias, before)  # not between micro-batches
        loads = module.gate.pending.clone()
        update.apply(0, torch.zeros(()), [])
        return loads, module.gate.bias - before

    results = together(work)
    load = sum(loads for loads, _ in results)
    for _, moved in results:
        torch.testing.assert_close(moved, 0.25 * torch.sign(load.float().mean() - load.float()))


def test_a_stage_without_parameters_takes_steps():
    update = Update(job_of(), nn.ReLU(), StageGroup(CPU), 10, Precision.of("", CPU))
    loss, counts = update.apply(0, torch.tensor(2.0), [])
    assert (loss.item(), counts) == (2.0, True)
