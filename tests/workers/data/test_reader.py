"""Reading a split: the same rows, whatever the format or the memory."""

import gzip
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from protos.job_pb2 import DataSpec
from workers.data import Batch, Dataset, GlobalBatches
from workers.data.batches import in_order
from workers.data.columns.arrays import concatenate

ROWS = 1000
LABEL, DENSE, SPARSE = "label", ["row", "gap"], ["word", "row", "word*small"]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One split as two Parquet files of several row groups and as other formats."""
    row = np.arange(ROWS)
    table = pa.table(
        {
            "row": row,
            "label": (row % 3 == 0).astype(np.int8),
            "word": pa.array([None if r % 11 == 0 else f"w{r % 17}" for r in row]),
            "small": pa.array([None if r % 7 == 0 else r % 5 for r in row], pa.int32()),
            "gap": pa.array([None if r % 4 == 0 else r / 4 for r in row]),
        }
    )
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        pa.parquet.write_table(table.slice(0, 600), path / "part-0.parquet", row_group_size=150)
        pa.parquet.write_table(table.slice(600), path / "part-1.parquet", row_group_size=90)
        pa.csv.write_csv(table, path / "all.csv")
        text = (path / "all.csv").read_text()
        (path / "all.tsv.gz").write_bytes(gzip.compress(text.replace(",", "\t").encode()))
        (path / "all.csv.gz").write_bytes(gzip.compress(text.encode()))
        (path / "empty.csv").write_text(text.splitlines()[0] + "\n")
        yield path


def dataset(folder: Path, train: str = "part-*.parquet", **options: Any) -> Dataset:
    spec = DataSpec(path=".", train=train, label=LABEL, dense=DENSE, sparse=SPARSE)
    return Dataset(spec, "train", folder, **options)


STREAMED: dict[str, Any] = {"cache_bytes": 0, "block_rows": 64, "window_rows": 200}


def whole(data: Dataset) -> Batch:
    """All rows, in the order of the files."""
    batches = in_order(data, 300, 0, 1)
    return concatenate([batch for _, batch in batches])


@pytest.mark.parametrize("file", ["all.csv", "all.csv.gz", "all.tsv.gz"])
@pytest.mark.parametrize("options", [{}, STREAMED])
def test_text_equals_parquet(folder: Path, file: str, options: dict[str, Any]) -> None:
    text, parquet = dataset(folder, file, **options), dataset(folder)
    assert text.rows == parquet.rows == ROWS
    left, right = whole(text), whole(parquet)
    np.testing.assert_array_equal(left["sparse"], right["sparse"])
    np.testing.assert_array_equal(left["dense"], right["dense"])
    np.testing.assert_array_equal(left["label.label"], right["label.label"])


def test_line_breaks_inside_quotes_end_no_row(tmp_path: Path) -> None:
    rows = 120_000  # more than the reader takes at a time
    lines = (f'0,2,"a text of {row}\n1,2,3\n1,2,3\n1,2,3\n"\n' for row in range(rows))
    (tmp_path / "texts.csv").write_text("label,number,text\n" + "".join(lines))
    spec = DataSpec(train="texts.csv", label="label", dense=["number"], sparse=["text"])
    data = Dataset(spec, "train", tmp_path)
    assert len(np.unique(data.encoded()["sparse"])) == data.rows == rows
    assert not data.encoded()["label.label"].any()


def test_shapes_types_and_missing_values(folder: Path) -> None:
    batch = whole(dataset(folder))
    assert (batch["sparse"].shape, str(batch["sparse"].dtype)) == ((ROWS, 3), "int64")
    assert (batch["dense"].shape, str(batch["dense"].dtype)) == ((ROWS, 2), "float32")
    assert (batch["label.label"].shape, str(batch["label.label"].dtype)) == ((ROWS,), "float32")
    assert len(set(batch["sparse"][::11, 0].tolist())) == 1
    assert len(set(batch["sparse"][:, 0].tolist())) == 18
    assert (batch["dense"][::4, 1] == 0).all()
    np.testing.assert_array_equal(batch["dense"][1::4, 1], np.arange(1, ROWS, 4) / 4)
    np.testing.assert_array_equal(batch["label.label"], np.arange(ROWS) % 3 == 0)


def test_a_window_mixes_rows_beyond_its_row_group(folder: Path) -> None:
    data = dataset(folder, cache_bytes=0, window_rows=1000, block_rows=64)
    first = GlobalBatches(data, 200).read(0)
    ends = [150, 300, 450, 600, 690, 780, 870, 960]
    groups = set(np.searchsorted(ends, first["dense"][:, 0], side="right").tolist())
    assert len(groups) >= 6


@pytest.mark.parametrize("options", [{}, STREAMED])
def test_evaluation_ends_with_a_short_batch(folder: Path, options: dict[str, Any]) -> None:
    sizes = [len(batch) for _, batch in in_order(dataset(folder, **options), 300, 0, 1)]
    assert sizes == [300, 300, 300, 100]


@pytest.mark.parametrize("options", [{}, STREAMED])
def test_no_rows_are_no_batches(folder: Path, options: dict[str, Any]) -> None:
    data = dataset(folder, "empty.csv", **options)
    assert data.rows == 0
    assert list(in_order(data, 10, 0, 1)) == []


def test_a_split_without_dense_or_without_sparse(folder: Path) -> None:
    only_sparse = DataSpec(path=".", train="part-*.parquet", label=LABEL, sparse=SPARSE)
    only_dense = DataSpec(path=".", train="part-*.parquet", label=LABEL, dense=DENSE)
    assert GlobalBatches(Dataset(only_sparse, "train", folder), 10).read(0)["dense"].shape == (
        10,
        0,
    )
    assert GlobalBatches(Dataset(only_dense, "train", folder), 10).read(0)["sparse"].shape == (
        10,
        0,
    )
