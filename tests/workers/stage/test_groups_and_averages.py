"""Groups of parameters and averages of weights, over any plan, against torch's own."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from protos.job_pb2 import JobSpec
from tests.workers.stage.in_process import Pipeline
from workers.data.columns.arrays import Batch
from workers.learning.optimizers import GroupError, check_groups, make_optimizer
from workers.model.saved.cut import read_cut, weights_of

FEATURES, STEPS, DECAY = 5, 9, 0.8
PLANS = [([2], [1], 1), ([2], [3], 5), ([0, 2], [2, 1], 4), ([0, 1, 2], [1, 2, 1], 3)]


class Net(nn.Module):
    """Its middle layer is not used at first."""

    def __init__(self):
        super().__init__()
        self.bottom, self.middle = nn.Linear(FEATURES, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, dense):
        x = self.bottom(dense).tanh()
        return self.head(x + self.middle(x)).squeeze(1)


def build():
    torch.manual_seed(3)
    return Net()


def batches():
    random = np.random.default_rng(1)
    return [
        Batch(
            {
                "dense": random.normal(size=(size, FEATURES)).astype(np.float32),
                "label.label": random.normal(size=size).astype(np.float32),
            }
        )
        for size in [16] * (STEPS - 1) + [7]
    ]


@pytest.fixture
def job():
    job = JobSpec()
    job.train.loss, job.train.ema = "mse", DECAY
    spec = job.train.optimizer
    spec.name, spec.learning_rate, spec.weight_decay = "adamw", 0.03, 0.1
    spec.schedule, spec.warmup_steps = "cosine", 3
    spec.groups["head.*"].learning_rate = 0.003
    spec.groups["bottom.bias"].weight_decay = 0.0
    spec.groups["middle.*"].learning_rate = 0.0
    return job


def plain(staleness, steps=STEPS):
    """Weights and averages after some steps: each computes on weights that lack some updates."""
    model, seen = build(), build()
    groups = [
        {"params": [model.bottom.weight]},
        {"params": [model.bottom.bias], "weight_decay": 0.0},
        {"params": model.middle.parameters(), "lr": 0.0},
        {"params": model.head.parameters(), "lr": 0.003},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.03, weight_decay=0.1)

    def rate(step):
        if step < 3:
            return (step + 1) / 4
        return 0.1 + 0.9 * (1 + np.cos(np.pi * (step - 3) / (STEPS - 3))) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    states = []
    for number, batch in enumerate(batches()[:steps]):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        seen.load_state_dict(states[max(0, number - staleness)])
        seen.zero_grad()
        found = seen(torch.from_numpy(batch.arrays["dense"]))
        nn.functional.mse_loss(found, torch.from_numpy(batch.arrays["label.label"])).backward()
        for own, other in zip(model.parameters(), seen.parameters(), strict=True):
            own.grad = other.grad.clone()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
    return model.state_dict(), average.module.state_dict()


def states(workers):
    """Weights, and averages, of all workers."""
    weights, averages = {}, {}
    for worker in chain(*workers):
        weights |= {name: value.clone() for name, value in worker.module.state_dict().items()}
        with worker.update.averaged():
            averages |= {n: value.clone() for n, value in worker.module.state_dict().items()}
        for name, value in worker.module.state_dict().items():
            assert torch.equal(value, weights[name])
    return weights, averages


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("plan", PLANS)
def test_groups_and_averages_are_those_of_torch(job, plan, staleness):
    job.train.staleness = staleness
    cuts, widths, micro_batches = plan
    found = states(Pipeline(job, build, cuts, widths, batches(), micro_batches).run())
    for some, expected in zip(found, plain(staleness), strict=True):
        assert some.keys() == expected.keys()
        for name, value in some.items():
            torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-5)
    assert torch.equal(found[0]["middle.weight"], build().middle.weight)
    assert not torch.equal(found[0]["head.weight"], found[1]["head.weight"])


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_cut_has_averages_to_go_on_from(job, tmp_path, staleness):
    """And gives them to who reads its weights."""
    job.train.staleness = staleness
    job.train.checkpoint.every, job.train.checkpoint.keep = "1 steps", 100
    (cuts, widths, micro_batches), steps = PLANS[2], batches()
    pipeline = Pipeline(job, build, cuts, widths, steps, micro_batches, folder=tmp_path)
    workers = pipeline.run()
    expected = states(workers)
    places = [cut.place for cut in workers[0][0].executor.progress.cuts.cuts]
    place = places[-1]
    cuts, widths, micro_batches = PLANS[3]
    pipeline = Pipeline(
        job,
        build,
        cuts,
        widths,
        steps,
        micro_batches,
        client=pipeline.client,
        resume=place,
        attempt=2,
    )
    for some, other in zip(states(pipeline.run()), expected, strict=True):
        for name, value in some.items():
            torch.testing.assert_close(value, other[name], rtol=2e-5, atol=2e-5)
    cut = read_cut(place)
    _, averages = plain(staleness, cut.step)
    kept = weights_of(str(tmp_path), cut)
    assert kept.keys() == averages.keys()
    for name, value in kept.items():
        torch.testing.assert_close(value, averages[name], rtol=2e-5, atol=2e-5)


class Middle(nn.Module):
    """Its middle layer has no parameters."""

    def __init__(self):
        super().__init__()
        self.bottom, self.middle, self.head = nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)

    def forward(self, dense):
        return self.head(self.middle(self.bottom(dense))).squeeze(1)


def test_a_stage_without_parameters_has_no_averages(job):
    job.train.optimizer.groups.clear()
    _, averages = states(Pipeline(job, Middle, [0, 1, 2], [1, 1, 1], batches(), 1).run())
    assert len(averages) == 4


def test_groups_that_say_nothing_or_too_much(job):
    spec = job.train.optimizer
    names = [(name,) for name, _ in build().named_parameters()]
    check_groups(spec, names)
    spec.groups["*.bias"].weight_decay = 0.0
    with pytest.raises(GroupError, match=r"'bottom.bias' is in '\*.bias' and in 'bottom.bias'"):
        make_optimizer(spec, list(build().parameters()), names)
    del spec.groups["*.bias"]
    spec.groups["tail.*"].weight_decay = 0.0
    with pytest.raises(GroupError, match=r"named 'tail.\*'; there are bottom.weight"):
        check_groups(spec, names)
