"""Pictures and captions brought together, on workers as in one process."""

import csv
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.jobs import write_workload
from tests.workers.stage.in_process import Pipeline
from workers.data import Dataset, GlobalBatches
from workers.model.code import entry

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/emoji"
DATA = ROOT.parent / "shared/data/emoji-image-text"
LAYERS = ("picture", "embedding", "caption", "scale")

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="the pictures and captions are not beside the project"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emoji")
    entry.load_entry("prepare.py:prepare", EXAMPLE, "data.prepare")(str(folder))
    return folder


def test_each_picture_has_its_own_words_and_no_emoji_is_in_two_splits(made):
    tables = {
        split: pq.read_table(made / f"{split}.parquet") for split in ("train", "valid", "test")
    }
    assert [len(table) for table in tables.values()] == [2832, 357, 354]
    bases = [set(table["base"].to_pylist()) for table in tables.values()]
    assert not bases[0] & bases[1] | bases[0] & bases[2] | bases[1] & bases[2]
    rows = [row for row in tables["test"].to_pylist() if "chequered" in row["words"]]
    for row in rows:  # black and white, and little else
        pixels = np.array(row["pixels"]).reshape(32, 32, 3)
        assert (pixels.max(2) - pixels.min(2)).mean() < 20
    assert max(len(words) for words in tables["train"]["words"].to_pylist()) <= 24


def test_a_short_training_is_that_of_one_process(made):
    settings = {"data.path": str(made), "train.max_steps": 4, "train.batch_size": 32}
    job = load_job(EXAMPLE / "job.yaml", {**settings, "train.optimizer.learning_rate": 0.01})
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    given = [batches.read(step) for step in range(batches.steps)]
    build = entry.load_entry("model.py:build", EXAMPLE, "model.entry")

    def seeded():
        torch.manual_seed(0)
        return build(dim=16)

    one, several = (
        Pipeline(job, seeded, *plan[:2], given, plan[2]).run()[-1][0].executor.progress.losses
        for plan in (([3], [1], 1), ([0, 3], [1, 3], 5))
    )
    assert several == pytest.approx(one, rel=1e-4)
    assert one[-1] < 0.9 * one[0]


@pytest.mark.exhaustive
def test_workers_learn_what_one_does_and_find_captions_of_what_they_have_not_seen(made, tmp_path):
    def trained(client, name, *overrides):
        file = tmp_path / f"{name}.yaml"
        seconds = {
            "cpu": {"picture": 1e3, "embedding": 1e3, "caption": 1e-3, "scale": 1e-3},
            "v100": {"picture": 1e-3, "embedding": 1e-3, "caption": 1e3, "scale": 1e3},
        }
        if name == "one":
            seconds = {"cpu": 1e-3}
        write_workload(file, LAYERS, seconds, reference_batch=64, samples=1e5)
        settings = {
            "output": str(tmp_path),
            "data.path": str(made),
            "schedule.method": "exact",
            "schedule.workload": str(file),
            **dict(overrides),
        }
        job_id = client.submit(load_job(EXAMPLE / "job.yaml", settings))
        status = client.wait(job_id, timeout=500)
        assert status.state == "succeeded", status.reason
        rows = csv.reader(Path(status.output, "loss.csv").read_text().splitlines()[1:])
        return status, client.decision(job_id), [float(loss) for _, loss, *_ in rows]

    with (
        Cluster(tmp_path / "cluster", types={"cpu": 4, "v100": 2}, emulate=["v100"]) as running,
        Client(running.address) as client,
    ):
        alone, _, losses = trained(client, "one")
        short = partial(trained, client, "several", ("train.epochs", 3))
        pinned = {"picture": "v100", "embedding": "v100", "caption": "cpu", "scale": "cpu"}
        several, decision, _ = short(
            *((f"schedule.pin.{layer}", kind) for layer, kind in pinned.items()),
            ("schedule.min_throughput", 40000),
            ("train.micro_batches", 6),
        )
    assert [stage.units for stage in decision.stages][1] > 1
    assert alone.metrics["test_recall_1"] > 0.1  # by chance 1 of 169
    assert losses[-2] < 0.6 * losses[0]
    assert several.metrics["valid_recall_10"] > 0.2
