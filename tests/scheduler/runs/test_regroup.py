"""Workers that are killed are replaced while the others go on, and the result is the same."""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_SUCCEEDED,
    END_WORKER_CRASHED,
    FAILED,
    JobRequest,
    JobStatus,
    ListNodesRequest,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from ps import LocalTable
from tests.cluster import Roles
from tests.waiting import wait_until
from workers.data import Dataset

pytest.importorskip("workers.stage")
STEPS, BATCH = 24, 32
_MODEL = """
import time

from torch import nn

from heterps import SparseEmbedding


class Slow(nn.Linear):
    def forward(self, x):
        if self.training:
            time.sleep(0.02)
        return super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = SparseEmbedding("rows", 4, optimizer="adam", learning_rate=0.05)
        self.tower = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU())
        self.head = Slow(8, 1)

    def forward(self, sparse):
        return self.head(self.tower(self.embedding(sparse))).squeeze(-1)
"""
_JOB = """
name: survivor
model: {entry: model.py:Model}
data: {train: train.csv, label: y, sparse: [a, b]}
train:
  epochs: 100
  max_steps: STEPS
  batch_size: BATCH
  micro_batches: 4
  staleness: 0
  loss: bce_with_logits
  optimizer: {name: adam, learning_rate: 0.01, warmup_steps: 5, schedule: cosine}
  clip: 0.5
servers: {shards: 2}
schedule:
  method: exact
  workload: workload.json
  resources: resources.json
  pin: {embedding: first, tower: first, head: last}
  min_throughput: 74
output: out
"""


class Service:
    """A scheduler, a node of two units of each of two types, and one for the shards."""

    def __init__(self, roles: Roles, directory: Path) -> None:
        self.directory = directory
        scheduler = roles.scheduler()
        for kind, units in (("cpu", 1), ("first", 3), ("last", 2)):
            roles.node(scheduler, kind, "--units", str(units), "--emulate")
        self.stub: SchedulerStub = roles.stub(scheduler)

    def job(self, name: str, **overrides: object) -> JobSpec:
        spec = load_job(self.directory / "job.yaml", overrides)
        spec.name = name
        return spec

    def submit(self, spec: JobSpec) -> str:
        self.stub.Submit(SubmitRequest(job_id=spec.name, job=spec), timeout=20)
        return spec.name

    def get(self, job_id: str) -> JobStatus:
        return self.stub.GetJob(JobRequest(job_id=job_id), timeout=20)

    def end(self, job_id: str) -> JobStatus:
        return list(self.stub.WatchJob(JobRequest(job_id=job_id), timeout=300))[-1]

    def recovered(self, job_id: str) -> bool:
        """Whether some of its workers were replaced; it has not ended."""
        status = self.get(job_id)
        assert not status.end_reason, status.reason
        return bool(status.recoveries)

    def pids(self, job_id: str) -> dict[str, int]:
        """The running processes of a job, by label."""
        nodes = self.stub.ListNodes(ListNodesRequest(), timeout=20).nodes
        found = [p for node in nodes for p in node.processes if p.job_id == job_id and p.running]
        return {process.label: process.pid for process in found}

    def digest(self, job_id: str) -> str:
        """Of a job's weights and rows, to the bit."""
        folder = self.directory / "out" / job_id
        tables = LocalTable.load_checkpoint(folder / "tables")
        (table,) = tables.values()
        keys = np.unique(np.asarray(Dataset.of(self.job("any"), "train").encoded().sparse))
        rows = table.pull(keys)
        assert len(keys) > 40
        assert np.abs(rows).max() > 0.02  # they have learned
        weights = (folder / "dense.safetensors").read_bytes()
        return hashlib.sha256(weights + rows.tobytes()).hexdigest()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("regroup")
    (directory / "model.py").write_text(_MODEL)
    (directory / "job.yaml").write_text(
        _JOB.replace("STEPS", str(STEPS)).replace("BATCH", str(BATCH))
    )
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(2)},{rng.integers(40)},{rng.integers(40)}" for _ in range(300)]
    (directory / "train.csv").write_text("\n".join(["y,a,b", *lines]) + "\n")
    (directory / ".heterpsignore").write_text("*\n!model.py\n")
    cost = {
        "sync_s": 1e-9,
        "transfer_s": 1e-9,
        "parallel_compute": 1.0,
        "parallel_sync": 1.0,
        "memory_bytes": 1e3,
    }
    layers = {"embedding": ("first", 0.09), "tower": ("first", 0.09), "head": ("last", 0.18)}
    workload = {
        "name": "survivor",
        "reference_batch": 10,
        "samples": 10_000,
        "ps_type": "cpu",
        "ps_core_s": 1e-6,
        "layers": [
            {"name": name, "kind": "dense", "cost": {kind: cost | {"compute_s": seconds}}}
            for name, (kind, seconds) in layers.items()
        ],
    }
    (directory / "workload.json").write_text(json.dumps(workload))
    types = [
        {"name": name, "price_per_hour": 1.0, "limit": limit, "memory_bytes": 1e9, "device": "cpu"}
        for name, limit in (("cpu", 1), ("first", 2), ("last", 2))
    ]
    (directory / "resources.json").write_text(json.dumps({"types": types}))
    with Roles(directory) as roles:
        yield Service(roles, directory)


@pytest.fixture(scope="module")
def unfailed(service: Service) -> str:
    """What the job comes to where nothing happens to it."""
    status = service.end(service.submit(service.job("unfailed")))
    assert status.end_reason == END_SUCCEEDED, status.reason
    return service.digest("unfailed")


@pytest.mark.parametrize(
    ("stage", "rank"),
    [
        (0, 0),
        (1, 1),
        pytest.param(0, 1, marks=pytest.mark.exhaustive),
        pytest.param(1, 0, marks=pytest.mark.exhaustive),
    ],
)
def test_the_others_keep_their_processes_and_the_result_is_the_same_to_the_bit(
    service: Service, unfailed: str, stage: int, rank: int
) -> None:
    name = f"killed-{stage}-{rank}"
    spec = service.job(name)
    spec.retries = 1
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    before = service.pids(name)
    victim = f"stage {stage} worker {rank}"
    os.kill(before.pop(victim), signal.SIGKILL)
    wait_until(lambda: service.recovered(name), "it is replaced")
    after = service.pids(name)
    assert {label: after.get(label) for label in before} == before
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, STEPS)
    (recovery,) = status.recoveries
    assert list(recovery.lost) == [victim]
    assert 4 <= recovery.step < STEPS
    assert service.digest(name) == unfailed


def test_each_time_takes_one_of_the_jobs_retries(service: Service) -> None:
    name = "not-forgiven"
    service.submit(service.job(name))
    wait_until(lambda: service.get(name).step >= 2, "it trains")
    os.kill(service.pids(name)["stage 1 worker 0"], signal.SIGKILL)
    status = service.end(name)
    assert (status.state, status.end_reason) == (FAILED, END_WORKER_CRASHED)
    assert status.process == "stage 1 worker 0"
