"""A saved model is opened again and held against what it predicted in training."""

import hashlib
import math
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import heterps
from protos.job_pb2 import JobSpec
from protos.naming import table_prefix
from ps import LocalTable
from ps.checkpoint.places import open_store
from ps.checkpoint.sealed import seal
from ps.local.table import save_checkpoint
from workers.embedding.sparse import SparseEmbedding
from workers.errors import DivergedError
from workers.model.code.entry import ModelError, job_model
from workers.model.objective.curve import LossCurve
from workers.model.objective.metrics import JobMetrics
from workers.model.saved import reloaded
from workers.model.saved.facts import DENSE, read_facts
from workers.model.saved.model import SavedModel
from workers.model.saved.reloaded import ReloadError, check_finite, check_predictions, reopened

MODEL = """
import torch
from torch import nn
from heterps import SparseEmbedding

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = SparseEmbedding("items", 4)
        self.idle = SparseEmbedding("idle", 4)

    def forward(self, keys):
        return self.rows(keys).flatten(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)
        self.offset = 0.0

    def forward(self, sparse):
        return self.head(self.norm(self.inner(sparse))).squeeze(-1) + self.offset

def build():
    return Model()
"""
PREFIX = table_prefix("job1")


@pytest.fixture
def trained(tmp_path):
    """A saved model, its job, a batch and its scores."""
    (tmp_path / "model.py").write_text(MODEL)
    job = JobSpec(directory=str(tmp_path))
    job.model.entry = "model.py:build"
    job.train.seed = 3
    model = job_model(job)
    table = LocalTable.create(PREFIX + "items", **model.inner.rows.spec.table_options())
    keys = np.arange(1, 31, dtype=np.uint64)
    table.push(keys, np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32))
    model.inner.rows.store = table
    with torch.no_grad():
        model.norm.running_mean += 0.5
    batch = {"sparse": torch.arange(1, 21).reshape(10, 2), "label.label": torch.zeros(10)}
    with torch.no_grad():
        scores = model.eval()(batch["sparse"])
    saved = SavedModel(str(tmp_path / "out"))
    saved.write_stage(0, model.state_dict())
    save_checkpoint(saved.tables, [table])
    output = saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})
    return output, job, batch, scores, table


def check(trained, shard_rows=None):
    output, job, batch, scores, _ = trained
    model = reopened(output, job, shard_rows)
    measured = {"score.": scores}
    check_predictions(model, JobMetrics(job), batch, measured, nullcontext, 1e-5, output)


def test_what_was_saved_predicts_as_it_did(trained):
    check(trained)
    output, _, batch, scores, _ = trained
    torch.testing.assert_close(heterps.load(output)(batch["sparse"]), scores)


def test_rows_of_large_tables_are_asked_of_the_shards(trained, monkeypatch):
    monkeypatch.setattr(reloaded, "MOST_TABLE_BYTES", 10)
    asked = []

    def shard_rows(name):
        asked.append(name)
        return trained[-1]

    check(trained, shard_rows)
    assert asked == [PREFIX + "items"]


def save_otherwise(output, state):
    """As a training would that saves something else than it has; the checksum is its own."""
    save_file(state, f"{output}/{DENSE}")
    facts = read_facts(open_store(output))
    facts[DENSE] = hashlib.sha256(Path(output, DENSE).read_bytes()).hexdigest()
    Path(output, "model.json").write_bytes(seal(facts))


@pytest.mark.parametrize("name", ["head.weight", "norm.running_mean"])
def test_tampered_weights_are_found(trained, name):
    state = load_file(f"{trained[0]}/{DENSE}")
    state[name] = state[name] + 0.05
    save_otherwise(trained[0], state)
    with pytest.raises(ReloadError, match=r"predicts .* where training's own evaluation gave"):
        check(trained)


def test_missing_weights_and_rows_are_found(trained):
    output, *_, table = trained
    table.push(np.arange(3, 5, dtype=np.uint64), np.ones((2, 4), np.float32))

    shutil.rmtree(f"{output}/tables")
    save_checkpoint(f"{output}/tables", [table])
    with pytest.raises(ReloadError, match="of 10 samples differ"):
        check(trained)
    state = load_file(f"{output}/{DENSE}")
    del state["head.bias"]
    save_otherwise(output, state)
    with pytest.raises(ModelError, match="its saved weights do not fit"):
        check(trained)


def test_tables_of_another_save_are_no_part_of_the_model(trained):
    output, *_, table = trained
    save_checkpoint(f"{output}/tables", [table])  # as of another attempt, the same rows
    with pytest.raises(ModelError, match="not the tables that the model was saved with"):
        heterps.load(output)


def test_state_that_is_not_saved_is_found(trained):
    *_, scores, _ = trained
    scores += 0.25  # as with an attribute that training has set
    with pytest.raises(ReloadError, match="is not in the model's state_dict"):
        check(trained)


def test_weights_that_the_last_update_made_infinite_are_no_success():
    model = nn.Linear(2, 1)
    model.register_parameter("mask", nn.Parameter(torch.tensor([-math.inf]), requires_grad=False))
    check_finite(model)
    for bad in (math.inf, math.nan):
        with torch.no_grad():
            model.bias.fill_(bad)
        with pytest.raises(DivergedError, match="'bias' is not finite"):
            check_finite(model)


def test_a_row_that_an_update_made_infinite_is_no_success():
    layer = SparseEmbedding("items", 2, optimizer="sgd", learning_rate=1e30)
    check_finite(layer)
    layer.store = LocalTable.create("items", **layer.spec.table_options())
    keys = np.arange(100_000, dtype=np.uint64)
    layer.store.push(keys, np.zeros((len(keys), 2), np.float32))
    check_finite(layer)
    layer.store.push(keys[-1:], np.full((1, 2), 1e10, np.float32))  # finite, and no later batch's
    with pytest.raises(DivergedError, match="row of key 99999 of table 'items' is not finite"):
        check_finite(layer)
