"""Jobs that begin with another's weights and rows, and nothing else of it: as plain PyTorch."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import heterps
from heterps import Client, Cluster
from heterps.client.records import Job
from tests.jobs import CPU, write_workload

KEYS = 4
MODEL = """
import torch
from torch import nn

from heterps import SparseEmbedding


class Net(nn.Module):
    def __init__(self, **table):
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Linear(1, 1)
        self.rows = SparseEmbedding("rows", 1, pooling="sum", **table)

    def forward(self, sparse, dense):
        return self.bias(dense).squeeze(-1) + self.rows(sparse).sum(-1)
"""
JOB = """
name: rows
model: {entry: model.py:Net}
data: {train: train.csv, label: y, sparse: [a], dense: [x]}
train: {epochs: 3, batch_size: 8, staleness: 0, loss: mse,
        optimizer: {name: adam, learning_rate: 0.1}}
servers: {shards: 1}
schedule: {method: greedy, resources: resources.yaml, workload: workload.yaml}
output: out
"""
SAMPLES = [(n % KEYS, n / 4.0, 2.0 * (n % KEYS) + n) for n in range(8)]
ADAM = {"optimizer": "adam", "learning_rate": 0.2}
OTHERS = (ADAM, {"optimizer": "sgd", "learning_rate": 0.5}, {"optimizer": "momentum"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("job")
    (made / "model.py").write_text(MODEL)
    (made / "job.yaml").write_text(JOB)
    (made / "resources.yaml").write_text(CPU)
    write_workload(made / "workload.yaml", ("bias", "rows"), {"cpu": 1e-3}, 128)
    lines = "".join(f"{key},{x},{label}\n" for key, x, label in SAMPLES)
    (made / "train.csv").write_text("a,x,y\n" + lines)
    return made


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with (
        Cluster(tmp_path_factory.mktemp("cluster"), types={"cpu": 2}) as cluster,
        Client(cluster.address) as made,
    ):
        yield made


def _run(client: Client, folder: Path, table: dict[str, object], **more: object) -> Job:
    overrides = {"model.args": {"scale": 0.5, **table}, **more}
    job = client.wait(client.submit(folder / "job.yaml", overrides=overrides), timeout=120)
    assert job.state == "succeeded", job.error
    return job


def _weights(job: Job, folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [KEYS], weight and bias of a job's model, by its predictions."""
    model = heterps.load(job.output)
    scores = torch.as_tensor(model.predict(folder / "train.csv")).float()
    linear = {name: value.detach().clone() for name, value in model.named_parameters()}
    weight, bias = linear["bias.weight"].reshape(()), linear["bias.bias"].reshape(())
    x = torch.tensor([sample[1] for sample in SAMPLES])
    return (scores - weight * x - bias)[:KEYS], weight, bias


def _plain(
    begun: tuple[torch.Tensor, ...], table: dict[str, object]
) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """What three steps with new optimizers make of it; every key is in each of them."""
    rows, weight, bias = (nn.Parameter(value.clone()) for value in begun)
    rate = float(table.get("learning_rate", 0.05))
    own: torch.optim.Optimizer
    if table["optimizer"] == "adam":
        own = torch.optim.Adam([rows], lr=rate)
    else:
        momentum = 0.9 if table["optimizer"] == "momentum" else 0.0
        own = torch.optim.SGD([rows], lr=rate, momentum=momentum)
    dense = torch.optim.Adam([weight, bias], lr=0.1)
    keys, x, labels = (torch.tensor(column) for column in zip(*SAMPLES, strict=True))
    for _ in range(3):
        loss = nn.functional.mse_loss(weight * x + bias + rows[keys], labels)
        loss.backward()
        for optimizer in (own, dense):
            optimizer.step()
            optimizer.zero_grad()
    return rows, weight, bias


@pytest.fixture(scope="module")
def first(client: Client, folder: Path) -> Job:
    return _run(client, folder, ADAM)


@pytest.mark.parametrize("table", OTHERS, ids=lambda table: table["optimizer"])
def test_optimizers_are_new_those_of_rows_too(
    client: Client, folder: Path, first: Job, table: dict[str, object]
) -> None:
    begun = _weights(first, folder)
    job = _run(client, folder, table, **{"train.from": first.job_id})
    for found, expected in zip(_weights(job, folder), _plain(begun, table), strict=True):
        np.testing.assert_allclose(found, expected.detach(), rtol=2e-5, atol=2e-5)


def test_a_table_of_other_rows_is_refused_before_the_first_step(
    client: Client, folder: Path, first: Job
) -> None:
    source = (folder / "model.py").read_text()
    (folder / "wide.py").write_text(source.replace('"rows", 1,', '"rows", 2,'))
    overrides = {"model.entry": "wide.py:Net", "train.from": first.job_id}
    overrides["model.args"] = ADAM
    job = client.wait(client.submit(folder / "job.yaml", overrides=overrides), timeout=120)
    assert (job.state, job.step) == ("failed", 0)
    assert "table 'rows' has rows of 1 values; the model's have 2" in job.error
