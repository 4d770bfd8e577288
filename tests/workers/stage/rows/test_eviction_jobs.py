"""Rows that come and go in whole jobs, workers and shards killed meanwhile, against counting."""

import os
import signal
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from heterps import Admission, Eviction, Score
from protos.job_pb2 import JobSpec
from ps import LocalShards, LocalTable
from tests.ps.counted import CountedTable
from tests.workers.stage.cuts.test_killed import JOB, LIMIT_S, attempt, heard, newest, to_the_end
from workers.data import Dataset, GlobalBatches
from workers.model.code.entry import job_model

__all__ = ["heard"]  # a fixture

STEPS, RATE, DIM = 40, 0.5, 4
SCORE = Score(non_click=0.5, click=1.5, decay=0.75)
ADMISSION = Admission(kind="score", threshold=1.0)
EVICTION = Eviction(ttl_steps=9, min_score=0.6, every_steps=4)
MODEL = """
import time

from torch import nn

from heterps import SparseEmbedding


class Wide(nn.Linear):
    def forward(self, x):
        if self.training:
            time.sleep(0.02)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = SparseEmbedding("rows", 4, scale=1.0, seed=3)
        self.tower = nn.Sequential(nn.Flatten(), nn.Linear(8, 1))
        self.wide = Wide(1, 1)

    def forward(self, sparse, dense):
        return (self.tower(self.embedding(sparse)) + self.wide(dense)).squeeze(-1)
"""


def job_in(folder):
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    random = np.random.default_rng(5)
    a, b = random.zipf(1.4, (2, 800)) % 300
    lines = zip(
        (a + b + random.integers(0, 3, 800)) % 2, a, b, random.normal(size=800), strict=True
    )
    text = "".join(f"{y},{a},{b},{x:.3f}\n" for y, a, b, x in lines)
    (folder / "train.csv").write_text("y,a,b,x\n" + text)
    job = JobSpec(name=JOB, directory=str(folder))
    job.model.entry = "model.py:Model"
    job.data.path, job.data.train, job.data.label = str(folder), "train.csv", "y"
    job.data.dense.append("x")
    job.data.sparse.extend(["a", "b"])
    job.train.epochs, job.train.batch_size, job.train.max_steps = 9, 48, STEPS
    job.train.loss = "bce_with_logits"
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 0.1
    job.train.checkpoint.every, job.train.checkpoint.keep = "3 steps", 3
    job.servers.durability = "log"
    table = job.tables["rows"]
    table.optimizer, table.learning_rate, table.clicks = "sgd", RATE, "y"
    table.score.non_click, table.score.click, table.score.decay = 0.5, 1.5, 0.75
    table.admission.kind, table.admission.threshold = "score", 1.0
    table.eviction.ttl_steps, table.eviction.min_score = 9, 0.6
    table.eviction.every_steps = 4
    return job


def by_hand(job):
    """Losses, dense weights, and the table of a training by one process of plain PyTorch."""
    model = job_model(job)
    options = model.embedding.spec.table_options()
    fresh = LocalTable.create("rows", **{**options, "admission": None})
    table = CountedTable(RATE, lambda key: fresh.pull([key], True)[0], EVICTION, SCORE, ADMISSION)
    dense = nn.ModuleDict({"tower": model.tower, "wide": nn.Linear(1, 1)})
    dense["wide"].load_state_dict(model.wide.state_dict())
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    batches, losses = GlobalBatches.of(job, Dataset.of(job, "train")), []
    for step in range(STEPS):
        batch = batches.read(step, 0, batches.samples(step))
        keys, inverse = np.unique(
            batch["sparse"].astype(np.int64).view(np.uint64), return_inverse=True
        )
        held = table.rows
        rows = torch.tensor(
            np.stack([held[k] if k in held else table.first(k) for k in keys.tolist()]),
            requires_grad=True,
        )
        label, x = (torch.from_numpy(batch[name]) for name in ("label.label", "dense"))
        looked_up = rows[torch.from_numpy(inverse.reshape(-1, 2))]
        out = (dense["tower"](looked_up) + dense["wide"](x)).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(out, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        usage = {}
        for sample, clicked in zip(inverse.reshape(-1, 2), label.tolist(), strict=True):
            for key in keys[sample].tolist():
                shows, clicks = usage.get(key, (0, 0))
                usage[key] = shows + 1, clicks + clicked
        gradients = dict(zip(keys.tolist(), rows.grad.numpy(), strict=True))
        table.push(step, gradients, usage)
        table.end_step(step)
    return losses, dense.state_dict(), table


def check(job, folder):
    losses, dense, table = by_hand(job)
    found = [
        float(line.split(",")[1]) for line in (folder / "model/loss.csv").read_text().split()[1:]
    ]
    assert found == pytest.approx(losses, rel=1e-4, abs=1e-5)
    for name, value in load_file(folder / "model/dense.safetensors").items():
        torch.testing.assert_close(value, dense[name], rtol=1e-4, atol=1e-5)
    (saved,) = LocalTable.load_checkpoint(folder / "model/tables").values()
    assert sorted(saved.keys().tolist()) == sorted(table.rows)
    assert saved.counters["waiting"] == table.waiting
    assert 10 < len(table.rows) < 200
    assert table.waiting > 10
    for key, row in table.rows.items():
        np.testing.assert_allclose(saved.pull([key])[0], row, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("widths", [(2, 1), pytest.param((1,), marks=pytest.mark.exhaustive)])
def test_a_job_holds_the_rows_that_are_counted(tmp_path, heard, widths):
    folder = tmp_path / "job"
    with ExitStack() as stack:
        shards = stack.enter_context(LocalShards(2, supervised=True))
        job = job_in(folder)
        to_the_end(attempt(stack, folder, shards, heard, job, widths, 1, ""))
    check(job, folder)


@pytest.mark.exhaustive
def test_workers_and_shards_are_killed_and_the_rows_are_those_that_are_counted(tmp_path, heard):
    folder, resume, number = tmp_path / "job", "", 0
    with ExitStack() as stack:
        shards = stack.enter_context(
            LocalShards(2, supervised=True, options=("--fold", "1"), directory=tmp_path / "shards")
        )
        job = job_in(folder)
        for number in range(1, 4):
            children = attempt(stack, folder, shards, heard, job, (2, 1), number, resume)
            for kill_a_shard in (True, False):
                before, limit = set(heard.cuts()), time.monotonic() + LIMIT_S
                while not set(heard.cuts()) - before:
                    assert time.monotonic() < limit, "takes no cut"
                    assert all(child.poll() is None for child in children)
                    time.sleep(0.02)
                if kill_a_shard:
                    os.kill(shards.processes[number % 2].pid, signal.SIGKILL)
            for child in children:
                child.process.send_signal(signal.SIGKILL)
            for child in children:
                child.process.wait(LIMIT_S)
            resume = newest(folder / "model.cuts")
            assert resume
        to_the_end(attempt(stack, folder, shards, heard, job, (2, 1), number + 1, resume))
    check(job, folder)
