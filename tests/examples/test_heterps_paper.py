"""The published models: as many layers as published, trainable, and planned from their profiles."""

import importlib.util
from pathlib import Path

import pytest
import torch

from heterps.job.file import load_job
from scheduler import load_resources, load_workload, plan
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import job_model

FOLDER = Path(__file__).parents[2] / "examples" / "heterps_paper"
LAYERS = {"ctrdnn": 16, "matchnet": 16, "two_embeddings": 10, "nce": 5}


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("criteo_shaped", FOLDER / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.clicks(200, seed=0)


def inputs(table, job):
    def columns(names):
        return torch.stack([torch.from_numpy(table[name].to_numpy().copy()) for name in names], 1)

    values = {"sparse": columns(job.data.sparse)}
    return values | ({"dense": columns(job.data.dense)} if job.data.dense else {})


@pytest.mark.parametrize(("name", "layers"), LAYERS.items())
def test_layers_are_as_many_as_published(name, layers):
    assert len(TracedModel(job_model(load_job(FOLDER / f"{name}.yaml"))).layers) == layers


@pytest.mark.parametrize(
    ("name", "steps"), [("ctrdnn", 20), ("matchnet", 20), ("two_embeddings", 20), ("nce", 150)]
)
def test_training_lowers_the_loss(name, steps, table):
    job = load_job(FOLDER / f"{name}.yaml")
    model = job_model(job).train()
    label = torch.from_numpy(table["label"].to_numpy().copy()).float()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        logits = model(**inputs(table, job))
        assert logits.shape == (len(label),)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
        for layer in model.modules():
            loss = loss + getattr(layer, "aux_loss", 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("name", LAYERS)
def test_profiles_fit_the_models_and_can_be_planned(name):
    workload = load_workload(FOLDER / "workloads" / f"{name}.yaml")
    traced = TracedModel(job_model(load_job(FOLDER / f"{name}.yaml")))
    assert [(x.name, x.kind) for x in workload.layers] == [(x.name, x.kind) for x in traced.layers]
    decision = plan(workload, load_resources(FOLDER / "resources.yaml"), method="greedy")
    assert decision.feasible


def test_data_has_the_shape_of_criteo(table):
    assert sum(name.startswith("I") for name in table.column_names) == 13
    assert sum(name.startswith("C") for name in table.column_names) == 26
    label = table["label"].to_numpy()
    assert 0.1 < label.mean() < 0.5
