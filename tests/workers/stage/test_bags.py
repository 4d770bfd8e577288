"""Bags, padding and attention over histories, on any plan, against plain PyTorch."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from heterps import PAD, Admission, SparseEmbedding
from protos.job_pb2 import JobSpec
from ps import LocalTable
from tests.workers.stage.in_process import TABLES, Pipeline
from workers.data.columns.arrays import Batch

KEYS, DIM, LENGTH, SIZES = 9, 4, 5, (16, 16, 5)
PLANS = [([5], [1], 1), ([5], [3], 4), ([1, 5], [2, 1], 3), ([1, 3, 5], [2, 3, 1], 5)]
ROWS_RATE, RATE = 0.5, 0.05


class Attention(nn.Module):
    """What of a history [B, L, D] is like a target [B, D]."""

    def forward(self, target, rows, history):
        there = history != PAD
        scores = (rows * target.unsqueeze(1)).sum(2).masked_fill(~there, -1e9)
        weights = scores.softmax(1) * there
        return (weights.unsqueeze(2) * rows).sum(1)


class Net(nn.Module):
    """A target, its user's history by attention, and two bags of the history."""

    def __init__(self, item, mean, biggest):
        super().__init__()
        self.item, self.attention, self.mean, self.biggest = item, Attention(), mean, biggest
        self.top = nn.Linear(3 * DIM, 1)

    def forward(self, sparse):
        history = sparse[:, 1:]
        liked = self.attention(self.item(sparse[:, 0]), self.item(history), history)
        return self.top(torch.cat([liked, self.mean(history), self.biggest(history)], 1))


def build(**options):
    torch.manual_seed(2)
    given = {"optimizer": "sgd", "learning_rate": ROWS_RATE, "scale": 1.0, **options}
    return Net(
        SparseEmbedding("item", DIM, seed=1, **given),
        SparseEmbedding("mean", DIM, seed=2, pooling="mean", **given),
        SparseEmbedding("biggest", DIM, seed=3, pooling="max", **given),
    )


class Plain(nn.Module):
    """An embedding of torch for keys of which some are PAD."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, keys):
        return self.table(torch.where(keys == PAD, KEYS, keys))


def plain():
    """The same, of torch alone, from the same first rows."""
    net = build()
    for name in ("item", "mean", "biggest"):
        spec, pooling = getattr(net, name).spec, getattr(net, name).pooling
        rows = LocalTable.create(spec.table, **spec.table_options()).pull(np.arange(KEYS), True)
        made = nn.Embedding(KEYS + 1, DIM, padding_idx=KEYS)
        if pooling:
            made = nn.EmbeddingBag(KEYS + 1, DIM, mode=pooling, padding_idx=KEYS)
        with torch.no_grad():
            made.weight[:KEYS] = torch.from_numpy(rows)
        setattr(net, name, Plain(made))
    return net


def batches():
    random = np.random.default_rng(0)
    found = []
    for size in SIZES:
        keys = random.integers(0, KEYS, (size, 1 + LENGTH))
        length = random.integers(0, LENGTH + 1, (size, 1))
        length[: size // 2] = 0  # whole micro-batches without any history
        keys[:, 1:][np.arange(LENGTH) >= length] = PAD
        label = random.integers(0, 2, size).astype(np.float32)
        found.append(Batch({"sparse": keys, "label.label": label}))
    return found


def job_of():
    job = JobSpec()
    job.train.loss = "bce_with_logits"
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", RATE
    return job


@pytest.mark.parametrize("plan", PLANS)
def test_bags_and_histories_train_as_plain_pytorch(plan):
    net, losses = plain(), []
    rows = [p for n, p in net.named_parameters() if ".table." in n]
    dense = [p for n, p in net.named_parameters() if ".table." not in n]
    optimizer = torch.optim.SGD([{"params": rows, "lr": ROWS_RATE}, {"params": dense, "lr": RATE}])
    for batch in batches():
        optimizer.zero_grad()
        out = net(torch.from_numpy(batch["sparse"])).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(
            out, torch.from_numpy(batch["label.label"])
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    cuts, widths, micro_batches = plan
    pipeline = Pipeline(job_of(), build, cuts, widths, batches(), micro_batches)
    workers = pipeline.run()
    for worker in workers[-1]:
        assert worker.executor.progress.losses == pytest.approx(losses, rel=1e-5)
    for worker in chain(*workers):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, net.state_dict()[name], rtol=2e-5, atol=2e-5)
    for name in ("item", "mean", "biggest"):
        found = torch.from_numpy(pipeline.client.tables[TABLES + name].pull(np.arange(KEYS)))
        expected = getattr(net, name).table.weight[:KEYS].detach()
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    asked = {key for _, _, keys in pipeline.client.calls for key in keys}
    assert asked == set(range(KEYS))


def test_the_options_of_a_table_are_those_that_it_trains_with():
    pipeline = Pipeline(
        job_of(),
        lambda: build(admission=Admission(kind="count", threshold=1000)),
        *([5], [1], batches(), 2),
    )
    pipeline.run()
    for name in ("item", "mean", "biggest"):
        assert len(pipeline.client.tables[TABLES + name]) == 0
