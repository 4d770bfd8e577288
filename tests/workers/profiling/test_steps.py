"""Real steps of one worker, beside what its layers take."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from protos.job_pb2 import JobSpec
from ps import LocalShards, ParameterClient
from ps.client.pull_many import PullMany
from workers.data import Dataset, GlobalBatches
from workers.profiling.steps import StepTimes, time_step

pytest.importorskip("ps.server")
PAUSE_S = 0.02
LATE_S = 0.1
LAYERS = ("rows", "head")
MODEL = f"""
import time
from torch import nn
from heterps import SparseEmbedding

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep({PAUSE_S})
        return super().forward(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = SparseEmbedding("rows", 4)
        self.head = Slow(4, 1)

    def forward(self, sparse):
        return self.head(self.rows(sparse).flatten(1)).squeeze(1)
"""


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    (tmp_path / "model.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    columns = {"s": rng.integers(0, 50, 640), "y": rng.integers(0, 2, 640).astype(np.float32)}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    job = JobSpec(name="net", directory=str(tmp_path))
    job.model.entry = "model.py:Net"
    job.data.path, job.data.train, job.data.label = ".", "train.parquet", "y"
    job.data.sparse.append("s")
    job.train.batch_size, job.train.epochs, job.train.loss = 64, 1, "bce_with_logits"
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 0.1
    return job


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_takes_its_micro_batches_and_more(job: JobSpec, staleness: int) -> None:
    job.train.staleness = staleness
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    with LocalShards(1) as shards:
        found = time_step(job, LAYERS, shards.addresses, batches, 3, 0.1, "cpu", "cpu")
    assert found.seconds >= 3 * PAUSE_S
    assert found.rows_s > 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_commit_and_pull_take_one_after_the_other_is_how_late_rows_are(
    job: JobSpec, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((ParameterClient, "commit_async"), (PullMany, "run")):
        monkeypatch.setattr(owner, name, _late(getattr(owner, name)))
    job.train.staleness = staleness
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    with LocalShards(1) as shards:
        found = time_step(job, LAYERS, shards.addresses, batches, 1, 0.1, "cpu", "cpu")
    assert found.rows_s >= 2 * LATE_S
    # Two steps under way share what is late; one has to wait for all of it.
    assert found.seconds >= (2 * LATE_S + PAUSE_S) / (staleness + 1)


def _late(method: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **named: Any) -> Any:
        time.sleep(LATE_S)
        return method(*args, **named)

    return late


CALLED = """
from pathlib import Path

class Called:
    def on_begin(self, state):
        Path(__file__).with_name("called").touch()

    def on_step(self, state):
        raise ValueError("no step of a training")
"""


def test_callbacks_and_loggers_hear_nothing_of_these_steps(job: JobSpec, tmp_path: Path) -> None:
    """They would have runs that nobody trained; and a profile has no folder for logs."""
    (tmp_path / "callbacks.py").write_text(CALLED)
    job.model.callbacks.append("callbacks.py:Called")
    job.train.loggers["tensorboard"].SetInParent()
    job.train.loggers["wandb"].SetInParent()
    job.data.valid, job.train.validate.metric = "train.parquet", "valid_auc"
    job.train.validate.every = job.train.checkpoint.every = "2 steps"
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    before = {*tmp_path.rglob("*")}
    with LocalShards(1) as shards:
        found = time_step(job, LAYERS, shards.addresses, batches, 1, 0.1, "cpu", "cpu")
    assert found.seconds >= PAUSE_S
    assert {path for path in tmp_path.rglob("*") if "__pycache__" not in str(path)} <= before
    assert job.model.callbacks
    assert {*job.train.loggers} == {"tensorboard", "wandb"}


def test_a_training_of_few_steps_tells_nothing(job: JobSpec) -> None:
    job.train.max_steps = 3
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    with LocalShards(1) as shards:
        found = time_step(job, LAYERS, shards.addresses, batches, 3, 0.1, "cpu", "cpu")
    assert found == StepTimes()


def test_a_training_that_diverges_tells_nothing(job: JobSpec) -> None:
    job.train.optimizer.learning_rate, job.train.loss = 1e30, "mse"
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    with LocalShards(1) as shards:
        found = time_step(job, LAYERS, shards.addresses, batches, 3, 0.1, "cpu", "cpu")
    assert found == StepTimes()
