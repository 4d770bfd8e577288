"""Layers that one worker computes alone, as their forward changes a buffer: planned and trained."""

import json
from pathlib import Path

import numpy as np
import torch

import heterps
from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.jobs import write_workload

_MODEL = """
import time

import torch
from torch import nn


class Slow(nn.Linear):
    def forward(self, x):
        if self.training:
            time.sleep(0.001 * len(x))
        return super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = Slow(4, 8)
        self.middle = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.top = nn.Linear(8, 1)

    def forward(self, dense):
        return self.top(torch.tanh(self.middle(torch.tanh(self.bottom(dense))))).squeeze(1)
"""


def test_others_have_several_workers_and_it_trains_as_on_one(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(512, 4))
    lines = [f"{int(row.sum() > 0)},{','.join(f'{v:.5f}' for v in row)}" for row in x]
    (tmp_path / "model.py").write_text(_MODEL)
    (tmp_path / "train.csv").write_text("\n".join(["y,a,b,c,d", *lines]) + "\n")
    states, losses = [], []
    with Cluster(tmp_path / "cluster", types={"cpu1": 3, "cpu2": 2}) as cluster:
        client = Client(cluster.address)
        for number, (types, workers) in enumerate(((("cpu1",), 1), (("cpu1", "cpu2"), 3))):
            kinds = [
                {"name": name, "price_per_hour": 0.04, "limit": 3, "memory_bytes": 4e9}
                for name in types
            ]
            job = {
                "name": f"on {workers}",
                "model": {"entry": "model.py:Net"},
                "data": {"train": "train.csv", "label": "y", "dense": ["a", "b", "c", "d"]},
                "train": {"epochs": 2, "batch_size": 60, "staleness": 0, "micro_batches": 4},
                "schedule": {
                    "method": "exact",
                    "resources": f"resources-{number}.json",
                    "workload": f"costs-{number}.json",
                    "pin": {"bottom": types[-1], "middle": types[0], "top": types[0]},
                    "elastic": {"min": workers, "max": workers},
                },
            }
            (tmp_path / f"resources-{number}.json").write_text(json.dumps({"types": kinds}))
            write_workload(
                tmp_path / f"costs-{number}.json",
                ("bottom", "middle", "top"),
                {kind: {"bottom": 6e-2, "middle": 1e-3, "top": 1e-3} for kind in types},
                ps_type="cpu1",
                parallel_compute=1.0,
            )
            (tmp_path / "job.json").write_text(json.dumps(job))
            name = client.submit(load_job(tmp_path / "job.json"))
            ended = client.wait(name, timeout=240)
            assert ended.state == "succeeded", ended.reason
            decision = client.decision(name)
            assert sum(stage.units for stage in decision.stages) == workers
            (middle,) = (s for s in decision.stages if s.first <= 1 <= s.last)
            assert middle.units == 1
            client.get(name, tmp_path / f"model-{number}")
            states.append(heterps.load(tmp_path / f"model-{number}").state_dict())
            (steps,) = (tmp_path / f"model-{number}").rglob("loss.csv")
            losses.append(np.loadtxt(steps, delimiter=",", skiprows=1))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-5, atol=1e-6, msg=key)


def _write(folder: Path, model: str, limit: int, **schedule: object) -> None:
    """A job of a few rows, and one type of so many units."""
    (folder / "model.py").write_text(model)
    (folder / "train.csv").write_text("y,a,b,c,d\n" + 64 * "0,1,2,3,4\n1,4,3,2,1\n")
    kind = {"name": "cpu", "price_per_hour": 0.04, "limit": limit, "memory_bytes": 4e9}
    (folder / "resources.json").write_text(json.dumps({"types": [kind]}))
    job = {
        "name": "small",
        "model": {"entry": "model.py:Net"},
        "data": {"train": "train.csv", "label": "y", "dense": ["a", "b", "c", "d"]},
        "train": {"epochs": 1, "batch_size": 32},
        "schedule": {"resources": "resources.json", **schedule},
    }
    (folder / "job.json").write_text(json.dumps(job))


