"""A job of two stages of two workers, on a cluster that tests of what becomes of it share."""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_SUCCEEDED,
    JobRequest,
    JobStatus,
    ListNodesRequest,
    Recovery,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from ps import LocalTable
from tests.cluster import Roles
from workers.data import Dataset

STEPS, BATCH = 24, 32
_MODEL = """
import os
import time

from torch import nn

from heterps import SparseEmbedding


class Slow(nn.Linear):
    def forward(self, x):
        if self.training:
            time.sleep(0.02)
            while os.path.exists("HELD"):
                time.sleep(0.01)
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
        prepare(directory)
        self._roles = roles
        self._scheduler = roles.scheduler()
        for kind, units in (("cpu", 1), ("first", 3), ("last", 2)):
            roles.node(self._scheduler, kind, "--units", str(units), "--emulate")
        self.stub: SchedulerStub = roles.stub(self._scheduler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step ends meanwhile."""
        (self.directory / "held").touch()
        yield
        (self.directory / "held").unlink()

    def replace_scheduler(self) -> None:
        """Kill it, and start another one on the same Redis."""
        os.kill(self._scheduler.pid, signal.SIGKILL)
        self._scheduler = self._roles.scheduler()
        self.stub = self._roles.stub(self._scheduler)

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

    def recovered(self, job_id: str) -> list[Recovery]:
        """When its workers were replaced; it has not ended."""
        status = self.get(job_id)
        assert not status.end_reason, status.reason
        return list(status.recoveries)

    def pids(self, job_id: str) -> dict[str, int]:
        """The running processes of a job, by label."""
        nodes = self.stub.ListNodes(ListNodesRequest(), timeout=20).nodes
        found = [p for node in nodes for p in node.processes if p.job_id == job_id and p.running]
        return {process.label: process.pid for process in found}

    def losses(self, job_id: str) -> list[float]:
        """Of each step, as they are kept."""
        lines = (self.directory / "out" / job_id / "loss.csv").read_text().splitlines()[1:]
        assert len(lines) == STEPS
        return [float(line.split(",")[1]) for line in lines]

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


def prepare(directory: Path) -> None:
    """Write the job, its model and its data."""
    (directory / "model.py").write_text(_MODEL.replace("HELD", str(directory / "held")))
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


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("survivors")
    with Roles(directory) as roles:
        yield Service(roles, directory)


@pytest.fixture(scope="session")
def unfailed(service: Service) -> str:
    """What the job comes to where nothing happens to it."""
    status = service.end(service.submit(service.job("unfailed")))
    assert status.end_reason == END_SUCCEEDED, status.reason
    return service.digest("unfailed")
