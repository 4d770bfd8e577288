"""Units of several cores: one worker computes on all of them, and trains the same model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import heterps
from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.jobs import write_workload

_MODEL = """
import os
import time
from pathlib import Path

import torch
from torch import nn

from heterps import SparseEmbedding


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds[torch.get_num_threads() - 1])
        return x + 0.0


class Net(nn.Module):
    def __init__(self, told, slow=(0.0, 0.0)):
        super().__init__()
        self.told = Path(told)
        self.embedding = SparseEmbedding("rows", 8, optimizer="adagrad", learning_rate=0.1)
        self.slow = Slow(slow)
        self.tower = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, sparse):
        (self.told / str(os.getpid())).write_text(str(torch.get_num_threads()))
        return self.tower(self.slow(self.embedding(sparse).flatten(1))).squeeze(1)
"""


def _data(folder: Path) -> None:
    (folder / "model.py").write_text(_MODEL)
    random = np.random.default_rng(0)
    keys = random.integers(0, 50, (4096, 4))
    rows = np.column_stack([(keys.sum(1) % 2), keys])
    lines = ("y,a,b,c,d", *(",".join(map(str, row)) for row in rows))
    (folder / "train.csv").write_text("\n".join(lines) + "\n")


def _job(folder: Path, kind: str, **schedule: str) -> Path:
    told = folder / f"told-{kind}"
    told.mkdir(exist_ok=True)
    one = {"name": "cpu1", "price_per_hour": 0.04, "limit": 2, "memory_bytes": 4e9}
    two = {"name": "cpu2", "price_per_hour": 0.08, "limit": 1, "memory_bytes": 8e9, "threads": 2}
    # Without data sheets: each is measured where it is, and neither is estimated by the other.
    (folder / "resources.json").write_text(json.dumps({"types": [one, two]}))
    job = {
        "name": f"on {kind}",
        "model": {"entry": "model.py:Net", "args": {"told": str(told)}},
        "data": {"train": "train.csv", "label": "y", "sparse": ["a", "b", "c", "d"]},
        "train": {"epochs": 1, "batch_size": 512, "staleness": 0, "micro_batches": 1, "seed": 3},
        "servers": {"shards": 1},
        "schedule": {
            "method": "exact",
            "resources": "resources.json",
            "pin": {"embedding": kind, "slow": kind, "tower": kind},
            "elastic": {"min": 1, "max": 1},
            **schedule,
        },
    }
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(job))
    return path


def test_a_worker_has_the_threads_of_its_type_and_trains_the_same(tmp_path: Path) -> None:
    _data(tmp_path)
    states, losses = [], []
    layers, seconds = ("embedding", "slow", "tower"), {"cpu1": 1e-3, "cpu2": 1e-3}
    costs = write_workload(tmp_path / "costs.json", layers, seconds, ps_type="cpu1")
    costs.write_text(json.dumps({**json.loads(costs.read_text()), "threads": {"cpu2": 2}}))
    with Cluster(tmp_path / "cluster", types={"cpu1": 2, "cpu2": 1}) as cluster:
        client = Client(cluster.address)
        for kind, threads, given in (
            ("cpu1", 0, {}),
            ("cpu2", 2, {"workload": str(costs)}),
            ("cpu2", 2, {"workload": str(costs)}),
        ):
            job = client.submit(load_job(_job(tmp_path, kind, **given)))
            ended = client.wait(job, timeout=240)
            assert ended.state == "succeeded", ended.reason
            told = sorted((tmp_path / f"told-{kind}").iterdir(), key=lambda p: p.stat().st_mtime)
            assert told[-1].read_text() == str(threads or 1)  # of the worker, after all profiles
            assert given or {path.read_text() for path in told[:-1]} == {"1", "2"}
            stages = client.decision(job).stages
            assert {(s.type, s.units, s.threads) for s in stages} == {(kind, 1, threads)}
            client.get(job, tmp_path / f"model-{job}")
            states.append(heterps.load(tmp_path / f"model-{job}").state_dict())
            (steps,) = (tmp_path / f"model-{job}").rglob("loss.csv")
            losses.append(np.loadtxt(steps, delimiter=",", skiprows=1))
    one, two, again = states
    assert one.keys() == two.keys() == again.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(two[name], again[name])
    assert len(losses[0]) == 8
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_array_equal(losses[1], losses[2])


def test_the_plan_says_on_how_many_cores_a_worker_computes_where_that_is_open(
    tmp_path: Path,
) -> None:
    _data(tmp_path)
    kind = {"name": "cpu", "price_per_hour": 0.04, "limit": 4, "memory_bytes": 4e9}
    types = {"types": [kind | {"threads_any": [1, 2]}]}
    (tmp_path / "resources.json").write_text(json.dumps(types))
    with Cluster(tmp_path / "cluster", types={"cpu": 4}) as cluster:
        client = Client(cluster.address)
        # The worker and the server take two units each, of one core or two.
        for slow, threads in (((0.1, 0.025), 2), ((0.025, 0.025), 1)):
            told = tmp_path / f"told-{threads}"
            told.mkdir()
            job = {
                "name": "open",
                "model": {"entry": "model.py:Net", "args": {"told": str(told), "slow": slow}},
                "data": {"train": "train.csv", "label": "y", "sparse": ["a", "b", "c", "d"]},
                "train": {"epochs": 1, "batch_size": 512, "staleness": 0, "micro_batches": 1},
                "servers": {"shards": 1},
                "schedule": {"method": "exact", "resources": "resources.json"},
            }
            (tmp_path / "job.json").write_text(json.dumps(job))
            name = client.submit(load_job(tmp_path / "job.json"))
            used = set()
            while not (status := client.status(name)).ended_at:
                if status.state == "running":
                    used |= {node.units_used for node in client.nodes() if node.type == "cpu"}
            assert status.state == "succeeded", status.reason
            decision = client.decision(name)
            several = threads if threads > 1 else 0
            assert [(s.type, s.units, s.threads) for s in decision.stages] == [("cpu", 1, several)]
            assert decision.plan.ps_units == 1
            assert max(used) == 2 * threads  # as the node declares them
            assert decision.plan.price_per_hour == pytest.approx(2 * threads * 0.04)
            assert decision.resources.types[0].limit == 4 // threads
            written = sorted(told.iterdir(), key=lambda path: path.stat().st_mtime)
            assert written[-1].read_text() == str(threads)
            assert {path.read_text() for path in written[:-1]} == {"1", "2"}  # profiles
            assert any(
                line.startswith(f"Each worker on cpu computes on {threads} core")
                for line in decision.reasons
            )
        assert {node.units_used for node in client.nodes()} == {0}
