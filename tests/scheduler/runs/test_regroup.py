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
    Recovery,
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
        *(pytest.param(*at, marks=pytest.mark.exhaustive) for at in ((0, 1), (1, 0), (1, 1))),
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


@pytest.mark.exhaustive
def test_one_death_after_another_before_a_step_is_over(service: Service, unfailed: str) -> None:
    name = "killed-again"
    spec = service.job(name)
    spec.retries = 3
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    for count, victim in enumerate(("stage 0 worker 1", "stage 1 worker 0", "stage 0 worker 0"), 1):
        pids = {label.partition(",")[0]: pid for label, pid in service.pids(name).items()}
        os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: len(service.recovered(name)) >= count, "it is replaced", pause_s=0.001)  # noqa: B023
    status = service.end(name)
    assert (status.end_reason, status.attempt, len(status.recoveries)) == (END_SUCCEEDED, 1, 3)
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_two_at_once(service: Service, unfailed: str) -> None:
    name = "two-killed"
    spec = service.job(name)
    spec.retries = 2
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    pids = service.pids(name)
    for victim in ("stage 0 worker 0", "stage 1 worker 1"):
        os.kill(pids[victim], signal.SIGKILL)
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_a_stage_that_is_gone_ends_the_attempt_which_names_it(
    service: Service, unfailed: str
) -> None:
    name = "stage-killed"
    spec = service.job(name)
    spec.retries = 1
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    pids = service.pids(name)
    for rank in range(2):
        os.kill(pids[f"stage 1 worker {rank}"], signal.SIGKILL)
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 2), status.reason
    (first,) = status.attempts
    assert first.end_reason == END_WORKER_CRASHED
    assert first.process in ("stage 1 worker 0", "stage 1 worker 1")
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_with_staleness_no_step_is_lost(service: Service) -> None:
    losses = []
    for name in ("stale", "stale-killed"):
        spec = service.job(name, **{"train.staleness": 1})
        spec.retries = 1
        service.submit(spec)
        if name == "stale-killed":
            wait_until(lambda: service.get("stale-killed").step >= 4, "it trains")
            os.kill(service.pids(name)["stage 0 worker 0"], signal.SIGKILL)
        status = service.end(name)
        assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, STEPS)
        lines = (service.directory / "out" / name / "loss.csv").read_text().splitlines()[1:]
        losses.append([float(line.split(",")[1]) for line in lines])
    assert len(losses[0]) == len(losses[1]) == STEPS
    # The steps that were under way see rows that are fresher by a step.
    np.testing.assert_allclose(losses[1], losses[0], atol=0.02)


def test_each_time_takes_one_of_the_jobs_retries(service: Service) -> None:
    name = "not-forgiven"
    service.submit(service.job(name))
    wait_until(lambda: service.get(name).step >= 2, "it trains")
    os.kill(service.pids(name)["stage 1 worker 0"], signal.SIGKILL)
    status = service.end(name)
    assert (status.state, status.end_reason) == (FAILED, END_WORKER_CRASHED)
    assert status.process == "stage 1 worker 0"
