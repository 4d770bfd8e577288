"""Rows that come and go as they are counted, on any plan, against plain PyTorch and counting."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from heterps import PAD, Admission, Eviction, Score, SparseEmbedding
from protos.job_pb2 import JobSpec
from ps import LocalTable
from tests.ps.counted import CountedTable
from tests.workers.stage.in_process import TABLES, Pipeline
from workers.data.columns.arrays import Batch

KEYS, DIM, STEPS, SIZE = 60, 3, 24, 13
PLANS = [([3], [1], 1), ([3], [3], 4), ([0, 3], [2, 1], 3), ([0, 2, 3], [2, 3, 1], 5)]
RATE = 0.3
RULES = {
    "item": {
        "score": Score(non_click=0.3, click=1.7, decay=0.8),
        "admission": Admission(kind="score", threshold=1.1),
        "eviction": Eviction(ttl_steps=5, min_score=0.9, every_steps=4),
    },
    "user": {
        "admission": Admission(kind="count", threshold=2),
        "eviction": Eviction(ttl_steps=3, every_steps=2),
    },
}


class Net(nn.Module):
    """A shared table, looked up turned round as well and as a bag, and one that counts steps."""

    def __init__(self, item, bag, user):
        super().__init__()
        self.user, self.item, self.bag = user, item, bag
        self.top = nn.Linear(3 * DIM, 1)

    def forward(self, sparse):
        user = self.user(sparse[:, 6])
        pair = self.item(sparse[:, :2].t()).sum(0)
        return self.top(torch.cat([pair, self.bag(sparse[:, 2:6]), user], 1))


def build():
    torch.manual_seed(2)
    given = {"optimizer": "sgd", "learning_rate": RATE, "scale": 1.0}
    item = {"seed": 1, **given, **RULES["item"]}
    return Net(
        SparseEmbedding("item", DIM, **item),
        SparseEmbedding("item", DIM, pooling="sum", **item),
        SparseEmbedding("user", DIM, seed=2, **given, **RULES["user"]),
    )


def first_rows(name, seed):
    fresh = LocalTable.create(
        name, DIM, optimizer="sgd", learning_rate=RATE, initializer="uniform", scale=1.0, seed=seed
    )
    return lambda key: fresh.pull(np.array([key]), True)[0]


def all_rows(table):
    """What each key reads, [KEYS, DIM]."""
    rows = table.rows
    return np.stack([rows[key] if key in rows else table.first(key) for key in range(KEYS)])


def batches():
    """What is asked for changes with time, so that keys grow old and come again."""
    random = np.random.default_rng(3)
    found = []
    for step in range(STEPS):
        keys = (random.geometric(0.15, (SIZE, 7)) + 2 * (step % 14)) % KEYS
        keys[:, 3:6][random.random((SIZE, 3)) < 0.4] = PAD
        label = random.integers(0, 2, SIZE).astype(np.float32)
        found.append(Batch({"sparse": keys, "label.label": label}))
    return found


def job_of(staleness=0):
    job = JobSpec()
    job.data.label = "clicked"
    job.train.loss = "bce_with_logits"
    job.train.staleness = staleness
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 0.1
    return job


def by_hand(staleness=0):
    """Losses, tables and dense weights of a training in which nothing of ours is used."""
    top = build().top
    tables = {
        name: CountedTable(RATE, first_rows(name, seed), **RULES[name])
        for name, seed in (("item", 1), ("user", 2))
    }
    optimizer = torch.optim.SGD(top.parameters(), lr=0.1)
    losses, had = [], []
    for step, batch in enumerate(batches()):
        rows = {
            n: np.stack([t.rows.get(k, t.first(k)) for k in range(KEYS)]) for n, t in tables.items()
        }
        had.append((rows, [p.detach().clone() for p in top.parameters()]))
        rows, (weight, bias) = had[max(0, step - staleness)]
        item, user = (torch.tensor(rows[n], requires_grad=True) for n in ("item", "user"))
        weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        keys, label = torch.from_numpy(batch["sparse"]), torch.from_numpy(batch["label.label"])
        there = (keys[:, 2:6] != PAD).unsqueeze(2)
        bag = (item[keys[:, 2:6].clamp(min=0)] * there).sum(1)
        out = torch.cat([item[keys[:, :2]].sum(1), bag, user[keys[:, 6]]], 1) @ weight.T + bias
        loss = nn.functional.binary_cross_entropy_with_logits(out.squeeze(1), label)
        loss.backward()
        losses.append(loss.item())
        top.weight.grad, top.bias.grad = weight.grad, bias.grad
        optimizer.step()
        usage = {}
        for sample, clicked in zip(batch["sparse"][:, :6].tolist(), label.tolist(), strict=True):
            for key in sample:
                if key != PAD:
                    shows, clicks = usage.get(key, (0, 0))
                    usage[key] = shows + 1, clicks + clicked
        users = set(batch["sparse"][:, 6].tolist())
        tables["item"].push(step, {key: item.grad[key].numpy() for key in usage}, usage)
        tables["user"].push(step, {key: user.grad[key].numpy() for key in users}, {})
        for table in tables.values():
            table.end_step(step)
    return losses, tables, top


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("plan", PLANS)
def test_rows_come_and_go_as_counted(plan, staleness):
    losses, tables, top = by_hand(staleness)
    cuts, widths, micro_batches = plan
    pipeline = Pipeline(job_of(staleness), build, cuts, widths, batches(), micro_batches)
    workers = pipeline.run()
    for worker in workers[-1]:
        assert worker.executor.progress.losses == pytest.approx(losses, rel=1e-5)
    for worker in chain(*workers):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, top.state_dict()[name[4:]], rtol=2e-5, atol=2e-5)
    for name, table in tables.items():
        found = pipeline.client.tables[TABLES + name]
        assert sorted(found.keys().tolist()) == sorted(table.rows)
        assert found.counters["waiting"] == table.waiting
        for key, row in table.rows.items():
            np.testing.assert_allclose(found.pull([key])[0], row, rtol=2e-5, atol=2e-5)


def test_the_reference_has_all_that_can_happen():
    """Rows that are evicted, some of which come again; keys that wait, and that are forgotten."""
    seen = set()
    counted = CountedTable.shrink

    def shrink(self, step):
        before = dict(self.keys)
        counted(self, step)
        for key in before.keys() - self.keys.keys():
            seen.add("evicted" if before[key].row is not None else "forgotten")
            gone.add(key)
        seen.update("again" for key in self.rows if key in gone)

    gone: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountedTable, "shrink", shrink)
        _, tables, _ = by_hand()
    assert seen == {"evicted", "forgotten", "again"}
    assert all(table.waiting and table.rows for table in tables.values())