def test_of_one_type_alone_all_layers_are_with_it(tmp_path: Path) -> None:
    _write(tmp_path, _MODEL, 3, elastic={"min": 2, "max": 3})
    given = write_workload(tmp_path / "costs.json", ["bottom", "middle", "top"], {"cpu": 1e-2})
    with Cluster(tmp_path / "cluster", types={"cpu": 3}) as cluster:
        client = Client(cluster.address)
        for overrides in ([], [f"schedule.workload={given}"]):
            name = client.submit(load_job(tmp_path / "job.json", overrides))
            ended = client.wait(name, timeout=240)
            assert ended.state == "failed"
            assert "schedule.elastic.min: 2, and no plan with so many units" in ended.reason
            assert "'middle' changes a buffer in forward, for which a stage has one" in ended.reason


_COUNTED = """
import time

import torch
from torch import nn


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.calls += 1
        return x - self.mean.clone()


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.002)
        return super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        normed = torch.nn.utils.parametrizations.spectral_norm
        self.bottom = nn.Sequential(normed(nn.Linear(4, 8)), Counted())
        self.top = Slow(8, 1)

    def forward(self, dense):
        return self.top(torch.tanh(self.bottom(dense))).squeeze(1)
"""


def test_a_job_goes_on_from_any_step_with_the_buffers_of_that_step(tmp_path: Path) -> None:
    """Though forwards of the step after it had begun when it was kept."""
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 4))
    lines = [f"{int(row.sum() > 0)},{','.join(f'{v:.5f}' for v in row)}" for row in x]
    (tmp_path / "model.py").write_text(_COUNTED)
    (tmp_path / "train.csv").write_text("\n".join(["y,a,b,c,d", *lines]) + "\n")
    kinds = [
        {"name": name, "price_per_hour": 0.04, "limit": 2, "memory_bytes": 4e9}
        for name in ("cpu1", "cpu2")
    ]
    job = {
        "name": "kept",
        "model": {"entry": "model.py:Net"},
        "data": {"train": "train.csv", "label": "y", "dense": ["a", "b", "c", "d"]},
        "train": {
            "epochs": 1,
            "batch_size": 30,
            "staleness": 1,
            "micro_batches": 3,
            "optimizer": {"name": "adam", "learning_rate": 0.05},
            "checkpoint": {"every": "3 steps", "keep": 3},
        },
        "schedule": {
            "method": "exact",
            "resources": "resources.json",
            "workload": "costs.json",
            "pin": {"bottom": "cpu1", "top": "cpu2"},
        },
    }
    seconds = {"cpu1": 1e-2, "cpu2": 1e-2}
    write_workload(tmp_path / "costs.json", ("bottom", "top"), seconds, ps_type="cpu1")
    (tmp_path / "resources.json").write_text(json.dumps({"types": kinds}))
    (tmp_path / "job.json").write_text(json.dumps(job))
    with Cluster(tmp_path / "cluster", types={"cpu1": 2, "cpu2": 1}) as cluster:
        client = Client(cluster.address)

        def trained(name: str) -> dict[str, torch.Tensor]:
            ended = client.wait(name, timeout=240)
            assert ended.state == "succeeded", ended.reason
            client.get(name, tmp_path / name)
            found: dict[str, torch.Tensor] = heterps.load(tmp_path / name).state_dict()
            return found

        first = client.submit(load_job(tmp_path / "job.json"))
        expected = trained(first)
        assert len(client.decision(first).stages) == 2
        steps = [cut.step for cut in client.checkpoints(first)]
        assert steps
        for step in steps:
            state = trained(client.submit(None, resume=f"{first}@{step}"))
            for key, value in expected.items():
                assert torch.equal(state[key], value), (step, key)


def test_a_buffer_that_predictions_need_and_nobody_saves_ends_the_job_before_it_trains(
    tmp_path: Path,
) -> None:
    model = _COUNTED.replace("torch.zeros(8))", "torch.zeros(8), persistent=False)")
    _write(tmp_path, model, 1)
    with Cluster(tmp_path / "cluster", types={"cpu": 1}) as cluster:
        client = Client(cluster.address)
        ended = client.wait(client.submit(load_job(tmp_path / "job.json")), timeout=240)
    assert (ended.state, ended.end_reason, ended.step) == ("failed", "user_error", 0)
    assert "changes the buffer 'bottom.1.mean'" in ended.error
