"""Global batches: each sample of an epoch once, the same for every width, format and memory."""

import gzip
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
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
from workers.data import Batch, DataError, Dataset, GlobalBatches
from workers.data.batches import in_order
from workers.data.files import counts

MOST = 300
FORMATS = ("parquet", "csv", "tsv.gz")
STREAMED: dict[str, Any] = {"cache_bytes": 0, "block_rows": 16, "window_rows": 37}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where splits of so many rows, in each format, are written when they are asked for."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def dataset(folder: Path, rows: int, kind: str, **options: Any) -> Dataset:
    """Rows whose dense column is their number, in two files, the first of two thirds."""
    names = [f"{rows}-{part}.{kind}" for part in range(2)]
    row = np.arange(rows)
    table = pa.table({"row": row, "label": row % 2, "word": [f"w{r % 7}" for r in row]})
    parts = table.slice(0, rows * 2 // 3), table.slice(rows * 2 // 3)
    for name, part in zip(names, parts, strict=True):
        if (folder / name).exists():
            continue
        if kind == "parquet":
            pa.parquet.write_table(part, folder / name, row_group_size=29)
            continue
        pa.csv.write_csv(part, folder / name)
        if kind == "tsv.gz":
            text = (folder / name).read_bytes().replace(b",", b"\t")
            (folder / name).write_bytes(gzip.compress(text))
    spec = DataSpec(
        path=".", train=f"{rows}-*.{kind}", label="label", dense=["row"], sparse=["word"]
    )
    return Dataset(spec, "train", folder, **options)


def rows_of(*batches: Batch) -> list[int]:
    return [int(row) for batch in batches for row in batch["dense"][:, 0]]


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def epochs_of(batches: GlobalBatches) -> list[list[int]]:
    """What is trained in each epoch, in order."""
    steps = [rows_of(batches.read(step)) for step in range(batches.steps)]
    size = batches.steps_per_epoch
    return [joined(steps[first : first + size]) for first in range(0, len(steps), size)]


@settings(max_examples=60)
@given(
    rows=st.integers(1, MOST),
    batch_size=st.integers(1, 120),
    micro_batches=st.integers(1, 9),
    width=st.integers(1, 5),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**40),
    kind=st.sampled_from(FORMATS),
    streamed=st.booleans(),
    drop_last=st.booleans(),
)
def test_workers_read_each_sample_of_an_epoch_once_whatever_their_number(
    folder: Path,
    rows: int,
    batch_size: int,
    micro_batches: int,
    width: int,
    epochs: int,
    seed: int,
    kind: str,
    streamed: bool,
    drop_last: bool,
) -> None:
    options = STREAMED if streamed else {}
    keys: dict[str, Any] = {"seed": seed, "epochs": epochs, "drop_last": drop_last}
    trained = rows // batch_size * batch_size if drop_last else rows
    data = dataset(folder, rows, kind, **options)
    if not trained:
        with pytest.raises(DataError, match="batch_size"):
            GlobalBatches(data, batch_size, **keys)
        return
    batches = GlobalBatches(data, batch_size, **keys)
    assert batches.steps == epochs * -(-trained // batch_size)
    assert batches.total == epochs * trained
    whole = [rows_of(batches.read(step)) for step in range(batches.steps)]
    assert [len(rows) for rows in whole] == [batches.samples(s) for s in range(batches.steps)]
    per_epoch = batches.steps_per_epoch
    for epoch in range(epochs):
        seen = joined(whole[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert len(seen) == len(set(seen)) == trained
        assert set(seen) <= set(range(rows))
    # Micro-batches dealt over workers, each of which reads in ascending order, for itself.
    dealt: dict[tuple[int, int], list[int]] = {}
    for worker in range(width):
        own = GlobalBatches(dataset(folder, rows, kind, **options), batch_size, **keys)
        counter = 0
        for step in range(own.steps):
            samples = own.samples(step)
            parts = min(micro_batches, samples)
            for m in range(parts):
                if counter % width == worker:
                    bounds = samples * m // parts, samples * (m + 1) // parts
                    dealt[step, m] = rows_of(own.read(step, *bounds))
                counter += 1
    for step, rows_of_step in enumerate(whole):
        parts = min(micro_batches, len(rows_of_step))
        assert joined(dealt[step, m] for m in range(parts)) == rows_of_step


@pytest.mark.parametrize("options", [{}, STREAMED])
def test_the_order_follows_from_seed_and_epoch_alone(folder: Path, options: dict[str, Any]) -> None:
    def epochs(seed: int, kind: str = "parquet", batch_size: int = 50) -> list[list[int]]:
        data = dataset(folder, 210, kind, **options)
        return epochs_of(GlobalBatches(data, batch_size, seed=seed, epochs=3))

    first = epochs(1)
    assert first == epochs(1) == epochs(1, batch_size=17)
    assert len({tuple(order) for order in first + epochs(2)}) == 6
    if not options:
        assert first == epochs(1, "csv") == epochs(1, "tsv.gz")
        expected = [np.random.default_rng([1, epoch]).permutation(210) for epoch in range(3)]
        assert first == [order.tolist() for order in expected]


def test_a_step_can_be_read_first_again_and_backwards(folder: Path) -> None:
    def batches() -> GlobalBatches:
        return GlobalBatches(dataset(folder, 210, "parquet", **STREAMED), 40, seed=3, epochs=2)

    expected = [rows_of(batches().read(step)) for step in range(12)]
    again = batches()
    for step in (11, 0, 5, 5, 6, 1, 10):
        assert rows_of(again.read(step)) == expected[step]
    with pytest.raises(IndexError, match="step 12 of 12"):
        again.read(12)
    with pytest.raises(IndexError, match="rows 0 to 11 of the 10 of step 5"):
        again.read(5, 0, 11)


def test_what_is_read_may_be_written_to(folder: Path) -> None:
    for options in ({}, STREAMED):
        batches = GlobalBatches(dataset(folder, 60, "parquet", **options), 20)
        before = batches.read(1)
        batches.read(1)["dense"][:] = -1
        np.testing.assert_array_equal(batches.read(1)["dense"], before["dense"])


def test_max_steps_ends_it(folder: Path) -> None:
    data = dataset(folder, 210, "parquet")
    batches = GlobalBatches(data, 100, epochs=4, max_steps=5)
    assert (batches.steps, batches.steps_per_epoch, batches.total) == (5, 3, 410)
    assert GlobalBatches(data, 100, max_steps=50).steps == 3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_held_out_split_comes_in_the_order_of_its_files(
    folder: Path, streamed: bool, workers: int
) -> None:
    read: dict[int, list[int]] = {}
    for rank in range(workers):
        data = dataset(folder, 210, "parquet", **(STREAMED if streamed else {}))
        read |= {number: rows_of(batch) for number, batch in in_order(data, 40, rank, workers)}
    assert [row for number in sorted(read) for row in read[number]] == list(range(210))
    assert sorted(read) == list(range(6))


class TestTextTooLargeToCount:
    """Text of more than so many bytes, a number that is small here."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(counts, "COUNTED_AT_ONCE", 100)
        monkeypatch.setattr(counts, "_KEPT", 100)
        monkeypatch.setenv("HETERPS_CACHE", str(tmp_path / "cache"))

    def test_it_needs_a_number_of_steps(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"210-\*\.csv: train\.max_steps: got 0, expected"):
            GlobalBatches(dataset(tmp_path, 210, "csv"), 50)

    @pytest.mark.parametrize("kind", ["csv", "tsv.gz"])
    def test_its_batches_run_over_the_ends_of_epochs(self, tmp_path: Path, kind: str) -> None:
        def read() -> list[list[int]]:
            data = dataset(tmp_path, 210, kind, **STREAMED)
            batches = GlobalBatches(data, 50, seed=9, max_steps=20)
            assert (batches.steps, batches.total) == (20, 1000)
            return [rows_of(batches.read(step)) for step in range(20)]

        steps = read()
        assert {len(rows) for rows in steps} == {50}
        seen = joined(steps)
        for row in range(210):
            assert 4 <= seen.count(row) <= 5
        assert read() == steps  # by then its rows are known on this host

    def test_once_read_its_rows_are_known(self, tmp_path: Path) -> None:
        data = dataset(tmp_path, 210, "csv", **STREAMED)
        assert sum(len(batch) for _, batch in in_order(data, 64, 0, 1)) == 210
        batches = GlobalBatches(dataset(tmp_path, 210, "csv", **STREAMED), 50)
        assert batches.steps == 5
        assert sorted(epochs_of(batches)[0]) == list(range(210))
        (tmp_path / "210-0.csv").write_text("row,label,word\n1,0,a\n")
        with pytest.raises(DataError, match="max_steps"):
            GlobalBatches(dataset(tmp_path, 210, "csv", **STREAMED), 50)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("gone", [False, True])
def test_no_step_has_rows_of_a_file_that_changed_between_epochs(
    tmp_path: Path, kind: str, gone: bool
) -> None:
    batches = GlobalBatches(dataset(tmp_path, 210, kind, **STREAMED), 7, epochs=2)
    first = [rows_of(batches.read(step)) for step in range(batches.steps_per_epoch)]
    assert sorted(joined(first)) == list(range(210))
    (tmp_path / "others").mkdir()
    dataset(tmp_path / "others", 210, kind)
    for part in range(2):
        path = tmp_path / f"210-{part}.{kind}"
        path.unlink() if gone else (tmp_path / "others" / path.name).replace(path)
    with pytest.raises(DataError, match=rf"210-[01]\.{kind}: contents: "):
        batches.read(batches.steps_per_epoch)


def test_no_rows_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"train\.batch_size: got 10, expected a split with rows"):
        GlobalBatches(dataset(folder, 0, "csv"), 10)


@pytest.mark.parametrize("options", [{}, STREAMED])
@pytest.mark.parametrize("more", [0, 1])
def test_a_file_that_changes_while_it_is_read_is_not_trained_on(
    tmp_path: Path, options: dict[str, Any], more: int
) -> None:
    data = dataset(tmp_path, 210, "csv", **options)
    batches, before = GlobalBatches(data, 50), data.contents
    path = tmp_path / "210-1.csv"
    head, *rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([head, *reversed(rows), *["210,0,w0\n"] * more]))
    with pytest.raises(DataError, match=r"210-1\.csv: contents: .* as it was when reading began"):
        epochs_of(batches)
    assert dataset(tmp_path, 210, "csv", **options).contents != before
