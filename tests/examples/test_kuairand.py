"""KuaiRand: three heads as plain PyTorch learns them, and histories that know nothing of later."""

import csv
import gzip
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import heterps
from bench.quality import JOBS, Plain
from heterps.job.file import load_job
from tests.workers.stage.in_process import Pipeline
from workers.data import Dataset, GlobalBatches
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import job_model, load_entry
from workers.model.module.inputs import inputs_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/kuairand"
DATA = ROOT.parent / "shared/data/kuairand-mini"
STEPS, LENGTH = 4, 24

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the KuaiRand data is not there")


def job_of(name, data, **settings):
    given = {"data.path": str(data), "train.batch_size": 64, "train.max_steps": STEPS, **settings}
    return load_job(EXAMPLE / name, given)


def losses(job, cuts, widths, micro_batches):
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    given = [batches.read(step) for step in range(STEPS)]
    pipeline = Pipeline(job, lambda: job_model(job), cuts, widths, given, micro_batches)
    return pipeline.run()[-1][0].executor.progress.losses


def test_three_heads_learn_what_plain_pytorch_does():
    job = job_of("heads.yaml", DATA)
    plain = Plain(job, JOBS["heads"].loss).train(STEPS)
    assert losses(job, [0, 5], [2, 1], 4) == pytest.approx(plain, rel=1e-5)
    assert plain[-1] < plain[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("histories")
    for file in DATA.glob("*.tsv.gz"):
        shutil.copy(file, folder)
    load_entry("prepare.py:prepare", EXAMPLE, "data.prepare")(str(folder))
    return folder


def source(split):
    with gzip.open(DATA / f"{split}.tsv.gz", "rt", newline="") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def test_histories_hold_all_that_lies_before_and_nothing_else(made):
    splits = {split: source(split) for split in ("train", "valid", "test")}
    everything = [row for rows in splits.values() for row in rows]
    of_user = {}
    for row in everything:
        of_user.setdefault(row["user_id"], []).append((int(row["time_ms"]), row))
    for rows in of_user.values():
        rows.sort(key=lambda pair: pair[0])
    lengths = set()
    for split, rows in splits.items():
        table = pq.read_table(made / f"{split}.parquet")
        assert not {"long_view", "is_like", "play_time_ms", "time_ms"} & {*table.column_names}
        for row, found in zip(rows, table.to_pylist(), strict=True):
            now = int(row["time_ms"])
            before = [one for at, one in of_user[row["user_id"]] if at < now][-LENGTH:]
            assert found["history"] == [int(one["video_id"]) for one in before]
            assert found["ages"] == [(now - int(one["time_ms"])) // 1000 for one in before]
            assert found["outcomes"] == [
                4 if one["is_like"] == "1"
                else 3 if one["long_view"] == "1"
                else 2 if one["is_click"] == "1"
                else 1
                for one in before
            ]  # fmt: skip
            assert found["is_click"] == int(row["is_click"])
            lengths.add(len(before))
    assert {0, LENGTH} <= lengths


@pytest.mark.parametrize("layers", [2, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_histories_are_learned_alike_by_one_worker_and_several(made, layers):
    job = job_of("histories.yaml", made, **{"model.args.layers": layers})
    last = len(TracedModel(job_model(job), inputs_of(job.data)).layers) - 1
    one = losses(job, [last], [1], 1)
    assert losses(job, [last - 2, last], [2, 1], 4) == pytest.approx(one, rel=1e-5)


def test_what_fills_up_a_history_counts_nothing():
    build = load_entry("histories.py:build", EXAMPLE, "model.entry")
    torch.manual_seed(0)
    encoder = build(slots=3, dense=7, layers=2, items=8).history.eval()
    history = torch.arange(1, 13).view(2, 6)
    history[0, 4:] = heterps.PAD
    past, own = torch.randn(2, 6, 8), torch.randn(2, 8)
    outcomes, ages = torch.randint(1, 5, (2, 6)), torch.randint(0, 9999, (2, 6))
    with torch.no_grad():
        for layer in encoder.layers:
            layer.times.normal_()
            layer.places.normal_()
        before = encoder.attend(past, own, history, outcomes, ages)
        past[0, 4:], outcomes[0, 4:], ages[0, 4:] = 9.0, 3, 77
        after = encoder.attend(past, own, history, outcomes, ages)
        past[0, 3, 0] += 1  # not to all: that a layer norm takes off
        other = encoder.attend(past, own, history, outcomes, ages)
    assert torch.equal(before, after)
    assert not np.allclose(other[0], after[0])
    assert torch.equal(other[1], after[1])
