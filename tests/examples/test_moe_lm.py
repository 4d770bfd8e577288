"""The language model with experts: its windows, its parameters, a short job through a cluster."""

import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import heterps
from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.jobs import write_workload
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import load_entry

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/moe_lm"
UNIFORM = math.log(256)


@pytest.fixture(scope="module")
def build():
    return load_entry("model.py:build", EXAMPLE, "model.entry")


def part_of(name):
    return load_entry(f"prepare.py:{name}", EXAMPLE, "data.prepare")


def test_windows_hold_the_library_and_no_file_is_in_both_splits():
    library, windows = part_of("library"), part_of("windows")
    train, valid = library(valid=False), library(valid=True)
    source = Path(sys.modules["json"].__file__).read_bytes()
    held = [source in text.tobytes() for text in (train, valid)]
    assert sorted(held) == [False, True]
    assert 0.01 < len(valid) / len(train) < 0.2
    rows = windows(valid[:1000], 64, 16)
    assert rows.shape == (59, 65)
    assert (rows[3] == valid[48:113]).all()


def test_no_position_sees_what_follows(build):
    model = build(layers=2, dim=32, hidden=16).eval()
    tokens = torch.randint(0, 256, (2, 64))
    changed = tokens.clone()
    changed[:, 40:] = 0
    torch.testing.assert_close(model(tokens)[:, :40], model(changed)[:, :40])
    assert not torch.allclose(model(tokens)[:, 40], model(changed)[:, 40])


def test_no_more_active_parameters_than_the_published_dense_model(build):
    model = build(vocabulary=128)
    # Of nanoGPT's: per layer attention 4 d^2, feed-forward 8 d^2, two norms; embeddings, last norm.
    dense = 4 * (12 * 128**2 + 2 * 128) + 65 * 128 + 64 * 128 + 128
    assert model.active_parameters() <= dense
    expert = model.experts0.moe.w1[0].numel() + model.experts0.moe.w2[0].numel()
    everything = sum(p.numel() for p in model.parameters())
    assert everything - model.active_parameters() == 4 * 6 * expert
    kinds = [layer.kind for layer in TracedModel(model).layers]
    assert kinds == ["dense", *["attention", "moe"] * 4, "dense"]


def short_job(folder):
    """The example's job on parts of the library, its costs given, so that nothing is profiled."""
    shutil.copytree(EXAMPLE, folder / "moe_lm")
    text = (EXAMPLE / "job.yaml").read_text()
    file = folder / "moe_lm/job.yaml"
    file.write_text(text.replace("  prepare: prepare.py:sources\n", ""))
    library = part_of("library")
    parts = library(valid=False)[:200_000], library(valid=True)[:20_000]
    part_of("write")(folder / "data", "", parts, 64)
    names = ("embedding", "attention0", "experts0", "head")
    write_workload(folder / "workload.yaml", names, {"cpu": 1e-3}, reference_batch=32, samples=4e3)
    arguments = {"vocabulary": 256, "layers": 1, "dim": 32, "hidden": 32, "experts": 4}
    overrides = {
        "output": f"{folder}/out",
        "data.path": f"{folder}/data",
        "train.max_steps": 120,
        "train.epochs": 2,
        "train.optimizer.learning_rate": 0.01,
        "train.optimizer.warmup_steps": 10,
        "schedule.method": "greedy",
        "schedule.workload": f"{folder}/workload.yaml",
    }
    overrides |= {f"model.args.{name}": value for name, value in arguments.items()}
    return load_job(file, overrides)


def test_a_short_job_learns(tmp_path):
    job = short_job(tmp_path)
    with (
        Cluster(tmp_path / "cluster", types={"cpu": 2}) as running,
        Client(running.address) as client,
    ):
        status = client.wait(client.submit(job), timeout=300)
        assert status.state == "succeeded", status.reason
    assert 1.5 < status.metrics["valid_loss"] < 2.8 < UNIFORM
    bits = status.metrics["valid_loss"] / math.log(2)
    assert status.metrics["valid_bits_per_token"] == pytest.approx(bits)
    model = heterps.load(status.output)
    rows = pq.read_table(tmp_path / "data/valid.parquet")["window"].combine_chunks()
    windows = torch.from_numpy(rows.flatten().to_numpy().reshape(-1, 65).astype(np.int64))
    with torch.no_grad():
        logits = model(windows[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert loss.item() == pytest.approx(status.metrics["valid_loss"], abs=1e-4)
