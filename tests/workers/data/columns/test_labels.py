"""Labels of the types that losses take."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from protos.job_pb2 import HeadSpec, JobSpec
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.check import check
from workers.data.tensors import tensors_of

ROWS = 50


def write(folder: Path, **columns: object) -> JobSpec:
    """A job of heads `click`, `kind` and `delay`, weighted by `w`."""
    given: dict[str, object] = {
        "x": np.arange(float(ROWS)),
        "click": np.arange(ROWS) % 2,
        "kind": np.arange(ROWS) % 7,
        "delay": np.arange(ROWS) - 3.5,
        "w": np.arange(ROWS) / 10,
    } | columns
    pa.parquet.write_table(pa.table(given), folder / "a.parquet")
    job = JobSpec(directory=str(folder))
    job.data.path, job.data.train, job.data.weight = ".", "a.parquet", "w"
    job.data.labels.extend(["click", "kind", "delay"])
    job.data.dense.append("x")
    job.train.batch_size = 16
    for name, loss in (("click", "bce_with_logits"), ("kind", "cross_entropy"), ("delay", "mae")):
        job.train.heads[name].CopyFrom(HeadSpec(loss=loss))
    return job


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_each_row_keeps_its_labels(tmp_path: Path, cache_bytes: int) -> None:
    job = write(tmp_path)
    from workers.data.columns.labels import labels_of

    dataset = Dataset(
        job.data, "train", tmp_path, labels=labels_of(job), cache_bytes=cache_bytes, window_rows=20
    )
    batches = GlobalBatches(dataset, 16, seed=1)
    for step in range(batches.steps):
        batch = tensors_of(batches.read(step))
        row = batch["dense"][:, 0].long()
        assert batch["label.click"].tolist() == (row % 2).float().tolist()
        assert batch["label.kind"].tolist() == (row % 7).tolist()
        assert str(batch["label.kind"].dtype) == "torch.int64"
        assert batch["label.delay"].tolist() == (row - 3.5).tolist()
        assert np.allclose(batch["label.weight"], row / 10)
        alone = tensors_of(batches.labels(step))
        assert sorted(alone) == sorted(name for name in batch if "." in name)
        assert all(alone[name].tolist() == batch[name].tolist() for name in alone)


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("click", 2, "0 or 1"),
        ("kind", 1.5, "a whole number from 0"),
        ("kind", -1, "a whole number from 0"),
        ("kind", 2.0**31, "a whole number from 0"),
        ("delay", float("nan"), "a finite number"),
        ("w", -0.5, "a finite number of at least 0"),
    ],
)
def test_a_label_that_its_loss_does_not_take_is_named(
    tmp_path: Path, column: str, value: float, expected: str
) -> None:
    check(write(tmp_path))
    values = np.ones(ROWS)
    values[20] = value
    job = write(tmp_path, **{column: values})
    with pytest.raises(DataError, match=rf"row 21: data\.(labels|weight): {column}: .*{expected}"):
        check(job)


def test_labels_of_a_loss_of_the_jobs_own_are_never_rounded(tmp_path: Path) -> None:
    job = write(tmp_path, kind=np.full(ROWS, 2**24 + 1))
    check(job)
    job.train.ClearField("heads")
    job.model.loss = "losses.py:total"
    with pytest.raises(DataError, match=r"data\.labels: kind: got 16777217\.0"):
        check(job)


def test_what_a_label_is_predicted_by_is_no_label(tmp_path: Path) -> None:
    job = write(tmp_path)
    job.data.dense.append("kind")
    with pytest.raises(DataError, match=r"data\.dense: got 'kind'.*it is data\.labels"):
        check(job)
    job = write(tmp_path)
    job.data.dense.append("w")  # a weight may be one, too
    check(job)
