"""Models of every shape through whole jobs: trained alike on any plan, saved as measured."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import heterps
from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.jobs import RESOURCES, write_workload

LAYERS = ("towers.pair", "first", "code", "head")
SPREAD = ["schedule.min_throughput=60000", *(f"schedule.pin.{name}=cpu" for name in LAYERS[:2])]
SPREAD_SECONDS = {
    "cpu": dict.fromkeys(LAYERS, 1e3) | dict.fromkeys(LAYERS[:2], 1e-2),
    "v100": 1e-3,
}
MODEL = """
import torch
from torch import nn

from heterps import SparseEmbedding


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = SparseEmbedding("rows", 4, optimizer="adam", betas=(0.8, 0.99), seed=1)
        self.right = SparseEmbedding("rows", 4, optimizer="adam", betas=(0.8, 0.99), seed=1)

    def forward(self, sparse):
        return torch.cat([self.left(sparse[:, 0]), self.right(sparse[:, 1])], 1)


class Drift(nn.Module):
    step = 0.0

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.training:
            self.step += self.rate
            return x
        return x + self.step


class Net(nn.Module):
    def __init__(self, drift):
        super().__init__()
        self.towers = nn.ModuleDict({"pair": Pair()})
        self.first = nn.Sequential(
            nn.Linear(9, 16, bias=False), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2)
        )
        self.code = nn.Linear(16, 6, bias=False)
        self.head = nn.Sequential(nn.Linear(16, 1), Drift(drift))
        self.idle = nn.Linear(2, 2)
        self.idle_rows = SparseEmbedding("idle", 4)

    def forward(self, sparse, dense):
        h = self.first(torch.cat([self.towers["pair"](sparse), dense], 1))
        return self.head(self.code(h) @ self.code.weight + h).squeeze(1)


def build(drift=0.0):
    return Net(drift)
"""
JOB = """\
name: shapes
model: {entry: model.py:build}
data: {train: train.csv, test: test.csv, label: y, dense: [x], sparse: [a, b]}
train: {epochs: 2, batch_size: 200, staleness: 0, clip: 0.5, rows: {warmup_steps: 3}}
servers: {shards: 1}
schedule: {method: greedy, resources: resources.yaml}
output: out
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    with (
        Cluster(folder, types={"cpu": 4}, emulate=["v100"]) as cluster,
        Client(cluster.address) as connected,
    ):
        yield connected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("job")
    draws = np.random.default_rng(0)
    for name, rows in (("train", 1010), ("test", 300)):
        a, b, x = draws.integers(0, 30, rows), draws.integers(0, 20, rows), draws.normal(size=rows)
        y = ((a % 3 == 0) ^ (x > 0)).astype(int)
        lines = [f"{y[i]},{x[i]:.4f},{a[i]},{b[i]}" for i in range(rows)]
        (made / f"{name}.csv").write_text("\n".join(["y,x,a,b", *lines]) + "\n")
    for name, text in (("model.py", MODEL), ("resources.yaml", RESOURCES), ("job.yaml", JOB)):
        (made / name).write_text(text)
    return made


def run(client, folder, *overrides, file="job.yaml", **seconds):
    workload = write_workload(folder / "workload.yaml", LAYERS, seconds, reference_batch=1024)
    job = load_job(folder / file, [f"output={folder}", f"schedule.workload={workload}", *overrides])
    job_id = client.submit(job)
    status = client.wait(job_id, timeout=300)
    return status, client.decision_message(job_id)


def losses(status):
    with open(Path(status.output) / "loss.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.exhaustive
def test_a_plan_changes_neither_dropout_nor_batch_norm_nor_what_is_shared(client, folder):
    alone, plan = run(client, folder, cpu=1e-2)
    assert [stage.units for stage in plan.stages] == [1]
    spread, plan = run(
        client,
        folder,
        *SPREAD,
        **SPREAD_SECONDS,
    )
    assert [(stage.type, stage.units > 1) for stage in plan.stages] == [
        ("cpu", True),
        ("v100", False),
    ]
    for status in (alone, spread):
        assert status.state == "succeeded", status.reason
    assert len(losses(alone)) == 12  # with the last partial batches
    np.testing.assert_allclose(losses(spread), losses(alone), rtol=1e-5)
    one, other = (heterps.load(status.output).state_dict() for status in (alone, spread))
    for name, tensor in one.items():
        np.testing.assert_allclose(other[name], tensor, rtol=1e-4, atol=1e-5, err_msg=name)
    assert spread.metrics == pytest.approx(alone.metrics, abs=1e-4)


def test_a_model_that_predicts_otherwise_when_loaded_fails_its_job(client, folder):
    status, _ = run(client, folder, "model.args={drift: 0.01}", cpu=1e-2)
    assert (status.state, status.end_reason) == ("failed", "user_error")
    assert "ReloadError" in status.error
    assert "300 of 300 samples differ" in status.error
    kept = Path(status.error.split()[1].rstrip(":"))
    assert heterps.load(kept).head[1].step == 0.0


@pytest.mark.parametrize(
    ("plan", "seconds"),
    [
        pytest.param([], {"cpu": 1e-2}, marks=pytest.mark.exhaustive),
        (SPREAD, SPREAD_SECONDS),
    ],
)
def test_it_does_so_too_where_nothing_is_held_out(client, folder, plan, seconds):
    (folder / "bare.yaml").write_text(JOB.replace("test: test.csv, ", ""))
    drifts = "model.args={drift: 0.01}"
    status, _ = run(client, folder, drifts, *plan, file="bare.yaml", **seconds)
    assert (status.state, status.end_reason) == ("failed", "user_error")
    assert "64 of 64 samples differ" in status.error
    status, _ = run(client, folder, *plan, file="bare.yaml", **seconds)
    assert status.state == "succeeded", status.reason
    assert not status.metrics


UNORDERED = """
import torch
from torch import nn

NAMES = "item", "price", "shop", "user", "place"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Linear(1, 3) for name in set(NAMES)})
        self.head = nn.Linear(15, 1)

    def forward(self, dense):
        towers = [tower(dense) for tower in self.towers.values()]
        return self.head(torch.cat(towers, 1).tanh()).squeeze(1)
"""


@pytest.mark.exhaustive
def test_a_model_in_the_order_of_a_set_is_not_opened_in_another_order(client, folder):
    (folder / "unordered.py").write_text(UNORDERED)
    job_id = client.submit(
        load_job(
            folder / "job.yaml",
            [f"output={folder}", "model.entry=unordered.py:Net", "data.sparse=[]"],
        )
    )
    status = client.wait(job_id, timeout=300)
    assert status.state == "succeeded", status.reason
    predict = "import sys, heterps; heterps.load(sys.argv[1]).predict(sys.argv[2])"
    argv = [sys.executable, "-c", predict, status.output, str(folder / "test.csv")]
    for seed in range(3):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        ran = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
        assert (ran.returncode == 0) is (seed == 0), ran.stderr
        assert seed == 0 or "computes something else of the same weights" in ran.stderr
