"""Wrong data: errors name the file, the job key, the value and what was expected."""

import gzip
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from protos.job_pb2 import DataSpec, JobSpec
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.batches import in_order
from workers.data.check import check

GOOD: dict[str, Any] = {"label": [0, 1], "origin": ["JFK", "EWR"], "distance": [1.0, 2.0]}


def read(folder: Path, file: str = "a.parquet", **spec: Any) -> Dataset:
    fields: dict[str, Any] = {"label": "label", "sparse": ["origin"], "dense": ["distance"]} | spec
    data = Dataset(DataSpec(path=".", train=file, **fields), "train", folder)
    list(in_order(data, 2, 0, 1))
    return data


def write(folder: Path, **columns: Any) -> None:
    pa.parquet.write_table(pa.table(GOOD | columns), folder / "a.parquet")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"file": "b.parquet"}, ["data.train", "'b.parquet'", "a.parquet"]),
        ({"file": "*.csv"}, ["data.train", "'*.csv'"]),
        ({"file": ""}, ["data.train", "glob"]),
        ({"sparse": ["orign"]}, ["a.parquet", "data.sparse", "'orign'", "mean 'origin'"]),
        ({"sparse": ["origin*dest"]}, ["a.parquet", "data.sparse", "'dest'"]),
        ({"sparse": ["origin*"]}, ["data.sparse", "'origin*'", "origin*date"]),
        ({"sparse": ["origin", "origin"]}, ["data.sparse", "'origin'", "once"]),
        ({"sparse": ["origin*label"]}, ["data.sparse", "'label'", "data.label"]),
        ({"sparse": [], "dense": []}, ["data.sparse", "at least one"]),
        ({"dense": ["distanse"]}, ["a.parquet", "data.dense", "mean 'distance'"]),
        ({"dense": ["origin"]}, ["a.parquet", "data.dense: origin", "string", "numeric"]),
        ({"label": "late"}, ["a.parquet", "data.label", "'late'"]),
        ({"label": ""}, ["data.label", "''"]),
        (
            {"label": "distance", "dense": []},
            ["a.parquet", "data.label: distance", "2.0", "0 or 1"],
        ),
    ],
)
def test_a_job_that_does_not_fit(tmp_path: Path, spec: dict[str, Any], words: list[str]) -> None:
    write(tmp_path)
    with pytest.raises(DataError) as caught:
        read(tmp_path, **spec)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label": [0, None]}, ["data.label: label", "missing"]),
        ({"label": ["0", "1"]}, ["data.label: label", "string"]),
        ({"distance": [1.0, float("inf")]}, ["data.dense: distance", "inf"]),
        ({"origin": [["JFK"], []]}, ["data.sparse: origin", "list"]),
    ],
)
def test_a_file_that_does_not_fit(
    tmp_path: Path, columns: dict[str, Any], words: list[str]
) -> None:
    write(tmp_path, **columns)
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    for word in ["a.parquet", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("label,origin,distance\n0,JFK,far\n1,EWR,2\n", ["data.dense: distance", "'far'"]),
        ("label,origin,distance\nyes,JFK,1\n1,EWR,2\n", ["data.label: label", "'yes'"]),
        ("label,origin,distance\n0,JFK\n1,EWR,2\n", ["contents", "Expected 3 columns"]),
        ("", ["contents"]),
    ],
)
def test_text_that_does_not_fit(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        read(tmp_path, "a.csv")
    for word in ["a.csv", *words]:
        assert word in str(caught.value)


def test_files_cut_short(tmp_path: Path) -> None:
    whole = gzip.compress(b"label,origin,distance\n" + b"0,JFK,1\n1,EWR,2\n" * 100)
    (tmp_path / "a.csv.gz").write_bytes(whole[:-20])
    write(tmp_path)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    for file in ("a.csv.gz", "b.parquet"):
        with pytest.raises(DataError, match=f"{file}: contents"):
            read(tmp_path, file)


def test_formats_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.xlsx.*\.parquet, \.csv or \.tsv"):
        read(tmp_path, "a.xlsx")
    spec = DataSpec(path="nowhere", train="a", label="label", dense=["x"])
    with pytest.raises(DataError, match=r"data\.path: got 'nowhere'"):
        Dataset(spec, "train", tmp_path)


def test_a_batch_of_more_than_all_rows_is_all_rows_unless_it_is_dropped(tmp_path: Path) -> None:
    write(tmp_path)
    data = read(tmp_path)
    assert GlobalBatches(data, 3).samples(0) == 2
    expected = r"train\.batch_size: got 3, expected at most the 2 rows of the split, or drop_last"
    with pytest.raises(DataError, match=expected):
        GlobalBatches(data, 3, drop_last=True)


ROW = 1 << 15  # in the third block, and the second row group


def long_file(folder: Path, file: str, column: str, value: Any) -> None:
    """Rows without a fault but for one value."""
    rows = 40_000
    columns: dict[str, list[Any]] = {
        "label": [row % 2 for row in range(rows)],
        "origin": ["JFK"] * rows,
        "distance": [1.0] * rows,
    }
    if file.endswith("csv"):
        columns["distance"] = [1.0] * (rows - 1) + ["NA"]
    columns[column][ROW] = value
    if file.endswith("csv"):
        names = ",".join(columns)
        lines = [",".join(map(str, line)) for line in zip(*columns.values(), strict=True)]
        (folder / file).write_text("\n".join([names, *lines]) + "\n")
    else:
        table = pa.table(columns)
        pa.parquet.write_table(table, folder / file, row_group_size=30_000)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("file", ["a.parquet", "a.csv"])
@pytest.mark.parametrize(
    ("column", "value", "key", "got"),
    [
        ("label", 2, "data.label: label", "got 2.0, expected 0 or 1"),
        ("distance", float("inf"), "data.dense: distance", "got inf, expected finite numbers"),
        ("distance", 1e39, "data.dense: distance", "got 1e+39, expected finite numbers"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_row(
    tmp_path: Path, streamed: bool, file: str, column: str, value: Any, key: str, got: str
) -> None:
    long_file(tmp_path, file, column, value)
    spec = DataSpec(path=".", train=file, label="label", sparse=["origin"], dense=["distance"])
    data = Dataset(spec, "train", tmp_path, cache_bytes=0 if streamed else 1 << 30)
    batches = GlobalBatches(data, 10_000)
    with pytest.raises(DataError, match=re.escape(f"{file}, row {ROW + 1}: {key}: {got}")) as error:
        [batches.read(step) for step in range(batches.steps)]
    assert error.value.row == ROW


def test_numbers_that_are_no_classes_are_labels_of_mse(tmp_path: Path) -> None:
    write(tmp_path, label=[-2.5, 1e6])
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.train, job.data.label = ".", "a.parquet", "label"
    job.data.dense.append("distance")
    job.train.loss = "mse"
    labels = GlobalBatches.of(with_batch(job, 2), Dataset.of(job, "train")).read(0)["label.label"]
    assert sorted(labels.tolist()) == [-2.5, 1e6]
    check(job)
    for wrong in (None, float("nan"), float("inf"), 1e300):
        write(tmp_path, label=[0.5, wrong])
        with pytest.raises(DataError, match=r"a\.parquet, row 2: data\.label: label.*a finite"):
            check(job)
    job.train.loss = "bce_with_logits"
    write(tmp_path, label=[0.5, 1.0])
    with pytest.raises(DataError, match=r"row 1: data\.label: label: got 0\.5, expected 0 or 1"):
        check(job)


def with_batch(job: JobSpec, size: int) -> JobSpec:
    job.train.batch_size = size
    return job


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("label", 7, ["row 32769", "data.label: label", "7.0"]),
        ("label", None, ["row 32769", "data.label: label", "missing"]),
        ("distance", float("-inf"), ["row 32769", "data.dense: distance", "-inf"]),
    ],
)
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_what_parquet_says_of_its_values_is_checked_without_reading_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    value: Any,
    words: list[str],
    split: str,
) -> None:
    long_file(tmp_path, "bad.parquet", column, value)
    write(tmp_path)
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.label = ".", "label"
    job.data.train = job.data.valid = job.data.test = "a.parquet"
    job.data.sparse.append("origin")
    job.data.dense.append("distance")
    check(job)
    setattr(job.data, split, "bad.parquet")
    with pytest.raises(DataError) as caught:
        check(job)
    for word in ["bad.parquet", *words]:
        assert word in str(caught.value)


def test_first_rows_are_looked_at(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "b.csv").write_text("label,origin,distance\n0,JFK,1\n1,JFK,far\n")
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.train, job.data.test, job.data.label = (
        ".",
        "a.parquet",
        "*.csv",
        "label",
    )
    job.data.dense.append("distance")
    with pytest.raises(DataError, match=r"b\.csv, row 2: data\.dense: distance: got 'far'"):
        check(job)


def test_whoever_checks_files_needs_no_torch() -> None:
    """Such as `heterps submit`, and a job's own `prepare`, which makes keys."""
    code = "import sys, workers.data.check, workers.data.keys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_column_that_comes_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,origin,origin,distance\n0,JFK,EWR,1\n")
    with pytest.raises(DataError, match=r"a\.csv: columns: got \"'origin' twice\", expected each"):
        read(tmp_path, "a.csv")
    assert len(read(tmp_path, "a.csv", sparse=[], dense=["distance"]).units) == 1


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "groups.parquet"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_split_without_rows_is_refused(tmp_path: Path, name: str, split: str) -> None:
    write(tmp_path)
    (tmp_path / "a.parquet").rename(tmp_path / "full.parquet")
    schema = pa.schema([("label", pa.int64()), ("origin", pa.string()), ("distance", pa.float64())])
    (tmp_path / "a.csv").write_text("label,origin,distance\n")
    pa.parquet.write_table(schema.empty_table(), tmp_path / "a.parquet")
    pa.parquet.ParquetWriter(tmp_path / "groups.parquet", schema).close()
    job = JobSpec(directory=str(tmp_path))
    job.data.CopyFrom(DataSpec(label="label", sparse=["origin"], dense=["distance"]))
    job.data.train = job.data.test = "full.parquet"
    check(job)
    setattr(job.data, split, name)
    with pytest.raises(DataError, match=rf"{name}: data\.{split}: got 'no rows'"):
        check(job)
