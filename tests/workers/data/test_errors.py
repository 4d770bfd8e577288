"""Wrong data: errors name the file, the job key, the value and what was expected."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from protos.job_pb2 import DataSpec
from workers.data import DataError, Dataset

GOOD: dict[str, Any] = {"label": [0, 1], "origin": ["JFK", "EWR"], "distance": [1.0, 2.0]}


def read(folder: Path, file: str = "a.parquet", **spec: Any) -> Dataset:
    fields: dict[str, Any] = {"label": "label", "sparse": ["origin"], "dense": ["distance"]} | spec
    data = Dataset(DataSpec(path=".", train=file, **fields), "train", folder)
    list(data.batches(2))
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


def test_more_batch_than_rows(tmp_path: Path) -> None:
    write(tmp_path)
    data = read(tmp_path)
    with pytest.raises(DataError, match=r"train\.batch_size: got 3, expected at most the 2 rows"):
        data.batches(3)
    with pytest.raises(ValueError, match="shard 2"):
        data.batches(1, shard=2, num_shards=2)
