"""Reading a split: every row once, the same every time, whatever the format or the memory."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.job_pb2 import DataSpec
from workers.data import Batch, Dataset

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


def rows_of(batches: Iterator[Batch]) -> list[int]:
    return [int(row) for batch in batches for row in batch.dense[:, 0]]


@settings(max_examples=40, deadline=None)
@given(
    shards=st.integers(1, 9),
    batch_size=st.integers(1, 400),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 3),
    streamed=st.booleans(),
    shuffle=st.booleans(),
)
def test_shards_cover_every_row_once(
    folder: Path,
    shards: int,
    batch_size: int,
    seed: int,
    epoch: int,
    streamed: bool,
    shuffle: bool,
) -> None:
    data = dataset(folder, **(STREAMED if streamed else {}))
    seen = []
    for shard in range(shards):
        rows = rows_of(
            data.batches(batch_size, shard, shards, seed, epoch, shuffle, drop_last=False)
        )
        assert abs(len(rows) - ROWS / shards) <= 1
        seen += rows
    assert sorted(seen) == list(range(ROWS))
    if not shuffle:
        assert seen == list(range(ROWS))


@settings(max_examples=40, deadline=None)
@given(
    shards=st.integers(1, 9),
    batch_size=st.integers(1, 110),
    seed=st.integers(0, 99),
    streamed=st.booleans(),
)
def test_shards_agree_on_the_number_of_batches(
    folder: Path, shards: int, batch_size: int, seed: int, streamed: bool
) -> None:
    data = dataset(folder, **(STREAMED if streamed else {}))
    expected = data.batches_per_epoch(batch_size, shards)
    seen: list[int] = []
    for shard in range(shards):
        batches = list(data.batches(batch_size, shard, shards, seed))
        assert [len(batch) for batch in batches] == [batch_size] * expected
        seen += rows_of(iter(batches))
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("options", [{}, STREAMED])
def test_order_is_fixed_by_seed_and_epoch(folder: Path, options: dict[str, Any]) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return rows_of(dataset(folder, **options).batches(50, 0, 2, seed, epoch))

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_later_epochs_from_memory_equal_a_fresh_start(folder: Path) -> None:
    data = dataset(folder)
    list(data.batches(50, epoch=0))
    assert rows_of(data.batches(50, epoch=1)) == rows_of(dataset(folder).batches(50, epoch=1))


@pytest.mark.parametrize("file", ["all.csv", "all.csv.gz", "all.tsv.gz"])
@pytest.mark.parametrize("options", [{}, STREAMED])
def test_text_equals_parquet(folder: Path, file: str, options: dict[str, Any]) -> None:
    text, parquet = dataset(folder, file, **options), dataset(folder)
    assert text.rows == parquet.rows == ROWS
    (left,) = text.batches(ROWS, shuffle=False)
    (right,) = parquet.batches(ROWS, shuffle=False)
    np.testing.assert_array_equal(left.sparse, right.sparse)
    np.testing.assert_array_equal(left.dense, right.dense)
    np.testing.assert_array_equal(left.label, right.label)


def test_shapes_types_and_missing_values(folder: Path) -> None:
    (batch,) = dataset(folder).batches(ROWS, shuffle=False)
    assert (batch.sparse.shape, str(batch.sparse.dtype)) == ((ROWS, 3), "int64")
    assert (batch.dense.shape, str(batch.dense.dtype)) == ((ROWS, 2), "float32")
    assert (batch.label.shape, str(batch.label.dtype)) == ((ROWS,), "float32")
    assert len(set(batch.sparse[::11, 0].tolist())) == 1
    assert len(set(batch.sparse[:, 0].tolist())) == 18
    assert (batch.dense[::4, 1] == 0).all()
    np.testing.assert_array_equal(batch.dense[1::4, 1], np.arange(1, ROWS, 4) / 4)
    np.testing.assert_array_equal(batch.label, np.arange(ROWS) % 3 == 0)


def test_a_window_mixes_rows_beyond_its_row_group(folder: Path) -> None:
    first, *_ = dataset(folder, cache_bytes=0, window_rows=1000, block_rows=64).batches(200)
    ends = [150, 300, 450, 600, 690, 780, 870, 960]
    groups = set(np.searchsorted(ends, first.dense[:, 0], side="right").tolist())
    assert len(groups) >= 6


def test_evaluation_ends_with_a_short_batch(folder: Path) -> None:
    data = dataset(folder)
    sizes = [len(batch) for batch in data.batches(300, shuffle=False, drop_last=False)]
    assert sizes == [300, 300, 300, 100]
    assert data.batches_per_epoch(300, drop_last=False) == 4
    assert data.batches_per_epoch(300) == 3


def test_no_rows_are_no_batches(folder: Path) -> None:
    data = dataset(folder, "empty.csv")
    assert data.rows == 0
    assert list(data.batches(10, shuffle=False, drop_last=False)) == []


def test_a_split_without_dense_or_without_sparse(folder: Path) -> None:
    only_sparse = DataSpec(path=".", train="part-*.parquet", label=LABEL, sparse=SPARSE)
    only_dense = DataSpec(path=".", train="part-*.parquet", label=LABEL, dense=DENSE)
    assert next(Dataset(only_sparse, "train", folder).batches(10)).dense.shape == (10, 0)
    assert next(Dataset(only_dense, "train", folder).batches(10)).sparse.shape == (10, 0)
